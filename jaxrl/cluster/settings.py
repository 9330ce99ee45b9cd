"""Read what the launcher needs of a config, in another process where it must not have jax.

python -m jaxrl.cluster.settings --processes=2 --config=configs/quickstart.py
"""

import contextlib
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxrl import cli
from jaxrl.cluster.placement import host_devices
from jaxrl.cluster.supervise import Restarts, newest_step


class Settings(NamedTuple):
    """Hold settings, see `jaxrl.config.ClusterConfig`; paths are absolute or in a bucket."""

    log_folder: str
    ckpt_path: str
    resume_mode: str | None
    max_restarts: int
    restart_backoff_seconds: float
    start_seconds: int
    heartbeat_seconds: int
    stall_seconds: int | None

    def restarts(self) -> Restarts:
        """Return the restarts of a job that has had none yet."""
        return Restarts(
            most=self.max_restarts,
            backoff_seconds=self.restart_backoff_seconds,
            newest=lambda: newest_step(self.ckpt_path),
            resume_mode=self.resume_mode,
        )

    def log(self, name: int | str) -> Path:
        """Return the file of what a process prints, by its number."""
        return Path(self.log_folder) / f"process_{name}.log"

    def limits(self) -> dict[str, str]:
        """Return the seconds that `jaxrl.parallel.processes` reads in the environment."""
        stall = "auto" if self.stall_seconds is None else str(self.stall_seconds)
        return {
            "JAXRL_START_SECONDS": str(self.start_seconds),
            "JAXRL_HEARTBEAT_SECONDS": str(self.heartbeat_seconds),
            "JAXRL_STALL_SECONDS": stall,
        }


def place_in_job(address: str, count: int, index: int) -> dict[str, str]:
    """Return what else `jaxrl.parallel.start_processes` reads in the environment."""
    return {
        "JAX_COORDINATOR_ADDRESS": address,
        "JAXRL_NUM_PROCESSES": str(count),
        "JAXRL_PROCESS_ID": str(index),
    }


def settings_of(config: Any) -> Settings:
    """Return the settings of a resolved `TrainConfig`."""
    trainer, cluster = config.trainer, config.trainer.cluster
    return Settings(
        log_folder=os.path.abspath(os.path.join(trainer.log_path, trainer.run_name, "logs")),
        ckpt_path=trainer.ckpt_path,
        resume_mode=trainer.resume_mode,
        max_restarts=cluster.max_restarts,
        restart_backoff_seconds=cluster.restart_backoff_seconds,
        start_seconds=cluster.start_seconds,
        heartbeat_seconds=cluster.heartbeat_seconds,
        stall_seconds=cluster.stall_seconds,
    )


def settings_without_config(log_folder: str) -> Settings:
    """Return the settings of a program without a config: it is not started again, nor watched."""
    return Settings(
        log_folder=log_folder,
        ckpt_path=log_folder,
        resume_mode=None,
        max_restarts=0,
        restart_backoff_seconds=0.0,
        start_seconds=300,
        heartbeat_seconds=100,
        stall_seconds=0,
    )


def check(config: Any, hosts: int, each: int, devices: int | None = None) -> None:
    """Refuse a config before anything is started; what it warns of is printed by the run.

    Args:
        config: resolved.
        hosts, each: processes of the job are hosts x each.
        devices: of a host; None = those of its CPU if JAX_PLATFORMS says so, else unknown.

    Raises:
        ValueError: names the field, the value and the fix.
    """
    from jaxrl.config import check_nodes, validate  # not above: they import jax
    from jaxrl.config.validation import check_fields

    if devices is None and os.environ.get("JAX_PLATFORMS", "").partition(",")[0] == "cpu":
        devices = host_devices(os.environ.get("XLA_FLAGS", "")) or each
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check_nodes(config, hosts * each)
        if devices is None:
            check_fields(config)
        else:
            validate(config, hosts * devices, hosts * each)


def read_settings(arguments: Sequence[str], processes: int) -> Settings | None:
    """Read the settings of `jaxrl.train`'s arguments; None if they are refused, which was said.

    Args:
        processes: on this machine, the whole job; 0 = other machines have some, or another module
            checks that itself.
    """
    command = [sys.executable, "-m", __name__, f"--processes={processes}", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    return Settings(*json.loads(done.stdout)) if done.returncode == 0 else None


@cli.command(__doc__, bare=cli.REFUSED)
def main(argv: Sequence[str]) -> int:
    """Print the settings as JSON."""
    from jaxrl.config import read_command_line, resolve
    from jaxrl.config.validation import check_fields

    arguments = cli.Arguments()
    arguments.add_argument("--processes", type=int, required=True)
    options, words = arguments.parse_known_args(argv)
    with contextlib.redirect_stdout(sys.stderr):  # of the recipe
        config = resolve(read_command_line(words))
        if options.processes:
            check(config, 1, options.processes)
        else:
            check_fields(config)
    print(json.dumps(settings_of(config)))
    return cli.DONE


if __name__ == "__main__":
    sys.exit(main())
