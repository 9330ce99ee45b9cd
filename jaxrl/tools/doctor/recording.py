"""An engine that keeps what it says, and one that says it again."""

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, cast

from jaxrl.rollout.protocol import Completion, Engine, Request

Key = tuple[tuple[int, ...], tuple[int, int]]  # input of a turn, key of a sample


class RecordingEngine:
    """Serve as the `Engine` of a run, and keep what it answers.

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
        """Submit requests and note their completions; see `Engine`."""
        submitted = self.engine.submit(requests)
        for request, futures in zip(requests, submitted, strict=True):
            for key, future in zip(request.keys, futures, strict=True):
                place = request.prompt_tokens, key
                future.add_done_callback(lambda done, place=place: self._keep(place, done))
        return submitted

    def generate(self, requests: Sequence[Request]) -> list[list[Completion]]:
        """Submit requests and wait for their completions; see `Engine`."""
        return [[future.result() for future in futures] for futures in self.submit(requests)]

    def _keep(self, place: Key, done: Future[Completion]) -> None:
        if not done.cancelled() and done.exception() is None:
            with self._lock:
                self.said[place] = done.result()


class NeverSaid(Exception):
    """Say that a conversation went where it did not go before."""


class ReplayingEngine:
    """Answer as another `Sampler` did, without a model."""

    def __init__(self, said: dict[Key, Completion]) -> None:
        self.said = said

    def submit(self, requests: Sequence[Request]) -> list[list[Future[Completion]]]:
        """Return what was answered to the same requests, as futures; see `Engine`."""
        return [[self._answer(request, key) for key in request.keys] for request in requests]

    def generate(self, requests: Sequence[Request]) -> list[list[Completion]]:
        """Return what was answered to the same requests; see `Engine`."""
        return [[future.result() for future in futures] for futures in self.submit(requests)]

    def _answer(self, request: Request, key: tuple[int, int]) -> Future[Completion]:
        future: Future[Completion] = Future()
        found = self.said.get((request.prompt_tokens, key))
        if found is None:
            future.set_exception(NeverSaid(f"prompt {request.prompt_tokens[-8:]}"))
        else:
            future.set_result(found)
        return future
