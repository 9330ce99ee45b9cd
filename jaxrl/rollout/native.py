"""The in-process engine: continuous batching over slots of a key/value cache.

A thread runs while there is work. Each of its turns admits samples to free slots, prefills chunks
of their prompts, and decodes a block of tokens for all that are ready; between two turns samples
join, leave and are cut off, and the weights may change. A prompt is prefilled but for its last
token, which the first decode step takes: so prefill needs no vocabulary head, and the samples of a
prompt differ from there on. docs/rollouts.md has a drawing.
"""

from collections.abc import Callable, Iterator, Sequence

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxrl.compilation import Call
from jaxrl.data.packing import round_up
from jaxrl.models.transformer import Params, TransformerConfig
from jaxrl.rollout.decode import Features, Rows
from jaxrl.rollout.programs import Programs
from jaxrl.rollout.protocol import Request
from jaxrl.rollout.sample_thread import SampleThread
from jaxrl.rollout.slot_memory import slots_that_fit
from jaxrl.rollout.slots import PADDING, Sample, SlotTable
from jaxrl.weight_sync import GROUP_BYTES

STOP_IDS = 4  # their number is rounded up to it, for few shapes
ROW_SETTINGS = {  # fields of Sampling that are columns of Rows
    np.float32: ("temperature", "top_p", "min_p", "repetition_penalty"),
    np.int32: ("top_k", "min_tokens"),
}


class NativeEngine(SampleThread):
    """Generation with the trainer's model; an `Engine`.

    Args:
        config: architecture.
        mesh: slots are spread over its batch axes, weights over "tensor".
        dtype: compute and cache dtype.
        max_num_seqs: slots; samples beyond them wait.
        max_num_batched_tokens: most prompt tokens between two blocks.
        max_model_len: most tokens of a row; a longer request is refused. None = no limit, the cache
            grows with the requests.
        gpu_memory_utilization: share of the devices' memory for decode weights and cache, if
            `max_model_len` is given: there are as many slots, of `max_num_seqs`, as fit into it.
        device_memory: bytes of a device; None = as it says itself.
        steps_per_dispatch: decode steps of a block, between two looks at the host.
        enable_prefix_caching: reuse keys and values between requests, not only between the samples
            of one. What is reused then depends on timing, and with it the last bits.
        recompute_kv_on_update: new weights compute the cache of samples in flight anew.
        shrink: blocks run over fewer rows when fewer are live, which changes the last bits; None =
            on one CPU device. False where samples join by the clock and bits must repeat.
        decode_text: token ids to text, for stop strings.
        group_bytes: most bytes of new weights that are on their way from other devices at a time.

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
        steps_per_dispatch: int = 32,
        enable_prefix_caching: bool = False,
        recompute_kv_on_update: bool = False,
        shrink: bool | None = None,
        decode_text: Callable[[Sequence[int]], str] | None = None,
        group_bytes: int = GROUP_BYTES,
    ) -> None:
        super().__init__()
        for name, value in (
            ("steps_per_dispatch", steps_per_dispatch),
            ("max_num_seqs", max_num_seqs),
            ("max_num_batched_tokens", max_num_batched_tokens),
        ):
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        self.max_num_batched_tokens, self.max_model_len = max_num_batched_tokens, max_model_len
        self.recompute_kv_on_update, self.decode_text = recompute_kv_on_update, decode_text
        slots = max_num_seqs
        if max_model_len is not None:
            given = mesh, dtype, max_model_len, gpu_memory_utilization, device_memory
            slots = min(slots, slots_that_fit(config, *given))
        programs = {"dtype": dtype, "steps": steps_per_dispatch, "shrink": shrink}
        self.programs = Programs(config, mesh, slots, **programs, group_bytes=group_bytes)
        self.table = SlotTable(self.programs.slots, share_prefixes=enable_prefix_caching)
        self.prefilled_tokens = self.decoded_tokens = 0
        # what any request asked for so far; monotone, so that programs are compiled once
        self._features, self._stop_ids = Features(), STOP_IDS

    # ---- weights

    def update_weights(self, params: Params, version: int) -> None:
        """Sample from these parameters from the next block on.

        `params` is copied, the caller may donate it. What finished samples left in the cache is
        forgotten; samples in flight go on with theirs, or compute it anew with
        `recompute_kv_on_update`.
        """
        with self._held():
            self.programs.load(params)
            self.version = version
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
        """Nothing to do: the cache is made when it is needed."""

    # ---- requests

    def warm_up(self, requests: Sequence[Request]) -> None:
        """Compile prefill and decode for the shapes of these requests; nothing is drawn."""
        with self._held():
            self._prepare(requests)
            self.programs.warm_up(
                [len(r.prompt_tokens) for r in requests],
                self._prefills_rests,
                lambda size: self._rows([self.programs.slots] * size),
            )

    def calls(self, params: Params, requests: Sequence[Request]) -> dict[str, Call]:
        """The largest programs for such requests, see `Programs.calls`; nothing is placed."""
        longest = max(request.longest for request in requests)
        self.table.lengthen(self.programs.cache_length(longest))
        self._expect(requests)
        rows = self._rows([self.programs.slots] * self.programs.slots)
        prompt = max(len(request.prompt_tokens) for request in requests)
        return self.programs.calls(params, longest, prompt, self._prefills_rests, rows)

    def check(self, request: Request) -> None:
        """Refuse what can never be served.

        Raises:
            ValueError: an empty prompt, a non-positive max_tokens, more tokens than max_model_len,
                or stop strings without `decode_text`.
        """
        request.check(self.max_model_len, self.decode_text is not None)

    def known_prefix(self, tokens: Sequence[int]) -> int:
        """Tokens of a prompt that the cache holds for any request; 0 without prefix caching."""
        return self.table.known_prefix(tokens)

    def describe(self) -> str:
        """The shapes of all programs."""
        return self.programs.describe()

    def _prepare(self, requests: Sequence[Request]) -> None:
        """Make room for requests; see `_expect`."""
        if self.programs.params is None:
            raise RuntimeError("the engine has no weights: call update_weights first")
        self.programs.reserve(max((request.longest for request in requests), default=1))
        self.table.lengthen(self.programs.length)
        self._expect(requests)

    @property
    def _prefills_rests(self) -> bool:
        """Whether chunks may follow a prefix that is in the cache."""
        return self.table.share_prefixes or self.recompute_kv_on_update

    def _expect(self, requests: Sequence[Request]) -> None:
        """See what the sampling of requests needs."""
        for s in {request.sampling for request in requests}:
            self._features = self._features.including(s)
            self._stop_ids = max(self._stop_ids, round_up(len(s.stop_token_ids), STOP_IDS))

    # ---- the thread

    def _has_weights(self) -> bool:
        return self.programs.params is not None

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
        while self._queue and self.table.take(self._queue[0]) is not None:
            self._queue.popleft()
        self._fill_slots()
        ready = [slot for slot, _ in self.table.live() if self.table.missing(slot) == 0]
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
            for (width, fresh), slots in shapes.items():
                rows = self.programs.prefill_rows(width)
                for first in range(0, len(slots), rows):
                    self._prefill(width, fresh, slots[first : first + rows])
                    budget -= rows * width

    def _copy_prefixes(self) -> None:
        pairs = []
        for slot, _ in self.table.live():
            if self.table.missing(slot):
                source, known = self.table.donor(slot)
                if known:
                    pairs.append((source, slot))
                    self.table.filled[slot] = known
        if pairs:
            self.programs.copy(pairs)

    def _next_chunks(self) -> dict[tuple[int, bool], list[int]]:
        """Slots by the shape of their next chunk: tokens, and whether they begin at position 0.

        Of the samples of one request that share a prompt the first alone is prefilled.
        """
        shapes: dict[tuple[int, bool], list[int]] = {}
        groups = set()
        for slot, sample in self.table.live():
            missing = self.table.missing(slot)
            if missing == 0 or (not sample.tokens and sample.group in groups):
                continue
            groups.add(sample.group)
            shape = self.programs.chunk(missing), bool(self.table.filled[slot] == 0)
            shapes.setdefault(shape, []).append(slot)
        return shapes

    def _prefill(self, width: int, fresh: bool, slots: Sequence[int]) -> None:
        table, chunks = self.table, []
        for slot in slots:
            start, size = int(table.filled[slot]), min(table.missing(slot), width)
            chunks.append((slot, start, table.tokens[slot, start : start + size].copy()))
            table.filled[slot] += size
            self.prefilled_tokens += size
        self.programs.prefill(width, fresh, chunks)

    # ---- decode

    def _decode_block(self, ready: list[int]) -> None:
        table, total = self.table, self.programs.slots
        size = min(size for size in self.programs.sizes() if size >= len(ready))
        if size == total:  # row s is slot s
            slots = [slot if slot in set(ready) else total for slot in range(total)]
        else:
            slots = ready + [total] * (size - len(ready))
        block = self.programs.decode(self._rows(slots), self._reach(ready))
        for row, slot in enumerate(slots):
            sample = table.samples[slot] if slot < total else None
            if sample is None:
                continue
            tokens = block.tokens[row, : block.count[row]]
            self.decoded_tokens += len(tokens)
            table.append(slot, tokens)
            sample.append(block, row, self.version)
            if sample.ended(bool(block.stopped[row]), len(tokens), self.decode_text):
                self._done.append(sample.hand_over)
                table.release(slot)
            elif news := sample.news():
                self._done.append(news)

    def _reach(self, ready: Sequence[int]) -> int:
        """Tokens of the longest row after the next block."""
        chosen = set(ready)  # in the order of `live`
        left = [s.max_tokens - len(s.tokens) for slot, s in self.table.live() if slot in chosen]
        return int((self.table.length[ready] + np.minimum(left, self.programs.steps)).max())

    def _rows(self, slots: Sequence[int]) -> Rows:
        """The samples in `slots` as arrays; slot S = padding."""
        table, total = self.table, self.programs.slots
        held = [(table.samples[s] if s < total else None) or PADDING for s in slots]
        at = np.minimum(slots, total - 1)
        settings = [sample.request.sampling for sample in held]
        stop_ids = np.full((len(slots), self._stop_ids), -1, np.int32)
        for row, s in enumerate(settings):
            stop_ids[row, : len(s.stop_token_ids)] = s.stop_token_ids
        columns = {
            name: np.array([getattr(s, name) for s in settings], kind)
            for kind, names in ROW_SETTINGS.items()
            for name in names
        }
        last = np.maximum(table.length[at] - 1, 0)
        history = np.where(np.arange(table.tokens.shape[1]) <= last[:, None], table.tokens[at], -1)
        return Rows(
            slots=np.array(slots, np.int32),
            last_token=table.tokens[at, last],
            position=last.astype(np.int32),
            count=np.array([len(sample.tokens) for sample in held], np.int32),
            keys=np.array([sample.key for sample in held], np.uint32),
            max_tokens=np.array([sample.max_tokens for sample in held], np.int32),
            stop_ids=stop_ids,
            history=history if self._features.penalised else None,
            features=self._features,
            **columns,
        )
