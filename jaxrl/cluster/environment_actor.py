"""Define the Ray actor in which environments live, see `environment_workers`."""

import functools
import os
from collections.abc import Awaitable, Mapping
from typing import Any, NamedTuple

from jaxrl import envs
from jaxrl.cluster.ray_import import ray
from jaxrl.functions import place_of
from jaxrl.registry.pickling import PackedFunction, unpack
from jaxrl.rollout.conversations.environment_pool import EnvironmentPool
from jaxrl.rollout.conversations.session import step_call
from jaxrl.types import Message

_READ = ("observations", "reward", "done", "postprocessed_action")  # of what `step` gives


class Failed(NamedTuple):
    """Describe a call that raised."""

    error: str  # its repr: the exception itself might not travel
    place: str  # `file:line` of the user's that raised, or ""
    hung: bool  # the process has threads that are left behind in calls without end


@ray.remote(num_cpus=0, max_restarts=0)
class EnvironmentWorker:
    """Hold environments in a process; their calls run in its threads.

    Args:
        calls: most of them at a time.
        timeout_seconds: of each call; None = none.
    """

    def __init__(self, calls: int, timeout_seconds: float | None) -> None:
        self._pool = EnvironmentPool(calls, timeout_seconds)
        self._imports = EnvironmentPool(1)  # one at a time, and they take the time that they take
        self._envs: dict[int, Any] = {}
        self._functions: dict[PackedFunction, Any] = {}

    async def ready(self) -> str:
        """Return where this worker runs."""
        return f"process {os.getpid()} of {ray.util.get_node_ip_address()}"

    async def init(
        self,
        number: int,
        packed: PackedFunction,
        made_with: tuple[str, Mapping[str, Any], Mapping[str, Any] | None],
        messages: list[Message],
    ) -> Any:
        """Make environment `number`, and return what its `init` gives."""

        async def start() -> Any:
            made = await self._unpacked(packed)
            make = functools.partial(envs.construct, made, *made_with)
            self._envs[number] = env = await self._pool.run(make)
            return await self._pool.run(functools.partial(env.init, messages))

        return await self._outcome(start())

    async def step(self, number: int, text: str, tokens: list[str], stopped: bool) -> Any:
        """Return what `step` of an environment gives, as far as it is read."""

        async def step() -> Any:
            found = await self._pool.run(step_call(self._envs[number], text, tokens, stopped))
            is_mapping = isinstance(found, Mapping)
            return {k: found[k] for k in _READ if k in found} if is_mapping else found

        return await self._outcome(step())

    async def judge(self, packed: PackedFunction, keywords: dict[str, Any]) -> Any:
        """Return what a reward function gives."""

        async def judge() -> Any:
            function = await self._unpacked(packed)
            return await self._pool.run(functools.partial(function, **keywords))

        return await self._outcome(judge())

    async def get_metrics(self, number: int) -> Any:
        """Return what `get_metrics` of an environment gives."""
        return await self._outcome(self._pool.run(self._envs[number].get_metrics))

    async def close(self, number: int) -> Any:
        """Forget environment `number` and let it release what it holds."""
        env = self._envs.pop(number, None)
        return None if env is None else await self._outcome(self._pool.run(env.close))

    async def _outcome(self, work: Awaitable[Any]) -> Any:
        try:
            return await work
        except Exception as error:
            return Failed(repr(error), place_of(error), hung=self._pool.given_up > 0)

    async def _unpacked(self, packed: PackedFunction) -> Any:
        """Load a class or function once: a second time would reset the globals of its module."""

        def load() -> Any:
            if packed not in self._functions:
                self._functions[packed] = unpack(packed, "a class or function")[0]
            return self._functions[packed]

        return await self._imports.run(load)
