"""The processes of a job on the hosts of a Ray cluster: one actor on each, with its processes."""

import contextlib
import dataclasses
import ipaddress
import os
import pickle
import sys
import sysconfig
import time
from typing import Any

from jaxrl.cluster.child import Start
from jaxrl.cluster.experiment import pack_job
from jaxrl.cluster.host import Facts, Host, Report, check_versions
from jaxrl.cluster.initialize import worker_environment
from jaxrl.cluster.placement import Placement, place
from jaxrl.cluster.ray_import import ray
from jaxrl.cluster.settings import place_in_job, settings_of
from jaxrl.cluster.supervise import LOST, HostLost
from jaxrl.config import TrainConfig
from jaxrl.train import BasePPOExp

EXPERIMENT = "-m", "jaxrl.cluster.experiment"
ANSWER_SECONDS, LOOK_SECONDS = 60.0, 2.0


@ray.remote
class HostActor(Host):
    """A host of the cluster. Its processes end with it, and it ends with the driver."""

    def facts(self, address: str = "") -> Facts:
        """Name, versions, and the address by which Ray knows it."""
        return super().facts(address or ray.util.get_node_ip_address())


class RayAttempt:
    """The processes of a job, started once; an `Attempt`.

    Args:
        placement: what it takes of each host.
        hosts: how many.
        deadline: by `time.monotonic()`, until they must be free.

    Raises:
        HostLost: they are not.
    """

    def __init__(self, placement: Placement, hosts: int, deadline: float) -> None:
        self._polls: dict[Any, int] = {}  # pending answers, by the number of the host
        self._running: list[set[int]] = []  # processes of each host
        self._actors: list[Any] = []
        self._group = ray.util.placement_group([placement.bundle] * hosts, "STRICT_SPREAD")
        while not self._group.wait(LOOK_SECONDS):
            if time.monotonic() > deadline:
                self.stop()
                raise HostLost(f"{hosts} hosts with {placement.bundle} each were not free in time")
        strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        resources = {k: v for k, v in placement.bundle.items() if k not in ("CPU", "GPU")}
        self._actors = [
            HostActor.options(  # type: ignore[attr-defined]
                num_cpus=placement.bundle["CPU"],
                num_gpus=placement.bundle.get("GPU", 0),
                resources=resources,
                scheduling_strategy=strategy(self._group, number),
            ).remote()
            for number in range(hosts)
        ]

    def facts(self) -> list[Facts]:
        """Of the hosts, which are put in order by it: that of a TPU slice, else of addresses."""
        found = _answers([actor.facts.remote() for actor in self._actors])
        numbered = [(f.tpu_worker, ipaddress.ip_address(f.address).packed) for f in found]
        order = sorted(range(len(found)), key=numbered.__getitem__)
        self._actors = [self._actors[number] for number in order]
        return [found[number] for number in order]

    def free_port(self) -> int:
        """Of the first host."""
        return _answers([self._actors[0].free_port.remote()])[0]

    def start(self, starts: list[list[Start]]) -> None:
        """Start the processes of every host."""
        self._running = [{start.index for start in of_host} for of_host in starts]
        pairs = zip(self._actors, starts, strict=True)
        _answers([actor.start.remote(of_host) for actor, of_host in pairs])

    def poll(self, seconds: float) -> list[Report]:
        """See `Attempt.poll`."""
        for number, running in enumerate(self._running):
            if running and number not in self._polls.values():
                self._polls[self._actors[number].poll.remote(seconds)] = number
        ready, _ = ray.wait(list(self._polls), num_returns=1, timeout=2 * seconds)
        reports: list[Report] = []
        for answer in ready:
            running = self._running[self._polls.pop(answer)]
            try:
                reports += ray.get(answer)
            except ray.exceptions.RayError:
                reports += [Report(index, "", LOST) for index in sorted(running)]
            running -= {report.index for report in reports if report.status is not None}
        return reports

    def signal(self, number: int) -> None:
        """See `Attempt.signal`."""
        for actor in self._actors:
            actor.signal.remote(number)

    def stop(self) -> None:
        """See `Attempt.stop`; a host that does not answer kills its processes when it can."""
        with contextlib.suppress(ray.exceptions.RayError):
            pending = [actor.stop.remote() for actor in self._actors]
            ray.wait(pending, num_returns=len(pending), timeout=ANSWER_SECONDS) if pending else None
        for actor in self._actors:
            ray.kill(actor)
        ray.util.remove_placement_group(self._group)


def _answers(pending: list[Any]) -> list[Any]:
    try:
        return ray.get(pending, timeout=ANSWER_SECONDS)
    except ray.exceptions.RayError as error:
        cause = getattr(error, "cause", None)
        if isinstance(cause, ValueError):
            raise ValueError(str(cause)) from error
        if "ModuleNotFoundError" in str(error):
            raise ValueError(
                f"a host of the cluster cannot import jaxrl: install it on all of them. {error}"
            ) from error
        raise HostLost(f"a host did not start: {type(error).__name__}: {error}") from error


class RayJob:
    """What is to run, and on what; `start` makes an attempt.

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
        return place(ray.nodes(), self.hosts, self.each, os.environ.get("JAX_PLATFORMS", ""))

    def start(self, mode: str | None) -> tuple[RayAttempt, dict[int, str]]:
        """Start all processes; with labels for what they print.

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
        """A host that died may come back, or another one in its place."""
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
            heading = f"--- process {index} on {host.name}, {time.strftime('%Y-%m-%d %H:%M:%S')}"
            environment = {**shared, **place_in_job(address, count, index)}
            log = self.settings.log(index)
            return Start(index, EXPERIMENT, environment, log, heading, job, os.getcwd())

        return [
            [one(number * self.each + place, host) for place in range(self.each)]
            for number, host in enumerate(facts)
        ]


def _environment() -> dict[str, str | None]:
    """The driver's settings; Ray, and what this process can import, in the processes too."""
    return {
        **worker_environment(),
        "RAY_ADDRESS": ray.get_runtime_context().gcs_address,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS"),  # Ray sets it in actors
        "PYTHONPATH": os.pathsep.join(_user_folders()),
    }


def _user_folders() -> list[str]:
    """Where this process finds modules, but for installed ones."""
    installed = tuple(sysconfig.get_paths().values())
    return [path for path in sys.path if os.path.isdir(path) and not path.startswith(installed)]


def _bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address
