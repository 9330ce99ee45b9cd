"""The thread of an engine in this process: a queue of samples, and turns while there is work."""

import functools
import itertools
import threading
import traceback
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from jaxrl.rollout.native.slots import Sample
from jaxrl.rollout.protocol import Completion, PromptScores, Request

_GROUPS = itertools.count()  # of all engines: samples may change theirs


class SampleThread(ABC):
    """Hold what those engines have in common whose thread runs while there is work.

    Between two of its turns samples join, leave and are cut off, and the weights may change.

    Attributes:
        version: of the weights; -1 before the first.
        constrains: it asks the constraints of requests.
        scores: it has `score`, which tells the log-probs of prompts.
        offer: is called in a turn, with the lock held, that leaves samples waiting.
    """

    constrains = scores = False

    def __init__(self) -> None:
        self.version = -1
        self.offer: Callable[[], None] | None = None
        self._queue: deque[Sample] = deque()
        self._borrowed_samples: deque[Sample] = deque()  # others' threads put them there
        self._paused, self._running = False, False
        # Since the last look; to ask a thousand futures takes long. Nor may they keep the engine.
        self._any_cancelled = threading.Event()
        self._done: list[Callable[[], None]] = []  # for the thread to call, without the lock
        # The lock is held by every turn and every public method. Whoever waits for it holds the
        # door, so the thread, which comes back at once, cannot keep others out.
        self._lock, self._door = threading.Lock(), threading.Lock()

    @abstractmethod
    def update_weights(self, params: Any, version: int) -> None:
        """Take new weights, see `protocol.Engine`."""

    @abstractmethod
    def sleep(self) -> None:
        """Free the memory of weights and cache, see `protocol.Engine`."""

    @abstractmethod
    def wake(self) -> None:
        """Undo `sleep`, see `protocol.Engine`."""

    @abstractmethod
    def warm_up(self, requests: Sequence[Request]) -> None:
        """Compile what such requests need, see `protocol.Engine`."""

    @abstractmethod
    def describe(self) -> str:
        """Describe the engine in one line, see `protocol.Engine`."""

    @abstractmethod
    def check(self, request: Request) -> None:
        """Raise what `submit` raises for a request that can never be served."""

    def score(self, tokens: Sequence[int]) -> PromptScores:
        """Return how likely the model finds the tokens of a prompt, of an engine that `scores`."""
        raise NotImplementedError(f"{type(self).__name__} scores no prompts")

    def known_prefixes(self, requests: Sequence[Request]) -> list[int]:
        """Return how many tokens of each prompt are held for any request."""
        return [0] * len(requests)

    def room(self) -> int:
        """Return how many samples of other engines could begin at once; any thread may ask."""
        return 0

    def waiting(self) -> int:
        """Return how many samples wait; any thread may ask."""
        return len(self._queue) + len(self._borrowed_samples)

    def spare(self, most: int, known: Callable[[Sample], bool]) -> list[Sample]:
        """Take samples that can begin elsewhere out of the queue; the lock is held.

        Args:
            most: samples.
            known: whether a sample may go.
        """
        del most, known
        return []

    def report(self, call: Callable[[], None]) -> None:
        """Have the thread call something when the lock, which is held, is free again."""
        self._done.append(call)

    def borrow(self, samples: Sequence[Sample]) -> None:
        """Queue samples that another engine has let go, and do not wait for this one's turn.

        Whoever calls it calls `awake` when it holds no lock.
        """
        self._borrowed_samples.extend(samples)  # first: who is told of one must find it
        for sample in samples:
            sample.future.add_done_callback(functools.partial(_tell, self._any_cancelled))

    def awake(self) -> None:
        """Go on, if there is work and the thread does not run."""
        if not self._running:  # if it ends just now, it sees what was borrowed before
            with self._held():
                pass

    @abstractmethod
    def _prepare(self, requests: Sequence[Request]) -> None:
        """Make room for requests; raise a RuntimeError without weights."""

    @abstractmethod
    def _has_weights(self) -> bool: ...

    @abstractmethod
    def _live(self) -> Iterator[tuple[int, Sample]]:
        """Yield the slots with a sample in them."""

    @abstractmethod
    def _release(self, slot: int) -> None: ...

    def _leaves_queue(self, sample: Sample) -> None:  # noqa: B027 - most hold nothing for it
        """Let go what is held for a sample that waits no more, and has no slot."""

    @abstractmethod
    def _turn(self) -> None:
        """Admit samples and draw tokens; what has ended goes to `_done`."""

    def _land(self) -> None:  # noqa: B027 - most draw and fetch at once
        """Fetch what is drawn, where an engine begins to draw before it fetches."""

    @abstractmethod
    def _recover(self) -> None:
        """Recover from a turn that failed, with no sample left: what it held may be gone."""

    def submit(self, requests: Sequence[Request]) -> list[list[Future[Completion]]]:
        """Queue requests; see `protocol.Engine`.

        Raises:
            ValueError: see `check`.
            RuntimeError: no weights yet.
        """
        for request in requests:
            self.check(request)
        with self._held():
            self._prepare(requests)
            samples = [self._samples(request) for request in requests]
            self._enqueue([sample for group in samples for sample in group])
        return [[sample.future for sample in group] for group in samples]

    def generate(self, requests: Sequence[Request]) -> list[list[Completion]]:
        """Return the samples of each request, in order; raise what `submit` raises."""
        return [[future.result() for future in group] for group in self.submit(requests)]

    def abort(self) -> None:
        """End all samples now, with the tokens that are drawn and the reason "abort"."""
        with self._held():
            self._land()
            for sample in self._all_out():
                sample.finish("abort")
                self._done.append(sample.hand_over)

    def pause(self) -> None:
        """Draw no more tokens until `resume`; samples stay where they are.

        What is drawn but not fetched yet is reported by whatever comes next.
        """
        with self._held():
            self._paused = True

    def resume(self) -> None:
        """Undo `pause`."""
        with self._held():
            self._paused = False

    @contextmanager
    def _held(self) -> Iterator[None]:
        """Hold the lock while the block runs; the thread goes on with what is to be done then.

        It alone reports what there is of samples: whoever holds the lock may hold locks of his own,
        and stand in the middle of what those who are told would change.
        """
        with self._door:
            self._lock.acquire()
        try:
            while self._borrowed_samples:
                self._queue.append(self._borrowed_samples.popleft())
            try:
                yield
            finally:
                if not self._running and (self._done or self._has_work()):
                    self._running = True
                    threading.Thread(target=self._run, name="jaxrl-engine", daemon=True).start()
        finally:
            self._lock.release()

    def _check_idle(self) -> None:
        self._drop_cancelled()
        if self._queue or any(self._live()):
            raise RuntimeError("samples are in flight: wait for them, or abort them, first")

    def _samples(self, request: Request) -> list[Sample]:
        group = next(_GROUPS)
        limit = request.sampling.max_tokens
        conversations = request.conversations or (None,) * len(request.keys)
        samples = [
            Sample(
                request,
                group,
                key,
                limit,
                number,
                conversation,
                constraint=None if request.constrain is None else request.constrain(),
            )
            for number, (key, conversation) in enumerate(
                zip(request.keys, conversations, strict=True)
            )
        ]
        for sample in samples:
            sample.future.add_done_callback(functools.partial(_tell, self._any_cancelled))
        return samples

    def _enqueue(self, samples: Sequence[Sample]) -> None:
        self._queue.extend(samples)

    def _has_work(self) -> bool:
        waiting = self.waiting() > 0 or any(self._live())
        return waiting and not self._paused and self._has_weights()

    def _run(self) -> None:
        while True:
            with self._held():
                if self._has_work():
                    self._try_turn()
                elif not self._done:
                    self._running = False  # who lent a sample just now saw a thread: `_held` looks
                    return
                done, self._done = self._done, []
            for report in done:
                try:
                    report()
                except Exception:  # of `on_tokens`: the others must still hear of theirs
                    traceback.print_exc()

    def _try_turn(self) -> None:
        try:
            self._turn()
        except BaseException as error:  # whoever waits must learn of it
            for sample in self._all_out():
                sample.outcome = error
                self._done.append(sample.hand_over)
            self._running = False  # or the next request would wait for a dead thread
            self._recover()
            self._running = True

    def _all_out(self) -> Iterator[Sample]:
        """Take every sample out of the queue and the slots."""
        while self._queue:
            sample = self._queue.popleft()
            self._leaves_queue(sample)
            yield sample
        for slot, sample in list(self._live()):
            self._release(slot)
            yield sample

    def _drop_cancelled(self) -> None:
        if not self._any_cancelled.is_set():
            return
        self._any_cancelled.clear()
        waiting, self._queue = self._queue, deque()
        for sample in waiting:
            if sample.future.cancelled():
                self._leaves_queue(sample)
            else:
                self._queue.append(sample)
        for slot, sample in list(self._live()):
            if sample.future.cancelled():
                self._release(slot)


def _tell(any_cancelled: threading.Event, future: Future[Completion]) -> None:
    if future.cancelled():
        any_cancelled.set()
