"""The samples of one request, from the engine's threads to the server's loop."""

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import AsyncIterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from jaxrl.rollout.conversations.submissions import Submissions
from jaxrl.rollout.protocol import Completion, Request
from jaxrl.rollout.server.errors import ApiError
from jaxrl.rollout.server.requests import SampleRequest

_log = logging.getLogger(__name__)
_COLUMNS = (
    *("tokens", "log_probs", "versions", "top_log_probs", "raw_log_probs", "sampling_mask_ids"),
    "context_versions",
)


@dataclass(frozen=True)
class SamplePart:
    """Describe what came of a sample.

    Attributes:
        sample: its number; the samples of the first prompt come first.
        new: tokens since the last part; with the stop_reason if it is the last one.
        whole: all of it, if it is the last part.
    """

    sample: int
    new: Completion
    whole: Completion | None = None


class RunningRequest:
    """Submits a request and collects what comes of it; belongs to one loop.

    Args:
        request: what was asked for.
    """

    def __init__(self, request: SampleRequest) -> None:
        self.request = request
        self._loop = asyncio.get_running_loop()
        self._parts: asyncio.Queue[SamplePart | Exception] = asyncio.Queue()
        self._so_far: list[Completion | None] = [
            Completion([], [], "", []) for _ in range(request.samples)
        ]  # None: it has ended
        self._futures: list[Future[Completion]] = []
        self._aborted = False

    async def start(self, submissions: Submissions) -> None:
        """Queue the samples; raises what the engine raises."""
        if not self.request.sampling.max_tokens:
            for number in range(self.request.samples):
                nothing = Completion([], [], "length", [])
                self._parts.put_nowait(SamplePart(number, nothing, nothing))
            return
        first, calls = 0, []
        for prompt, keys in zip(self.request.prompts, self.request.keys, strict=True):
            engine_request = Request(
                prompt,
                keys,
                self.request.sampling,
                self._teller(first),
                constrain=self.request.constrain,
            )
            calls.append(self._submit(submissions, engine_request, first))
            first += len(keys)
        await asyncio.gather(*calls)

    async def _submit(self, submissions: Submissions, request: Request, first: int) -> None:
        futures = await submissions.submit(request)
        self._futures += futures
        for number, future in enumerate(futures, first):
            future.add_done_callback(lambda f, n=number: self._post(self._finish, n, f))
        if self._aborted:
            self.close()

    async def parts(self) -> AsyncIterator[SamplePart]:
        """Yield what comes, until all samples have ended.

        Raises:
            ApiError: the engine failed, or was put to sleep.
        """
        left = self.request.samples
        while left:
            part = await self._parts.get()
            if isinstance(part, Exception):
                raise part
            left -= part.whole is not None
            yield part

    def abort(self) -> None:
        """End all samples with what is known of them."""
        self._aborted = True
        self.close()

    def close(self) -> None:
        """Cancel the samples and free what they hold."""
        for future in self._futures:
            future.cancel()

    def _teller(self, first: int) -> Any:
        return lambda number, new: self._post(self._take, first + number, new)

    def _post(self, call: Any, *arguments: Any) -> None:
        """Schedule a call in the loop; the engine's thread must not learn that the loop is gone."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(call, *arguments)

    def _take(self, number: int, new: Completion) -> None:
        known = self._so_far[number]
        if known is None:  # it was aborted while these were on their way
            return
        for name in _COLUMNS:
            getattr(known, name).extend(getattr(new, name))
        self._parts.put_nowait(SamplePart(number, new))

    def _finish(self, number: int, future: Future[Completion]) -> None:
        known, self._so_far[number] = self._so_far[number], None
        assert known is not None
        if future.cancelled():
            if not self._aborted:
                gone = ApiError(503, "the engine was put to sleep; try again", retry_after=1)
                self._parts.put_nowait(gone)
                return
            whole = dataclasses.replace(known, stop_reason="abort")
        elif isinstance(error := future.exception(), ApiError):  # of its constraint
            self._parts.put_nowait(error)
            return
        elif error:
            _log.error("request %s failed", self.request.request_id, exc_info=error)
            self._parts.put_nowait(ApiError(500, f"the engine failed: {type(error).__name__}"))
            return
        else:
            whole = future.result()
        self._parts.put_nowait(SamplePart(number, _after(whole, len(known.tokens)), whole))


def _after(whole: Completion, start: int) -> Completion:
    columns = {name: getattr(whole, name)[start:] for name in _COLUMNS}
    return dataclasses.replace(whole, **columns)
