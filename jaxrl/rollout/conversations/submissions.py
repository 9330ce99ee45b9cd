"""Requests of many conversations, in few calls of the engine."""

import asyncio
from concurrent.futures import Future

from jaxrl.rollout.protocol import Completion, Request, Sampler

Turn = Future[Completion]
Samples = list[Turn]  # of one request


class Submissions:
    """Collects single requests while the engine takes earlier ones.

    An engine takes requests between two blocks of tokens: calls one after the other would each wait
    for a block, and in the event loop's thread they would stop all conversations. Belongs to one
    loop.
    """

    def __init__(self, engine: Sampler, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self.engine, self.loop = engine, loop
        self._waiting: list[tuple[Request, asyncio.Future[Samples]]] = []
        self._call: asyncio.Task[None] | None = None

    async def submit(self, request: Request) -> Samples:
        """Queue a request; raises what the engine raises."""
        taken: asyncio.Future[Samples] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, taken))
        if self._call is None or self._call.done():
            self._call = asyncio.create_task(self._submit())
        try:
            return await taken
        except asyncio.CancelledError:
            if taken.done() and not taken.cancelled() and not taken.exception():
                for turn in taken.result():  # they came in the very moment
                    turn.cancel()
            raise

    async def close(self) -> None:
        """Wait for the call under way."""
        if self._call is not None:
            await asyncio.wait([self._call])  # which leaves it alone if this is cancelled

    async def _submit(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting, []
            try:
                groups = await asyncio.to_thread(self.engine.submit, [r for r, _ in batch])
            except Exception as error:
                for _, taken in batch:
                    if not taken.done():
                        taken.set_exception(error)
                continue
            for (_, taken), samples in zip(batch, groups, strict=True):
                if not taken.done():
                    taken.set_result(samples)
                    continue
                for turn in samples:  # nobody waits any more
                    turn.cancel()
