"""Which slot a sample takes, and what it finds there."""

import numpy as np
import pytest

from jaxrl.rollout.protocol import Request, Sampling
from jaxrl.rollout.slots import LEAST_REUSE, Sample, SlotTable

LONG = tuple(range(100, 100 + LEAST_REUSE + 4))  # 20 tokens


def sample(prompt, group):
    return Sample(Request(tuple(prompt), ((0, 0),), Sampling(max_tokens=4)), group, (0, 0), 4)


def table(slots=3, *, share_prefixes=False):
    made = SlotTable(slots, share_prefixes=share_prefixes)
    made.lengthen(64)
    return made


def run(slots, slot, *drawn):
    """As if the slot had been prefilled and had decoded `drawn`, and its sample were over."""
    slots.append(slot, np.array(drawn))
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
    slots.append(slot, np.array([8, 9]))  # 5 6 7 8 | 9 in the cache
    assert (slots.length[slot], slots.filled[slot]) == (5, 4)


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
    slots.append(live, np.array([1]))
    slots.forget(live=False)
    assert (slots.filled[free], slots.filled[live]) == (0, 3)
    slots.forget(live=True)
    assert slots.missing(live) == 3  # 5 6 8 again; the last token is decoded
