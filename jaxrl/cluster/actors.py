"""Start the processes of a job by an actor on each host of a Ray cluster; no actor has jax."""

import contextlib
import ipaddress
import time
from typing import Any

from jaxrl.cluster.child import Start
from jaxrl.cluster.host import Facts, Host, Report
from jaxrl.cluster.lifeline import Lifeline, hold_on
from jaxrl.cluster.placement import Placement
from jaxrl.cluster.ray_import import ray
from jaxrl.cluster.supervise import LOST, HostLost

ANSWER_SECONDS, LOOK_SECONDS = 60.0, 2.0


@ray.remote
class HostActor(Host):
    """Represent a host of the cluster. Its processes end with it, and it ends with the driver."""

    def facts(self, address: str = "") -> Facts:
        """Return name, versions, and the address by which Ray knows this host."""
        return super().facts(address or ray.util.get_node_ip_address())

    def end_with(self, address: tuple[str, int]) -> None:
        """End, and so the processes of this host, as soon as nobody listens there any more.

        Ray lets the actors of a driver that was killed go on, for three steps of a test.

        Raises:
            ValueError: the launcher cannot be reached.
        """
        hold_on(address)


class RayAttempt:
    """Hold the processes of a job, started once; an `Attempt`.

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
        self._lifeline = Lifeline(ray.util.get_node_ip_address())  # see end_with
        bundles = placement.bundles(hosts)
        self._group = ray.util.placement_group(bundles, "STRICT_SPREAD")
        while not self._group.wait(LOOK_SECONDS):
            if time.monotonic() > deadline:
                self.stop()
                raise HostLost(f"{hosts} hosts with {placement.bundle} each were not free in time")
        strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        self._actors = [
            HostActor.options(  # type: ignore[attr-defined]
                num_cpus=placement.bundle["CPU"],
                num_gpus=placement.bundle.get("GPU", 0),
                resources={k: v for k, v in bundle.items() if k not in ("CPU", "GPU")},
                scheduling_strategy=strategy(self._group, number),
            ).remote()
            for number, bundle in enumerate(bundles)
        ]

    def facts(self) -> list[Facts]:
        """Return the facts of the hosts and put the hosts in order.

        The order is that of a TPU slice, else of addresses.
        """
        _answers([actor.end_with.remote(self._lifeline.address) for actor in self._actors])
        found = _answers([actor.facts.remote() for actor in self._actors])
        numbered = [(f.tpu_worker, ipaddress.ip_address(f.address).packed) for f in found]
        order = sorted(range(len(found)), key=numbered.__getitem__)
        self._actors = [self._actors[number] for number in order]
        return [found[number] for number in order]

    def free_port(self) -> int:
        """Return a free port of the first host."""
        return _answers([self._actors[0].free_port.remote()])[0]

    def start(self, starts: list[list[Start]]) -> None:
        """Start the processes of every host."""
        self._running = [{start.index for start in host_starts} for host_starts in starts]
        pairs = zip(self._actors, starts, strict=True)
        _answers([actor.start.remote(host_starts) for actor, host_starts in pairs])

    def poll(self, seconds: float) -> list[Report]:
        """Return news of the processes, see `Attempt.poll`."""
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
        """Send a signal to all processes, see `Attempt.signal`."""
        for actor in self._actors:
            actor.signal.remote(number)

    def stop(self) -> None:
        """Kill all processes, see `Attempt.stop`; a host that does not answer does when it can."""
        with contextlib.suppress(ray.exceptions.RayError):
            pending = [actor.stop.remote() for actor in self._actors]
            ray.wait(pending, num_returns=len(pending), timeout=ANSWER_SECONDS) if pending else None
        for actor in self._actors:
            ray.kill(actor)
        self._lifeline.close()
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
