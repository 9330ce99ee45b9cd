"""Calls of environments: a bounded number at a time, each with a time limit."""

import asyncio
import inspect
import queue
import threading
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from typing import Any

from jaxrl import envs


class EnvironmentPool:
    """Make environments, and run the calls of them, at most `workers` at a time.

    A call that is a coroutine function is awaited in the caller's loop; any other runs in a daemon
    thread, so that one which never returns keeps neither the run nor the process waiting: its
    thread is given up and another takes its place. Threads are kept from batch to batch.

    Args:
        workers: most calls at a time; 0 = in the caller's thread, one after the other and without
            a time limit.
        timeout_seconds: of each call, from its start; None = none.

    Attributes:
        given_up: threads that were left behind in calls that took too long.
    """

    def __init__(self, workers: int, timeout_seconds: float | None = None) -> None:
        self.workers, self.timeout_seconds = workers, timeout_seconds
        self.given_up = 0
        self._idle: list[_Worker] = []
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

    async def run(self, call: Callable[[], Any]) -> Any:
        """Run a call and return its result.

        Raises:
            TimeoutError: it took longer than the limit.
            Exception: what the call raises; an exit becomes a RuntimeError.
        """
        if not self.workers:
            result = call()
            return await self._limited(result) if inspect.isawaitable(result) else result
        if self._loop is not asyncio.get_running_loop():  # a semaphore belongs to one loop
            self._loop = asyncio.get_running_loop()
            self._places = asyncio.Semaphore(self.workers)
        async with self._places:
            if inspect.iscoroutinefunction(call):
                return await self._limited(call())
            return await self._in_thread(call)

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
