"""Any engine of JetStream's protocol as an `Engine`, driven in this process.

What JetStream's orchestrator does with four threads, queues and gRPC is here a loop: fill free
slots, draw, hand over what has ended. docs/jetstream.md says what such an engine lacks.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.rollout.jetstream.protocol import JetStreamEngine, ResultTokens, prefill_length
from jaxrl.rollout.native.sample_thread import SampleThread
from jaxrl.rollout.native.slots import Sample
from jaxrl.rollout.protocol import Request, Sampling

REPORTS = "logprobs", "raw_log_probs", "keep_sampling_mask"  # no room in ResultTokens
DRAWING = "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "min_tokens"


def check_sampling(
    asked: Sampling, known: Sampling, names: Sequence[str] = (*REPORTS, *DRAWING)
) -> None:
    """Refuse what an engine cannot be told.

    Raises:
        ValueError: names the field, what it asks for, and what the engine does.
    """
    for name in names:
        if (value := getattr(asked, name)) != getattr(known, name):
            fix = "leave it at that"
            if name in DRAWING:
                fix = "ask for that, or say in engine_init_kwargs['sampling'] what it does"
            raise ValueError(
                f"{name}={value}: this JetStream engine cannot be told, it samples with "
                f"{name}={getattr(known, name)}; {fix}"
            )


class JetStreamDriver(SampleThread):
    """Drive an engine of JetStream's protocol as an `Engine`.

    A group is prefilled once if the engine has `prefill_multisampling` and `bulk_insert`; else each
    of its samples is, since a prefix holds its first token and samples must not share that. Stop
    ids, stop strings and max_tokens are looked after on the host, so an engine may draw a few
    tokens too many; these are dropped.

    Args:
        engine: with one sample per slot.
        convert_params: the trainer's parameters to the engine's; None = `engine.load_params`, which
            must take them.
        sampling: how the engine samples, if it has no `make_sampler`: fields of `Sampling`;
            requests
            that ask for another are refused. It is taken at the user's word.
        decode_text: token ids to text, for stop strings.
        max_model_len: most tokens of a row.

    Attributes:
        prefills: calls of prefill so far.

    Raises:
        ValueError: the engine lacks a part of the protocol, or has no way for weights to come in.
    """

    def __init__(
        self,
        engine: JetStreamEngine,
        *,
        convert_params: Callable[[Any], Any] | None = None,
        sampling: Mapping[str, Any] | None = None,
        decode_text: Callable[[Sequence[int]], str] | None = None,
        max_model_len: int | None = None,
    ) -> None:
        super().__init__()
        _check_engine(engine, convert_params)
        self.engine, self.convert_params = engine, convert_params
        self.decode_text, self.max_model_len = decode_text, max_model_len
        self.make_sampler = getattr(engine, "make_sampler", None)
        self.declared = Sampling(max_tokens=1, **(sampling or {}))
        self.params: Any = None
        self.prefills = 0
        self._state: Any = None
        self._samples_in: list[Sample | None] = [None] * engine.max_concurrent_decodes

    # ---- weights

    def update_weights(self, params: Any, version: int) -> None:
        """Sample from these parameters from the next call of the engine on.

        `params` is copied, the caller may donate it. Samples in flight go on with their cache.
        """
        with self._held():
            self.params = None
            if self.convert_params is None:
                self.params = self.engine.load_params(params)
            else:
                self.params = jax.tree.map(jnp.copy, self.convert_params(params))
            self.version = version

    def sleep(self) -> None:
        """Drop weights and cache; `update_weights` wakes the engine.

        Raises:
            RuntimeError: samples are in flight.
        """
        with self._held():
            self._check_idle()
            self.params = self._state = None
            if unload := getattr(self.engine, "unload_params", None):
                unload()

    def wake(self) -> None:
        """Do nothing: the cache is made when it is needed."""

    # ---- requests

    def check(self, request: Request) -> None:
        """Refuse what can never be served.

        Raises:
            ValueError: see `Request.check`; a prompt longer than max_prefill_length; sampling that
                the engine does not do.
        """
        request.check(self.max_model_len, self.decode_text is not None)
        longest, sampling = self.engine.max_prefill_length, request.sampling
        if len(request.prompt_tokens) > longest:
            raise ValueError(
                f"a prompt of {len(request.prompt_tokens)} tokens is longer than the engine's "
                f"max_prefill_length={longest}; shorten generator.max_input_length"
            )
        if self.make_sampler:
            check_sampling(sampling, Sampling(max_tokens=1), REPORTS)
        else:
            check_sampling(sampling, self.declared)

    def warm_up(self, requests: Sequence[Request]) -> None:
        """Compile for prompts and groups of these shapes; what is drawn is forgotten."""
        shapes = {
            (prefill_length(len(r.prompt_tokens)), len(r.keys), r.sampling): r for r in requests
        }
        with self._held():
            self._check_idle()
            self._prepare(requests)
            for request in shapes.values():
                slots = list(range(min(len(request.keys), len(self._samples_in))))
                self._insert(request, request.keys[: len(slots)], slots)
                for _ in ("after an insert", "after a call"):  # the state may lie elsewhere then
                    self._state, _ = self.engine.generate(self.params, self._state)
                for slot in slots:
                    self._release(slot)

    def describe(self) -> str:
        """Describe the engine and its slots."""
        return (
            f"{type(self.engine).__name__}, {len(self._samples_in)} slots, prompts of at most "
            f"{self.engine.max_prefill_length} tokens"
        )

    def _prepare(self, requests: Sequence[Request]) -> None:
        del requests
        if self.params is None:
            raise RuntimeError("the engine has no weights: call update_weights first")
        if self._state is None:
            self._state = self.engine.init_decode_state()

    # ---- the thread

    def _has_weights(self) -> bool:
        return self.params is not None

    def _live(self) -> Iterator[tuple[int, Sample]]:
        return ((slot, s) for slot, s in enumerate(self._samples_in) if s is not None)

    def _release(self, slot: int) -> None:
        self._samples_in[slot] = None
        if free := getattr(self.engine, "free_resource", None):
            free(slot)

    def _recover(self) -> None:
        self._state = self.engine.init_decode_state()  # the old one may have been donated

    def _turn(self) -> None:
        self._drop_cancelled()
        while self._queue and self._admit():
            pass
        if not any(self._live()):
            return
        self._state, result = self.engine.generate(self.params, self._state)
        result.copy_to_host_async()
        drawn = _Drawn(result)
        for slot, sample in list(self._live()):
            self._take(slot, sample, *drawn.of(slot))

    def _admit(self) -> bool:
        """Admit the samples at the head of the queue; return whether they have left it."""
        head = self._queue[0]
        group = list(takewhile(lambda s: s.group == head.group, self._queue))
        free = [slot for slot, s in enumerate(self._samples_in) if s is None]
        size = min(len(group), len(self._samples_in))  # a group waits until it fits as a whole
        if len(free) < size:
            return False
        chosen = [self._queue.popleft() for _ in range(size)]
        slots = free[:size]
        for slot, sample in zip(slots, chosen, strict=True):
            self._samples_in[slot] = sample  # before anything can fail: it must not be lost
        drawn = self._insert(head.request, [sample.key for sample in chosen], slots)
        for slot, sample, first in zip(slots, chosen, drawn, strict=True):
            self._take(slot, sample, *first)
        return True

    def _insert(
        self, request: Request, keys: Sequence[tuple[int, int]], slots: Sequence[int]
    ) -> list[tuple[list[int], list[float]]]:
        """Put samples of a prompt into slots, and return the first tokens of each."""
        tokens = np.zeros(prefill_length(len(request.prompt_tokens)), np.int32)
        tokens[: len(request.prompt_tokens)] = request.prompt_tokens
        length, engine = len(request.prompt_tokens), self.engine
        together = getattr(engine, "prefill_multisampling", None)
        bulk_insert = getattr(engine, "bulk_insert", None)
        if together and bulk_insert:
            self.prefills += 1
            prefix, result = together(
                params=self.params,
                padded_tokens=tokens,
                true_length=length,
                num_samples=len(keys),
                **self._options(request, keys),
            )
            self._state = bulk_insert(prefix, self._state, slots=list(slots))
            drawn = _Drawn(result)
            return [drawn.of(row) for row in range(len(keys))]
        first = []
        for key, slot in zip(keys, slots, strict=True):
            self.prefills += 1
            prefix, result = engine.prefill(
                params=self.params,
                padded_tokens=tokens,
                true_length=length,
                **self._options(request, [key]),
            )
            self._state = engine.insert(prefix, self._state, slot=slot)
            first.append(_Drawn(result).of(0))
        return first

    def _options(self, request: Request, keys: Sequence[tuple[int, int]]) -> dict[str, Any]:
        if self.make_sampler is None:
            return {}
        return {"sampler": self.make_sampler(request.sampling, tuple(keys))}

    def _take(self, slot: int, sample: Sample, tokens: list[int], log_probs: list[float]) -> None:
        """Add what was drawn in a slot to its sample, up to its end."""
        if not sample.take(tokens, log_probs, self.version, self.decode_text) and not tokens:
            sample.finish("length")  # the engine has no more room for it
        if sample.outcome is not None:
            self._release(slot)
            self._done.append(sample.hand_over)


class _Drawn:
    """Read `ResultTokens` on the host, row by row; of any engine, so by its fields alone."""

    def __init__(self, result: ResultTokens) -> None:
        self.data = np.asarray(result.data)
        self.tokens, self.valid = slice(*result.tokens_idx), slice(*result.valid_idx)
        log_prob = getattr(result, "log_prob", None)
        self.log_prob = None if log_prob is None else np.asarray(log_prob)

    def of(self, row: int) -> tuple[list[int], list[float]]:
        """Return a row's valid tokens and log-probs; no log-probs where the engine has none."""
        valid = self.data[row, self.valid] != 0
        count = int(valid.cumprod().sum())
        tokens = self.data[row, self.tokens][:count].tolist()
        return tokens, [] if self.log_prob is None else self.log_prob[row, :count].tolist()


def _check_engine(engine: Any, convert_params: Callable[[Any], Any] | None) -> None:
    name = type(engine).__name__
    needed = "load_params init_decode_state prefill insert generate"
    needed += " max_concurrent_decodes max_prefill_length"
    if missing := [part for part in needed.split() if not hasattr(engine, part)]:
        raise ValueError(f"{name} is no JetStream engine: it has no {', '.join(missing)}")
    if (samples := getattr(engine, "samples_per_slot", 1)) != 1:
        raise ValueError(f"{name}.samples_per_slot={samples}: the driver needs 1")
    if convert_params is None:
        try:
            inspect.signature(engine.load_params).bind(None)
        except TypeError as error:
            raise ValueError(
                f"{name}.load_params takes no parameters, so new weights cannot reach it; set "
                "engine_init_kwargs['convert_params'] to a function 'module:name' from the "
                "trainer's parameters to the engine's"
            ) from error
