"""The in-process engine: continuous batching over pages of a key/value cache.

A thread runs while there is work. Each of its turns admits samples to free slots, gives their rows
pages, and begins a block, which prefills chunks of prompts and decodes tokens for all that are
ready; between two turns samples join, leave and are cut off, and the weights may change. A prompt
is prefilled but for its last token, which the first decode step takes: so prefill needs no
vocabulary head, and the samples of a prompt differ from there on. docs/rollouts.md has a drawing.

What a sample draws follows from its request alone. Rows share pages only where their bits follow
from the tokens; a row that must make room goes to the host's memory and comes back as it was.
"""

import dataclasses
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxrl import activity
from jaxrl.models.exact import Tiles
from jaxrl.models.lora import LoraConfig
from jaxrl.models.transformer import Params, TransformerConfig
from jaxrl.parallel.compilation import Call
from jaxrl.rollout.native.decode import Block, Features, Rows, check_drafts
from jaxrl.rollout.native.programs import Prefill, Programs, pages_that_fit
from jaxrl.rollout.native.sample_thread import SampleThread
from jaxrl.rollout.native.scoring import Scorer
from jaxrl.rollout.native.slots import Sample, SlotTable
from jaxrl.rollout.protocol import Completion, PromptScores, Request
from jaxrl.rollout.weights.groups import GROUP_BYTES

NOBODY = 2**30  # in place of a slot: padding


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


class Ended(NamedTuple):
    """Hold samples that are at their end but for their routes, which are on their way.

    Attributes:
        samples: each with the number of its positions.
        fetch: waits for them, see `Programs.read_routes`.
    """

    samples: list[tuple[Sample, int]]
    fetch: Callable[[], list[np.ndarray]]


class NativeEngine(SampleThread):
    """Generate samples with the trainer's model, as an `Engine`.

    Args:
        config: architecture.
        mesh: rows are spread over its batch axes, weights over "tensor".
        dtype: compute and cache dtype.
        max_num_seqs: most rows that decode together; samples beyond them wait.
        max_num_batched_tokens: most prompt tokens that a block prefills.
        max_model_len: most tokens of a row; a longer request is refused. None = no limit, the cache
            grows with the requests.
        gpu_memory_utilization: share for decode weights and cache of what the devices' memory has
            beside `resident_bytes`, if `max_model_len` is given: there are as many pages as fit
            into it, and no more than `max_num_seqs` of the longest rows need.
        device_memory: bytes of a device; None = as it says itself.
        resident_bytes: that others keep on each device while the engine samples.
        steps_per_dispatch: decode steps of a block, between two looks at the host; None = 32 on
            CPUs, 16 on GPUs, 8 elsewhere.
        enable_prefix_caching: reuse between requests what was decoded, too, and not only what was
            prefilled. What is reused then depends on timing, and with it the last bits.
        recompute_kv_on_update: new weights compute the cache of samples in flight anew.
        shrink: blocks run over fewer rows when fewer are live, which changes the last bits; None =
            on one CPU device; never with `ahead`. False where samples join by the clock and bits
            must repeat.
        ahead: a block begins before the one before is fetched, so that the device does not wait for
            the host. A stop string or a cancellation is then seen a block late, and a slot that
            comes free is filled a block later; the tokens are the same. None = but on CPUs.
        decode_text: token ids to text, for stop strings.
        group_bytes: most bytes of new weights that are on their way from other devices at a time.
        kernel, experts_kernel, rule_kernel: of `PAGED_ATTENTION`, `GROUPED_PRODUCT` and
            `DELTA_RULE`; None = the fastest that can.
        platform: see `Programs`.
        programs: makes the device side.
        keep_routes: completions tell the experts of every token that was computed, of the prompt
            too: those of the keys and values that its sample was drawn from.
        tiles: of the exact mode: what a sample gets depends on nothing but its tokens, and the
            trainer computes the same.
        speculative_tokens: guessed in each step from how the row went on before, and kept as far as
            they are what would have been drawn: so the tokens are the same, in fewer steps.
        speculative_history: tokens of a request's `references` that guesses are looked for in; with
            `tiles`, where no bit depends on what is guessed, also of its other samples so far.
        quantization, kv_cache_dtype: 8 bits of weights, and of keys and values, see `Programs`. The
            log-probs are those of what is computed with them.
        lora, places: adapters beside the base, see `Programs`.

    Attributes:
        prefilled_tokens: computed so far, each time counted.
        decoded_tokens: drawn so far.
        suspended: how often a sample has made room for others so far.
    """

    constrains = scores = True

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
        experts_kernel: str | None = None,
        rule_kernel: str | None = None,
        platform: str | None = None,
        keep_routes: bool = False,
        tiles: Tiles | None = None,
        speculative_tokens: int = 0,
        speculative_history: int = 0,
        quantization: str | None = None,
        kv_cache_dtype: str = "auto",
        lora: LoraConfig | None = None,
        places: int = 0,
        programs: Callable[..., Programs] = Programs,
    ) -> None:
        super().__init__()
        if keep_routes and config.experts is None:
            raise ValueError("keep_routes=True: the model has no experts; leave it off")
        for name, value in (
            ("steps_per_dispatch", steps_per_dispatch),
            ("max_num_seqs", max_num_seqs),
            ("max_num_batched_tokens", max_num_batched_tokens),
        ):
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        check_drafts(config, speculative_tokens, tiles)
        self.drafts, self.guesses_alike = speculative_tokens, tiles is not None
        self.max_model_len = max_model_len
        self.recompute_kv_on_update, self.decode_text = recompute_kv_on_update, decode_text
        pages = None
        if max_model_len is not None:
            pages = pages_that_fit(
                config,
                mesh,
                dtype,
                max_model_len=max_model_len,
                utilization=gpu_memory_utilization,
                memory=device_memory,
                resident=resident_bytes,
                platform=platform,
                keep_routes=keep_routes,
                slots=max_num_seqs,
                quantization=quantization,
                kv_cache_dtype=kv_cache_dtype,
            )
        self.programs = programs(
            config,
            mesh,
            max_num_seqs,
            dtype=dtype,
            steps=steps_per_dispatch,
            shrink=shrink,
            pages=pages,
            batched_tokens=max_num_batched_tokens,
            ahead=ahead,
            group_bytes=group_bytes,
            kernel=kernel,
            experts_kernel=experts_kernel,
            rule_kernel=rule_kernel,
            platform=platform,
            keep_routes=keep_routes,
            tiles=tiles,
            drafts=speculative_tokens,
            quantization=quantization,
            kv_cache_dtype=kv_cache_dtype,
            lora=lora,
            places=places,
        )
        self.keep_routes = keep_routes
        self.table = SlotTable(
            self.programs.slots,
            parts=self.programs.parts,
            share_prefixes=enable_prefix_caching,
            save=self.programs.take,
            restore=self.programs.put,
            tile=self.programs.shape.tile,
            states=self.programs.states,
            references=speculative_history if speculative_tokens else 0,
        )
        self._newest: Flight | None = None  # block, whether it is fetched or not
        self._flight: Flight | None = None
        self._ended: list[Ended] = []
        self._borrowed: list[tuple[int, int]] = []  # (part, state) of the next block
        self.prefilled_tokens = self.decoded_tokens = self.suspended = 0
        self._warm: set[Features] = set()  # of `warm_up`, and their unions
        self._scorer = Scorer(self.programs, self._held, lambda: self.version)

    # ---- weights

    def update_weights(self, params: Params, version: int) -> None:
        """Sample from these parameters from the next block on.

        `params` is copied, the caller may donate it. What finished samples left in the cache is
        forgotten; samples in flight go on with theirs, which no sample that begins later finds, or
        compute it anew with `recompute_kv_on_update`. Adapters stay in their places.
        """
        with self._held():
            self._land()
            self.programs.load(params)
            self.version = self.table.version = version
            self.table.forget(self._queue, live=self.recompute_kv_on_update)

    def put_adapter(self, place: int, adapters: Params, scale: float) -> None:
        """Put an adapter to a place, from the next block on; no sample in flight may have it.

        Args:
            place: from 1 on; at 0 there is none.
            adapters: of `lora.adapter_specs`.
            scale: alpha / rank.
        """
        with self._held():
            self._land()
            self.programs.put_adapter(place, adapters, scale)

    def sleep(self) -> None:
        """Drop weights and cache; `update_weights` wakes the engine.

        Raises:
            RuntimeError: samples are in flight.
        """
        with self._held():
            self._check_idle()
            self._land()
            self.programs.drop(weights=True)
            self.table.reset()

    def wake(self) -> None:
        """Do nothing: the cache is made when it is needed."""

    # ---- requests

    def warm_up(self, requests: Sequence[Request]) -> None:
        """Compile prefill and decode for the shapes of these requests; nothing is drawn.

        Blocks where they meet, and meet those of earlier calls, are compiled too.
        """
        with self._held():
            self._prepare(requests)
            for features in {self._needs([request]) for request in requests}:
                self._warm |= {features, *(features.union(other) for other in self._warm)}
            self.programs.warm_up(
                lambda size: [
                    self._rows(np.full(size, NOBODY), features)
                    for features in sorted(self._warm, key=dataclasses.astuple)
                ]
            )

    def calls(self, params: Params, requests: Sequence[Request]) -> dict[str, Call]:
        """Return the largest programs for such requests, see `Programs.calls`; place nothing."""
        needs = self._needs(requests)

        def padding() -> Rows:
            self._resize()
            return self._rows(np.full(self.programs.slots, NOBODY), needs)

        return self.programs.calls(params, max(r.longest for r in requests), padding)

    def check(self, request: Request) -> None:
        """Refuse what can never be served.

        Raises:
            ValueError: an empty prompt, a non-positive max_tokens, more tokens than max_model_len,
                stop strings without `decode_text`, or a constraint that no stop token could end.
        """
        request.check(self.max_model_len, self.decode_text is not None, constrains=True)
        places = self.programs.places
        if request.adapter is not None and not 0 < request.adapter.place < max(places, 1):
            raise ValueError(f"{request.adapter}: the engine has places from 1 to {places - 1}")

    def score(self, tokens: Sequence[int]) -> PromptScores:
        """Return how likely the model finds the tokens of a prompt; wait for it.

        Samples go on meanwhile. An engine with places for adapters does not do so.

        Raises:
            RuntimeError: no weights.
        """
        return self._scorer.score(tokens)

    def known_prefixes(self, requests: Sequence[Request]) -> list[int]:
        """Return how many tokens of each prompt the cache holds for any request.

        The numbers are 0 without prefix caching: nobody waits for a turn to learn of prompts.
        """
        if not self.table.share_prefixes:
            return super().known_prefixes(requests)
        with self._held():
            return [self.table.known_prefix(request) for request in requests]

    def room(self) -> int:
        """Return how many samples of other engines could begin at once; any thread may ask.

        Of an engine whose blocks shrink it is 0: what is beside a sample changes its last bits, and
        samples come from others by the clock.
        """
        shrinks = len(self.programs.sizes()) > 1
        if shrinks or self._paused or not self._has_weights() or self.waiting():
            return 0
        return int(np.count_nonzero(~self.table.taken))

    def spare(self, most: int, known: Callable[[Sample], bool]) -> list[Sample]:
        """Take samples that can begin elsewhere out of the queue, the newest requests first.

        What was begun here stays here, and so does what goes on with pages that are here. Requests
        are taken whole where one fits, so that its prompt is prefilled once; of conversations no
        others are, as their next turns may be one request again.
        """
        here = {s.conversation for _, s in self.table.live()} | self.table.kept.keys()
        groups: dict[int, list[Sample]] = {}
        for sample in self._queue:
            begun = sample.tokens or sample.context is not None
            stays = sample.conversation is not None and sample.conversation in here
            if not (begun or stays or sample.future.done()) and known(sample):
                groups.setdefault(sample.group, []).append(sample)
        chosen: list[Sample] = []
        for group in reversed(groups.values()):
            request = group[0].request
            whole = not request.conversations or len(group) == len(request.keys)
            if whole and len(chosen) + len(group) <= most:
                chosen = [*group, *chosen]
        if not chosen:
            parts = [group for group in groups.values() if not group[0].request.conversations]
            chosen = parts[-1][-most:] if parts else []
        gone = {id(sample) for sample in chosen}
        self._queue = deque(sample for sample in self._queue if id(sample) not in gone)
        return chosen

    def describe(self) -> str:
        """Describe the shapes of all programs."""
        return self.programs.describe()

    def _prepare(self, requests: Sequence[Request]) -> None:
        """Make room for requests."""
        if self.programs.params is None:
            raise RuntimeError("the engine has no weights: call update_weights first")
        self.programs.reserve(max([1, *(r.longest for r in requests)]))
        self._resize()

    def _resize(self) -> None:
        programs = self.programs
        self.table.resize(programs.length, programs.pages, programs.shape.page, programs.columns)

    # ---- the thread

    def _has_weights(self) -> bool:
        return self.programs.params is not None

    def _enqueue(self, samples: Sequence[Sample]) -> None:
        """Queue samples; the next turn of a conversation waits behind nobody."""
        for sample in samples:
            if sample.conversation in self.table.kept:
                self._queue.appendleft(sample)
            else:
                self._queue.append(sample)

    def _leaves_queue(self, sample: Sample) -> None:
        self.table.keep(sample)

    def _live(self) -> Iterator[tuple[int, Sample]]:
        return self.table.live()

    def _release(self, slot: int) -> None:
        self.table.release(slot, in_flight=self._is_on_its_way(slot))

    def _is_on_its_way(self, slot: int) -> bool:
        """Return whether a block that is not fetched may draw more of a slot's sample."""
        newest = self._newest
        return newest is not None and any(
            of.sample is self.table.samples[slot] for of in newest.drawn
        )

    def _all_out(self) -> Iterator[Sample]:
        for ended in self._ended:
            yield from (sample for sample, _ in ended.samples)
        self._ended = []
        yield from super()._all_out()

    def _has_work(self) -> bool:
        return super()._has_work() or bool(self._ended and not self._paused)

    def _recover(self) -> None:
        self._flight = self._newest = None
        self._borrowed = []
        self.table.reset()
        self.programs.drop(weights=False)  # the cache may have been donated
        self.programs.reserve(1)

    def _turn(self) -> None:
        flight = self._flight.drawn if self._flight else ()
        if any(of.sample.constraint is not None for of in flight):
            self._land()  # what may come next follows from what it drew
        self._drop_cancelled()
        self.table.let_go()
        self._reserve()
        self._admit()
        if self._queue and self.offer is not None:
            self.offer()
        self._reserve()  # for those that have nothing to prefill
        begun = self._begin_block()
        self._newest = begun
        if not self.programs.ahead:
            self._flight, begun = begun, None
        before = len(self._ended)
        self._fetch_block()
        # of a block whose samples have all ended meanwhile there is nothing to fetch
        if begun and any(self.table.samples[of.slot] is of.sample for of in begun.drawn):
            self._flight = begun
        # what was asked for behind a block that is under way is there when that is
        self._hand_over(before if self._flight else len(self._ended))

    # ---- pages

    def _admit(self) -> None:
        """Give samples that wait slots, while there are slots and pages."""
        while self._queue and not self.table.taken.all():
            request = self._queue[0].request
            if not self.programs.has_room(request.longest):  # it was submitted to another engine
                self._prepare([request])
            if self.table.take(self._queue[0], self.programs.reach) is not None:
                self._queue.popleft()
            elif not self.table.make_room(self._queue[0]):
                return

    def _reserve(self) -> None:
        """Give all rows that decode pages for the block, those first that were here first."""
        table, needed = self.table, self._needed()
        ready = table.taken & (table.filled == table.length - 1)
        short = np.flatnonzero(ready & (needed > table.held * table.page))
        for slot in short[table.age[short].argsort()].tolist():
            sample = table.samples[slot]  # it may have made room, or come to its end, meanwhile
            if sample is None or self._allocate(slot, int(needed[slot])):
                continue
            if table.samples[slot] is sample:
                self._suspend(slot)

    def _needed(self) -> np.ndarray:
        """Return the positions that each slot's row [S] may have filled after its next block."""
        table, most = self.table, self.programs.reach
        reach = np.full(len(table.length), most)
        if self._flight:  # the host does not know yet how many it draws
            here = [of.slot for of in self._flight.drawn if table.samples[of.slot] is of.sample]
            reach[here] += most
        return table.reach(slice(None), reach)

    def _allocate(self, slot: int, tokens: int) -> bool:
        """Give a slot pages for a row of `tokens`; whoever came later makes room.

        Returns:
            Whether it has them; False where it is the one to make room.
        """
        table, part = self.table, self.table.part(slot)
        sample = table.samples[slot]
        while table.samples[slot] is sample and not table.reserve(slot, tokens):
            if table.put_by(part):
                continue
            if self._flight:  # samples may end with it, and what the others drew is to be known
                self._land()
                continue
            newest = table.newest(part)
            if table.age[newest] <= table.age[slot]:
                return False
            self._suspend(newest)
        return table.samples[slot] is sample

    def _suspend(self, slot: int) -> None:
        """Take a sample out of its slot, to go on when there are pages again."""
        sample = self.table.samples[slot]
        assert sample is not None
        self._queue.appendleft(sample)
        self.table.suspend(slot)
        self.suspended += 1

    # ---- prefill

    def _plan_prefill(self) -> tuple[Prefill, dict[int, int]]:
        """Share and prefill what rows miss, those first that were here first.

        Of the samples of one request that share a prompt the first alone is prefilled.

        Returns:
            The chunks, and for each slot that they complete the one that does.
        """
        table, plan = self.table, self.programs.prefill()
        ready: dict[int, int] = {}
        chunk_of: dict[tuple[int, int], int] = {}  # of pages: the one that fills it
        kept_in: dict[tuple[int, int], int] = {}  # the same of states
        waits_for = set()  # groups whose prompt is not there yet
        for slot in table.incomplete():
            sample, part = table.samples[slot], table.part(slot)
            if sample is None:  # it has made room
                continue
            if not sample.tokens and (sample.group, part) in waits_for:
                continue
            chunk = max([0, *(chunk_of.get((part, page), 0) for page in table.share(slot))])
            start = int(table.filled[slot])
            size = min(table.missing(slot), plan.room(part))
            last = size == table.missing(slot)  # then it decodes in this block
            reach = int(table.reach(slot, self.programs.reach)) if last else start + size
            if not (size or last) or not self._allocate(slot, reach):
                waits_for.add((sample.group, part))
                continue
            copy = table.copy_tail(slot) if last else None
            begin = table.begun(slot)
            if begin is not None:
                self._borrowed.append((part, begin))
                chunk = max(chunk, kept_in.get((part, begin), 0))
                if copy is not None or not size:
                    plan.copy_state(part, begin, int(table.state[slot]), chunk)
            if copy is not None:
                table.pools[part].refer(copy[0])  # until the block has begun
                chunk = max(chunk, chunk_of.get((part, copy[0]), 0))
                plan.copy(part, *copy, chunk)
            elif size:
                new = table.tokens[slot, start : start + size]
                pages, borders = table.fill(slot, size), table.borders(slot, start)
                where = table.table[slot], start, new, int(table.state[slot]), begin, borders
                adapter = int(table.asked["adapter"][slot])
                chunk = max(chunk, plan.add(part, *where, adapter=adapter))
                chunk_of.update(((part, page), chunk) for page in pages)
                for state in borders.values():
                    kept_in[part, state] = chunk
                    self._borrowed.append((part, state))
                self.prefilled_tokens += size
            if table.missing(slot):
                waits_for.add((sample.group, part))
            else:
                ready[slot] = chunk
        return plan, ready

    # ---- decode

    def _begin_block(self) -> Flight | None:
        """Begin a block of all that are ready, and of what is to be prefilled, if there is any.

        Those of the block that is not fetched go on from where it leaves them, unless it must be
        their last.
        """
        plan, new = self._plan_prefill()
        table, flight = self.table, self._flight
        steps, chunks = self.programs.steps, plan.chunks
        allowed: dict[int, np.ndarray] = {}
        flown = {of.slot: of.sample for of in flight.drawn} if flight else {}
        ready = (table.filled == table.length - 1) & (self._needed() <= table.held * table.page)
        decodes = ready.tolist()
        samples, going = {}, []
        for slot, sample in list(table.live()):
            left = sample.max_tokens - len(sample.tokens)
            goes_on = flown.get(slot) is sample
            if not decodes[slot] or goes_on and left <= steps:
                continue
            if sample.constraint is not None:
                try:
                    allowed[slot] = sample.constraint.allowed()
                except Exception as error:  # its neighbours go on
                    self._fail(slot, sample, error)
                    continue
            samples[slot] = sample
            if goes_on:
                going.append(slot)
        if not samples and not plan.used:
            return None
        features = self._needs([sample.request for sample in samples.values()])
        if allowed:
            features, steps = dataclasses.replace(features, constrained=True), 1
        # where most wait for their prompts these come first, and else a few in each step
        pace = max(chunks if 2 * len(new) > len(samples) else -(-chunks // steps), 1)
        chosen = np.fromiter(samples, int, len(samples))
        size = min(size for size in self.programs.sizes() if size >= len(chosen))
        # of all slots row s is slot s
        rows = chosen if size == self.programs.slots else np.arange(len(chosen))
        slots, start = np.full(size, NOBODY), np.zeros(size, np.int32)
        slots[rows] = chosen
        start[rows] = [new.get(slot, 0) // pace for slot in samples]
        begins = np.ones(size, bool)
        begins[going] = False
        after, block = self.programs.decode(
            self._rows(slots, features, start, allowed),
            plan.arrays(pace) if plan.used else None,
            flight.rows if flight else None,
            begins,
        )
        contexts = table.oldest_version[chosen].tolist()
        drawn = map(Drawn, rows.tolist(), samples.keys(), samples.values(), contexts)
        for part, page in plan.sources:
            table.pools[part].release(page)
        for part, state in self._borrowed:
            table.states[part].release(state)
        self._borrowed = []
        return Flight(after, block, list(drawn))

    def _fail(self, slot: int, sample: Sample, error: Exception) -> None:
        """End a sample with an error that is its own."""
        sample.outcome = error
        self._done.append(sample.hand_over)
        self._release(slot)

    def _land(self) -> None:
        """Fetch all that is under way, and hand out what was drawn."""
        self._fetch_block()
        self._hand_over(len(self._ended))

    def _fetch_block(self) -> None:
        """Fetch the block that is under way, if there is one, and hand out what it drew.

        Of samples that are at their end the routes, where they are kept, are asked for instead.
        """
        if self._flight is None:
            return
        flight, self._flight = self._flight, None
        if self._newest is flight:
            self._newest = None
        if not flight.drawn:  # it prefilled alone
            return
        table, block = self.table, self.programs.fetch(flight.block)
        activity.progressed()
        here = [  # the others were cancelled, or cut at a stop string
            of for of in flight.drawn if table.samples[of.slot] is of.sample
        ]
        rows, slots = (np.array([of[i] for of in here], int) for i in (0, 1))
        counts, features = block.count[rows], flight.rows.features
        table.append(slots, block.tokens[rows], counts)
        self.decoded_tokens += int(counts.sum())
        columns = (x.tolist() for x in (block.tokens, block.log_probs, block.count, block.stopped))
        tokens, log_probs, drawn, stopped = columns
        asks_more = features.alternatives or features.raw or features.sampling_mask_size
        asks_more = asks_more or features.drafts
        ended: list[tuple[int, Sample, int]] = []  # they have their slots until routes are coming
        for row, slot, sample, context in here:
            n = drawn[row]
            sample.extend(tokens[row][:n], log_probs[row][:n], self.version, context)
            if asks_more:
                sample.note(block, row)
            if sample.ended(stopped[row], n, self.decode_text):
                if self.keep_routes:
                    length = len(sample.request.prompt) + len(sample.tokens)
                    ended.append((slot, sample, min(length, int(table.filled[slot]))))
                    continue
                self._done.append(sample.hand_over)
                self._release_ended(slot, sample)
            elif report := sample.report():
                self._done.append(report)
        if ended:
            fetch = self.programs.read_routes([table.pages_of(slot) for slot, _, _ in ended])
            self._ended.append(Ended([(sample, n) for _, sample, n in ended], fetch))
            for slot, sample, _ in ended:
                self._release_ended(slot, sample)

    def _release_ended(self, slot: int, sample: Sample) -> None:
        """Release a slot whose sample is at its end; if the device knows that, it draws no more."""
        outcome = sample.outcome
        known = isinstance(outcome, Completion) and outcome.stop_string is None
        self.table.release(slot, in_flight=not known and self._is_on_its_way(slot))

    def _hand_over(self, number: int) -> None:
        """Hand over the first of the samples that wait for nothing but their routes."""
        for ended in self._ended[:number]:
            for (sample, positions), routes in zip(ended.samples, ended.fetch(), strict=True):
                assert isinstance(sample.outcome, Completion)
                # a copy: what was fetched is of other samples, too
                known = routes[:positions].copy()
                sample.outcome = dataclasses.replace(sample.outcome, routes=known)
                self._done.append(sample.hand_over)
        del self._ended[:number]

    def _needs(self, requests: Sequence[Request]) -> Features:
        """Return what rows of a block with samples of such requests need together."""
        features = Features(drafts=self.drafts if any(r.guesses for r in requests) else 0)
        samplings = {id(request.sampling): request.sampling for request in requests}
        for sampling in samplings.values():
            features = features.including(sampling)
        return features

    def _rows(
        self,
        slots: np.ndarray,
        features: Features,
        start: np.ndarray | None = None,
        allowed: Mapping[int, np.ndarray] = MappingProxyType({}),
    ) -> Rows:
        """Return samples in `slots` as arrays, for a program of such features; NOBODY = padding.

        Args:
            start: see `Rows`; None = 0.
            allowed: of those that are constrained.
        """
        table = self.table
        at = np.minimum(slots, len(table.samples) - 1)
        last = np.maximum(table.length[at] - 1, 0)
        history = None
        if features.penalised or features.drafts:
            known = np.arange(table.tokens.shape[1]) <= last[:, None]
            history = np.where(known, table.tokens[at], -1)
        references = None
        if features.drafts and table.references.size:
            references = table.references_of(at, with_group=self.guesses_alike)
        stop_ids = np.full((len(slots), features.stop_ids), -1, np.int32)
        constrained = bits = None
        if features.constrained:
            constrained = np.isin(slots, list(allowed))
            bits = np.full((len(slots), -(-self.programs.config.vocab_size // 8)), 255, np.uint8)
            for row in np.flatnonzero(constrained):
                bits[row] = allowed[int(slots[row])]
        wanted = table.stop_ids[at, : features.stop_ids]
        stop_ids[:, : wanted.shape[1]] = wanted
        return Rows(
            live=slots != NOBODY,
            table=table.table[at],
            start=np.zeros(len(slots), np.int32) if start is None else start,
            last_token=table.tokens[at, last],
            position=last.astype(np.int32),
            count=table.length[at] - table.prompt[at],
            stop_ids=stop_ids,
            history=history,
            references=references,
            state=table.state[at] if table.keeps_states else None,
            constrained=constrained,
            allowed=bits,
            features=features,
            **{
                name: column[at] if name != "adapter" or self.programs.places else None
                for name, column in table.asked.items()
            },
        )
