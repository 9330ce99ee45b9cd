"""Which sample is in which slot, and in which pages its keys and values are. Host only."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxrl.rollout.native.decode import LEAST_STOP_IDS, LONGEST_MATCH, SETTINGS, Block
from jaxrl.rollout.native.page_pool import ROOT, PagePool, page_key
from jaxrl.rollout.native.stop_strings import StopStrings
from jaxrl.rollout.protocol import Completion, Constraint, Request


def root_of(request: Request) -> bytes:
    """Return the key of no tokens: of the base, or of the base with an adapter."""
    if request.adapter is None:
        return ROOT
    return page_key(ROOT, np.frombuffer(request.adapter.name.encode(), np.uint8))


@dataclass(eq=False)
class Context:
    """Hold the keys and values of a row that has no slot: of a conversation between two turns, or
    of a sample that makes room for others.

    Attributes:
        tokens: of the positions that are filled.
        pure, keys, stale, oldest_version: as in `SlotTable`.
        part: of the pages.
        pages: where they are; () where they are in `saved`.
        saved: what `save` returned; None while they are on the device.
        state: where the row's state is, behind `tokens`; None = there is none on the device.
    """

    tokens: np.ndarray
    pure: int
    keys: list[bytes]
    oldest_version: int
    part: int
    pages: list[int]
    stale: bool
    saved: Any = None
    state: int | None = None


@dataclass(eq=False)
class Sample:
    """Hold one sample in flight."""

    request: Request
    group: int  # number of its request
    key: tuple[int, int]
    max_tokens: int
    number: int = 0  # in its request
    conversation: Future[None] | None = None  # done when it is over
    future: Future[Completion] = field(default_factory=Future)
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    spans: list[list[int]] = field(default_factory=list)  # [version, context version, tokens]
    top_log_probs: list[dict[int, float]] = field(default_factory=list)
    raw_log_probs: list[float] = field(default_factory=list)
    sampling_mask_ids: list[tuple[int, ...]] = field(default_factory=list)
    outcome: Completion | BaseException | None = None
    reported: int = 0  # tokens that `on_tokens` has been given
    stop_strings: StopStrings | None = None
    context: Context | None = None  # of a sample that makes room for others
    steps: int = 0  # that drew the tokens, where some are guessed
    constraint: Constraint | None = None

    def note(self, block: Block, row: int) -> None:
        """Add what the request wants to know of the tokens that a block drew in a row."""
        drawn, sampling = int(block.count[row]), self.request.sampling
        self.steps += int(block.steps[row])
        wanted = sampling.logprobs
        for i in range(drawn if wanted else 0):
            ids, scores = block.top_ids[row, i, :wanted], block.top_log_probs[row, i, :wanted]
            self.top_log_probs.append(dict(zip(ids.tolist(), scores.tolist(), strict=True)))
        if sampling.raw_log_probs:
            self.raw_log_probs += block.raw_log_probs[row, :drawn].tolist()
        if sampling.keep_sampling_mask:
            ids = block.sampling_mask_ids[row, :drawn, : sampling.top_k]
            self.sampling_mask_ids += map(tuple, ids.tolist())

    def extend(
        self,
        tokens: Sequence[int],
        log_probs: Sequence[float],
        version: int,
        context_version: int | None = None,
    ) -> None:
        """Add tokens; `log_probs` are empty where the engine has none.

        Args:
            version: of the weights that drew them.
            context_version: the oldest in the row's keys and values; None = the sample goes on with
                all that its first weights computed.
        """
        if not len(tokens):
            return
        if context_version is None:
            context_version = self.spans[0][0] if self.spans else version
        self.tokens += tokens
        self.log_probs += log_probs
        if self.constraint is not None:
            self.constraint.take(tokens)
        if not self.spans or self.spans[-1][:2] != [version, context_version]:
            self.spans.append([version, context_version, 0])
        self.spans[-1][2] += len(tokens)

    def ended(
        self, stopped: bool, new: int, decode_text: Callable[[Sequence[int]], str] | None
    ) -> bool:
        """Return whether the sample is at its end, `new` tokens longer; then its outcome is known.

        Args:
            stopped: the last token is a stop token.
        """
        string = self.cut_at_stop_string(decode_text, new)
        if string is not None or stopped:
            self.finish("stop", string)
        elif len(self.tokens) >= self.max_tokens:
            self.finish("length")
        return self.outcome is not None

    def take(
        self,
        tokens: Sequence[int],
        log_probs: Sequence[float],
        version: int,
        decode_text: Callable[[Sequence[int]], str] | None,
    ) -> bool:
        """Add tokens up to the sample's end; return whether it has ended.

        The engine may have drawn more tokens.
        """
        sampling, before = self.request.sampling, len(self.tokens)
        room = self.max_tokens - before
        stops = (
            i
            for i, token in enumerate(tokens[:room])
            if token in sampling.stop_token_ids and before + i >= sampling.min_tokens
        )
        stop = next(stops, room)
        new = tokens[: stop + 1][:room]
        self.extend(new, log_probs[: len(new)], version)
        return self.ended(stop < room, len(new), decode_text)

    def cut_at_stop_string(
        self, decode_text: Callable[[Sequence[int]], str] | None, new: int
    ) -> str | None:
        """Return the stop string that one of the last `new` tokens completes; cut off what follows.

        One that is complete within the first `min_tokens` tokens is text like any other.
        """
        sampling, known = self.request.sampling, len(self.tokens) - new
        if not sampling.stop or decode_text is None:
            return None
        if self.stop_strings is None:
            self.stop_strings = StopStrings(sampling.stop, decode_text)
        first = max(known, min(sampling.min_tokens, len(self.tokens)))
        self.stop_strings.skip(self.tokens[known:first])
        found = self.stop_strings.find(self.tokens[first:])
        if found is None:
            return None
        size, string = found
        for column in (
            self.tokens,
            self.log_probs,
            self.top_log_probs,
            self.raw_log_probs,
            self.sampling_mask_ids,
        ):
            del column[first + size :]
        return string

    def finish(self, reason: str, stop_string: str | None = None) -> None:
        """End the sample; what there is can be handed over."""
        self.outcome = self._completion(0, reason, stop_string)

    def _completion(self, start: int, reason: str, stop_string: str | None) -> Completion:
        """Return what there is of each token from `start` on."""
        versions: list[int] = []
        context_versions: list[int] = []
        for version, context_version, tokens in self.spans:
            versions += [version] * tokens
            context_versions += [context_version] * tokens
        new = slice(start, len(self.tokens))  # a stop string cuts off tokens of a span
        return Completion(
            tokens=self.tokens[start:],
            log_probs=self.log_probs[start:],
            stop_reason=reason,
            versions=versions[new],
            stop_string=stop_string,
            top_log_probs=self.top_log_probs[start:],
            raw_log_probs=self.raw_log_probs[start:],
            sampling_mask_ids=self.sampling_mask_ids[start:],
            context_versions=context_versions[new],
            steps=self.steps,
        )

    def report(self) -> Callable[[], None] | None:
        """Return a call of `on_tokens` with the tokens since the last one, if it is wanted."""
        on_tokens, start = self.request.on_tokens, self.reported
        if on_tokens is None or start == len(self.tokens):
            return None
        self.reported = len(self.tokens)
        new = self._completion(start, "", None)
        return lambda: on_tokens(self.number, new)

    def hand_over(self) -> None:
        """Tell whoever waits, if anybody still does."""
        if self.future.done() or not self.future.set_running_or_notify_cancel():
            return
        if isinstance(self.outcome, BaseException):
            self.future.set_exception(self.outcome)
        else:
            self.future.set_result(self.outcome)  # type: ignore[arg-type]


class SlotTable:
    """Track the slots of a block, and the pages of their rows, as the host knows them.

    The pages of a slot hold the keys and values of the first `filled` tokens of its row. Of these
    the first `pure` were prefilled from the beginning of the row on: their bits follow from the
    tokens alone, whoever prefilled them, so whole pages of them have names by which every row with
    the same beginning finds them. What was decoded, and what follows that, stays with its sample
    and the further turns of its conversation.

    Of a model that keeps states (see states.py) each slot has one, of the tokens that it has
    filled. Others have the name of a whole page, or of the tail of a prompt, and are the state
    behind it: a row that finds pages takes them up to the last one that has a state.

    After an update a row that is in flight may hold some of older weights; its own sample, or
    conversation, goes on with them, but they are shared with no other.

    Args:
        slots: number.
        parts: of the slots and of the pages, one after the other.
        share_prefixes: what was decoded is found by others, too.
        save: (part, pages, state) -> what is in them, on the host.
        restore: (part, pages, what `save` returned of these and more, state).
        tile: tokens that are prefilled together.
        states: of each part; 0 = the model keeps none.
        references: tokens of a request's that a row has.
    """

    def __init__(
        self,
        slots: int,
        *,
        parts: int = 1,
        share_prefixes: bool,
        save: Callable[..., Any],
        restore: Callable[..., None],
        tile: int = 1,
        states: int = 0,
        references: int = 0,
    ) -> None:
        self.share_prefixes, self.parts, self.each = share_prefixes, parts, slots // parts
        self._save, self._restore, self._tile = save, restore, tile
        self.page, self.pools = 1, [PagePool() for _ in range(parts)]
        self.keeps_states = states > 0
        self.states = [PagePool() for _ in range(parts)]
        for kept in self.states:
            kept.grow(states)
        self.state = np.full(slots, -1, np.int32)  # [S] where the row's state is; -1 = none
        # of slots whose first tokens are those of others: where the state behind them is
        self.begin: list[int | None] = [None] * slots
        self.samples: list[Sample | None] = [None] * slots
        self.taken = np.zeros(slots, bool)  # [S] by a sample
        self.tokens = np.zeros((slots, 0), np.int32)  # [S, L]
        self.length = np.zeros(slots, np.int32)  # [S] tokens of the row, prompt and response
        self.filled = np.zeros(slots, np.int32)  # [S]
        self.pure = np.zeros(slots, np.int32)  # [S]
        self.table = np.zeros((slots, 0), np.int32)  # [S, C] pages
        self.held = np.zeros(slots, np.int32)  # [S] of them that are the row's
        self.soon = np.zeros(slots, np.int32)  # [S] those that it needs for its first block
        self.found = np.zeros(slots, np.int32)  # [S] of these, what others have
        self.keys: list[list[bytes]] = [[] for _ in range(slots)]  # of the first pages
        self.roots = [ROOT] * slots  # before them: of the weights
        self.version = -1  # of the weights that fill positions now
        self.oldest_version = np.full(slots, -1)  # [S] of those that filled the row's positions
        self.stale = np.zeros(slots, bool)  # [S] some were filled before the last update
        self.age = np.zeros(slots, np.int64)  # [S] a smaller one was here before
        self.prompt = np.zeros(slots, np.int32)  # [S] tokens of the prompt
        self.references = np.full((slots, references), -1, np.int32)  # [S, H] as in Rows
        self.stop_ids = np.full((slots, LEAST_STOP_IDS), -1, np.int32)  # as in Rows
        self.asked = {  # name -> [S], columns of Rows that are the sample's from its start
            "keys": np.zeros((slots, 2), np.uint32),
            "max_tokens": np.zeros(slots, np.int32),
            "adapter": np.zeros(slots, np.int32),
            **{name: np.zeros(slots, kind) for kind, names in SETTINGS.items() for name in names},
        }
        self.kept: dict[Future[None], Context] = {}  # of conversations, the longest there first
        self._groups: dict[tuple[int, int], int] = {}  # (request, part) -> samples in slots
        self._clock = 0

    def resize(self, length: int, pages: int, size: int, columns: int) -> None:
        """Make room for rows of `length` tokens, in `pages` pages of `size` positions a part."""
        self.page = size
        if length > self.tokens.shape[1]:
            self.tokens = np.pad(self.tokens, ((0, 0), (0, length - self.tokens.shape[1])))
            self.table = np.pad(self.table, ((0, 0), (0, columns - self.table.shape[1])))
        for pool in self.pools:
            pool.grow(pages)

    def live(self) -> Iterator[tuple[int, Sample]]:
        """Yield the slots with a sample in them, each with its sample."""
        return ((slot, s) for slot, s in enumerate(self.samples) if s is not None)

    def pages_of(self, slot: int) -> tuple[int, list[int]]:
        """Return the part of a slot, and the pages there that have what its row has filled."""
        used = self._pages(int(self.filled[slot]))
        return self.part(slot), self.table[slot, :used].tolist()

    def part(self, slot: int) -> int:
        """Return the part of a slot."""
        return slot // self.each

    def missing(self, slot: int) -> int:
        """Count the positions to fill before the slot can decode: all tokens but the last."""
        return int(self.length[slot] - 1 - self.filled[slot])

    def incomplete(self) -> list[int]:
        """Return slots with a sample that cannot decode yet, those first that were there first."""
        slots = np.flatnonzero(self.taken & (self.filled < self.length - 1))
        return slots[self.age[slots].argsort()].tolist()

    # ---- samples come and go

    def take(self, sample: Sample, ahead: int) -> int | None:
        """Put a sample into a free slot; return None if there is no slot, or are no pages, for it.

        What its conversation holds, or it held itself, comes with it. Else it takes the part where
        most of its prompt is, or where most pages are free. Beside those that it needs, a page
        stays free for every row of the part that may grow.

        Args:
            ahead: tokens that it must have room for behind its own.
        """
        row = sample.request.prompt
        if sample.tokens:
            row = np.append(row, np.array(sample.tokens, np.int32))
        context = sample.context or self.kept.get(sample.conversation)  # type: ignore[arg-type]
        limit = len(sample.request.prompt) + sample.max_tokens
        needed = self._pages(min(len(row) + ahead, limit) - 1)
        known: list[tuple[int, int, int, int]] = []  # (pages of others, free, part, slot)
        for part in self._parts(context):
            here = slice(part * self.each, (part + 1) * self.each)
            taken = self.taken[here]
            if taken.all() or not self._has_state(part, context):
                continue
            others = idle = 0
            if context is None and (sample.group, part) in self._groups and not sample.tokens:
                others = (len(row) - 1) // self.page
            elif context is None:
                found = self._reusable(part, row, 0, root_of(sample.request))
                pages = [page for _, page in found]
                idle = sum(self.pools[part].references[page] == 0 for page in pages)
                others = len(pages)
            has = len(context.pages) if context is not None else others
            promised = np.maximum(self.soon - np.maximum(self.held, self.found), 0)[here]
            room = self.pools[part].available - idle - int(promised[taken].sum())
            room -= max(needed - has, 0)
            if room >= self._growing(here):
                known.append((others, room, -part, here.start + int(taken.argmin())))
        if not known:
            return None
        others, _, _, slot = max(known)
        self._clear(slot)
        self.roots[slot] = root_of(sample.request)
        self.samples[slot], self.taken[slot], self.length[slot] = sample, True, len(row)
        self.tokens[slot, : len(row)] = row
        group = sample.group, self.part(slot)
        self._groups[group] = self._groups.get(group, 0) + 1
        self.soon[slot], self.found[slot] = needed, others
        if self.keeps_states:
            held = context.state if context is not None else None
            self.state[slot] = self._taken(self.states[self.part(slot)]) if held is None else held
        if context is not None:
            sample.context = None
            self.kept.pop(sample.conversation, None)  # type: ignore[arg-type]
            self._bring(slot, context)
        self._clock += 1
        self.age[slot] = self._clock
        self._note(slot, sample)
        return slot

    def _has_state(self, part: int, context: Context | None) -> bool:
        """Return whether a part has a state for a row with such a context."""
        brings = context is not None and context.state is not None
        return not self.keeps_states or brings or self.states[part].available > 0

    def _parts(self, context: Context | None) -> Sequence[int]:
        """Return the parts in which a row can be that has such a context."""
        fixed = context is not None and context.saved is None
        return (context.part,) if context is not None and fixed else range(self.parts)

    def make_room(self, sample: Sample) -> bool:
        """Take to the host what a conversation keeps where a sample could be.

        Returns:
            Whether there was any.
        """
        context = sample.context or self.kept.get(sample.conversation)  # type: ignore[arg-type]
        with_slot = (
            part
            for part in self._parts(context)
            if not self.taken[part * self.each : (part + 1) * self.each].all()
        )
        return any(self.put_by(part) for part in with_slot)

    def _growing(self, here: slice) -> int:
        """Count the rows of some slots that may need more pages than they will have soon."""
        most = -(-(self.prompt[here] + self.asked["max_tokens"][here] - 1) // self.page)
        return int((self.taken[here] & (most > np.maximum(self.held, self.soon)[here])).sum())

    def _note(self, slot: int, sample: Sample) -> None:
        """Write what a sample asks for into the columns of its slot."""
        sampling = sample.request.sampling
        self.prompt[slot] = len(sample.request.prompt)
        adapter = sample.request.adapter
        given = {"keys": sample.key, "max_tokens": sample.max_tokens}
        given["adapter"] = adapter.place if adapter is not None else 0
        for name, column in self.asked.items():
            column[slot] = given[name] if name in given else getattr(sampling, name)
        if (more := len(sampling.stop_token_ids) - self.stop_ids.shape[1]) > 0:
            self.stop_ids = np.pad(self.stop_ids, ((0, 0), (0, more)), constant_values=-1)
        self.stop_ids[slot] = -1
        self.stop_ids[slot, : len(sampling.stop_token_ids)] = sampling.stop_token_ids
        given = sample.request.references[: self.references.shape[1]]
        self.references[slot] = -1
        self.references[slot, : len(given)] = given

    def references_of(self, slots: np.ndarray, *, with_group: bool) -> np.ndarray:
        """Return the texts [B, H] in which guesses for slots [B] are looked for, -1 between them.

        Args:
            with_group: before those of the request, what its other samples have drawn so far.
        """
        references = self.references[slots]
        if not with_group:
            return references
        groups: dict[int, list[int]] = {}
        for slot, sample in self.live():
            if self.length[slot] > self.prompt[slot]:
                groups.setdefault(sample.group, []).append(slot)
        for row, slot in enumerate(slots.tolist()):
            sample, text = self.samples[slot], list[int]()
            for other in groups.get(sample.group, ()) if sample else ():
                if other != slot:  # from some tokens before its answer on: where that begins
                    begin = max(int(self.prompt[other]) - LONGEST_MATCH, 0)
                    text += [*self.tokens[other, begin : self.length[other]].tolist(), -1]
            if text:
                given = [*text, *references[row].tolist()]
                references[row] = given[: references.shape[1]]
        return references

    def _clear(self, slot: int) -> None:
        """Note that a slot has no positions."""
        self.filled[slot] = self.pure[slot] = self.held[slot] = 0
        self.keys[slot], self.oldest_version[slot], self.stale[slot] = [], self.version, False
        self._begin_from(slot, None)

    def _bring(self, slot: int, context: Context) -> None:
        """Give a slot what was kept, as far as it is of the slot's row."""
        row, pool = self._row(slot), self.pools[self.part(slot)]
        kept = context.tokens
        width = min(len(row) - 1, len(kept))
        known = int(np.minimum.accumulate(row[:width] == kept[:width]).sum())
        if self.keeps_states and known < len(kept):  # the state is of other tokens
            known = 0
        pages, whole = context.pages, self._pages(known)
        if context.saved is not None:
            pages = [self._taken(pool) for _ in range(whole)]
            if known:
                state = (int(self.state[slot]),) if self.keeps_states else ()
                self._restore(self.part(slot), pages, context.saved, *state)
        elif known < len(kept) and known % self.page:
            last = pages[whole - 1]
            if pool.references[last] > 1 or pool.is_whole(last):  # others read what follows there
                whole -= 1
                known = whole * self.page
            else:  # the tail of its prompt, what follows is written over
                pool.unname(last)
        for page in reversed(pages[whole:]):
            pool.release(page)
        self.table[slot, :whole], self.held[slot] = pages[:whole], whole
        self.filled[slot], self.pure[slot] = known, min(context.pure, known)
        self.keys[slot] = context.keys[: known // self.page]
        if known:
            self.oldest_version[slot] = context.oldest_version
            self.stale[slot] = context.stale

    @staticmethod
    def _taken(pool: PagePool) -> int:
        page = pool.take()
        assert page is not None  # as many were free
        return page

    def release(self, slot: int, *, in_flight: bool = False) -> None:
        """Take the sample out of a slot; what it holds stays if its conversation goes on.

        Args:
            in_flight: a block that is under way may draw more of it, which goes into its state.
        """
        sample = self.samples[slot]
        assert sample is not None
        context = self._leave(slot)
        if self.keeps_states and in_flight:
            self._drop(context)
        else:
            self._keep(sample.conversation, context)

    def keep(self, sample: Sample) -> None:
        """Let the conversation of a sample that has made room, and ends, have what it held."""
        if sample.context is not None:
            self._keep(sample.conversation, sample.context)

    def _keep(self, conversation: Future[None] | None, context: Context) -> None:
        if conversation is None or conversation.done() or not len(context.tokens):
            self._drop(context)
            return
        if (other := self.kept.pop(conversation, None)) is not None:
            self._drop(other)
        self.kept[conversation] = context

    def suspend(self, slot: int) -> None:
        """Take a sample out of its slot to make room, and what it holds to the host.

        What it holds is not computed anew, so no bit changes. Nothing of it may be on its way.
        """
        sample = self.samples[slot]
        assert sample is not None
        context = self._leave(slot)
        if context.pure == len(context.tokens) and not context.stale:
            self._drop(context)  # to prefill it again gives the same bits
        else:
            sample.context = context
            self._to_host(context)

    def _leave(self, slot: int) -> Context:
        """Empty a slot, and return what it held."""
        sample, self.samples[slot], self.taken[slot] = self.samples[slot], None, False
        assert sample is not None
        group = sample.group, self.part(slot)
        self._groups[group] -= 1
        if not self._groups[group]:
            del self._groups[group]
        pool, pages = self.pools[self.part(slot)], self.table[slot, : self.held[slot]].tolist()
        if self.begin[slot] is not None:  # what it found has not come to its own state
            self.filled[slot] = self.pure[slot] = 0
            self.keys[slot] = []
        used = self._pages(int(self.filled[slot]))
        for page in pages[used:]:
            pool.release(page)
        tokens = self.tokens[slot, : self.filled[slot]].copy()
        pure, keys, oldest = int(self.pure[slot]), self.keys[slot], int(self.oldest_version[slot])
        stale = bool(self.stale[slot])
        state = int(self.state[slot]) if self.keeps_states else None
        self._clear(slot)
        self.state[slot] = -1
        part = self.part(slot)
        return Context(tokens, pure, keys, oldest, part, pages[:used], stale, state=state)

    def _drop(self, context: Context) -> None:
        for page in reversed(context.pages):  # the end of a row is the first to be forgotten
            self.pools[context.part].release(page)
        if context.state is not None:
            self.states[context.part].release(context.state)
        context.pages, context.state = [], None

    def _to_host(self, context: Context) -> None:
        state = (context.state,) if self.keeps_states else ()
        context.saved = self._save(context.part, context.pages, *state)
        self._drop(context)

    def let_go(self) -> None:
        """Free the pages of conversations that are over."""
        for conversation in [c for c in self.kept if c.done()]:
            self._drop(self.kept.pop(conversation))

    def put_by(self, part: int) -> bool:
        """Take to the host what a conversation keeps in a part, the longest there first.

        Returns:
            Whether there was one.
        """
        for context in self.kept.values():
            if context.saved is None and part == context.part:
                self._to_host(context)
                return True
        return False

    def newest(self, part: int) -> int:
        """Return the slot whose sample came to a part last."""
        here = slice(part * self.each, (part + 1) * self.each)
        return here.start + int(np.where(self.taken[here], self.age[here], -1).argmax())

    # ---- pages

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self.page)

    def reach(self, slots: Any, more: Any) -> Any:
        """Return the positions that rows have filled at most when they are `more` tokens longer."""
        limit = self.prompt[slots] + self.asked["max_tokens"][slots]
        return np.minimum(self.length[slots] + more, limit) - 1

    def reserve(self, slot: int, tokens: int) -> bool:
        """Give a slot pages for a row of `tokens`; return whether there are enough."""
        pool, needed = self.pools[self.part(slot)], self._pages(tokens)
        while (held := int(self.held[slot])) < needed:
            page = pool.take()
            if page is None:
                return False
            self.table[slot, held] = page
            self.held[slot] += 1
        return True

    def share(self, slot: int) -> list[int]:
        """Fill a slot with pages of others that are of its row; return them.

        They are whole, or nobody's: then the tail of its prompt may be in one, which it takes.
        """
        if not self._may_share(slot):
            return []
        filled, keys, row = int(self.filled[slot]), self.keys[slot], self._row(slot)
        if self.keeps_states and filled:  # its state has gone on from there
            return []
        found = self._reusable(self.part(slot), row, filled // self.page, self._last_key(slot))
        for number, (key, page) in enumerate(found, filled // self.page):
            self._put(slot, number, page)
            keys.append(key)
        filled += len(found) * self.page
        if found and self.keeps_states:
            self._begin_from(slot, found[-1][0])
        tail = self._tail(slot, filled)
        if tail is not None and not self.pools[self.part(slot)].references[tail]:
            self._put(slot, filled // self.page, tail)
            self._begin_with_tail(slot, filled)
            filled = len(row) - 1
        self.filled[slot] = self.pure[slot] = filled
        return [page for _, page in found]

    def copy_tail(self, slot: int) -> tuple[int, int] | None:
        """Fill a slot, which has its pages, with the tail of its prompt if some page has it.

        Returns:
            The page that has to be copied, and to which.
        """
        filled = int(self.filled[slot])
        page = self._tail(slot, filled) if self._may_share(slot) else None
        if page is None:
            return None
        self._begin_with_tail(slot, filled)
        self.filled[slot] = self.pure[slot] = self.length[slot] - 1
        return page, int(self.table[slot, filled // self.page])

    def _tail(self, slot: int, filled: int) -> int | None:
        """Return the page that has what a row misses, where that is less than a page."""
        tail, part = self._row(slot)[filled:-1], self.part(slot)
        if not 0 < len(tail) < self.page:
            return None
        key = page_key(self._last_key(slot), tail)
        if self.keeps_states and self.states[part].find(key) is None:
            return None
        return self.pools[part].find(key)

    def _begin_with_tail(self, slot: int, filled: int) -> None:
        """Let a slot that has `filled` tokens begin behind the tail of its prompt."""
        if self.keeps_states:
            self._begin_from(slot, page_key(self._last_key(slot), self._row(slot)[filled:-1]))

    def _begin_from(self, slot: int, key: bytes | None) -> None:
        """Let a slot begin from the state of that name; None = from its own."""
        pool, before = self.states[self.part(slot)], self.begin[slot]
        self.begin[slot] = None if key is None else pool.find(key)
        if (state := self.begin[slot]) is not None:
            pool.refer(state)
        if before is not None:
            pool.release(before)

    def begun(self, slot: int) -> int | None:
        """Return the state that a slot begins from, for the caller to release; None = its own."""
        state, self.begin[slot] = self.begin[slot], None
        return state

    def borders(self, slot: int, start: int) -> dict[int, int]:
        """Name states at borders of a prompt that a slot has filled from `start` on.

        They are the last border of a page, and the end but for the last token.

        Returns:
            The positions that are borders, and the state that is to be kept of each.
        """
        filled, end = int(self.filled[slot]), int(self.prompt[slot]) - 1
        if not self.keeps_states or self.stale[slot] or self.pure[slot] < filled:
            return {}
        last = end // self.page * self.page
        row, keys, found = self._row(slot), self.keys[slot], {}
        pool = self.states[self.part(slot)]
        for at in {last, end}:
            if not start < at <= filled or (at != filled and (at - start) % self._tile):
                continue  # no tile ends there
            key = keys[last // self.page - 1] if last else self.roots[slot]
            if at > last:
                key = page_key(key, row[last:at])
            if pool.find(key) is None and (state := pool.take()) is not None:
                pool.name(state, key)
                found[at] = state  # with a reference until the block has begun
        return found

    def _may_share(self, slot: int) -> bool:
        """Return whether pages of others can follow what a slot has."""
        filled = self.filled[slot]
        whole = filled == self.pure[slot] and filled % self.page == 0
        return bool(whole and not self.stale[slot])

    def _row(self, slot: int) -> np.ndarray:
        return self.tokens[slot, : self.length[slot]]

    def _last_key(self, slot: int) -> bytes:
        return self.keys[slot][-1] if self.keys[slot] else self.roots[slot]

    def _put(self, slot: int, number: int, page: int) -> None:
        """Let a page that was found be a slot's."""
        pool = self.pools[self.part(slot)]
        pool.refer(page)
        if number < self.held[slot]:
            pool.release(int(self.table[slot, number]))
        self.held[slot] = max(int(self.held[slot]), number + 1)
        self.table[slot, number] = page

    def _find(self, part: int, row: np.ndarray, first: int, before: bytes) -> list:
        """Return (key, page) of the whole pages of a row from number `first` on that are found.

        Never that of the last token.
        """
        found = []
        for at in range(first * self.page, len(row) - self.page, self.page):
            before = page_key(before, row[at : at + self.page])
            page = self.pools[part].find(before)
            if page is None:
                break
            found.append((before, page))
        return found

    def _reusable(self, part: int, row: np.ndarray, first: int, before: bytes) -> list:
        """Return what `_find` does, but no more than up to a state, of a model that keeps some."""
        found = self._find(part, row, first, before)
        while found and self.keeps_states and self.states[part].find(found[-1][0]) is None:
            found.pop()
        return found

    def fill(self, slot: int, tokens: int) -> list[int]:
        """Note that the next `tokens` of a row are prefilled; return the pages they are in."""
        start = int(self.filled[slot])
        self.filled[slot] += tokens
        if self.pure[slot] == start and start % self._tile == 0 or self.share_prefixes:
            self.pure[slot] = self.filled[slot]
        self._name(slot)
        used = slice(start // self.page, self._pages(int(self.filled[slot])))
        return self.table[slot, used].tolist()

    def _name(self, slot: int) -> None:
        """Name the pages of a slot that others may find."""
        if self.stale[slot]:
            return
        pool, row = self.pools[self.part(slot)], self._row(slot)
        keys, pure = self.keys[slot], int(self.pure[slot])
        for number in range(len(keys), pure // self.page):
            at = number * self.page
            keys.append(page_key(self._last_key(slot), row[at : at + self.page]))
            pool.name(int(self.table[slot, number]), keys[-1])
        number, rest = divmod(int(self.prompt[slot]) - 1, self.page)
        if rest and number * self.page + rest <= pure and number == len(keys):
            tail = row[number * self.page :][:rest]
            page = int(self.table[slot, number])
            pool.name(page, page_key(self._last_key(slot), tail), tail=True)

    def append(self, slots: np.ndarray, tokens: np.ndarray, counts: np.ndarray) -> None:
        """Add the tokens [n, N] that were drawn in n slots; all but the last are in the cache.

        Args:
            counts: [n] of those of each slot.
        """
        assert (self.length[slots] + counts <= self.tokens.shape[1]).all()
        drawn = np.arange(tokens.shape[1]) < counts[:, None]
        first = slots * self.tokens.shape[1] + self.length[slots]  # in the flat array
        into = np.repeat(first - counts.cumsum() + counts, counts) + np.arange(counts.sum())
        self.tokens.reshape(-1)[into] = tokens[drawn]
        before = self.filled[slots] // self.page
        self.length[slots] += counts
        self.filled[slots] = self.length[slots] - 1
        if self.share_prefixes:
            for slot in slots[self.filled[slots] // self.page > before].tolist():
                self.pure[slot] = self.filled[slot]
                self._name(slot)

    def known_prefix(self, request: Request) -> int:
        """Return how many tokens of a prompt some part has for any request of its weights."""
        row, root = request.prompt, root_of(request)
        found = (self._reusable(part, row, 0, root) for part in range(self.parts))
        return max(map(len, found)) * self.page

    def forget(self, waiting: Iterable[Sample] = (), *, live: bool) -> None:
        """Forget what nobody goes on with; with `live` that of conversations and samples, too.

        Args:
            waiting: samples without a slot.
        """
        self.let_go()
        for pool in (*self.pools, *self.states):
            pool.forget()
        for slot, _ in self.live():
            if live:
                for page in self.table[slot, : self.held[slot]].tolist():
                    self.pools[self.part(slot)].release(page)
                self._clear(slot)
            self.keys[slot], self.stale[slot] = [], bool(self.filled[slot])
            if not self.filled[slot]:
                self.oldest_version[slot] = self.version
        made_room = [sample.context for sample in waiting if sample.context is not None]
        for context in (*self.kept.values(), *made_room):
            context.keys, context.stale = [], True
        if not live:
            return
        for context in self.kept.values():
            self._drop(context)
        self.kept.clear()
        for sample in waiting:
            sample.context = None

    def reset(self) -> None:
        """Hold nothing, as at the beginning. No sample is in a slot."""
        pages = len(self.pools[0].references)
        self.pools = [PagePool() for _ in self.pools]
        for pool in self.pools:
            pool.grow(pages)
        states = len(self.states[0].references)
        self.states = [PagePool() for _ in self.states]
        for pool in self.states:
            pool.grow(states)
        self.state[:] = -1
        self.begin = [None] * len(self.begin)
        self.kept.clear()
