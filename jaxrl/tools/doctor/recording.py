"""An engine that keeps what it says, and one that says it again."""

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, cast

from jaxrl.rollout.protocol import Completion, Engine, Request

Key = tuple[tuple[int, ...], tuple[int, int]]  # input of a turn, key of a sample


class RecordingEngine:
    """The `Engine` of a run; what it answers stays here.

    Attributes:
        engine: of the run.
        said: completions by input and key.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine, self.said = engine, cast(dict[Key, Completion], {})
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def submit(self, requests: Sequence[Request]) -> list[list[Future[Completion]]]:
        """See `Engine`."""
        submitted = self.engine.submit(requests)
        for request, futures in zip(requests, submitted, strict=True):
            for key, future in zip(request.keys, futures, strict=True):
                place = request.prompt_tokens, key
                future.add_done_callback(lambda done, place=place: self._keep(place, done))
        return submitted

    def generate(self, requests: Sequence[Request]) -> list[list[Completion]]:
        """See `Engine`."""
        return [[future.result() for future in futures] for futures in self.submit(requests)]

    def _keep(self, place: Key, done: Future[Completion]) -> None:
        if not done.cancelled() and done.exception() is None:
            with self._lock:
                self.said[place] = done.result()


class NeverSaid(Exception):
    """A conversation went where it did not go before."""


class ReplayingEngine:
    """A `Sampler` that answers as another did; it has no model."""

    def __init__(self, said: dict[Key, Completion]) -> None:
        self.said = said

    def submit(self, requests: Sequence[Request]) -> list[list[Future[Completion]]]:
        """See `Engine`."""
        return [[self._answer(request, key) for key in request.keys] for request in requests]

    def generate(self, requests: Sequence[Request]) -> list[list[Completion]]:
        """See `Engine`."""
        return [[future.result() for future in futures] for futures in self.submit(requests)]

    def _answer(self, request: Request, key: tuple[int, int]) -> Future[Completion]:
        future: Future[Completion] = Future()
        found = self.said.get((request.prompt_tokens, key))
        if found is None:
            future.set_exception(NeverSaid(f"prompt {request.prompt_tokens[-8:]}"))
        else:
            future.set_result(found)
        return future
