"""Start a job on the hosts of a Ray cluster."""

import dataclasses
import os
import pickle
import sys
import sysconfig
import time

from jaxrl.cluster.actors import LOOK_SECONDS, RayAttempt
from jaxrl.cluster.child import Start
from jaxrl.cluster.experiment import pack_job
from jaxrl.cluster.host import Facts, Host, check_versions
from jaxrl.cluster.initialize import worker_environment
from jaxrl.cluster.placement import Placement, place_in_slice
from jaxrl.cluster.ray_import import ray
from jaxrl.cluster.settings import place_in_job, settings_of
from jaxrl.cluster.supervise import HostLost
from jaxrl.config import TrainConfig
from jaxrl.train import BasePPOExp

EXPERIMENT = "-m", "jaxrl.cluster.experiment"


class RayJob:
    """Hold what is to run, and on what; `start` makes an attempt.

    Args:
        config: resolved and checked.
        experiment: class to run.

    Raises:
        ValueError: the cluster lacks hosts.
    """

    def __init__(self, config: TrainConfig, experiment: type[BasePPOExp]) -> None:
        self.config, self.experiment = config, experiment
        self.settings = settings_of(config)
        self.hosts = config.trainer.placement.policy_num_nodes
        self.each = config.trainer.cluster.processes_per_host
        self.placement = self._place()

    def _place(self) -> Placement:
        platforms, free = os.environ.get("JAX_PLATFORMS", ""), ray.available_resources()
        return place_in_slice(ray.nodes(), self.hosts, self.each, platforms, free)

    def start(self, mode: str | None) -> tuple[RayAttempt, dict[int, str]]:
        """Start all processes; return the attempt, with labels for what they print.

        Args:
            mode: resume_mode of this attempt.

        Raises:
            HostLost: the hosts were not free in time, or one was lost meanwhile.
            ValueError: they have other versions, or cannot write their logs.
        """
        deadline = time.monotonic() + self.settings.start_seconds
        attempt = RayAttempt(self._free_place(deadline), self.hosts, deadline)
        try:
            facts = attempt.facts()
            check_versions([Host().facts("the driver"), *facts])
            address = f"{_bracketed(facts[0].address)}:{attempt.free_port()}"
            attempt.start(self._starts(facts, address, mode))
        except BaseException:
            attempt.stop()
            raise
        count = self.hosts * self.each
        names = [facts[index // self.each].name for index in range(count)]
        labels = {i: f"[process {i} {name}]" if i else "" for i, name in enumerate(names)}
        return attempt, labels

    def _free_place(self, deadline: float) -> Placement:
        """Wait for free hosts: one that died may come back, or another one in its place."""
        while True:
            try:
                return self._place()
            except ValueError as error:
                if time.monotonic() > deadline:
                    raise HostLost(str(error)) from error
            time.sleep(LOOK_SECONDS)

    def _starts(self, facts: list[Facts], address: str, mode: str | None) -> list[list[Start]]:
        count = self.hosts * self.each
        trainer = dataclasses.replace(self.config.trainer, resume_mode=mode)
        config = dataclasses.replace(self.config, trainer=trainer)
        job = pickle.dumps(pack_job(config, self.experiment))
        shared = {**_environment(), **self.settings.limits()}

        def one(index: int, host: Facts) -> Start:
            return Start(
                index=index,
                arguments=EXPERIMENT,
                environment={**shared, **place_in_job(address, count, index)},
                log=self.settings.log(index),
                heading=f"--- process {index} on {host.name}, {time.strftime('%Y-%m-%d %H:%M:%S')}",
                stdin=job,
                folder=os.getcwd(),
            )

        return [
            [one(number * self.each + place, host) for place in range(self.each)]
            for number, host in enumerate(facts)
        ]


def _environment() -> dict[str, str | None]:
    """Return the driver's settings; Ray, and what this process can import, in the processes too."""
    return {
        **worker_environment(),
        "RAY_ADDRESS": ray.get_runtime_context().gcs_address,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS"),  # Ray sets it in actors
        "PYTHONPATH": os.pathsep.join(_user_folders()),
    }


def _user_folders() -> list[str]:
    """Return where this process finds modules, but for installed ones."""
    installed = tuple(sysconfig.get_paths().values())
    return [path for path in sys.path if os.path.isdir(path) and not path.startswith(installed)]


def _bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address
