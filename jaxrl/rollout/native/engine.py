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
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxrl.models.transformer import Params, TransformerConfig
from jaxrl.parallel.compilation import Call
from jaxrl.rollout.native.decode import FREE, Block, Features, Rows
from jaxrl.rollout.native.programs import Programs, slots_that_fit
from jaxrl.rollout.native.sample_thread import SampleThread
from jaxrl.rollout.native.slots import Sample, SlotTable
from jaxrl.rollout.protocol import Request, Sampling
from jaxrl.rollout.weights.groups import GROUP_BYTES


class Drawn(NamedTuple):
    """Hold a sample in a block: its row there, and the oldest version of its keys and values."""

    row: int
    slot: int
    sample: Sample
    context: int


class Flight(NamedTuple):
    """Hold a block that is under way.

    Attributes:
        rows: as it leaves them, on the device.
        block: what it draws, on the device.
        drawn: its samples.
    """

    rows: Rows
    block: Block
    drawn: list[Drawn]


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
        steps_per_dispatch: decode steps of a block, between two looks at the host; None = 32 on
            CPUs, 8 elsewhere.
        enable_prefix_caching: reuse keys and values between requests, not only between the samples
            of one and the turns of a conversation. What is reused then depends on timing, and with
            it the last bits.
        recompute_kv_on_update: new weights compute the cache of samples in flight anew.
        shrink: blocks run over fewer rows when fewer are live, which changes the last bits; None =
            on one CPU device; never with `ahead`. False where samples join by the clock and bits
            must repeat: nor do blocks then see fewer positions when rows are short, and the cache
            has room for `max_model_len` from the start.
        ahead: a block begins before the one before is fetched, so that the device does not wait for
            the host. A stop string or a cancellation is then seen a block late, and a slot that
            comes free is filled a block later; the tokens are the same. None = but on CPUs.
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
        ahead: bool | None = None,
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
            ahead=ahead,
            group_bytes=group_bytes,
            kernel=kernel,
            platform=platform,
        )
        self.table = SlotTable(self.programs.slots, share_prefixes=enable_prefix_caching)
        self._flight: Flight | None = None
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
            self._land()
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
            self._land()
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
                    self._rows(np.full(size, FREE), features)
                    for features in sorted(self._warm, key=dataclasses.astuple)
                ],
            )

    def calls(self, params: Params, requests: Sequence[Request]) -> dict[str, Call]:
        """Return the largest programs for such requests, see `Programs.calls`; place nothing."""
        longest = max(request.longest for request in requests)
        self.table.lengthen(self.programs.cache_length(longest))
        needs = _needs([request.sampling for request in requests])
        rows = self._rows(np.full(self.programs.slots, FREE), needs)
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
        self._flight = None
        self.table.forget(live=True)
        self.programs.drop(weights=False)  # the cache may have been donated
        self.programs.reserve(1)

    def _turn(self) -> None:
        self._drop_cancelled()
        self.table.let_go()
        while self._queue and self.table.take(self._queue[0]) is not None:
            self._queue.popleft()
        self._fill_slots()
        begun = self._begin_block()
        if not self.programs.ahead:
            self._flight, begun = begun, None
        self._land()
        # of a block whose samples have all ended meanwhile there is nothing to fetch
        if begun and any(self.table.samples[of.slot] is of.sample for of in begun.drawn):
            self._flight = begun

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

    def _begin_block(self) -> Flight | None:
        """Begin a block of all that are ready, if there are any.

        Those of the block that is not fetched go on from where it leaves them, unless it must be
        their last.
        """
        table, total, flight = self.table, self.programs.slots, self._flight
        incomplete, steps = table.incomplete(), self.programs.steps
        flown = {of.slot: of.sample for of in flight.drawn} if flight else {}
        samples, reach, going = {}, [], []
        for slot, sample in table.live():
            left = sample.max_tokens - len(sample.tokens)
            goes_on = flown.get(slot) is sample
            if slot in incomplete or goes_on and left <= steps:
                continue
            samples[slot] = sample
            reach.append(min(left, 2 * steps if goes_on else steps))
            if goes_on:
                going.append(slot)
        if not samples:
            return None
        ready = np.fromiter(samples, int, len(samples))
        size = min(size for size in self.programs.sizes() if size >= len(ready))
        rows = ready if size == total else np.arange(len(ready))  # of all slots row s is slot s
        slots = np.full(size, FREE)
        slots[rows] = ready
        begins = np.ones(size, bool)
        begins[going] = False
        after, block = self.programs.decode(
            self._rows(slots, _needs([sample.request.sampling for sample in samples.values()])),
            int((table.length[ready] + reach).max()),
            flight.rows if flight else None,
            begins,
        )
        contexts = table.oldest_version[ready].tolist()
        drawn = map(Drawn, rows.tolist(), samples.keys(), samples.values(), contexts)
        return Flight(after, block, list(drawn))

    def _land(self) -> None:
        """Fetch the block that is under way, if there is one, and hand out what it drew."""
        if self._flight is None:
            return
        flight, self._flight = self._flight, None
        table, block = self.table, self.programs.fetch(flight.block)
        here = [  # the others were cancelled, or cut at a stop string
            of for of in flight.drawn if table.samples[of.slot] is of.sample
        ]
        rows, slots = np.array([(of.row, of.slot) for of in here], int).reshape(-1, 2).T
        counts, features = block.count[rows], flight.rows.features
        table.append(slots, block.tokens[rows], counts)
        self.decoded_tokens += int(counts.sum())
        columns = (x.tolist() for x in (block.tokens, block.log_probs, block.count, block.stopped))
        tokens, log_probs, drawn, stopped = columns
        asks_more = features.alternatives or features.raw or features.sampling_mask_size
        for row, slot, sample, context in here:
            n = drawn[row]
            sample.extend(tokens[row][:n], log_probs[row][:n], self.version, context)
            if asks_more:
                sample.note(block, row)
            if sample.ended(stopped[row], n, self.decode_text):
                self._done.append(sample.hand_over)
                table.release(slot)
            elif report := sample.report():
                self._done.append(report)

    def _rows(self, slots: np.ndarray, features: Features) -> Rows:
        """Return samples in `slots` as arrays, for a program of such features; FREE = padding."""
        table = self.table
        at = np.minimum(slots, len(table.samples) - 1)
        last = np.maximum(table.length[at] - 1, 0)
        history = None
        if features.penalised:
            known = np.arange(table.tokens.shape[1]) <= last[:, None]
            history = np.where(known, table.tokens[at], -1)
        stop_ids = np.full((len(slots), features.stop_ids), -1, np.int32)
        wanted = table.stop_ids[at, : features.stop_ids]
        stop_ids[:, : wanted.shape[1]] = wanted
        return Rows(
            slots=slots.astype(np.int32),
            last_token=table.tokens[at, last],
            position=last.astype(np.int32),
            count=table.length[at] - table.prompt[at],
            stop_ids=stop_ids,
            history=history,
            features=features,
            **{name: column[at] for name, column in table.asked.items()},
        )


def _needs(samplings: Sequence[Sampling]) -> Features:
    """Return what rows of a block with such sampling need together."""
    features = Features()
    for sampling in {id(s): s for s in samplings}.values():  # the samples of a request share one
        features = features.including(sampling)
    return features
