"""Calls of environments: a bounded number at a time, each with a time limit."""

import asyncio
import inspect
import logging
import queue
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from typing import Any

from jaxrl import envs

_log = logging.getLogger(__name__)
# Calls in the caller's thread are looked at a thousand at a time: a conversation has about five, of
# which one judges. A second of calls that took more than 5 ms is 5 ms for each judgement.
_WINDOW, _SLOW_SECONDS, _TOO_MANY_SECONDS = 1000, 0.005, 1.0


class EnvironmentPool:
    """Make environments, and run the calls of them, at most `workers` at a time.

    A call that is a coroutine function is awaited in the caller's loop; any other runs in a daemon
    thread, so that one which never returns keeps neither the run nor the process waiting: its
    thread is given up and another takes its place. Threads are kept from batch to batch.

    Args:
        workers: most calls at a time; 0 = in the caller's thread, one after the other and without
            a time limit: the log says once if they are slow.
        timeout_seconds: of each call, from its start; None = none.

    Attributes:
        given_up: threads that were left behind in calls that took too long.
    """

    def __init__(self, workers: int, timeout_seconds: float | None = None) -> None:
        self.workers, self.timeout_seconds = workers, timeout_seconds
        self.given_up = 0
        self._idle: list[_Worker] = []
        self._inline, self._slow, self._told = 0, list[float](), False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._places: asyncio.Semaphore

    def make(
        self,
        env_class: str,
        extras: Mapping[str, Any] | None = None,
        env_config: Mapping[str, Any] | None = None,
    ) -> Any:
        """Make a fresh environment, see `envs.make`.

        This is a call for `run`, as are its methods.
        """
        return envs.make(env_class, extras, env_config)

    def beside(self, env: Any, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a user's function as it is called where the environment lives."""
        return function

    async def run(self, call: Callable[[], Any], *, instant: bool = False) -> Any:
        """Run a call and return its result.

        Args:
            instant: it takes microseconds, and is made in the caller's thread.

        Raises:
            TimeoutError: it took longer than the limit.
            Exception: what the call raises; an exit becomes a RuntimeError.
        """
        if not self.workers:
            return await self._inline_call(call)
        if instant and not inspect.iscoroutinefunction(call):
            return call()
        if self._loop is not asyncio.get_running_loop():  # a semaphore belongs to one loop
            self._loop = asyncio.get_running_loop()
            self._places = asyncio.Semaphore(self.workers)
        async with self._places:
            if inspect.iscoroutinefunction(call):
                return await self._limited(call())
            result = await self._in_thread(call)
            return await self._limited(result) if inspect.isawaitable(result) else result

    async def _inline_call(self, call: Callable[[], Any]) -> Any:
        started = time.monotonic()
        result = call()
        self._time(time.monotonic() - started)
        return await self._limited(result) if inspect.isawaitable(result) else result

    def _time(self, seconds: float) -> None:
        """Count a call that kept all others waiting, and say once that such calls are slow."""
        if self._told:
            return
        self._inline += 1
        if seconds > _SLOW_SECONDS:
            self._slow.append(seconds)
            if len(self._slow) > 3 and sum(self._slow) > _TOO_MANY_SECONDS:
                self._told = True
                _log.warning(
                    "rewards run one after another, %.3g s each, without a time limit: "
                    "environment.skyrl_gym.max_env_workers=0. Set it to 32, its default, and 32 "
                    "run at a time",
                    sum(self._slow) / len(self._slow),
                )
        if self._inline >= _WINDOW:
            self._inline, self._slow = 0, []

    async def _in_thread(self, call: Callable[[], Any]) -> Any:
        worker = self._idle.pop() if self._idle else _Worker()
        future = worker.submit(call)
        try:
            return await self._limited(asyncio.wrap_future(future))
        finally:
            if future.done():
                self._idle.append(worker)
            else:
                worker.give_up()
                self.given_up += 1

    async def _limited(self, work: Awaitable[Any]) -> Any:
        """Return the result of `work`, whose own TimeoutError is not mistaken for ours."""
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait([task], timeout=self.timeout_seconds)
            if not task.done():
                raise TimeoutError(f"no answer within {self.timeout_seconds:g} s")
            return task.result()
        finally:
            task.cancel()


class _Worker:
    """Make one call after the other in a daemon thread."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = (
            queue.SimpleQueue()
        )
        threading.Thread(target=self._work, name="jaxrl-environment", daemon=True).start()

    def submit(self, call: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()  # from here on it cannot be cancelled
        self._calls.put((future, call))
        return future

    def give_up(self) -> None:
        """End when the call under way returns."""
        self._calls.put(None)

    def _work(self) -> None:
        while (item := self._calls.get()) is not None:
            future, call = item
            try:
                result = call()
            except Exception as error:
                future.set_exception(error)
            except BaseException as error:  # sys.exit in an environment must not end the run
                future.set_exception(RuntimeError(repr(error)))
            else:
                future.set_result(result)
            del item, future, call  # nothing of a conversation lives on in an idle thread
