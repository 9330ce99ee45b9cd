"""Rollout workers as Ray actors: each starts its server on its host, and watches it."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from jaxrl.rollout.http_client import ServerError
from jaxrl.rollout.own_server import NOT_STARTED, OwnServer


@ray.remote(num_cpus=1)
class RolloutWorker:
    """Has the server of one worker; it ends with this actor.

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
        """Have the server run; whether it had to be started, and its address."""
        try:
            return await self._server.ensure(None), self._server.url
        except ServerError as error:  # which Ray could not pickle
            raise RuntimeError(str(error)) from None

    def pid(self) -> int:
        """Of the server's process."""
        process = self._server._process
        assert process is not None
        return process.pid


class RayWorker:
    """A `Host`: one actor, and another one in its place when it dies.

    Args:
        group: of placement, with those of the other workers.
        bundle: its number there.
        arguments: of the actor.
    """

    def __init__(self, group: PlacementGroup, bundle: int, *arguments: Any) -> None:
        self.url = NOT_STARTED
        self.actor: Any = None
        self._group, self._bundle, self._arguments = group, bundle, arguments

    async def ensure(self, folder: Any) -> bool:
        """See `rollout.server_process.Host`.

        Raises:
            ServerError: the actor died, and another takes its place at the next call; or its server
                does not start.
        """
        del folder
        if self.actor is None:
            place = PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=self._bundle
            )
            actor = RolloutWorker.options(scheduling_strategy=place)
            self.actor = actor.remote(*self._arguments)
        try:
            answer = asyncio.wrap_future(self.actor.ensure.remote().future())
            started, self.url = await answer
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
    config: Mapping[str, Any], given: Sequence[tuple[Path, Mapping[str, str]]]
) -> list[RayWorker]:
    """An actor for each folder and environment, each in a bundle of its own, on hosts apart if
    there are enough."""
    group = placement_group([{"CPU": 1}] * len(given), strategy="SPREAD")
    return [
        RayWorker(group, number, config, folder, environment)
        for number, (folder, environment) in enumerate(given)
    ]
