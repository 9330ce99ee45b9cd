"""One engine for its owner, who may put it to sleep, and for guests, who come and go."""

import contextlib
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from jaxrl.rollout.protocol import Completion, Engine, PromptScores, Request
from jaxrl.rollout.server.errors import ApiError


class Guests:
    """Present the engine as the HTTP server sees it: there while it has weights.

    Attributes:
        version: of the weights; None = the engine has none.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.version: int | None = None
        self._running: set[Future[Completion]] = set()
        self._lock = threading.Lock()

    def submit(self, requests: Sequence[Request]) -> list[list[Future[Completion]]]:
        """Queue the samples of requests; see `protocol.Engine`.

        Raises:
            ApiError: 503, the engine has no weights now.
        """
        with self._lock:
            if self.version is None:
                raise ApiError(503, "the engine has no weights now; try again", retry_after=1)
            groups = self.engine.submit(requests)
            futures = [future for group in groups for future in group]
            self._running.update(futures)
        for future in futures:
            future.add_done_callback(self._left)
        return groups

    def score(self, tokens: Sequence[int]) -> PromptScores:
        """Return how likely the model finds the tokens of a prompt, of an engine that `scores`.

        Raises:
            ApiError: 503, the engine has no weights now.
        """
        if self.version is not None:
            with contextlib.suppress(RuntimeError):  # it was put to sleep meanwhile
                return self.engine.score(tokens)  # type: ignore[attr-defined]
        raise ApiError(503, "the engine has no weights now; try again", retry_after=1)

    def send_away(self) -> None:
        """Cancel what runs, and take no more until `version` is set."""
        with self._lock:
            self.version = None
            running = list(self._running)
        for future in running:
            future.cancel()

    def _left(self, future: Future[Completion]) -> None:
        with self._lock:
            self._running.discard(future)


class HostEngine:
    """Present the same engine to its owner; an `Engine`.

    Its samples end before guests do: `sleep` sends these away, so that it never finds the engine at
    work.

    Args:
        engine: of both.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine, self.guests = engine, Guests(engine)

    def submit(self, requests: Sequence[Request]) -> list[list[Future[Completion]]]:
        """Queue the samples of requests; see `protocol.Engine`."""
        return self.engine.submit(requests)

    def generate(self, requests: Sequence[Request]) -> list[list[Completion]]:
        """Sample requests, and wait for all of it; see `protocol.Engine`."""
        return self.engine.generate(requests)

    def warm_up(self, requests: Sequence[Request]) -> None:
        """Compile for batches with the shapes of these requests; see `protocol.Engine`."""
        self.engine.warm_up(requests)

    def update_weights(self, params: Any, version: int) -> None:
        """Give new weights to both, owner and guests."""
        self.engine.update_weights(params, version)
        self.guests.version = version

    def describe(self) -> str:
        """Return the shapes of what is compiled, in a line; see `protocol.Engine`."""
        return self.engine.describe()

    def sleep(self) -> None:
        """Send guests away, and free the engine's memory."""
        self.guests.send_away()
        self.engine.sleep()

    def wake(self) -> None:
        """Undo `sleep`; see `protocol.Engine`."""
        self.engine.wake()

    def pause(self) -> None:
        """Draw no more tokens until `resume`."""
        self.engine.pause()  # type: ignore[attr-defined]

    def resume(self) -> None:
        """Undo `pause`."""
        self.engine.resume()  # type: ignore[attr-defined]
