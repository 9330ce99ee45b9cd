"""Start a run on every host of a cluster, and start it again where a host fails.

    python -m jaxrl.cluster.launch --config=configs/quickstart.py --config.trainer.seed=1
    python -m jaxrl.cluster.launch --local-processes=2 --config=...
    python -m jaxrl.cluster.launch --no-ray --config=...

The first runs one process on each of trainer.placement.policy_num_nodes hosts of the Ray cluster of
RAY_ADDRESS, or of one that it starts here. The second runs all processes of a job on this machine.
The third is started on every host by other means (Slurm, GKE, ssh) and runs the process of that
one: JAX_COORDINATOR_ADDRESS, JAXRL_NUM_PROCESSES and JAXRL_PROCESS_ID say which it is, or JAX finds
it out. These two also take --module=jaxrl.sft. docs/cluster.md
"""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jaxrl.cluster.local import TRAIN, launch_here
from jaxrl.cluster.supervise import REFUSED, supervise

if TYPE_CHECKING:
    from jaxrl.train import BasePPOExp

LOCAL, NO_RAY, MODULE = "--local-processes", "--no-ray", "--module"


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
    from jaxrl.config import resolve, to_train_config
    from jaxrl.train import BasePPOExp

    config = resolve(to_train_config(config))
    trainer = config.trainer
    hosts, each = trainer.placement.policy_num_nodes, trainer.cluster.processes_per_host
    check(config, hosts, each)
    pack_job(config, experiment or BasePPOExp)  # what cannot be pickled is refused now
    with joined_ray(config, **options):
        job = RayJob(config, experiment or BasePPOExp)
        if job.placement.devices:
            check(config, hosts, each, job.placement.devices)
        return supervise(job.start, settings_of(config).restarts())


def main(argv: Sequence[str]) -> int:
    """Run `python -m jaxrl.cluster.launch [--no-ray | --local-processes=N] --config=FILE ...`."""
    if not argv or "--help" in argv or "-h" in argv:
        print(
            f"{__doc__}\nEvery field of docs/configuration.md can be set: --config.<path>=<value>."
        )
        return 0
    try:
        words, local, module = _own_flags(argv)
        if local is not None:
            return launch_here(words, local, module)
        if module != TRAIN:
            raise ValueError(f"{MODULE}={module}: needs {NO_RAY} or {LOCAL}=N")
        from jaxrl.config import apply_overrides, load_config_file, parse_command_line

        path, overrides = parse_command_line(words)
        return launch(apply_overrides(load_config_file(path), overrides))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return REFUSED


def _own_flags(argv: Sequence[str]) -> tuple[list[str], int | None, str]:
    """Return the other arguments; processes here, None = Ray, 0 = --no-ray; the module."""
    local, module, words = None, TRAIN, []
    for word in argv:
        flag, _, value = word.partition("=")
        if flag == LOCAL:
            if not value.isdecimal() or int(value) < 1:
                raise ValueError(f"{word}: give the number of processes, e.g. {LOCAL}=2")
            local = int(value)
        elif word == NO_RAY:
            local = local or 0
        elif flag == MODULE:
            module = value
        else:
            words.append(word)
    return words, local, module


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
