"""Which sample is in which slot of the cache, and which of its positions are filled. Host only."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from jaxrl.rollout.native.decode import LEAST_STOP_IDS, SETTINGS, Block
from jaxrl.rollout.native.stop_strings import StopStrings
from jaxrl.rollout.protocol import Completion, Request

LEAST_REUSE = 16  # tokens; copying fewer from another request's slot is not worth a copy


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
    versions: list[int] = field(default_factory=list)
    top_log_probs: list[dict[int, float]] = field(default_factory=list)
    raw_log_probs: list[float] = field(default_factory=list)
    sampling_mask_ids: list[tuple[int, ...]] = field(default_factory=list)
    context_versions: list[int] = field(default_factory=list)
    outcome: Completion | BaseException | None = None
    reported: int = 0  # tokens that `on_tokens` has been given
    stop_strings: StopStrings | None = None

    def note(self, block: Block, row: int) -> None:
        """Add what the request wants to know of the tokens that a block drew in a row."""
        drawn, sampling = int(block.count[row]), self.request.sampling
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
        if context_version is None:
            context_version = self.versions[0] if self.versions else version
        self.tokens += tokens
        self.log_probs += log_probs
        self.versions += [version] * len(tokens)
        self.context_versions += [context_version] * len(tokens)

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
            self.versions,
            self.top_log_probs,
            self.raw_log_probs,
            self.sampling_mask_ids,
            self.context_versions,
        ):
            del column[first + size :]
        return string

    def finish(self, reason: str, stop_string: str | None = None) -> None:
        """End the sample; what there is can be handed over."""
        self.outcome = self._completion(0, reason, stop_string)

    def _completion(self, start: int, reason: str, stop_string: str | None) -> Completion:
        """Return what there is of each token from `start` on."""
        return Completion(
            tokens=self.tokens[start:],
            log_probs=self.log_probs[start:],
            stop_reason=reason,
            versions=self.versions[start:],
            stop_string=stop_string,
            top_log_probs=self.top_log_probs[start:],
            raw_log_probs=self.raw_log_probs[start:],
            sampling_mask_ids=self.sampling_mask_ids[start:],
            context_versions=self.context_versions[start:],
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
    """Track the slots of a cache, as the host knows them.

    A slot holds the keys and values of the first `filled` tokens of a row. They stay when its
    sample ends, until another one takes the slot: the next turn of a conversation, and samples of
    the same prompt, find them there. Nobody else takes a conversation's slot until it is over.
    After an update a slot that is taken may hold some of older weights; its own sample, or
    conversation, goes on with them, but they are shared with no other.

    Args:
        slots: number.
        share_prefixes: reuse what any request left; False: only other samples of the same request.
    """

    def __init__(self, slots: int, *, share_prefixes: bool) -> None:
        self.share_prefixes = share_prefixes
        self.samples: list[Sample | None] = [None] * slots
        self.tokens = np.zeros((slots, 0), np.int32)  # [S, L]
        self.length = np.zeros(slots, np.int32)  # [S] tokens of the row, prompt and response
        self.filled = np.zeros(slots, np.int32)  # [S]
        self.version = -1  # of the weights that fill positions now
        self.oldest_version = np.full(slots, -1)  # [S] of those that filled the slot's positions
        self.group = np.full(slots, -1)  # [S] request of the tokens
        self.members: dict[int, list[int]] = {-1: list(range(slots))}  # slots of each group
        self.used = np.zeros(slots, np.int64)  # [S] when the slot was taken last
        self.prompt = np.zeros(slots, np.int32)  # [S] tokens of the prompt
        self.stop_ids = np.full((slots, LEAST_STOP_IDS), -1, np.int32)  # as in Rows
        self.asked = {  # name -> [S], columns of Rows that are the sample's from its start
            "keys": np.zeros((slots, 2), np.uint32),
            "max_tokens": np.zeros(slots, np.int32),
            **{name: np.zeros(slots, kind) for kind, names in SETTINGS.items() for name in names},
        }
        self.slot_of: dict[Future[None] | None, int] = {}  # of conversations
        self.taken = np.zeros(slots, bool)  # [S] by a sample or a conversation
        self._clock = 0

    def lengthen(self, length: int) -> None:
        """Make room for rows of `length` tokens."""
        self.tokens = np.pad(self.tokens, ((0, 0), (0, length - self.tokens.shape[1])))

    def live(self) -> Iterator[tuple[int, Sample]]:
        """Yield the slots with a sample in them, each with its sample."""
        return ((slot, s) for slot, s in enumerate(self.samples) if s is not None)

    def missing(self, slot: int) -> int:
        """Count the positions to fill before the slot can decode: all tokens but the last."""
        return int(self.length[slot] - 1 - self.filled[slot])

    def incomplete(self) -> dict[int, int]:
        """Return slots with a sample that cannot decode yet, and what is `missing` of each."""
        missing = (self.length - 1 - self.filled).tolist()
        return {slot: missing[slot] for slot, _ in self.live() if missing[slot]}

    def take(self, sample: Sample) -> int | None:
        """Put a sample into the slot of its conversation, if that has one.

        Otherwise into the free slot that holds most of its prompt, or was used least lately; None
        if no slot is free.
        """
        if not self.has_room(sample):
            return None
        row = np.array([*sample.request.prompt_tokens, *sample.tokens], np.int32)
        slot = self.slot_of.get(sample.conversation)
        if slot is None:
            slot, known = self._best(row, sample.group, free=True)
            if not known:
                free = np.flatnonzero(~self.taken)
                slot = int(free[self.used[free].argmin()])
            self._regroup(slot, sample.group)
            self.taken[slot] = True
            if sample.conversation is not None:
                self.slot_of[sample.conversation] = slot
        else:  # the group stays: those of the first turn that still wait find their prompt here
            known = int(self._shared(row, np.array([slot]))[0])
        self._clock += 1
        self.used[slot], self.samples[slot] = self._clock, sample
        self.tokens[slot, : len(row)], self.length[slot] = row, len(row)
        self.filled[slot] = known
        if not known:
            self.oldest_version[slot] = self.version
        self._note(slot, sample)
        return slot

    def _note(self, slot: int, sample: Sample) -> None:
        """Write what a sample asks for into the columns of its slot."""
        sampling = sample.request.sampling
        self.prompt[slot] = len(sample.request.prompt_tokens)
        for name, column in self.asked.items():
            given = {"keys": sample.key, "max_tokens": sample.max_tokens}
            column[slot] = given[name] if name in given else getattr(sampling, name)
        if (more := len(sampling.stop_token_ids) - self.stop_ids.shape[1]) > 0:
            self.stop_ids = np.pad(self.stop_ids, ((0, 0), (0, more)), constant_values=-1)
        self.stop_ids[slot] = -1
        self.stop_ids[slot, : len(sampling.stop_token_ids)] = sampling.stop_token_ids

    def has_room(self, sample: Sample) -> bool:
        """Return whether `take` finds a slot."""
        slot = self.slot_of.get(sample.conversation)
        return not self.taken.all() if slot is None else self.samples[slot] is None

    def let_go(self) -> None:
        """Free the slots of conversations that are over."""
        for conversation, slot in [(c, s) for c, s in self.slot_of.items() if c and c.done()]:
            del self.slot_of[conversation]
            self.taken[slot] = self.samples[slot] is not None

    def _regroup(self, slot: int, group: int) -> None:
        old = int(self.group[slot])
        self.members[old].remove(slot)
        if not self.members[old]:
            del self.members[old]
        self.group[slot] = group
        self.members.setdefault(group, []).append(slot)

    def append(self, slots: np.ndarray, tokens: np.ndarray, counts: np.ndarray) -> None:
        """Add the tokens [n, N] that were drawn in n slots; all but the last are in the cache.

        Args:
            counts: [n] of those of each slot.
        """
        drawn = np.arange(tokens.shape[1]) < counts[:, None]
        row, step = np.nonzero(drawn)
        self.tokens[slots[row], self.length[slots[row]] + step] = tokens[drawn]
        self.length[slots] += counts
        self.filled[slots] = self.length[slots] - 1

    def copy(self, source: int, slot: int, known: int) -> None:
        """Note that a slot holds what `source` holds, of which `known` positions are of its row."""
        self.filled[slot], self.oldest_version[slot] = known, self.oldest_version[source]

    def donor(self, slot: int) -> tuple[int, int]:
        """Return the slot that holds more of this slot's row than itself, and how much; or (-1, 0).

        Later turns find none of their group: what they reuse does not depend on who came first.
        """
        row, filled = self.tokens[slot, : self.length[slot]], int(self.filled[slot])
        sample = self.samples[slot]
        assert sample is not None
        source, known = self._best(row, sample.group)
        return (source, known) if known > filled else (-1, 0)

    def _best(self, row: np.ndarray, group: int, *, free: bool = False) -> tuple[int, int]:
        """Return the slot that shares most positions with a row, and how many; never the last one.

        Slots with positions of older weights share none.

        Args:
            free: only slots that nobody has.
        """
        every = range(len(self.samples)) if self.share_prefixes else ()
        for among, least in ((self.members.get(group, ()), 1), (every, LEAST_REUSE)):
            if not among:
                continue
            slots = np.array(among)
            good = (self.filled[slots] >= least) & (self.oldest_version[slots] == self.version)
            slots = slots[good & ~self.taken[slots] if free else good]
            if not slots.size:
                continue
            known = self._shared(row, slots)
            best = int(known.argmax())
            if known[best] >= least:
                return int(slots[best]), int(known[best])
        return -1, 0

    def _shared(self, row: np.ndarray, slots: np.ndarray) -> np.ndarray:
        """Count the positions that each of some slots shares with a row; never the last one."""
        width = min(len(row) - 1, self.tokens.shape[1])
        same = self.tokens[slots, :width] == row[:width]
        same &= np.arange(width) < self.filled[slots, None]
        return np.minimum.accumulate(same, axis=1).sum(1)

    def known_prefix(self, tokens: Sequence[int]) -> int:
        """Return how many tokens of a row some slot holds for any request.

        The number is 0 without `share_prefixes`.
        """
        return self._best(np.array(tokens, np.int32), -2)[1]

    def release(self, slot: int) -> None:
        """Take the sample out of a slot.

        The slot is free, if it is no conversation's. What it holds stays.
        """
        sample, self.samples[slot] = self.samples[slot], None
        self.taken[slot] = sample is not None and sample.conversation in self.slot_of

    def forget(self, *, live: bool) -> None:
        """Mark as invalid what free slots (with `live` all, conversations' too) hold."""
        self.let_go()
        self.filled[slice(None) if live else ~self.taken] = 0
        self.oldest_version[self.filled == 0] = self.version
