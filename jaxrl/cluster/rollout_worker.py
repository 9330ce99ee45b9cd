"""Rollout workers as Ray actors: each starts its server on its host, and watches it."""

import asyncio
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from jaxrl.cluster.placement import Placement, place
from jaxrl.rollout.remote.http_client import ServerError
from jaxrl.rollout.remote.worker import NOT_STARTED, OwnServer

FIELD = "trainer.placement.rollout_num_nodes"


@ray.remote
class RolloutWorker:
    """Hold the server of one worker; it ends with this actor.

    Args:
        config, folder, environment: of `OwnServer`; it listens on the address of this host.
    """

    def __init__(
        self, config: Mapping[str, Any], folder: Path, environment: Mapping[str, str]
    ) -> None:
        engine = config["generator"]["inference_engine"]
        engine["http_endpoint_host"] = ray.util.get_node_ip_address()
        self._server = OwnServer(config, folder, environment)

    async def ensure(self) -> tuple[bool, str]:
        """Have the server run; return whether it had to be started, and its address."""
        try:
            return await self._server.ensure(None), self._server.url
        except ServerError as error:  # which Ray could not pickle
            raise RuntimeError(str(error)) from None


class RayWorker:
    """Keep one actor as a `Host`, and put another one in its place when it dies.

    Args:
        group: of placement, with those of the other workers.
        bundle: its number there.
        resources: of the bundle: all are the actor's.
        config, folder, environment: of `RolloutWorker`.
    """

    def __init__(
        self,
        group: PlacementGroup,
        bundle: int,
        resources: Mapping[str, float],
        *,
        config: Mapping[str, Any],
        folder: Path,
        environment: Mapping[str, str],
    ) -> None:
        self.url = NOT_STARTED
        self.actor: Any = None
        self._group, self._bundle, self._resources = group, bundle, resources
        self._config, self._folder, self._environment = config, folder, environment

    async def ensure(self, folder: Any) -> bool:
        """Have the server of the actor run, see `rollout.remote.server_process.ServerStarter`.

        Raises:
            ServerError: the actor died, and another takes its place at the next call; or its server
                does not start.
        """
        del folder
        if self.actor is None:
            resources = self._resources
            actor = RolloutWorker.options(  # type: ignore[attr-defined]
                num_cpus=resources["CPU"],
                num_gpus=resources.get("GPU", 0),  # else Ray hides them from it
                resources={k: v for k, v in resources.items() if k not in ("CPU", "GPU")},
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    self._group, placement_group_bundle_index=self._bundle
                ),
            )
            self.actor = actor.remote(self._config, self._folder, self._environment)
        try:
            started, self.url = await asyncio.wrap_future(self.actor.ensure.remote().future())
        except RayTaskError as error:  # the actor lives; its server does not
            raise ServerError(str(error), retryable=False) from error
        except RayError as error:
            self.actor = None
            raise ServerError(f"a rollout worker died: {error}", broken=True) from error
        return started

    def stop(self) -> None:
        """End actor and server, and give the bundles back."""
        if self.actor is not None:
            ray.kill(self.actor)
            self.actor = None
        remove_placement_group(self._group)


def ray_workers(
    config: Mapping[str, Any],
    folders: Sequence[Path],
    environments: Sequence[Mapping[str, str]],
    *,
    trainer_hosts: int,
    start_seconds: float,
) -> list[RayWorker]:
    """Make an actor for each folder and environment, each in a bundle of its own, see `bundles`.

    Args:
        trainer_hosts: hosts of the trainer, this one among them.
        start_seconds: until all bundles must be free.

    Raises:
        ValueError: they are not; names `trainer.placement.rollout_num_nodes`.
    """
    nodes, number = ray.nodes(), len(folders)
    what, wanted, strategy = bundles(
        nodes,
        address=ray.util.get_node_ip_address(),
        number=number,
        trainer_hosts=trainer_hosts,
        platforms=os.environ.get("JAX_PLATFORMS", ""),
    )
    group = placement_group(wanted, strategy=strategy)
    if not group.wait(start_seconds):
        remove_placement_group(group)
        alive = sum(node["Alive"] for node in nodes)
        raise ValueError(
            f"{FIELD}={number}: {what.bundle} for each, {strategy} over {alive} host(s), were not "
            f"free within {start_seconds:g} s (trainer.cluster.start_seconds); start Ray on more "
            "hosts (ray start --address=...), end what holds them, or lower it"
        )
    return [
        RayWorker(
            group,
            index,
            what.bundle,
            config=config,
            folder=folder,
            environment=environment,
        )
        for index, (folder, environment) in enumerate(zip(folders, environments, strict=True))
    ]


def bundles(
    nodes: Sequence[Mapping[str, Any]],
    *,
    address: str,
    number: int,
    trainer_hosts: int,
    platforms: str,
) -> tuple[Placement, list[dict[str, float]], str]:
    """Return what each worker takes of a host; Ray's bundles, and how they are placed.

    Where hosts have accelerators each worker has those of a host of its own. A last bundle, which
    stands for this process, keeps them off this host: Ray need not know that its accelerators are
    in use. On CPUs they share hosts if there are too few.

    Args:
        nodes: of `ray.nodes()`.
        address: of this host.
        platforms: JAX_PLATFORMS.

    Raises:
        ValueError: too few hosts with accelerators.
    """
    if place(nodes, 1, 1, platforms, field=FIELD).devices is None:
        what = Placement({"CPU": 1.0}, None)
        return what, [what.bundle] * number, "SPREAD"
    others = [node for node in nodes if node["NodeManagerAddress"] != address]
    taken = trainer_hosts - 1
    what = place(others, number, 1, platforms, field=FIELD, taken=taken)
    return what, [what.bundle] * number + [{f"node:{address}": 0.001}], "STRICT_SPREAD"
