"""Several engines as one: each request goes to the engine with the fewest samples in flight.

Which samples are long is not known then. So an engine whose samples wait lends some to one that has
free slots and none that wait. What a sample draws does not depend on where it is drawn.

No engine waits for another: one that lends holds its own lock and then, for a moment, the
balancer's, under which nobody takes an engine's; the samples go to a place that the other looks
into when it has its lock.
"""

import functools
import threading
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from jaxrl.models.transformer import Params
from jaxrl.rollout.native.sample_thread import SampleThread
from jaxrl.rollout.native.slots import Sample
from jaxrl.rollout.protocol import Completion, PromptScores, Request


class Balancer:
    """Serve as one `Engine` over engines with the same weights.

    The samples of a request are queued together. A conversation stays with the engine that began
    its first turn. With `enable_prefix_caching` a prompt that goes on from another follows it to
    its engine.

    Args:
        engines: at least one.

    Attributes:
        lent: samples so far that went from one engine to another.
    """

    def __init__(self, engines: Sequence[SampleThread]) -> None:
        self.engines = list(engines)
        self.lent = 0
        self._in_flight = [0] * len(self.engines)  # samples and conversations: pages that they need
        # The engine of each conversation, and of each sample without one.
        self._home: dict[Future[Any], int] = {}
        self._coming = [0] * len(self.engines)  # samples that are not queued yet
        self._kept_apart = 0  # calls during which no sample may go from one engine to another
        self._lock = threading.RLock()  # a conversation may be over when it is looked at
        for number, engine in enumerate(self.engines if len(self.engines) > 1 else ()):
            engine.offer = functools.partial(_offer, weakref.ref(self), number)

    @property
    def constrains(self) -> bool:
        """Return whether the engines ask the constraints of requests."""
        return all(engine.constrains for engine in self.engines)

    @property
    def scores(self) -> bool:
        """Return whether the engines score prompts."""
        return all(engine.scores for engine in self.engines)

    def score(self, tokens: Sequence[int]) -> PromptScores:
        """Return how likely the model finds the tokens of a prompt, as one engine does."""
        with self._lock:
            least = min(range(len(self.engines)), key=lambda e: self._in_flight[e])
        return self.engines[least].score(tokens)

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
                self._coming[engine] += len(request.keys)
        futures: dict[int, list[Future[Completion]]] = {}
        try:
            for engine, numbers in enumerate(assigned):
                if not numbers:  # it would let us wait for its block
                    continue
                submitted = self.engines[engine].submit([requests[n] for n in numbers])
                futures |= dict(zip(numbers, submitted, strict=True))
                with self._lock:
                    for number in numbers:
                        for ends in () if requests[number].conversations else futures[number]:
                            self._home[ends] = engine
                            ends.add_done_callback(self._over)
        except BaseException:  # nothing of the call is queued
            for future in (f for group in futures.values() for f in group):
                future.cancel()
            for engine, numbers in enumerate(assigned):
                never = [requests[n] for n in numbers if n not in futures]
                self._left(engine, sum(len(r.keys) for r in never if not r.conversations))
            raise
        finally:
            with self._lock:
                for engine, numbers in enumerate(assigned):
                    self._coming[engine] -= sum(len(requests[n].keys) for n in numbers)
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

    def _over(self, ends: Future[Any]) -> None:
        with self._lock:
            self._left(self._home.pop(ends))

    def _left(self, engine: int, samples: int = 1) -> None:
        with self._lock:
            self._in_flight[engine] -= samples

    def lend(self, giver: int) -> None:
        """Let the engine with most room have samples that wait at another, whose lock is held."""
        engine, others = self.engines[giver], [e for e in range(len(self.engines)) if e != giver]
        with self._lock:
            longest = max(self.engines[e].waiting() for e in others)
            if self._kept_apart or engine.waiting() < longest:
                return
            room = {e: self.engines[e].room() - self._coming[e] for e in others}
            taker = max(room, key=lambda e: room[e])
            other = self.engines[taker]
            if room[taker] < 1 or other.version != engine.version:
                return
            samples = engine.spare(room[taker], lambda sample: _place(sample) in self._home)
            for sample in samples:
                self._home[_place(sample)] = taker
            self._left(giver, len(samples))
            self._left(taker, -len(samples))
            self.lent += len(samples)
            other.borrow(samples)
        if samples:
            engine.report(other.awake)  # which may wait for its lock

    @contextmanager
    def _apart(self) -> Iterator[None]:
        """Let no sample go from one engine to another while the block runs.

        What is done to one engine after another reaches every sample so.
        """
        with self._lock:
            self._kept_apart += 1
        try:
            yield
        finally:
            with self._lock:
                self._kept_apart -= 1

    def generate(self, requests: Sequence[Request]) -> list[list[Completion]]:
        """Return the samples of each request, in order."""
        return [[future.result() for future in group] for group in self.submit(requests)]

    def warm_up(self, requests: Sequence[Request]) -> None:
        """Compile on every engine."""
        for engine in self.engines:
            engine.warm_up(requests)

    def update_weights(self, params: Params, version: int) -> None:
        """Give all engines the same weights, one after the other."""
        with self._apart():
            for engine in self.engines:
                engine.update_weights(params, version)

    def sleep(self) -> None:
        """Drop weights and caches."""
        with self._apart():
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
        with self._apart():
            for engine in self.engines:
                engine.abort()

    def describe(self) -> str:
        """Describe the number of engines, and the shapes of their programs."""
        return f"{len(self.engines)} engines: {self.engines[0].describe()}"


def _place(sample: Sample) -> Future[Any]:
    """Return what the balancer knows a sample's engine by."""
    return sample.future if sample.conversation is None else sample.conversation


def _offer(balancer: "weakref.ref[Balancer]", giver: int) -> None:
    if (found := balancer()) is not None:  # the engines do not keep it
        found.lend(giver)
