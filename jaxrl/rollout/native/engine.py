"""The in-process engine: continuous batching over slots of a key/value cache.

A thread runs while there is work. Each of its turns admits samples to free slots, prefills chunks
of their prompts, and decodes a block of tokens for all that are ready; between two turns samples
join, leave and are cut off, and the weights may change. A prompt is prefilled but for its last
token, which the first decode step takes: so prefill needs no vocabulary head, and the samples of a
prompt differ from there on. docs/rollouts.md has a drawing.
"""

import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxrl.models.transformer import Params, TransformerConfig
from jaxrl.parallel.compilation import Call
from jaxrl.rollout.native.decode import Features, Rows
from jaxrl.rollout.native.programs import Programs, slots_that_fit
from jaxrl.rollout.native.sample_thread import SampleThread
from jaxrl.rollout.native.slots import PADDING, Sample, SlotTable
from jaxrl.rollout.protocol import Request, Sampling
from jaxrl.rollout.weights.groups import GROUP_BYTES

ROW_SETTINGS = {  # fields of Sampling that are columns of Rows
    np.float32: ("temperature", "top_p", "min_p", "repetition_penalty"),
    np.int32: ("top_k", "min_tokens"),
}


class NativeEngine(SampleThread):
    """Generate samples with the trainer's model, as an `Engine`.

    Args:
        config: architecture.
        mesh: slots are spread over its batch axes, weights over "tensor".
        dtype: compute and cache dtype.
        max_num_seqs: slots; samples beyond them wait.
        max_num_batched_tokens: most prompt tokens between two blocks.
        max_model_len: most tokens of a row; a longer request is refused. None = no limit, the cache
            grows with the requests.
        gpu_memory_utilization: share for decode weights and cache of what the devices' memory has
            beside `resident_bytes`, if `max_model_len` is given: there are as many slots, of
            `max_num_seqs`, as fit into it.
        device_memory: bytes of a device; None = as it says itself.
        resident_bytes: that others keep on each device while the engine samples.
        steps_per_dispatch: decode steps of a block, between two looks at the host; None = 64 on
            GPUs, 32 elsewhere.
        enable_prefix_caching: reuse keys and values between requests, not only between the samples
            of one and the turns of a conversation. What is reused then depends on timing, and with
            it the last bits.
        recompute_kv_on_update: new weights compute the cache of samples in flight anew.
        shrink: blocks run over fewer rows when fewer are live, which changes the last bits; None =
            on one CPU device. False where samples join by the clock and bits must repeat: nor do
            blocks then see fewer positions when rows are short, and the cache has room for
            `max_model_len` from the start.
        decode_text: token ids to text, for stop strings.
        group_bytes: most bytes of new weights that are on their way from other devices at a time.
        kernel: of decoding, see `decode_attention`; None = the platform's fastest.
        platform: whose shapes the programs have; None = that of the devices.

    Attributes:
        prefilled_tokens: computed so far, each time counted.
        decoded_tokens: drawn so far.
    """

    def __init__(
        self,
        config: TransformerConfig,
        mesh: Mesh,
        *,
        dtype: jnp.dtype = jnp.float32,
        max_num_seqs: int = 1024,
        max_num_batched_tokens: int = 8192,
        max_model_len: int | None = None,
        gpu_memory_utilization: float = 0.8,
        device_memory: float | None = None,
        resident_bytes: float = 0,
        steps_per_dispatch: int | None = None,
        enable_prefix_caching: bool = False,
        recompute_kv_on_update: bool = False,
        shrink: bool | None = None,
        decode_text: Callable[[Sequence[int]], str] | None = None,
        group_bytes: int = GROUP_BYTES,
        kernel: str | None = None,
        platform: str | None = None,
    ) -> None:
        super().__init__()
        for name, value in (
            ("steps_per_dispatch", steps_per_dispatch),
            ("max_num_seqs", max_num_seqs),
            ("max_num_batched_tokens", max_num_batched_tokens),
        ):
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        self.max_num_batched_tokens, self.max_model_len = max_num_batched_tokens, max_model_len
        self.recompute_kv_on_update, self.decode_text = recompute_kv_on_update, decode_text
        self._least_length = max_model_len or 1 if shrink is False else 1
        slots = max_num_seqs
        if max_model_len is not None:
            fitting = slots_that_fit(
                config,
                mesh,
                dtype,
                max_model_len=max_model_len,
                utilization=gpu_memory_utilization,
                memory=device_memory,
                resident=resident_bytes,
                kernel=kernel,
            )
            slots = min(slots, fitting)
        self.programs = Programs(
            config,
            mesh,
            slots,
            dtype=dtype,
            steps=steps_per_dispatch,
            shrink=shrink,
            group_bytes=group_bytes,
            kernel=kernel,
            platform=platform,
        )
        self.table = SlotTable(self.programs.slots, share_prefixes=enable_prefix_caching)
        self.prefilled_tokens = self.decoded_tokens = 0
        self._warm: set[Features] = set()  # of `warm_up`, and their unions

    # ---- weights

    def update_weights(self, params: Params, version: int) -> None:
        """Sample from these parameters from the next block on.

        `params` is copied, the caller may donate it. What finished samples left in the cache is
        forgotten; samples in flight go on with theirs, which no sample that begins later finds, or
        compute it anew with `recompute_kv_on_update`.
        """
        with self._held():
            self.programs.load(params)
            self.version = self.table.version = version
            self.table.forget(live=self.recompute_kv_on_update)
        self._start()

    def sleep(self) -> None:
        """Drop weights and cache; `update_weights` wakes the engine.

        Raises:
            RuntimeError: samples are in flight.
        """
        with self._held():
            self._check_idle()
            self.programs.drop(weights=True)
            self.table.forget(live=True)

    def wake(self) -> None:
        """Do nothing: the cache is made when it is needed."""

    # ---- requests

    def warm_up(self, requests: Sequence[Request]) -> None:
        """Compile prefill and decode for the shapes of these requests; nothing is drawn.

        Blocks where they meet, and meet those of earlier calls, are compiled too.
        """
        with self._held():
            self._prepare(requests)
            for features in {_needs([request.sampling]) for request in requests}:
                self._warm |= {features, *(features.union(other) for other in self._warm)}
            self.programs.warm_up(
                [len(r.prompt_tokens) for r in requests],
                self._prefills_rests(requests),
                lambda size: [
                    self._rows([self.programs.slots] * size, features)
                    for features in sorted(self._warm, key=dataclasses.astuple)
                ],
            )

    def calls(self, params: Params, requests: Sequence[Request]) -> dict[str, Call]:
        """Return the largest programs for such requests, see `Programs.calls`; place nothing."""
        longest = max(request.longest for request in requests)
        self.table.lengthen(self.programs.cache_length(longest))
        needs = _needs([request.sampling for request in requests])
        rows = self._rows([self.programs.slots] * self.programs.slots, needs)
        prompt = max(len(request.prompt_tokens) for request in requests)
        rests = self._prefills_rests(requests)
        return self.programs.calls(params, longest, prompt, rests, rows)

    def check(self, request: Request) -> None:
        """Refuse what can never be served.

        Raises:
            ValueError: an empty prompt, a non-positive max_tokens, more tokens than max_model_len,
                or stop strings without `decode_text`.
        """
        request.check(self.max_model_len, self.decode_text is not None)

    def known_prefixes(self, requests: Sequence[Request]) -> list[int]:
        """Return how many tokens of each prompt the cache holds for any request.

        The numbers are 0 without prefix caching.
        """
        if not self.table.share_prefixes:
            return super().known_prefixes(requests)
        with self._held():
            return [self.table.known_prefix(request.prompt_tokens) for request in requests]

    def describe(self) -> str:
        """Describe the shapes of all programs."""
        return self.programs.describe()

    def _prepare(self, requests: Sequence[Request]) -> None:
        """Make room for requests."""
        if self.programs.params is None:
            raise RuntimeError("the engine has no weights: call update_weights first")
        self.programs.reserve(max([self._least_length, *(r.longest for r in requests)]))
        self.table.lengthen(self.programs.length)

    def _prefills_rests(self, requests: Sequence[Request]) -> bool:
        """Return whether chunks may follow a prefix that is in the cache."""
        turns = any(request.conversations for request in requests)
        return turns or self.table.share_prefixes or self.recompute_kv_on_update

    # ---- the thread

    def _has_weights(self) -> bool:
        return self.programs.params is not None

    def _enqueue(self, samples: Sequence[Sample]) -> None:
        """Queue samples; the next turn of a conversation has its slot, and waits behind nobody."""
        for sample in samples:
            if sample.conversation in self.table.slot_of:
                self._queue.appendleft(sample)
                continue
            self._queue.append(sample)
            if sample.conversation is not None:
                sample.conversation.add_done_callback(self._look_again)

    def _look_again(self, conversation: Future[None]) -> None:
        """Go on after the end of a conversation if samples wait and the thread had stopped.

        Whoever ended it does not wait for the lock.
        """
        del conversation
        if self._queue and not self._running:
            threading.Thread(target=self._start, daemon=True).start()

    def _has_work(self) -> bool:
        """Return False if all that waits is for slots of conversations whose environments think."""
        if not super()._has_work() or any(self._live()):
            return super()._has_work()
        self.table.let_go()
        return self.table.has_room(self._queue[0])

    def _live(self) -> Iterator[tuple[int, Sample]]:
        return self.table.live()

    def _release(self, slot: int) -> None:
        self.table.release(slot)

    def _recover(self) -> None:
        self.table.forget(live=True)
        self.programs.drop(weights=False)  # the cache may have been donated
        self.programs.reserve(1)

    def _turn(self) -> None:
        self._drop_cancelled()
        self.table.let_go()
        while self._queue and self.table.take(self._queue[0]) is not None:
            self._queue.popleft()
        self._fill_slots()
        incomplete = self.table.incomplete()
        ready = [slot for slot, _ in self.table.live() if slot not in incomplete]
        if ready:
            self._decode_block(ready)

    # ---- prefill

    def _fill_slots(self) -> None:
        """Copy what other slots hold, then prefill chunks, until the turn's tokens are spent."""
        budget = self.max_num_batched_tokens
        while budget > 0:
            self._copy_prefixes()
            shapes = self._next_chunks()
            if not shapes:
                return
            for (width, seen), slots in shapes.items():
                rows = self.programs.prefill_rows(width)
                for first in range(0, len(slots), rows):
                    self._prefill(width, seen, slots[first : first + rows])
                    budget -= rows * width

    def _copy_prefixes(self) -> None:
        pairs = []
        donors: dict[int, tuple[int, int]] = {}  # of groups, whose samples begin with one row
        for slot in self.table.incomplete():
            sample = self.table.samples[slot]
            assert sample is not None
            begins = not sample.tokens
            source, known = begins and donors.get(sample.group) or self.table.donor(slot)
            if begins:
                donors[sample.group] = source, known
            if known > self.table.filled[slot]:
                pairs.append((source, slot))
                self.table.copy(source, slot, known)
        if pairs:
            self.programs.copy(pairs)

    def _next_chunks(self) -> dict[tuple[int, int | None], list[int]]:
        """Group slots by the shape of their next chunk: tokens, and the positions that they see.

        None = no others, it begins at position 0. Of the samples of one request that share a prompt
        the first alone is prefilled.
        """
        shapes: dict[tuple[int, int | None], list[int]] = {}
        groups = set()
        for slot, missing in self.table.incomplete().items():
            sample = self.table.samples[slot]
            assert sample is not None
            if not sample.tokens and sample.group in groups:
                continue
            groups.add(sample.group)
            shape = self.programs.chunk(missing, int(self.table.filled[slot]))
            shapes.setdefault(shape, []).append(slot)
        return shapes

    def _prefill(self, width: int, seen: int | None, slots: Sequence[int]) -> None:
        table, chunks = self.table, []
        for slot in slots:
            start, size = int(table.filled[slot]), min(table.missing(slot), width)
            chunks.append((slot, start, table.tokens[slot, start : start + size].copy()))
            table.filled[slot] += size
            self.prefilled_tokens += size
        self.programs.prefill(width, seen, chunks)

    # ---- decode

    def _decode_block(self, ready: list[int]) -> None:
        table, total = self.table, self.programs.slots
        size = min(size for size in self.programs.sizes() if size >= len(ready))
        rows = ready if size == total else range(len(ready))  # of all slots row s is slot s
        slots = np.full(size, total)
        slots[rows] = ready
        block = self.programs.decode(self._rows(slots.tolist()), self._reach(ready))
        for row, slot in zip(rows, ready, strict=True):
            sample = table.samples[slot]
            assert sample is not None
            tokens = block.tokens[row, : block.count[row]]
            self.decoded_tokens += len(tokens)
            table.append(slot, tokens)
            sample.append(block, row, self.version, int(table.oldest_version[slot]))
            if sample.ended(bool(block.stopped[row]), len(tokens), self.decode_text):
                self._done.append(sample.hand_over)
                table.release(slot)
            elif report := sample.report():
                self._done.append(report)

    def _reach(self, ready: Sequence[int]) -> int:
        """Return the tokens of the longest row after the next block."""
        chosen = set(ready)  # in the order of `live`
        left = [s.max_tokens - len(s.tokens) for slot, s in self.table.live() if slot in chosen]
        return int((self.table.length[ready] + np.minimum(left, self.programs.steps)).max())

    def _rows(self, slots: Sequence[int], expected: Features | None = None) -> Rows:
        """Return samples in `slots` as arrays, with room for what is expected; slot S = padding."""
        table, total = self.table, self.programs.slots
        held = [(table.samples[s] if s < total else None) or PADDING for s in slots]
        at = np.minimum(slots, total - 1)
        settings = [sample.request.sampling for sample in held]
        features = _needs(settings)
        if expected is not None:
            features = features.union(expected)
        stop_ids = np.full((len(slots), features.stop_ids), -1, np.int32)
        for row, s in enumerate(settings):
            stop_ids[row, : len(s.stop_token_ids)] = s.stop_token_ids
        columns = {
            name: np.array([getattr(s, name) for s in settings], kind)
            for kind, names in ROW_SETTINGS.items()
            for name in names
        }
        last = np.maximum(table.length[at] - 1, 0)
        history = None
        if features.penalised:
            known = np.arange(table.tokens.shape[1]) <= last[:, None]
            history = np.where(known, table.tokens[at], -1)
        return Rows(
            slots=np.array(slots, np.int32),
            last_token=table.tokens[at, last],
            position=last.astype(np.int32),
            count=np.array([len(sample.tokens) for sample in held], np.int32),
            keys=np.array([sample.key for sample in held], np.uint32),
            max_tokens=np.array([sample.max_tokens for sample in held], np.int32),
            stop_ids=stop_ids,
            history=history,
            features=features,
            **columns,
        )


def _needs(samplings: Sequence[Sampling]) -> Features:
    """Return what rows of a block with such sampling need together."""
    features = Features()
    for sampling in {id(s): s for s in samplings}.values():  # the samples of a request share one
        features = features.including(sampling)
    return features
