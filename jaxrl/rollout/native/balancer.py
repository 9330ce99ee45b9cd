"""Several engines as one: each request goes to the engine with the fewest samples in flight."""

import threading
from collections.abc import Sequence
from concurrent.futures import Future

from jaxrl.models.transformer import Params
from jaxrl.rollout.native.sample_thread import SampleThread
from jaxrl.rollout.protocol import Completion, Request


class Balancer:
    """Serve as one `Engine` over engines with the same weights.

    The samples of a request stay together. A conversation stays with the engine of its first turn.
    With `enable_prefix_caching` a prompt that goes on from another follows it to its engine.

    Args:
        engines: at least one.
    """

    def __init__(self, engines: Sequence[SampleThread]) -> None:
        self.engines = list(engines)
        self._in_flight = [0] * len(self.engines)  # samples and conversations: pages that they need
        self._home: dict[Future[None], int] = {}  # engine of each conversation
        self._lock = threading.RLock()  # a conversation may be over when it is looked at

    @property
    def constrains(self) -> bool:
        """Return whether the engines ask the constraints of requests."""
        return all(engine.constrains for engine in self.engines)

    def submit(self, requests: Sequence[Request]) -> list[list[Future[Completion]]]:
        """Queue requests as `protocol.Engine` says.

        Which engine serves a request depends on what is in flight.
        """
        for request in requests:
            self.engines[0].check(request)
        known = [engine.known_prefixes(requests) for engine in self.engines]
        with self._lock:
            assigned: list[list[int]] = [[] for _ in self.engines]
            for number, request in enumerate(requests):
                engine = self._choose(request, [lengths[number] for lengths in known])
                assigned[engine].append(number)
        futures: dict[int, list[Future[Completion]]] = {}
        try:
            for engine, numbers in enumerate(assigned):
                if not numbers:  # it would let us wait for its block
                    continue
                submitted = self.engines[engine].submit([requests[n] for n in numbers])
                futures |= dict(zip(numbers, submitted, strict=True))
                for number in numbers:
                    for ends in () if requests[number].conversations else futures[number]:
                        ends.add_done_callback(lambda _, engine=engine: self._left(engine))
        except BaseException:  # nothing of the call is queued
            for future in (f for group in futures.values() for f in group):
                future.cancel()
            for engine, numbers in enumerate(assigned):
                never = [requests[n] for n in numbers if n not in futures]
                self._left(engine, sum(len(r.keys) for r in never if not r.conversations))
            raise
        return [futures[number] for number in range(len(requests))]

    def _choose(self, request: Request, known: Sequence[int]) -> int:
        home = next((self._home[c] for c in request.conversations if c in self._home), None)
        if home is not None:
            return home
        order = range(len(self.engines))
        engine = min(order, key=lambda e: (-known[e], self._in_flight[e]))
        self._in_flight[engine] += len(request.keys)
        for conversation in request.conversations:
            self._home[conversation] = engine
            conversation.add_done_callback(self._over)
        return engine

    def _over(self, conversation: Future[None]) -> None:
        self._left(self._home.pop(conversation))

    def _left(self, engine: int, samples: int = 1) -> None:
        with self._lock:
            self._in_flight[engine] -= samples

    def generate(self, requests: Sequence[Request]) -> list[list[Completion]]:
        """Return the samples of each request, in order."""
        return [[future.result() for future in group] for group in self.submit(requests)]

    def warm_up(self, requests: Sequence[Request]) -> None:
        """Compile on every engine."""
        for engine in self.engines:
            engine.warm_up(requests)

    def update_weights(self, params: Params, version: int) -> None:
        """Give all engines the same weights, one after the other."""
        for engine in self.engines:
            engine.update_weights(params, version)

    def sleep(self) -> None:
        """Drop weights and caches."""
        for engine in self.engines:
            engine.sleep()

    def wake(self) -> None:
        """Do nothing: `update_weights` brings back what `sleep` let go."""

    def pause(self) -> None:
        """Draw no more tokens until `resume`."""
        for engine in self.engines:
            engine.pause()

    def resume(self) -> None:
        """Undo `pause`."""
        for engine in self.engines:
            engine.resume()

    def abort(self) -> None:
        """End all samples with what they have."""
        for engine in self.engines:
            engine.abort()

    def describe(self) -> str:
        """Describe the number of engines, and the shapes of their programs."""
        return f"{len(self.engines)} engines: {self.engines[0].describe()}"
