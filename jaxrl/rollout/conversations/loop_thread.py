"""An event loop in a thread of its own, for rollouts that go on beside other work."""

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from jaxrl import activity

Result = TypeVar("Result")
CLOSING_SECONDS = 60.0


class LoopThread:
    """Run coroutines; `close` cancels what is left of them and ends the thread."""

    def __init__(self, name: str) -> None:
        self._loop: asyncio.AbstractEventLoop
        self._stop: asyncio.Event
        ready = threading.Event()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._main(ready)), name=name, daemon=True
        )
        self._thread.start()
        ready.wait()

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """Return the event loop, for `call_soon_threadsafe`."""
        return self._loop

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine in the loop and return its result; cancel it if interrupted.

        To be called from any thread but the loop's own.
        """
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        finally:
            future.cancel()

    def close(self) -> None:
        """End the thread. One that does not answer is left behind; it ends with the process."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(CLOSING_SECONDS)
        if self._thread.is_alive():
            activity.warn(f"the rollouts have not ended within {CLOSING_SECONDS:g} s; left behind")

    async def _main(self, ready: threading.Event) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        ready.set()
        await self._stop.wait()  # asyncio.run then cancels all tasks, and waits for them
