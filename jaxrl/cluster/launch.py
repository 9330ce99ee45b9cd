"""Start a run on every host of a cluster, and start it again where a host fails.

    python -m jaxrl.cluster.launch --config=configs/quickstart.py --config.trainer.seed=1
    python -m jaxrl.cluster.launch --local-processes=2 --config=...
    python -m jaxrl.cluster.launch --no-ray --config=...

The first runs one process on each of trainer.placement.policy_num_nodes hosts of the Ray cluster of
RAY_ADDRESS, or of one that it starts here. The second runs all processes of a job on this machine.
The third is started on every host by other means (Slurm, GKE, ssh) and runs the process of that
one: JAX_COORDINATOR_ADDRESS, JAXRL_NUM_PROCESSES and JAXRL_PROCESS_ID say which it is, or JAX finds
it out. These two also take --module=jaxrl.sft, and --module=jaxrl.replay with its arguments.
docs/cluster.md explains; every field of docs/configuration.md can be set: --config.<path>=<value>.
"""

import os
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jaxrl import cli
from jaxrl.cluster.child import Start
from jaxrl.cluster.host import Host
from jaxrl.cluster.settings import (
    Settings,
    place_in_job,
    read_settings,
    settings_without_config,
)
from jaxrl.cluster.supervise import supervise

if TYPE_CHECKING:
    from jaxrl.train import BasePPOExp

TRAIN, REPLAY = "jaxrl.train", "jaxrl.replay"


def launch(config: Any, experiment: "type[BasePPOExp] | None" = None, **options: Any) -> int:
    """Run an experiment on the hosts of a Ray cluster; return its exit status, as of `jaxrl.train`.

    Args:
        config: a `TrainConfig`, `ml_collections.ConfigDict` or nested dict.
        experiment: class, with `BasePPOExp`'s methods; it goes to the hosts by value. None =
            `BasePPOExp`.
        options: of `ray.init`, such as address; where Ray is initialised they are not used.

    Raises:
        ValueError: the config is wrong, the cluster lacks hosts or does not answer, its hosts have
            other versions, or the experiment cannot be pickled. Nothing was started.
    """
    # not above: without Ray this process must not have jax
    from jaxrl.cluster.experiment import pack_job
    from jaxrl.cluster.initialize import joined_ray
    from jaxrl.cluster.ray_job import RayJob
    from jaxrl.cluster.settings import check, settings_of
    from jaxrl.config import resolve
    from jaxrl.config.recipe import converted
    from jaxrl.train import BasePPOExp

    config = resolve(converted(config))  # every host writes its own file of given rows
    trainer = config.trainer
    hosts, each = trainer.placement.policy_num_nodes, trainer.cluster.processes_per_host
    check(config, hosts, each)
    pack_job(config, experiment or BasePPOExp)  # what cannot be pickled is refused now
    with joined_ray(config, **options):
        job = RayJob(config, experiment or BasePPOExp)
        if job.placement.devices:
            check(config, hosts, each, job.placement.devices)
        return supervise(job.start, settings_of(config).restarts())


def launch_here(arguments: Sequence[str], processes: int, module: str = TRAIN) -> int:
    """Run the processes of a job on this machine without Ray, supervised; return the exit status.

    This process has no jax.

    Args:
        arguments: of the module.
        processes: on this machine, the whole job; 0 = one of a job whose others are on other
            machines, as the environment says or JAX finds out.
        module: what is run; another one checks the devices for its config itself.

    Raises:
        ValueError: see `Host.start`.
    """
    if module == REPLAY:  # which has no config of its own, and is not started again
        with tempfile.TemporaryDirectory(prefix="jaxrl_replay_logs_") as logs:
            return _supervised(arguments, processes, module, settings_without_config(logs))
    settings = read_settings(arguments, processes if module == TRAIN else 0)
    return cli.REFUSED if settings is None else _supervised(arguments, processes, module, settings)


def _supervised(arguments: Sequence[str], processes: int, module: str, settings: Settings) -> int:

    def start(mode: str | None) -> tuple[Host, dict[int, str]]:
        words = ["-m", module, *arguments]
        if mode != settings.resume_mode:
            words.append(f"--config.trainer.resume_mode={mode}")
        host = Host()
        starts = _starts(settings, words, host, processes) if processes else [_one(settings, words)]
        try:
            host.start(starts)
        except BaseException:
            host.stop()
            raise
        return host, {s.index: f"[process {s.index}]" if i else "" for i, s in enumerate(starts)}

    return supervise(start, settings.restarts())


def _starts(settings: Settings, words: Sequence[str], host: Host, count: int) -> list[Start]:
    """Return what to start for a job that is on this machine alone."""
    address = f"127.0.0.1:{host.free_port()}"
    joined = [settings.limits() | place_in_job(address, count, index) for index in range(count)]
    return [
        Start(index, words, environment, settings.log(index), _heading(index))
        for index, environment in enumerate(joined)
    ]


def _one(settings: Settings, words: Sequence[str]) -> Start:
    """Return what to start here for a job on many machines.

    Where the environment does not say which process of the job this is, JAX has to find out.
    """
    in_environment = "JAX_COORDINATOR_ADDRESS" in os.environ
    index = os.environ.get("JAXRL_PROCESS_ID", "")
    return Start(
        index=int(index) if index.isdecimal() else 0,
        arguments=words if in_environment else [*words, "--distributed"],
        environment=settings.limits(),
        log=settings.log(index if in_environment else socket.gethostname()),
        heading=_heading(index),
    )


def _heading(index: object) -> str:
    now = time.strftime("%Y-%m-%d %H:%M:%S")
    return f"--- process {index} on {socket.gethostname()}, started {now}"


@cli.command(__doc__)
def main(argv: Sequence[str]) -> int:
    """Run `python -m jaxrl.cluster.launch [--no-ray | --local-processes=N] --config=FILE ...`."""
    arguments = cli.Arguments()
    arguments.add_argument("--local-processes")
    arguments.add_argument("--no-ray", action="store_true")
    arguments.add_argument("--module", default=TRAIN)
    options, words = arguments.parse_known_args(argv)
    if not hasattr(os, "killpg"):
        raise ValueError(
            f"the launcher needs Linux or macOS, for its process groups; this is {sys.platform}. "
            "python -m jaxrl.train runs here, in one process"
        )
    if (count := options.local_processes) is not None:
        if not count.isdecimal() or int(count) < 1:
            fix = "give the number of processes, e.g. --local-processes=2"
            raise ValueError(f"--local-processes={count}: {fix}")
        return launch_here(words, int(count), options.module)
    if options.no_ray:
        return launch_here(words, 0, options.module)
    if options.module != TRAIN:
        raise ValueError(f"--module={options.module}: needs --no-ray or --local-processes=N")
    from jaxrl.config import read_command_line

    return launch(read_command_line(words))


if __name__ == "__main__":
    sys.exit(main())
