"""The engine's schedule: joining, waiting, stopping, weights that change in flight."""

import dataclasses
import functools
import re
import threading
import time
from concurrent.futures import Future

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.data.packing import one_per_row
from jaxrl.models.transformer import forward, unembed
from jaxrl.parallel import make_mesh
from jaxrl.rollout.native.decode import Features
from jaxrl.rollout.native.engine import NativeEngine
from jaxrl.rollout.native.programs import Prefill, Shape
from jaxrl.rollout.protocol import Request, Sampling
from jaxrl.training.forward import log_probs_and_entropy
from tests.rollout.test_native import LLAMA, ROOM, flat, random_params, reserve

PROMPT = tuple(int(t) for t in np.random.default_rng(0).integers(1, 32, 40))
WIDTH = 96


def make(slots=4, *, devices=None, version=1, room=ROOM, **options):
    """An engine with room for rows as long as those of other tests: the same programs serve all."""
    mesh = make_mesh(devices=jax.devices()[:1]) if devices is None else make_mesh(**devices)
    options = {"steps_per_dispatch": 8, "shrink": False, **options}
    engine = NativeEngine(LLAMA, mesh, max_num_seqs=slots, **options)
    engine.update_weights(random_params(LLAMA), version)
    if room:
        reserve(engine, room)
    return engine


shared = functools.cache(make)  # for tests that leave the engine as it was


def request(prompt=PROMPT, keys=(1,), **sampling):
    return Request(
        tuple(prompt), tuple((7, k) for k in keys), Sampling(**{"max_tokens": 12, **sampling})
    )


@functools.cache
def scorer(temperature):
    return jax.jit(
        functools.partial(log_probs_and_entropy, LLAMA, temperature=temperature, dtype=jnp.float32)
    )


def scores(prompt, completion, seed=0, kept=None, temperature=1.0):
    """Log-probs of a completion by the trainer's forward."""
    row = np.zeros((1, WIDTH), np.int32)
    whole = [*prompt, *completion.tokens]
    row[0, : len(whole)] = whole
    if kept is not None:
        ids, kept = kept, np.full((1, WIDTH, len(kept[0])), -1, np.int32)
        kept[0, len(prompt) : len(whole)] = ids
    rows = one_per_row(row, np.array([len(whole)], np.int32), np.ones_like(row), {"kept": kept})
    found = scorer(temperature)(random_params(LLAMA, seed), rows)[0]
    return np.asarray(found)[0, len(prompt) : len(whole)]


SMALL = {"cpu": Shape(page=16, tile=8, tiles=2)}


# ------------------------------------------------------------------ prefill


def test_a_group_of_16_prefills_one_prompt_even_over_4_slots():
    engine = make()
    samples = flat(engine.generate([request(keys=range(16))]))
    assert engine.prefilled_tokens == len(PROMPT) - 1  # the last token is decoded
    assert len({tuple(c.tokens) for c in samples}) == 16


@pytest.mark.parametrize("length", [1, 9, 40])
def test_chunked_prefill_is_prefill(length, monkeypatch):
    monkeypatch.setattr("jaxrl.rollout.native.programs.SHAPES", SMALL)
    (completion,) = flat(make().generate([request(PROMPT[:length])]))
    np.testing.assert_allclose(completion.log_probs, scores(PROMPT[:length], completion), atol=1e-4)


def test_decoding_leaves_a_half_prefilled_neighbour_alone(monkeypatch):
    monkeypatch.setattr("jaxrl.rollout.native.programs.SHAPES", SMALL)
    engine = make(2, max_num_batched_tokens=16)
    long, short = request(keys=(1,)), request(PROMPT[:3], keys=(2,), max_tokens=40)
    (first,), (second,) = engine.generate([long, short])  # 39 tokens, 16 a turn: three turns
    np.testing.assert_allclose(first.log_probs, scores(PROMPT, first), atol=1e-4)
    np.testing.assert_allclose(second.log_probs, scores(PROMPT[:3], second), atol=1e-4)


def test_decoding_leaves_pages_that_nobody_has_alone(monkeypatch):
    monkeypatch.setattr("jaxrl.rollout.native.programs.SHAPES", SMALL)
    engine = make(enable_prefix_caching=True)
    ((first,),) = engine.generate([request()])
    engine.generate([request(PROMPT[:3], max_tokens=20)])
    before = engine.prefilled_tokens
    told = [*PROMPT, *first.tokens, 5]
    ((second,),) = engine.generate([request(told)])
    assert engine.prefilled_tokens - before == 4  # 53 tokens: 48 are found in three pages of 16
    np.testing.assert_allclose(second.log_probs, scores(told, second), atol=1e-4)


def test_what_was_decoded_is_found_with_prefix_caching(monkeypatch):
    monkeypatch.setattr("jaxrl.rollout.native.programs.SHAPES", SMALL)
    engine = make(enable_prefix_caching=True)
    first = flat(engine.generate([request()]))[0]
    turn = [*PROMPT, *first.tokens, 3, 1, 4]  # 40 + 12 + 3
    computed = engine.prefilled_tokens
    second = flat(engine.generate([request(turn, max_tokens=20)]))[0]
    # positions 0 ... 50 are in the cache, three pages of 16; 48 ... 53 are prefilled, 54 is decoded
    assert engine.prefilled_tokens - computed == 6
    np.testing.assert_allclose(second.log_probs, scores(turn, second), atol=1e-4)
    engine.update_weights(random_params(LLAMA, 1), 2)  # the cache is of no more use
    third = flat(engine.generate([request(turn)]))[0]
    np.testing.assert_allclose(third.log_probs, scores(turn, third, seed=1), atol=1e-4)


# ------------------------------------------------------------------ what a sample depends on


def test_neighbours_and_slots_change_no_bit():
    engine = shared()
    (alone,) = flat(engine.generate([request(temperature=0.9)]))
    others = [request(PROMPT[n:], (n, n + 50), max_tokens=3 + n, top_k=n % 3) for n in range(1, 12)]
    mixed = flat(engine.generate([*others, request(temperature=0.9), *others]))[22]
    assert mixed.tokens == alone.tokens
    assert mixed.log_probs == alone.log_probs


DEMANDS = {
    "filters": {"top_k": 5, "top_p": 0.9, "min_p": 0.01},
    "penalty": {"repetition_penalty": 1.3},
    # stop ids outside of the vocabulary
    "alternatives, stop ids": {"logprobs": 3, "stop_token_ids": (40, 41, 42, 43, 44)},
    "sets": {"top_k": 5, "keep_sampling_mask": True, "raw_log_probs": True},
}

EVERYTHING = {"top_k": 5, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.2, "min_tokens": 4}
EVERYTHING |= {"stop_token_ids": (3, 30), "logprobs": 3}
EVERYTHING |= {"raw_log_probs": True, "keep_sampling_mask": True}


def watched(engine):
    """The features of every block that an engine runs from now on."""
    seen, decode = [], engine.programs.decode

    def noted(rows, *others):
        seen.append(rows.features)
        return decode(rows, *others)

    engine.programs.decode = noted
    return seen


@pytest.mark.parametrize("demand", DEMANDS)
def test_what_neighbours_ask_for_changes_no_bit_and_goes_with_them(demand):
    engine = make()
    seen = watched(engine)
    plain = [request(keys=(1, 2), temperature=0.9), request(keys=(3,), temperature=0.0)]
    alone = flat(engine.generate(plain))
    assert set(seen) == {Features()}
    guest = request(PROMPT[3:], **DEMANDS[demand])
    mixed = flat(engine.generate([guest, *plain]))[1:]
    assert seen[-1] == Features().including(guest.sampling) != Features()
    for ours, theirs in zip(mixed, alone, strict=True):
        assert (ours.tokens, ours.log_probs) == (theirs.tokens, theirs.log_probs)
    seen.clear()
    assert [c.log_probs for c in flat(engine.generate(plain))] == [c.log_probs for c in alone]
    assert set(seen) == {Features()}


def test_training_and_evaluation_have_programs_of_their_own_and_for_both_together():
    engine = make()
    train, evaluation = request(repetition_penalty=1.2), request(PROMPT[3:], top_p=0.7)
    engine.warm_up([train])
    engine.warm_up([evaluation])
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, *_, **__: compiled.append(name) if "backend_compile" in name else None
    )
    seen = watched(engine)
    for requests in ([train], [evaluation], [train, evaluation]):
        engine.generate(requests)
    assert [(f.penalised, f.filtered) for f in dict.fromkeys(seen)] == [(1, 0), (0, 1), (1, 1)]
    assert not compiled


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("temperature", 1e-36),
        ("temperature", 9e-5),
        ("temperature", -1.0),
        ("temperature", float("nan")),
        ("repetition_penalty", 1e-45),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 1e38),
    ],
)
def test_what_float32_logits_cannot_be_divided_by_is_refused(setting, value):
    said = re.escape(f"{setting}={value:g} must be ") + r".*from 0\.0001 to 10000"
    with pytest.raises(ValueError, match=said):
        shared().submit([request(**{setting: value})])


def test_at_the_bounds_of_temperature_and_penalty_tokens_and_log_probs_are_sound():
    bounds = [{"temperature": 1e-4}, {"repetition_penalty": 1e-4}, {"repetition_penalty": 1e4}]
    asked = [request(logprobs=3, top_p=0.9, **one) for one in bounds]
    # as long as the others: all blocks are of the program that has all features
    asked.append(request(**{**EVERYTHING, "stop_token_ids": ()}))
    for completion in flat(shared().generate(asked)):
        assert all(0 <= token < LLAMA.vocab_size for token in completion.tokens)
        assert np.isfinite(completion.log_probs).all()
        assert all(np.isfinite(list(top.values())).all() for top in completion.top_log_probs)


@pytest.mark.some(1)
@pytest.mark.parametrize("tensor", [2, 4])  # the model has two key/value heads
def test_a_tensor_parallel_engine_draws_the_same(tensor):
    asked = [request(keys=(1, 2, 3)), request(keys=(4, 5), **EVERYTHING)]
    expected = flat(shared().generate(asked))
    sizes = {"data": 2, "tensor": tensor}
    split = make(devices={"devices": jax.devices()[: 2 * tensor], **sizes})
    for ours, theirs in zip(flat(split.generate(asked)), expected, strict=True):
        assert ours.tokens == theirs.tokens
        assert ours.sampling_mask_ids == theirs.sampling_mask_ids
        np.testing.assert_allclose(ours.log_probs, theirs.log_probs, atol=1e-5)
        np.testing.assert_allclose(ours.raw_log_probs, theirs.raw_log_probs, atol=1e-5)
        for found, wanted in zip(ours.top_log_probs, theirs.top_log_probs, strict=True):
            assert list(found) == list(wanted)
            np.testing.assert_allclose(list(found.values()), list(wanted.values()), atol=1e-5)


def test_1000_requests_over_16_slots_lose_and_repeat_nothing():
    engine = make(16, shrink=True)
    rng = np.random.default_rng(0)
    asked = [
        request(rng.integers(1, 32, rng.integers(1, 30)), (i,), max_tokens=int(rng.integers(1, 9)))
        for i in range(1000)
    ]
    futures = [f for group in engine.submit(asked) for f in group]
    for r, f in zip(asked, futures, strict=True):
        assert len(f.result(timeout=300).tokens) == r.sampling.max_tokens
    assert engine.decoded_tokens == sum(r.sampling.max_tokens for r in asked)


def test_nothing_compiles_after_the_warm_up():
    # as engines of CPUs are by default, and of shapes that no other test compiles
    engine = make(2, shrink=None, ahead=False, room=0, steps_per_dispatch=5)
    assert engine.programs.sizes() == [1, 2]
    rng = np.random.default_rng(1)

    def some(n, kinds):
        return [
            request(
                rng.integers(1, 32, rng.integers(1, 24)),
                tuple(range(rng.integers(1, 5))),
                max_tokens=int(rng.integers(1, 30)),
                top_k=int(rng.choice(kinds)),
                stop_token_ids=tuple(range(rng.integers(0, 3))),
            )
            for _ in range(n)
        ]

    lengths = 2, 9, 13, 17, 24
    kinds = -1, 1  # of blocks: without filters, and with some
    engine.warm_up([request(range(1, n), max_tokens=30, top_k=k) for n in lengths for k in kinds])
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, *_, **__: compiled.append(name) if "backend_compile" in name else None
    )
    seen, free, filtered = watched(engine), (-1, 0), (1, 2, 3)
    numbers = (40, free + filtered), (8, free), (8, filtered)
    asked = [some(number, kinds) for number, kinds in numbers]
    # and two of which the first ends first: the second goes on in blocks of its row alone
    asked += [
        [request(PROMPT[n:9], (n,), max_tokens=4 + 20 * n, top_k=k) for n in (0, 1)] for k in kinds
    ]
    found = [[f.result(timeout=300) for f in flat(engine.submit(r))] for r in asked]
    assert not compiled
    for ours, requests in zip(found, asked, strict=True):
        expected = flat(shared().generate(requests))
        assert [c.tokens for c in ours] == [c.tokens for c in expected]
    assert {features.filtered for features in seen} == {False, True}


# ------------------------------------------------------------------ sampling parameters


def test_the_repetition_penalty_is_that_of_transformers():
    """logits of seen tokens / 1.5 where positive, * 1.5 where negative; prompt and response."""
    (greedy,) = flat(shared().generate([request(temperature=0.0, repetition_penalty=1.5)]))
    row = [*PROMPT]
    step = jax.jit(functools.partial(forward, LLAMA))
    for token, log_prob in zip(greedy.tokens, greedy.log_probs, strict=True):
        tokens = np.zeros((1, WIDTH), np.int32)
        tokens[0, : len(row)] = row
        place = np.arange(WIDTH)[None]
        hidden = step(random_params(LLAMA), tokens, place, (place < len(row)).astype(np.int32))
        logits = np.array(unembed(LLAMA, random_params(LLAMA), hidden[0, len(row) - 1]))
        for seen in set(row):
            logits[seen] = logits[seen] / 1.5 if logits[seen] > 0 else logits[seen] * 1.5
        assert token == logits.argmax()
        np.testing.assert_allclose(
            log_prob, logits[token] - np.log(np.exp(logits).sum()), atol=1e-4
        )
        row.append(token)


def test_no_stop_token_before_min_tokens():
    (free,) = flat(shared().generate([request()]))
    stops = tuple(set(free.tokens[:4]))
    (early,) = flat(shared().generate([request(stop_token_ids=stops)]))
    assert len(early.tokens) == 1
    (late,) = flat(shared().generate([request(stop_token_ids=stops, min_tokens=6)]))
    assert len(late.tokens) >= 6
    assert not set(late.tokens[:5]) & set(stops)


def test_alternatives_are_the_most_probable_tokens():
    asked = request(temperature=0.0, **DEMANDS["alternatives, stop ids"])
    (completion,) = flat(shared().generate([asked]))
    for token, log_prob, top in zip(
        completion.tokens, completion.log_probs, completion.top_log_probs, strict=True
    ):
        assert len(top) == 3
        assert next(iter(top)) == token  # greedy
        assert top[token] == pytest.approx(log_prob, abs=1e-5)
        assert list(top.values()) == sorted(top.values(), reverse=True)


FILTERS = {"top_k": 6, "top_p": 0.8, "min_p": 0.02, "temperature": 0.7}


def test_the_trainer_scores_over_the_set_that_was_kept():
    asked = request(keys=(1, 2), keep_sampling_mask=True, raw_log_probs=True, **FILTERS)
    for completion in flat(shared().generate([asked])):
        assert {len(ids) for ids in completion.sampling_mask_ids} == {6}
        sizes = [sum(i >= 0 for i in ids) for ids in completion.sampling_mask_ids]
        assert 1 <= min(sizes) < max(sizes) <= 6
        assert all(
            t in ids for t, ids in zip(completion.tokens, completion.sampling_mask_ids, strict=True)
        )
        over_kept = scores(PROMPT, completion, kept=completion.sampling_mask_ids, temperature=0.7)
        np.testing.assert_allclose(completion.log_probs, over_kept, atol=1e-4)
        over_all = scores(PROMPT, completion, temperature=0.7)
        assert np.abs(over_all - completion.log_probs).max() > 0.1  # the filter is seen
        raw = scores(PROMPT, completion)  # temperature 1, no filters
        np.testing.assert_allclose(completion.raw_log_probs, raw, atol=1e-4)


def test_a_greedy_token_is_drawn_from_all():
    asked = request(temperature=0.0, top_k=5, keep_sampling_mask=True, raw_log_probs=True)
    (completion,) = flat(shared().generate([asked]))
    assert completion.sampling_mask_ids == [(-1,) * 5] * len(completion.tokens)


def test_a_set_without_a_bound_is_refused():
    with pytest.raises(ValueError, match=r"top_k=-1: the set could be the whole vocabulary"):
        shared().generate([request(top_p=0.9, keep_sampling_mask=True)])


def test_a_stop_string_ends_with_the_token_that_completes_it():
    def text(tokens):
        return "".join(chr(97 + t % 26) for t in tokens)

    engine = make(decode_text=text)
    (free,) = flat(engine.generate([request()]))
    stop = text(free.tokens)[4:7]  # three letters, the last by the seventh token
    at = text(free.tokens).index(stop) + 3
    (cut,) = flat(engine.generate([request(stop=("0", stop))]))
    assert (cut.stop_reason, cut.stop_string) == ("stop", stop)
    assert cut.tokens == free.tokens[:at]
    assert cut.log_probs == free.log_probs[:at]
    assert len(cut.versions) == at
    with pytest.raises(ValueError, match="give the engine decode_text"):
        shared().generate([request(stop=("x",))])


# ------------------------------------------------------------------ in flight


def between_turns(engine, turns, act):
    """Run `act` in the engine's thread after its `turns`-th turn from now on."""
    original, left = engine._turn, [turns]

    def turn():
        original()
        left[0] -= 1
        if left[0] == 0:
            engine._turn = original
            threading.Thread(target=act).start()
            for _ in range(10_000):
                if engine._door.locked():  # it waits for this turn to end
                    break
                time.sleep(0.001)

    engine._turn = turn


@pytest.mark.parametrize("recompute", [True, False])
def test_weights_change_in_flight(recompute):
    engine = make(recompute_kv_on_update=recompute)
    between_turns(engine, 2, lambda: engine.update_weights(random_params(LLAMA, 1), 2))
    (completion,) = flat(engine.generate([request(max_tokens=40)]))
    switched = completion.versions.index(2)
    assert completion.versions == [1] * switched + [2] * (40 - switched)
    assert switched % 8 == 0  # between two blocks
    old, new = (scores(PROMPT, completion, seed) for seed in (0, 1))
    np.testing.assert_allclose(completion.log_probs[:switched], old[:switched], atol=1e-4)
    difference = np.abs(np.array(completion.log_probs) - new)[switched:].max()
    assert (difference <= 1e-4) == recompute  # a cache of the old weights is caught


def until_idle(engine):
    """Wait until the engine's thread has told what there is to tell, and stopped."""
    for _ in range(2_000):
        if not engine._running:
            return
        time.sleep(0.001)
    raise AssertionError("the engine's thread goes on with nothing to do")


def by_hand(engine):
    """An engine whose turns the test makes, one by one."""
    engine.pause()

    def turn():
        with engine._held():
            engine._turn()
        until_idle(engine)

    return turn


def finished(turn, *futures):
    """Make turns until all are done, and return what has come of them."""
    for _ in range(20):
        if all(future.done() for future in futures):
            break
        turn()
    return [future.result(timeout=0) for future in futures]


def update(engine, version):
    """Weights of a version, each unlike the others."""
    engine.update_weights(random_params(LLAMA, version - 1), version)


def assert_scored(prompt, completion):
    """Tokens whose two versions agree are the trainer's; the others are caught."""
    versions, contexts = np.array(completion.versions), np.array(completion.context_versions)
    for version in set(completion.versions):
        difference = np.abs(completion.log_probs - scores(prompt, completion, version - 1))
        assert difference[(versions == version) & (contexts == version)].max(initial=0) <= 1e-4
        mixed = (versions == version) & (contexts < version)
        assert not mixed.any() or difference[mixed].max() > 1e-2


@pytest.mark.parametrize("recompute", [True, False])
def test_samples_of_a_group_that_begin_after_an_update_prefill_their_prompt_anew(recompute):
    engine = make(2, recompute_kv_on_update=recompute)
    turn = by_hand(engine)
    (futures,) = engine.submit([request(keys=range(6))])
    turn()  # 39 tokens of the prompt; samples 0 and 1 draw 8 of their 12 tokens
    assert engine.prefilled_tokens == 39
    update(engine, 2)
    found = finished(turn, *futures)
    flight, later = found[:2], found[2:]
    context = 2 if recompute else 1
    assert all(c.versions == [1] * 8 + [2] * 4 for c in flight)
    assert all(c.context_versions == [1] * 8 + [context] * 4 for c in flight)
    assert all(c.versions == c.context_versions == [2] * 12 for c in later)
    for completion in (*flight, *later):
        assert_scored(PROMPT, completion)
    # recomputed: two rows of 47, then the prompt comes from them; else it is prefilled once more
    assert engine.prefilled_tokens == 39 + (2 * 47 if recompute else 39)


@pytest.mark.parametrize("recompute", [True, False])
def test_a_shared_beginning_is_never_older_than_the_last_update(recompute):
    rng = np.random.default_rng(1)
    engine = make(4, enable_prefix_caching=True, recompute_kv_on_update=recompute)
    turn, talks, prefilled = by_hand(engine), [], []
    for version in range(1, 8):
        if version > 1:
            update(engine, version)  # while the sample before is in flight
        prompt = (*PROMPT[:32], *rng.integers(1, 32, 6).tolist())
        talks.append((prompt, *engine.submit([request(prompt)])[0]))
        before = engine.prefilled_tokens
        turn()
        prefilled.append(engine.prefilled_tokens - before)
    found = finished(turn, *(future for _, future in talks))
    for version, ((prompt, _), completion) in enumerate(zip(talks, found, strict=True), 1):
        last = min(version + 1, 7)
        context = last if recompute else version
        assert completion.versions == [version] * 8 + [last] * 4
        assert completion.context_versions == [version] * 8 + [context] * 4
        assert_scored(prompt, completion)
    if not recompute:
        assert prefilled == [37] * 7


@pytest.mark.parametrize("recompute", [True, False])
def test_the_next_turn_and_the_same_prompt_after_an_update_find_nothing_old(recompute):
    engine = make(4, enable_prefix_caching=True, recompute_kv_on_update=recompute)
    turn = by_hand(engine)
    first = engine.submit([request()])[0][0]
    turn()
    update(engine, 2)
    (said,) = finished(turn, first)
    assert_scored(PROMPT, said)
    told = (*PROMPT, *said.tokens, 3, 1, 4)  # 55 tokens
    before = engine.prefilled_tokens
    asked = [engine.submit([request(p, keys=(2,))])[0][0] for p in (told, PROMPT)]
    for prompt, completion in zip((told, PROMPT), finished(turn, *asked), strict=True):
        assert completion.versions == completion.context_versions == [2] * 12
        assert_scored(prompt, completion)
    if not recompute:
        assert engine.prefilled_tokens - before >= 54  # the prompt of `same` is its beginning


@pytest.mark.parametrize("recompute", [True, False])
def test_a_conversation_goes_on_with_its_own_keys_of_older_weights_and_says_so(recompute):
    engine = make(4, enable_prefix_caching=True, recompute_kv_on_update=recompute)
    turn, over = by_hand(engine), Future()
    first = engine.submit([dataclasses.replace(request(), conversations=(over,))])[0][0]
    (said,) = finished(turn, first)
    update(engine, 2)
    told = (*PROMPT, *said.tokens, 3, 1, 4)
    talks = [dataclasses.replace(request(told), conversations=(over,)), request(told, keys=(2,))]
    found = finished(turn, *(group[0] for group in engine.submit(talks)))
    over.cancel()
    for completion, context in zip(found, (2 if recompute else 1, 2), strict=True):
        assert completion.versions == [2] * 12
        assert completion.context_versions == [context] * 12
        assert_scored(told, completion)


def test_cancelled_samples_leave_and_the_others_do_not_notice():
    expected = flat(shared().generate([request(keys=(5,), max_tokens=30)]))[0]
    engine = make(2)
    storm = [f for g in engine.submit([request(keys=range(10), max_tokens=30)]) for f in g]
    (kept,) = (f for g in engine.submit([request(keys=(5,), max_tokens=30)]) for f in g)
    for future in storm:
        future.cancel()
    assert kept.result(timeout=60).tokens == expected.tokens
    assert engine.decoded_tokens < 11 * 30


def test_abort_hands_over_what_there_is():
    engine = make(2)
    between_turns(engine, 1, engine.abort)
    samples = flat(engine.generate([request(keys=(1, 2, 3), max_tokens=40)]))
    assert [c.stop_reason for c in samples] == ["abort"] * 3
    lengths = [len(c.tokens) for c in samples]
    assert lengths[0] == lengths[1] > 0
    assert lengths[2] == 0
    expected = flat(shared().generate([request(keys=(1,), max_tokens=40)]))[0]
    assert samples[0].tokens == expected.tokens[: lengths[0]]


def test_a_paused_engine_goes_on_where_it_was():
    expected = flat(shared().generate([request(max_tokens=30)]))[0]
    engine = make()
    engine.pause()
    (future,) = engine.submit([request(max_tokens=30)])[0]
    assert not future.done()
    engine.resume()
    assert future.result(timeout=60).tokens == expected.tokens
    engine.sleep()
    with pytest.raises(RuntimeError, match="no weights"):
        engine.generate([request()])
    engine.update_weights(random_params(LLAMA), 3)
    assert flat(engine.generate([request(max_tokens=30)]))[0].tokens == expected.tokens


def test_sleeping_with_samples_in_flight_is_refused():
    engine = make()
    engine.pause()
    futures = engine.submit([request()])
    with pytest.raises(RuntimeError, match="in flight"):
        engine.sleep()
    engine.abort()
    assert futures[0][0].result().stop_reason == "abort"


@pytest.mark.parametrize(
    "wrong", [{"top_k": 2**31}, {"min_tokens": 2**31}, {"stop_token_ids": (3, 2**40)}]
)
def test_what_no_device_can_count_is_refused_and_the_others_are_served(wrong):
    engine = shared()
    (name,) = wrong
    with pytest.raises(ValueError, match=rf"{name}=\d+ must be at most 2147483647"):
        engine.submit([request(), request(keys=(2,), **wrong)])
    assert len(flat(engine.generate([request()]))[0].tokens) == 12


def test_an_error_of_who_is_told_of_tokens_keeps_nobody_else_from_being_served(capsys):
    engine, told = make(), []

    def tell(number, new):
        told.append(number)
        raise KeyError("of the user's")

    asked = dataclasses.replace(request(max_tokens=20), on_tokens=tell)
    (failing,), (other,) = engine.generate([asked, request(keys=(2,))])
    assert told and len(failing.tokens) == 20 and len(other.tokens) == 12
    assert "of the user's" in capsys.readouterr().err


def test_an_error_in_a_turn_reaches_whoever_waits_and_the_engine_lives():
    engine = make()
    decode, engine.programs.decode = engine.programs.decode, None
    with pytest.raises(TypeError):
        engine.generate([request()])
    engine.programs.decode = decode
    (after,) = flat(engine.generate([request()]))
    assert after.tokens == flat(shared().generate([request()]))[0].tokens


def test_a_request_longer_than_a_row_is_refused():
    engine = make(max_model_len=48)
    with pytest.raises(ValueError, match="need more than max_model_len=48"):
        engine.submit([request(), request(PROMPT * 2)])
    assert len(flat(engine.generate([request(PROMPT[:30])]))[0].tokens) == 12


def test_the_tail_of_a_prompt_is_copied_to_all_samples_that_have_no_page_of_it_yet(monkeypatch):
    engine, copied, prefill = make(slots=4), [], Prefill.copy
    monkeypatch.setattr(
        Prefill, "copy", lambda self, *given: copied.append(given) or prefill(self, *given)
    )
    (samples,) = engine.generate([request(keys=(1, 2, 3, 4), max_tokens=2)])
    assert copied == [(0, 0, 1, 0), (0, 0, 2, 0), (0, 0, 3, 0)]  # part, from, to, chunk
    alone = [shared().generate([request(keys=(k,), max_tokens=2)])[0][0] for k in (1, 2, 3, 4)]
    assert [s.tokens for s in samples] == [s.tokens for s in alone]
