"""Which slot a sample takes, and what it finds there."""

import dataclasses
from concurrent.futures import Future

import numpy as np
import pytest

from jaxrl.rollout.native.slots import LEAST_REUSE, Sample, SlotTable
from jaxrl.rollout.protocol import Request, Sampling

LONG = tuple(range(100, 100 + LEAST_REUSE + 4))  # 20 tokens


def sample(prompt, group):
    return Sample(Request(tuple(prompt), ((0, 0),), Sampling(max_tokens=4)), group, (0, 0), 4)


def table(slots=3, *, share_prefixes=False):
    made = SlotTable(slots, share_prefixes=share_prefixes)
    made.lengthen(64)
    return made


def draw(slots, slot, *drawn):
    """As if a slot had been prefilled and had decoded `drawn`."""
    slots.append(np.array([slot]), np.array([drawn]), np.array([len(drawn)]))


def run(slots, slot, *drawn):
    """As if the slot had been prefilled and had decoded `drawn`, and its sample were over."""
    draw(slots, slot, *drawn)
    slots.release(slot)


def test_slots_are_taken_least_lately_used_first_and_no_more_than_there_are():
    slots = table(2)
    first, second = slots.take(sample([1, 2], 1)), slots.take(sample([3, 4], 2))
    assert {first, second} == {0, 1}
    assert slots.take(sample([5], 3)) is None
    slots.release(second)
    slots.release(first)
    assert slots.take(sample([5], 3)) == first


def test_all_but_the_last_token_is_to_be_filled():
    slots = table()
    slot = slots.take(sample([5, 6, 7], 1))
    assert slots.missing(slot) == 2
    assert slots.missing(slots.take(sample([5], 2))) == 0
    draw(slots, slot, 8, 9)  # 5 6 7 8 | 9 in the cache
    assert (slots.length[slot], slots.filled[slot]) == (5, 4)


def test_slots_take_as_many_tokens_of_a_block_as_were_drawn_in_each():
    slots = table(3)
    taken = np.array([slots.take(sample([5, 6, 7][:n], n)) for n in (2, 3)])
    slots.append(taken[::-1], np.array([[8, 9, 0], [1, 2, 3]]), np.array([2, 3]))
    rows = [slots.tokens[slot, : slots.length[slot]].tolist() for slot in taken]
    assert rows == [[5, 6, 1, 2, 3], [5, 6, 7, 8, 9]]
    assert slots.filled[taken].tolist() == [4, 4]


def test_a_sample_of_the_same_request_finds_the_prompt():
    slots = table()
    leader = slots.take(sample([5, 6, 7], 1))
    member = slots.take(sample([5, 6, 7], 1))
    assert slots.donor(member) == (-1, 0)  # nobody has been prefilled
    slots.filled[leader] = 2
    assert slots.donor(member) == (leader, 2)
    assert slots.donor(leader) == (-1, 0)


def test_the_slot_of_a_finished_sibling_is_continued_in_place():
    slots = table()
    first = slots.take(sample([5, 6, 7], 1))
    slots.take(sample([9, 9, 9], 2))
    run(slots, first, 8, 8)
    assert slots.take(sample([5, 6, 7], 1)) == first
    assert slots.missing(first) == 0


@pytest.mark.parametrize("share", [False, True])
def test_other_requests_are_reused_with_prefix_caching_alone(share):
    slots = table(share_prefixes=share)
    first = slots.take(sample(LONG, 1))
    run(slots, first, 1, 2, 3)  # 100 ... 119 1 2 are in the cache
    turn = sample([*LONG, 1, 2, 3, 50, 51], 2)  # 25 tokens: the next turn
    slot = slots.take(turn)
    assert (slot == first) == share
    assert slots.missing(slot) == (24 - 22 if share else 24)


def test_a_short_common_prefix_of_another_request_is_not_copied():
    slots = table(share_prefixes=True)
    run(slots, slots.take(sample(LONG[: LEAST_REUSE - 1], 1)), 7)
    slot = slots.take(sample([*LONG[: LEAST_REUSE - 1], 8, 9], 2))
    assert slots.filled[slot] == 0


def test_new_weights_empty_free_slots_and_live_ones_only_if_told():
    slots = table()
    free, live = slots.take(sample([5, 6, 7], 1)), slots.take(sample([5, 6, 8], 2))
    run(slots, free, 1)
    draw(slots, live, 1)
    slots.forget(live=False)
    assert (slots.filled[free], slots.filled[live]) == (0, 3)
    slots.forget(live=True)
    assert slots.missing(live) == 3  # 5 6 8 again; the last token is decoded


def test_a_slot_is_free_when_neither_a_conversation_nor_a_sample_has_it():
    slots, over = table(1), Future()
    slot = slots.take(dataclasses.replace(sample([5, 6, 7], 1), conversation=over))
    over.cancel()  # before the answer to its last turn
    slots.let_go()
    assert slots.take(sample([9], 2)) is None
    slots.release(slot)
    assert slots.take(sample([9], 2)) == slot


def test_positions_of_older_weights_are_shared_with_no_other_slot():
    slots = table(4, share_prefixes=True)
    old = slots.take(sample(LONG, 1))
    draw(slots, old, 7)  # 20 positions, of version -1
    slots.version = 4
    slots.forget(live=False)
    assert slots.known_prefix([*LONG, 1]) == 0
    new = slots.take(sample(LONG, 1))  # of the same request
    assert slots.donor(new) == (-1, 0)
    assert slots.oldest_version[[old, new]].tolist() == [-1, 4]
    slots.release(old)
    assert slots.filled[slots.take(sample(LONG, 2))] == 0  # the slot is free, and taken anew
    draw(slots, new, 7)
    assert slots.known_prefix([*LONG, 1]) == 20
    last = slots.take(sample(LONG, 3))
    source, known = slots.donor(last)
    assert (source, known) == (new, 19)
    slots.copy(source, last, known)
    assert (slots.missing(last), slots.oldest_version[last]) == (0, 4)


def test_a_copy_has_the_versions_of_what_was_copied():
    """A prompt half prefilled by older weights, of which a later sample has all by new ones."""
    slots = table()
    early = slots.take(sample([5, 6, 7, 8], 1))
    slots.filled[early] = 1
    slots.version = 4
    slots.forget(live=False)
    late = slots.take(sample([5, 6, 7, 8], 1))
    slots.filled[late] = 3
    assert slots.oldest_version[[early, late]].tolist() == [-1, 4]
    assert slots.donor(early) == (late, 3)
    slots.copy(late, early, 3)
    assert slots.oldest_version[early] == 4


def test_a_slot_without_positions_has_none_of_older_weights():
    slots = table()
    waiting = slots.take(sample([5, 6, 7], 1))  # not prefilled yet
    slots.version = 4
    slots.forget(live=False)
    assert slots.oldest_version[waiting] == 4


def test_every_token_is_told_once():
    told = []
    asked = dataclasses.replace(
        sample([5], 1).request, on_tokens=lambda number, new: told.append((number, new.tokens))
    )
    made = Sample(asked, 1, (0, 0), 4, number=2)
    for tokens in ([7, 8], [9]):
        made.extend(tokens, [0.0] * len(tokens), 1)
        made.report()()
        assert made.report() is None
    assert told == [(2, [7, 8]), (2, [9])]


# ------------------------------------------------------------------ stop strings


def drawn(tokens, stop, **sampling):
    """A sample that draws these tokens, two at a time; the text of token 65 is "A"."""
    asked = Sampling(max_tokens=len(tokens), stop=stop, **sampling)
    made = Sample(Request((1,), ((0, 0),), asked), 1, (0, 0), len(tokens))
    for first in range(0, len(tokens), 2):
        new = tokens[first : first + 2]
        made.extend(new, [0.0] * len(new), 1)
        if made.ended(False, len(new), lambda ids: "".join(map(chr, ids))):
            break
    return made.outcome


@pytest.mark.parametrize(
    ("text", "min_tokens", "left"),
    [
        ("aXbXcd", 0, "aX"),
        ("aXbXcd", 1, "aX"),  # the second token completes it
        ("aXbXcd", 2, "aXbX"),  # it is within the first two
        ("aXbXcd", 4, "aXbXcd"),
        ("aXYbcd", 2, "aXY"),  # it begins there and ends behind them
        ("aXYbcd", 3, "aXYbcd"),
    ],
)
def test_a_stop_string_within_min_tokens_is_text_like_any_other(text, min_tokens, left):
    stop = ("XY",) if "Y" in text else ("X",)
    outcome = drawn(list(map(ord, text)), stop, min_tokens=min_tokens)
    assert "".join(map(chr, outcome.tokens)) == left
    assert outcome.stop_reason == ("length" if left == text else "stop")
    assert outcome.stop_string == (None if left == text else stop[0])
    assert len(outcome.log_probs) == len(outcome.versions) == len(left)


def test_take_looks_for_stops_behind_min_tokens_alone():
    asked = Sampling(max_tokens=9, stop=("X",), stop_token_ids=(46,), min_tokens=3)
    made = Sample(Request((1,), ((0, 0),), asked), 1, (0, 0), 9)
    text = list(map(ord, "X.a.X"))
    assert made.take(text, [0.0] * 5, 1, lambda ids: "".join(map(chr, ids)))
    assert made.outcome.tokens == text[:4]  # token 4 is the first that may stop it
    assert (made.outcome.stop_reason, made.outcome.stop_string) == ("stop", None)
