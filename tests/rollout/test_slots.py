"""Which slot a sample takes, in which pages its row is, and what it finds there."""

import dataclasses
from concurrent.futures import Future

import numpy as np
import pytest

from jaxrl.rollout.native.page_pool import ROOT, PagePool, page_key
from jaxrl.rollout.native.slots import Sample, SlotTable
from jaxrl.rollout.protocol import Request, Sampling

PAGE = 4
LONG = tuple(range(100, 111))  # 11 tokens: 10 to prefill, two pages and a tail of 2


def known(slots, tokens):
    return slots.known_prefix(Request(tuple(tokens), ((0, 0),), Sampling(1)))


def sample(prompt, group, max_tokens=4, conversation=None):
    asked = Request(tuple(prompt), ((0, 0),), Sampling(max_tokens))
    return Sample(asked, group, (0, 0), max_tokens, conversation=conversation)


def table(slots=3, pages=24, *, parts=1, **options):
    """Slots whose pages are nowhere: `saved` has what would be on the host."""
    saved = []
    made = SlotTable(
        slots,
        parts=parts,
        **{"share_prefixes": False, **options},
        save=lambda part, pages: saved.append((part, list(pages))) or len(saved),
        restore=lambda part, pages, held: saved.append((part, list(pages), held)),
    )
    made.resize(64, pages, PAGE, 17)
    made.saved = saved
    return made


def prefill(slots, slot):
    """As if the rest of a row had been prefilled; return the pages that it shares and copies."""
    shared = slots.share(slot)
    assert slots.reserve(slot, int(slots.length[slot]) - 1)
    copy = slots.copy_tail(slot)
    slots.fill(slot, slots.missing(slot))
    return shared, copy


def begin(slots, *given, **options):
    """The slot of a sample that has been prefilled."""
    slot = slots.take(sample(*given, **options), 0)
    prefill(slots, slot)
    return slot


def draw(slots, slot, *drawn):
    """As if a slot had decoded `drawn`."""
    assert slots.reserve(slot, int(slots.length[slot]) + len(drawn) - 1)
    slots.append(np.array([slot]), np.array([drawn]), np.array([len(drawn)]))


def pages_of(slots, slot):
    return slots.table[slot, : slots.held[slot]].tolist()


def free(slots):
    return [pool.available for pool in slots.pools]


# ------------------------------------------------------------------ pages


def test_a_page_without_references_is_found_until_its_place_is_needed():
    pool = PagePool()
    pool.grow(3)
    first, second = pool.take(), pool.take()
    key, other = page_key(ROOT, np.arange(4)), page_key(ROOT, np.arange(3))
    pool.name(first, key)
    pool.name(second, other, tail=True)
    assert (pool.find(key), pool.find(other)) == (first, second)
    assert (pool.is_whole(first), pool.is_whole(second)) == (True, False)
    pool.release(second)
    pool.release(first)
    assert pool.available == 3
    pool.refer(first)  # found again
    assert [pool.take(), pool.take(), pool.take()] == [2, second, None]  # that without a name first
    assert pool.find(other) is None and pool.find(key) == first
    pool.release(first)
    pool.forget()
    assert pool.find(key) is None and pool.take() == first


def test_the_same_tokens_behind_others_are_another_page():
    tokens = np.arange(4, dtype=np.int32)
    assert page_key(ROOT, tokens) != page_key(page_key(ROOT, tokens), tokens)
    assert page_key(ROOT, tokens) == page_key(ROOT, tokens.copy())


# ------------------------------------------------------------------ slots


def test_no_more_slots_are_taken_than_there_are():
    slots = table(2)
    assert [slots.take(sample([n, 4], n), 0) for n in range(3)] == [0, 1, None]
    slots.release(1)
    assert slots.take(sample([5], 3), 0) == 1


def test_all_but_the_last_token_is_to_be_filled():
    slots = table()
    slot = slots.take(sample([5, 6, 7], 1), 0)
    assert slots.missing(slot) == 2
    assert slots.missing(slots.take(sample([5], 2), 0)) == 0
    prefill(slots, slot)
    draw(slots, slot, 8, 9)  # 5 6 7 8 | 9 in the cache
    assert (slots.length[slot], slots.filled[slot]) == (5, 4)


def test_slots_take_as_many_tokens_of_a_block_as_were_drawn_in_each():
    slots = table(3)
    taken = np.array([begin(slots, [5, 6, 7][:n], n) for n in (2, 3)])
    slots.append(taken[::-1], np.array([[8, 9, 0], [1, 2, 3]]), np.array([2, 3]))
    rows = [slots.tokens[slot, : slots.length[slot]].tolist() for slot in taken]
    assert rows == [[5, 6, 1, 2, 3], [5, 6, 7, 8, 9]]
    assert slots.filled[taken].tolist() == [4, 4]


# ------------------------------------------------------------------ what is found


def test_samples_of_a_prompt_share_its_whole_pages_and_copy_the_last():
    slots = table()
    leader = begin(slots, LONG, 1)
    member = slots.take(sample(LONG, 1), 0)
    shared, copy = prefill(slots, member)
    mine, theirs = pages_of(slots, member), pages_of(slots, leader)
    assert shared == mine[:2] == theirs[:2]
    assert copy == (theirs[2], mine[2]) and mine[2] != theirs[2]
    assert slots.missing(member) == 0
    assert free(slots) == [24 - 4]
    slots.release(leader)
    slots.release(member)
    assert free(slots) == [24]


def test_a_tail_that_nobody_has_is_taken_and_not_copied():
    slots = table()
    first = begin(slots, LONG, 1)
    pages = pages_of(slots, first)
    draw(slots, first, 7, 8)  # behind the tail, in its page
    slots.release(first)
    second = slots.take(sample(LONG, 2), 0)
    assert prefill(slots, second) == (pages[:2], None)
    assert pages_of(slots, second) == pages


@pytest.mark.parametrize("share", [False, True])
def test_what_was_decoded_is_found_by_others_with_prefix_caching_alone(share):
    slots = table(share_prefixes=share)
    first = begin(slots, LONG, 1)
    draw(slots, first, 1, 2, 3)  # 13 positions: page 2 holds 108, 109, 110 and 1
    slots.release(first)
    row = [*LONG, 1, 2, 3, 50]
    second = slots.take(sample(row, 2), 0)
    slots.share(second)
    assert slots.filled[second] == (12 if share else 8)
    assert known(slots, row) == (12 if share else 8)


def test_what_follows_decoded_tokens_has_no_name():
    slots, over = table(), Future()
    first = begin(slots, LONG, 1, conversation=over)
    draw(slots, first, 1, 2, 3)
    slots.release(first)
    told = [*LONG, 1, 2, 3, *range(50, 60)]
    later = begin(slots, told, 2, conversation=over)
    assert slots.missing(later) == 0 and slots.pure[later] == 10
    assert known(slots, [*told, 1]) == 8  # the two pages of the first prompt


def test_the_next_turn_has_the_pages_of_its_conversation_and_those_it_changes_are_its_own():
    slots, over = table(), Future()
    first = begin(slots, LONG, 1, conversation=over)
    draw(slots, first, 1, 2, 3)
    pages = pages_of(slots, first)
    slots.release(first)
    assert free(slots) == [24 - 4] and list(slots.kept) == [over]
    # the answer was cut behind its first token: 11 + 1 of the 13 positions are of the new row
    told = sample([*LONG, 1, 9, 9], 2, conversation=over)
    again = slots.take(told, 0)
    assert (slots.filled[again], pages_of(slots, again)) == (12, pages[:3])
    slots.release(again)
    # the prompt itself changes within its second page, which others may read: it is computed anew
    third = slots.take(sample([*LONG[:6], 9, 9], 3, conversation=over), 0)
    assert (slots.filled[third], pages_of(slots, third)) == (4, pages[:1])
    over.cancel()
    slots.release(third)
    assert free(slots) == [24] and not slots.kept


def test_a_tail_is_not_found_once_its_conversation_writes_over_it():
    slots, over = table(), Future()
    first = begin(slots, LONG, 1, conversation=over)
    slots.release(first)
    cut = begin(slots, [*LONG[:9], 9, 9], 2, conversation=over)  # its tail was 108, 109
    assert slots.filled[cut] == 10
    other = slots.take(sample(LONG, 3), 0)
    assert prefill(slots, other)[1] is None and known(slots, [*LONG, 1]) == 8


# ------------------------------------------------------------------ new weights


def test_new_weights_empty_rows_that_are_live_only_if_told():
    slots = table()
    ended, live = begin(slots, LONG, 1), begin(slots, [5, 6, 8], 2)
    draw(slots, live, 1)
    slots.release(ended)
    slots.forget(live=False)
    assert known(slots, [*LONG, 1]) == 0
    assert slots.filled[live] == 3
    slots.forget(live=True)
    assert slots.missing(live) == 3  # 5 6 8 again; the last token is decoded
    assert free(slots) == [24]


def test_positions_of_older_weights_are_shared_with_no_other_row():
    slots = table(4, share_prefixes=True)
    old = begin(slots, LONG, 1)
    slots.version = 4
    slots.forget(live=False)
    draw(slots, old, 7, 8, 9)
    assert known(slots, [*LONG, 7, 8]) == 0
    new = slots.take(sample(LONG, 1), 0)  # of the same request
    assert slots.share(new) == []
    prefill(slots, new)
    assert slots.oldest_version[[old, new]].tolist() == [-1, 4]
    slots.release(old)
    assert known(slots, [*LONG, 1]) == 8
    last = slots.take(sample(LONG, 3), 0)
    shared, copy = prefill(slots, last)
    assert len(shared) == 2 and copy is not None
    assert (slots.missing(last), slots.oldest_version[last]) == (0, 4)


def test_a_prompt_half_prefilled_by_older_weights_goes_on_with_them():
    slots = table()
    early = slots.take(sample(LONG, 1), 0)
    slots.reserve(early, 4)
    slots.fill(early, 4)
    slots.version = 4
    slots.forget(live=False)
    late = begin(slots, LONG, 2)
    assert slots.share(early) == []
    assert slots.oldest_version[[early, late]].tolist() == [-1, 4]


def test_a_row_without_positions_has_none_of_older_weights():
    slots = table()
    waiting = slots.take(sample([5, 6, 7], 1), 0)  # not prefilled yet
    slots.version = 4
    slots.forget(live=False)
    assert slots.oldest_version[waiting] == 4


# ------------------------------------------------------------------ when pages run out


def test_a_sample_waits_for_the_pages_that_it_and_the_others_may_need():
    slots = table(4, pages=6)
    # 11 tokens and the first 4 of its answer: 14 positions, 4 pages, and it never needs a fifth
    assert slots.take(sample(LONG, 1), 4) == 0
    # one of the other two is for each row that grows: [1, 2] may come to 21 positions
    assert slots.take(sample([1, 2], 2, max_tokens=20), 1) == 1
    assert slots.take(sample([1, 2], 3), 1) is None
    slots.release(1)
    assert slots.take(sample([1, 2], 3), 1) == 1


def test_what_a_group_shares_is_counted_once():
    slots = table(4, pages=6)
    taken = [slots.take(sample(LONG, 1, max_tokens=2), 0) for _ in range(4)]
    assert taken == [0, 1, 2, 3]  # two pages of the prompt, and one of each


def test_a_row_that_makes_room_comes_back_with_what_it_had():
    slots = table(2, pages=6)
    old, new = begin(slots, [1, 2, 3], 1), begin(slots, LONG, 2)
    draw(slots, new, 7, 8)
    assert slots.newest(0) == new
    pages = pages_of(slots, new)
    asked = slots.samples[new]
    slots.suspend(new)
    assert slots.saved == [(0, pages)] and free(slots) == [5]
    asked.tokens += [7, 8]
    assert slots.take(asked, 0) == new
    assert slots.saved[1:] == [(0, pages_of(slots, new), 1)]
    assert (slots.filled[new], slots.pure[new], slots.missing(new)) == (12, 10, 0)
    slots.release(new)
    slots.release(old)
    assert free(slots) == [6]


def test_what_was_only_prefilled_is_not_carried_to_the_host():
    slots = table(2)
    slot = begin(slots, LONG, 1)
    asked = slots.samples[slot]
    slots.suspend(slot)
    assert slots.saved == [] and asked.context is None
    slot = slots.take(asked, 0)
    assert len(slots.share(slot)) == 2  # nobody has needed their place


def test_conversations_that_think_make_room_first_the_one_that_waits_longest():
    slots, overs = table(3, pages=6), [Future(), Future()]
    for number, over in enumerate(overs):
        slot = begin(slots, [number, 2, 3, 4, 5], number, conversation=over)
        draw(slots, slot, 6)
        slots.release(slot)
    assert [slots.put_by(1), slots.put_by(0)] == [False, True]
    assert [context.saved for context in slots.kept.values()] == [1, None]
    slot = slots.take(sample([0, 2, 3, 4, 5, 6, 7], 0, conversation=overs[0]), 0)
    assert slots.filled[slot] == 5
    assert slots.saved[1] == (0, pages_of(slots, slot), 1)


def test_of_what_is_on_the_host_only_what_is_of_the_row_comes_back():
    """A turn that is shorter than what its conversation keeps finds room though that would not."""
    slots, over = table(2, pages=4), Future()
    slot = begin(slots, LONG, 1, conversation=over)
    draw(slots, slot, 1, 2, 3, 4, 5)
    pages = pages_of(slots, slot)
    slots.release(slot)
    assert slots.put_by(0) and slots.saved == [(0, pages)]
    begin(slots, [1, 2, 3], 2)
    again = slots.take(sample([*LONG[:8], 9], 3, max_tokens=1, conversation=over), 0)
    assert slots.saved[1:] == [(0, pages_of(slots, again), 1)]
    assert (slots.held[again], slots.filled[again], slots.missing(again)) == (2, 8, 0)


def test_a_conversation_has_what_its_sample_left_that_made_room():
    slots, over = table(2), Future()
    slot = begin(slots, LONG, 1, conversation=over)
    draw(slots, slot, 1, 2)
    asked = slots.samples[slot]
    slots.suspend(slot)
    slots.keep(asked)  # it is cancelled while it waits
    again = slots.take(sample([*LONG, 1, 2, 3], 2, conversation=over), 0)
    assert slots.filled[again] == 12
    slots.release(again)
    other = begin(slots, [5, 6], 3, conversation=over)  # at the same time
    slots.release(other)
    over.cancel()
    slots.let_go()
    assert free(slots) == [24]


def test_rows_that_begin_amid_a_tile_have_no_names_for_others():
    slots, over = table(tile=4), Future()
    first = begin(slots, LONG, 1, conversation=over)  # 10 positions
    slots.release(first)
    again = begin(slots, [*LONG, *range(50, 60)], 2, conversation=over)
    assert (slots.filled[again], slots.pure[again]) == (20, 10)


def test_parts_have_pages_of_their_own():
    slots, over = table(4, parts=2), Future()
    first = begin(slots, LONG, 1)
    assert begin(slots, LONG, 1) == first + 1  # where the prompt is
    third = begin(slots, [1, 2, 3], 2, conversation=over)
    assert slots.part(third) == 1  # where most pages are free
    slots.release(third)
    assert begin(slots, [9], 3) == 2
    assert slots.take(sample([1, 2, 3, 4], 4, conversation=over), 0) == 3  # where its pages are
    assert free(slots) == [20, 23]  # [9] is decoded, nothing of it is prefilled


# ------------------------------------------------------------------ what is told


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
