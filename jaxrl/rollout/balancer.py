"""Several engines as one: each request goes to the engine with the fewest samples in flight."""

import threading
from collections.abc import Sequence
from concurrent.futures import Future

from jaxrl.models.transformer import Params
from jaxrl.rollout.protocol import Completion, Request
from jaxrl.rollout.sample_thread import SampleThread


class Balancer:
    """An `Engine` over engines with the same weights; the samples of a request stay together.

    With `enable_prefix_caching` a prompt that goes on from another, as the next turn of a
    conversation does, follows it to its engine.

    Args:
        engines: at least one.
    """

    def __init__(self, engines: Sequence[SampleThread]) -> None:
        self.engines = list(engines)
        self._in_flight = [0] * len(self.engines)
        self._lock = threading.Lock()

    def submit(self, requests: Sequence[Request]) -> list[list[Future[Completion]]]:
        """See `protocol.Engine`; which engine serves a request depends on what is in flight."""
        for request in requests:
            self.engines[0].check(request)
        with self._lock:
            shares: list[list[int]] = [[] for _ in self.engines]
            for number, request in enumerate(requests):
                engine = self._choose(request)
                shares[engine].append(number)
                self._in_flight[engine] += len(request.keys)
        futures: dict[int, list[Future[Completion]]] = {}
        for engine, numbers in enumerate(shares):
            submitted = self.engines[engine].submit([requests[n] for n in numbers])
            futures |= dict(zip(numbers, submitted, strict=True))
            for future in (f for group in submitted for f in group):
                future.add_done_callback(lambda _, engine=engine: self._left(engine))
        return [futures[number] for number in range(len(requests))]

    def _choose(self, request: Request) -> int:
        known = [engine.known_prefix(request.prompt_tokens) for engine in self.engines]
        order = range(len(self.engines))
        return min(order, key=lambda e: (-known[e], self._in_flight[e]))

    def _left(self, engine: int) -> None:
        with self._lock:
            self._in_flight[engine] -= 1

    def generate(self, requests: Sequence[Request]) -> list[list[Completion]]:
        """The samples of each request, in order."""
        return [[future.result() for future in group] for group in self.submit(requests)]

    def warm_up(self, requests: Sequence[Request]) -> None:
        """Compile on every engine."""
        for engine in self.engines:
            engine.warm_up(requests)

    def update_weights(self, params: Params, version: int) -> None:
        """The same weights for all, one engine after the other."""
        for engine in self.engines:
            engine.update_weights(params, version)

    def sleep(self) -> None:
        """Drop weights and caches."""
        for engine in self.engines:
            engine.sleep()

    def wake(self) -> None:
        """Nothing to do."""

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
        """Number of engines, and the shapes of their programs."""
        return f"{len(self.engines)} engines: {self.engines[0].describe()}"
