"""Samples of base and adapters from one engine, in which every row has its own."""

import hashlib
import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from jaxrl.rollout.protocol import MOST_COUNT, Adapter, Completion, Request, Sampling
from jaxrl.tools.tinker.bodies import Sample
from jaxrl.tools.tinker.journal import Call
from jaxrl.tools.tinker.wire import tinker_pb2 as wire

NO_LOG_PROB = -99999.0  # of a place in a table of alternatives that holds none
Answered = Callable[[bytes | Exception], object]


class Prompt(NamedTuple):
    """Hold what is told of a prompt of T tokens; None = it is not asked for.

    Attributes:
        log_probs: [T] of its tokens given those before, NaN where there is none.
        ids, scores: [T, K] of the likeliest in their places, 0 and `NO_LOG_PROB` where there are
            none.
    """

    log_probs: np.ndarray | None = None
    ids: np.ndarray | None = None
    scores: np.ndarray | None = None


@dataclass
class Asked:
    """Hold one call for samples.

    Attributes:
        name: of the weights; "" = the base.
        load: reads them.
        prompt: what is told of it.
        answered: is called once, by any thread.
    """

    request: Request
    name: str
    load: Callable[[], dict[str, Any]] | None
    prompt: Prompt
    answered: Answered


class Samplers:
    """Give the calls of all samplers to one engine, which holds some adapters at a time.

    Args:
        engine: a `NativeEngine` with places, or several of them as one.
        places: of adapters, with the first, which is the base's.
        stops: tokens that end a sample, if the call says nothing of that.
        vocabulary, longest: ids, and tokens of prompt and answer.
    """

    def __init__(
        self, engine: Any, places: int, stops: Sequence[int], vocabulary: int, longest: int
    ) -> None:
        self.engine, self.vocabulary, self.longest = engine, vocabulary, longest
        self._stops = tuple(stops)
        self._names: list[str | None] = [None] * places  # of the weights at each place
        self._in_flight = [0] * places  # calls
        self._used = [0] * places  # when
        self._clock = 0
        self._waiting: list[Asked] = []  # for a place
        self._beginning = False  # a thread is in `_begin`
        # of what is above; never held while something else is called
        self._lock = threading.Lock()

    def submit(
        self,
        call: Call,
        body: Sample,
        name: str,
        load: Callable[[], dict[str, Any]] | None,
        prompt: Prompt,
        answered: Answered,
    ) -> None:
        """Begin to sample, or wait until the adapter finds a place.

        Args:
            name: of the weights; "" = the base's.
            load: reads them.
            prompt: what is told of it in the answer.

        Raises:
            ValueError: it can never be done.
        """
        asked = Asked(self._request(call, body), name, load, prompt, answered)
        self.engine.check(asked.request)
        with self._lock:
            self._waiting.append(asked)
        self._begin()

    def _request(self, call: Call, body: Sample) -> Request:
        tokens, params = body.prompt.tokens, body.sampling_params
        if not tokens or any(token >= self.vocabulary for token in tokens):
            raise ValueError(f"prompt: must hold ids from 0 to {self.vocabulary - 1}, at least one")
        stops, strings = self._stops, ()
        if isinstance(params.stop, str):
            stops, strings = (), (params.stop,)
        elif params.stop is not None:
            stops = tuple(x for x in params.stop if isinstance(x, int))
            strings = tuple(x for x in params.stop if isinstance(x, str))
        room = self.longest - len(tokens)
        sampling = Sampling(
            max_tokens=params.max_tokens or max(room, 1),
            temperature=params.temperature,
            top_k=params.top_k if 0 < params.top_k < MOST_COUNT else -1,
            top_p=params.top_p,
            stop_token_ids=stops,
            stop=strings,
            logprobs=body.topk_sample_logprobs,
        )
        seed = call.id if params.seed is None else str(params.seed)
        keys = tuple(_key(seed, number) for number in range(body.num_samples))
        return Request(tokens, keys, sampling)

    def _begin(self) -> None:
        """Give the engine what waits and has a place, unless that is being done already.

        One thread does it at a time, to the end, so that an adapter is at its place when it is
        asked for. Whoever comes meanwhile, be it this thread in a callback, has only added to what
        waits or freed a place: both are looked at before each call.
        """
        with self._lock:
            if self._beginning:
                return
            self._beginning = True
        while (found := self._next()) is not None:
            self._sample(*found)

    def _next(self) -> tuple[Asked, int] | None:
        """Take the next call that has a place, which is in use from here on; None = there is none.

        Then nobody is in `_begin` any more.
        """
        with self._lock:
            for number, asked in enumerate(self._waiting):
                place = self._place(asked)
                if place is not None:
                    del self._waiting[number]
                    self._clock += 1
                    self._in_flight[place] += 1
                    self._used[place] = self._clock
                    return asked, place
            self._beginning = False
            return None

    def _place(self, asked: Asked) -> int | None:
        """Return where the adapter of a call is, or is to be; None = all places are in use."""
        if not asked.name:
            return 0
        if asked.name in self._names:
            return self._names.index(asked.name)
        idle = [p for p in range(1, len(self._names)) if not self._in_flight[p]]
        return min(idle, key=lambda p: self._used[p], default=None)

    def _sample(self, asked: Asked, place: int) -> None:
        """Submit a call; when all its samples are over, answer it, and give others its place."""
        try:
            futures = self._submit(asked, place)
        except Exception as error:
            futures = [Future()]
            futures[0].set_exception(error)
        left = [len(futures)]

        def over(_: Future[Completion]) -> None:
            with self._lock:
                left[0] -= 1
                if left[0]:
                    return
                self._in_flight[place] -= 1
            try:
                answer: bytes | Exception = sample_response(
                    [future.result() for future in futures],
                    asked.prompt,
                    asked.request.sampling.logprobs,
                )
            except Exception as error:
                answer = error
            try:
                asked.answered(answer)
            finally:  # also where the answer cannot be written: others wait for the place
                self._begin()

        for future in futures:
            future.add_done_callback(over)

    def _submit(self, asked: Asked, place: int) -> list[Future[Completion]]:
        """Put the adapter of a call to its place, if it is not there, and submit the call."""
        request = asked.request
        if place:
            if self._names[place] != asked.name:
                assert asked.load is not None
                parts = asked.load()
                self._names[place] = None  # until it is there
                self.engine.put_adapter(place, parts["adapters"], float(parts["scale"]))
                self._names[place] = asked.name
            adapter = Adapter(asked.name, place)
            request = Request(
                request.prompt_tokens, request.keys, request.sampling, adapter=adapter
            )
        (futures,) = self.engine.submit([request])
        return futures


def _key(seed: str, number: int) -> tuple[int, int]:
    """Return the PRNG key of a sample: a function of the seed and its number alone."""
    digest = hashlib.sha256(f"{seed}/{number}".encode()).digest()
    return int.from_bytes(digest[:4]), int.from_bytes(digest[4:8])


def sample_response(completions: Sequence[Completion], prompt: Prompt, alternatives: int) -> bytes:
    """Return the answer to a call for samples.

    Args:
        prompt: what is told of it.
        alternatives: that are told of each sampled token.
    """
    message = wire.SampleResponse()
    for completion in completions:
        stopped = completion.stop_reason == "stop"
        sequence = message.sequences.add(
            stop_reason=wire.STOP_REASON_STOP if stopped else wire.STOP_REASON_LENGTH,
            tokens=np.array(completion.tokens, "<i4").tobytes(),
            logprobs=np.array(completion.log_probs, "<f4").tobytes(),
        )
        if alternatives:
            shape = len(completion.tokens), alternatives
            ids, scores = np.zeros(shape, "<i4"), np.full(shape, NO_LOG_PROB, "<f4")
            for at, known in enumerate(completion.top_log_probs):
                told = [(i, x) for i, x in known.items() if math.isfinite(x)]
                for rank, (token, score) in enumerate(told):
                    ids[at, rank], scores[at, rank] = token, score
            _write_table(sequence.topk_sampled_logprobs, ids, scores)
    if prompt.log_probs is not None:
        message.prompt_logprobs = prompt.log_probs.astype("<f4").tobytes()
    if prompt.ids is not None and prompt.scores is not None:
        _write_table(message.topk_prompt_logprobs, prompt.ids, prompt.scores)
    return message.SerializeToString(deterministic=True)


def _write_table(table: wire.TopkLogprobs, ids: np.ndarray, scores: np.ndarray) -> None:
    table.token_ids, table.logprobs = ids.astype("<i4").tobytes(), scores.astype("<f4").tobytes()
    table.length, table.k = ids.shape
