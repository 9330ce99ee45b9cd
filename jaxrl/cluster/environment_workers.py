"""Keep environments in Ray actors: apart from the trainer's process, on all nodes of a cluster.

trainer's process                            one of N actors
Session -- EnvironmentWorkers.run --> _Remote -- init, step, judge, close --> EnvironmentWorker
           max_env_workers calls at a time       in threads, where the        env 3, env 7, ...
                                                 time limit holds
"""

import asyncio
import functools
import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxrl import config as cfg, envs
from jaxrl.cluster.environment_actor import EnvironmentWorker, Failed
from jaxrl.cluster.initialize import initialize_ray
from jaxrl.cluster.ray_import import ray
from jaxrl.functions import import_call, origin
from jaxrl.registry.pickling import pack
from jaxrl.rollout.conversations.environment_pool import EnvironmentPool
from jaxrl.types import Message

_SILENT_SECONDS = 30.0  # after the time limit of a call an actor that says nothing is ended


class EnvironmentWorkerError(RuntimeError):
    """Signal that the process in which an environment lived is gone, and so is the environment."""


class _RemoteError(Exception):
    """Say what a call raised in its process, and where, see `blame.place_of`."""

    def __init__(self, text: str, place: str) -> None:
        super().__init__(text)
        self.place = place

    def __repr__(self) -> str:
        return str(self)


class EnvironmentWorkers(EnvironmentPool):
    """Keep a pool whose environments live in Ray actors, several in each, from `init` to `close`.

    Actors start when the first environment is made, and end with this process. One that died is
    replaced, and its environments are lost. So is one in which a call hangs, but its other
    environments go on, and it ends with the last of them.

    Args:
        count: of the actors.
        calls: most of them at a time, in all actors together.
        timeout_seconds: of each call; None = none.
    """

    def __init__(self, count: int, calls: int, timeout_seconds: float | None = None) -> None:
        super().__init__(calls)  # the time limit holds in the actors
        self.count, self.limit = count, timeout_seconds
        self._actors: list[_Actor] = []
        self._packed: dict[int, tuple[Any, Any]] = {}
        self._numbers, self._lock = itertools.count(), threading.Lock()

    async def make(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        env_class: str,
        extras: Mapping[str, Any] | None = None,
        env_config: Mapping[str, Any] | None = None,
    ) -> Any:
        """Return a handle; its `init` makes the environment in the actor that has the fewest."""
        packed = self.packed(envs.load(env_class), f"environment '{env_class}'")
        made_with = env_class, extras or {}, env_config
        with self._lock:
            self._actors = [actor for actor in self._actors if actor.takes_more]
            while len(self._actors) < self.count:
                node = _emptiest_node([actor.node for actor in self._actors])
                self._actors.append(_Actor(node, self.workers, self.limit))
            actor = min(self._actors, key=lambda actor: actor.environments)
            actor.environments += 1
            return _Remote(self, actor, next(self._numbers), packed, made_with)

    def beside(self, env: Any, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function as it is called in the environment's actor."""
        label = f"reward function '{origin(function)}'"
        return functools.partial(env.judge, self.packed(function, label))

    def packed(self, function: Any, label: str) -> Any:
        """Return a reference to a pickled class or function, by value where it is not installed.

        Raises:
            ValueError: it cannot be pickled, see `registry.pickling.pack`.
        """
        if id(function) not in self._packed:
            found = ray.put(pack(function, label, {}))
            self._packed[id(function)] = function, found  # which keeps the id its own
        return self._packed[id(function)][1]

    def leave(self, actor: "_Actor") -> None:
        """Count an environment as closed, and end an actor that takes no more with its last one."""
        with self._lock:
            actor.environments -= 1
            if not actor.takes_more and not actor.environments:
                actor.end()


def _emptiest_node(taken: Sequence[str]) -> str:
    """Return the id of the living node that has the fewest of our actors for each of its CPUs.

    Args:
        taken: nodes of the actors that there are. They reserve nothing, so that Ray itself would
            put all of them on one node.
    """
    cpus = {n["NodeID"]: n["Resources"].get("CPU", 0) for n in ray.nodes() if n["Alive"]}
    able = {node: cpus[node] for node in cpus if cpus[node]} or dict.fromkeys(cpus, 1)
    return min(able, key=lambda node: ((taken.count(node) + 1) / able[node], node))


class _Actor:
    """Hold an actor and how many environments it has."""

    def __init__(self, node: str, calls: int, timeout_seconds: float | None) -> None:
        self.node = node
        on_node = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
        options: Any = EnvironmentWorker.options(  # pyright: ignore
            scheduling_strategy=on_node(node, soft=True),
            runtime_env={"env_vars": {"JAX_PLATFORMS": "cpu"}},  # accelerators are the trainer's
        )
        self._handle: Any = options.remote(calls, timeout_seconds)
        self._ready = self._handle.ready.remote()
        self._limit, self._place = timeout_seconds, "a process that was starting"
        self.environments, self.takes_more, self.lost = 0, True, False

    async def ask(self, method: str, *arguments: Any, calls: int = 1) -> Any:
        """Call a method of the actor and return its answer.

        Args:
            calls: of the environment that it makes, each with its time limit.

        Raises:
            EnvironmentWorkerError: the process died, or no longer answers and was ended.
        """
        limit = None if self._limit is None else calls * self._limit + _SILENT_SECONDS
        try:
            self._place = await self._ready  # a start takes the time that it takes
            reference = getattr(self._handle, method).remote(*arguments)
            found = await asyncio.wait_for(reference, limit)
        except ray.exceptions.RayTaskError:  # an answer that cannot be pickled, for instance
            raise
        except ray.exceptions.RayError as error:
            self.end()
            reason = str(error).strip().splitlines()[-1].strip()
            raise EnvironmentWorkerError(f"{self._place} died: {reason}") from error
        except TimeoutError as error:  # something holds Python's lock: no thread of it can run
            self.end()
            raise EnvironmentWorkerError(
                f"{self._place} gave no sign of life for {limit:g} s and was ended"
            ) from error
        if not isinstance(found, Failed):
            return found
        if found.hung:
            self.takes_more = False
        raise _RemoteError(found.error, found.place)

    def end(self) -> None:
        """End the process, whatever it does."""
        self.takes_more, self.lost = False, True
        ray.kill(self._handle)


class _Remote:
    """Stand for an environment in an actor, with the methods of one, and `judge`."""

    def __init__(
        self, pool: EnvironmentWorkers, actor: _Actor, number: int, packed: Any, made_with: Any
    ) -> None:
        self._pool, self._actor, self._number = pool, actor, number
        self._made = packed, made_with

    async def init(self, messages: list[Message]) -> Any:
        return await self._actor.ask("init", self._number, *self._made, messages, calls=2)

    async def step(self, action: str, tokens: list[str], stopped: bool) -> Any:
        return await self._actor.ask("step", self._number, action, tokens, stopped)

    async def judge(self, packed: Any, /, **keywords: Any) -> Any:
        return await self._actor.ask("judge", packed, keywords, calls=2)

    async def get_metrics(self) -> Any:
        return await self._actor.ask("get_metrics", self._number)

    async def close(self) -> None:
        """Close the environment. Where the process is gone, nothing is left to release."""
        try:
            if not self._actor.lost:
                await self._actor.ask("close", self._number)
        finally:
            self._pool.leave(self._actor)


def pool_of_run(config: cfg.TrainConfig, processes: int = 1) -> EnvironmentWorkers:
    """Return the pool that a config asks for, and start or join Ray where that has not happened.

    Args:
        processes: of the job. Where each of them samples with an engine of its own, each has its
            share of the actors.

    Raises:
        ValueError: the environment or a reward function cannot be sent to other processes.
    """
    if not ray.is_initialized():
        initialize_ray(config)
    environment, gym = config.environment, config.environment.skyrl_gym
    share = -(-gym.ray_env_workers // processes) if cfg.in_process(config) else gym.ray_env_workers
    pool = EnvironmentWorkers(share, gym.max_env_workers, gym.env_timeout_seconds)
    pool.packed(envs.load(environment.env_class), f"environment '{environment.env_class}'")
    for path in environment.reward_functions:
        pool.packed(import_call(path, "reward function"), f"reward function '{path}'")
    return pool
