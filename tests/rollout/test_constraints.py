"""Samples whose next token must be one of those that the host allows."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.models.exact import choose_tiles
from jaxrl.models.transformer import init_params
from jaxrl.parallel import make_mesh
from jaxrl.rollout.native.balancer import Balancer
from jaxrl.rollout.native.decode import Features
from jaxrl.rollout.native.engine import NativeEngine
from jaxrl.rollout.native.recompute import RecomputeEngine
from jaxrl.rollout.protocol import Request
from tests.models.test_exact import MODEL as EXACT_MODEL
from tests.rollout.test_engine import PROMPT, SMALL, make, request, scores, watched
from tests.rollout.test_native import LLAMA, flat

STOP, VOCAB = 31, 32
EVEN = [4, 6, 8, 10, 12]


class Turns:
    """Allows five even ids, then the odd ids next to them, for `length` tokens; then the stop.

    From the third token on the stop is allowed, too.
    """

    def __init__(self, length=9):
        self.length, self.taken = length, []

    def ids(self):
        number = len(self.taken)
        if number >= self.length:
            return [STOP]
        return [i + number % 2 for i in EVEN] + [STOP] * (number >= 3)

    def allowed(self):
        bits = np.zeros(VOCAB, np.uint8)
        bits[self.ids()] = 1
        return np.packbits(bits, bitorder="little")

    def take(self, tokens):
        self.taken += tokens


class Long(Turns):
    def ids(self):
        return EVEN


class Broken(Turns):
    def allowed(self):
        if len(self.taken) == 2:
            raise KeyError("it knows no more")
        return super().allowed()


def constrained(*, keys=(1,), constrain=Turns, prompt=PROMPT, **sampling):
    sampling = {"stop_token_ids": (STOP,), "max_tokens": 20, **sampling}
    return dataclasses.replace(request(prompt, keys, **sampling), constrain=constrain)


def kept(completion):
    """The ids that each token was drawn from, filled up with -1."""
    turns, found = Turns(), []
    for token in completion.tokens:
        ids = turns.ids()
        assert token in ids
        found.append(ids + [-1] * (6 - len(ids)))
        turns.take([token])
    return found


def drawn(completions):
    return [(c.tokens, c.log_probs, c.stop_reason) for c in completions]


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_tokens_are_drawn_from_those_that_are_allowed(temperature):
    keys = range(6)
    found = flat(make().generate([constrained(keys=keys, temperature=temperature)]))
    for completion in found:
        assert completion.stop_reason == "stop"
        assert 4 <= len(completion.tokens) <= 10
        # a greedy token is scored without temperature
        expected = scores(PROMPT, completion, kept=kept(completion), temperature=temperature or 1.0)
        np.testing.assert_allclose(completion.log_probs, expected, atol=1e-4)
    if temperature:
        assert len({tuple(c.tokens) for c in found}) > 3


def test_filters_choose_among_those_that_are_allowed():
    ask = constrained(keys=range(4), top_k=2, keep_sampling_mask=True, logprobs=5)
    for completion in flat(make().generate([ask])):
        for ids, of_filter, top in zip(
            kept(completion),
            completion.sampling_mask_ids,
            completion.top_log_probs,
            strict=True,
        ):
            assert {i for i in of_filter if i >= 0} <= set(ids)
            of_allowed = {i: score for i, score in top.items() if np.isfinite(score)}
            assert of_allowed.keys() <= set(ids)
        # 5 alternatives are all that the first token has
        np.testing.assert_allclose(np.exp(list(completion.top_log_probs[0].values())).sum(), 1)


def test_neighbours_have_the_same_bits_and_blocks_are_long_again_behind_it():
    engine = make()
    seen = watched(engine)
    plain = [request(keys=(1, 2), temperature=0.9), request(keys=(3,), temperature=0.0)]
    alone = flat(engine.generate(plain))
    assert set(seen) == {Features()}
    ask = constrained(prompt=PROMPT[3:])
    by_itself = flat(engine.generate([ask]))
    seen.clear()
    mixed = flat(engine.generate([ask, *plain]))
    assert seen.count(Features(constrained=True)) == len(mixed[0].tokens)  # one step each
    assert drawn(mixed) == drawn([*by_itself, *alone])
    seen.clear()
    assert drawn(flat(engine.generate(plain))) == drawn(alone)
    assert set(seen) == {Features()}


@pytest.mark.parametrize(
    "options",
    [
        {"ahead": True},
        {"speculative_tokens": 3},
        {"speculative_tokens": 3, "ahead": True},
        {"devices": {"fsdp": 2, "tensor": 2, "devices": jax.devices()[:4]}},
    ],
    ids=["blocks ahead", "guesses", "guesses ahead", "over devices"],
)
@pytest.mark.some(3)
def test_wherever_it_runs(options):
    asks = [
        request(PROMPT[:6] * 2, keys=(5, 6), max_tokens=40),
        constrained(keys=(1, 2), prompt=PROMPT[:7] * 2),
        constrained(keys=(4,), temperature=0.0),
        request(PROMPT[:2] * 4, keys=(7,), temperature=0.0, max_tokens=30),
    ]
    expected = flat(make().generate(asks))
    found = flat(make(**options).generate(asks))
    for one, other in zip(found, expected, strict=True):
        assert (one.tokens, one.stop_reason) == (other.tokens, other.stop_reason)
        np.testing.assert_allclose(one.log_probs, other.log_probs, atol=1e-4)


def test_rows_that_make_room_for_others_know_where_they_are(monkeypatch):
    """Four rows of up to 90 tokens, six pages each, where there are eight pages."""
    monkeypatch.setattr("jaxrl.rollout.native.programs.SHAPES", SMALL)
    monkeypatch.setattr("jaxrl.rollout.native.engine.pages_that_fit", lambda *_, **__: 8)
    asks = [
        constrained(keys=(n,), prompt=PROMPT[n:], max_tokens=50, constrain=Long) for n in range(3)
    ]
    asks += [request(PROMPT[3:], keys=(8,), max_tokens=50)]
    engine = make(max_model_len=96)
    alone = flat([engine.generate([ask])[0] for ask in asks])
    assert not engine.suspended
    together = flat(engine.generate(asks))
    assert engine.suspended
    assert drawn(together) == drawn(alone)
    for completion in together[:3]:
        assert set(completion.tokens) <= set(EVEN)


def test_one_that_fails_ends_alone():
    engine, broken = make(), constrained(constrain=Broken, prompt=PROMPT[:9])
    (failed,), (other,) = engine.submit([broken, request(keys=(2,))])
    with pytest.raises(KeyError, match="it knows no more"):
        failed.result()
    assert drawn([other.result()]) == drawn(flat(make().generate([request(keys=(2,))])))
    assert drawn(flat(engine.generate([constrained()]))) == drawn(
        flat(make().generate([constrained()]))
    )


@pytest.mark.slow
@pytest.mark.usefixtures("as_users_compile")
def test_in_the_exact_mode_neighbours_are_exact():
    tiles = choose_tiles("log_probs", "cpu", tokens=None, parts=1)
    engine = NativeEngine(
        EXACT_MODEL,
        make_mesh(devices=jax.devices()[:1]),
        max_num_seqs=4,
        dtype=jnp.bfloat16,
        tiles=tiles,
    )
    engine.update_weights(init_params(EXACT_MODEL, 0), 0)
    plain = [request(keys=(2, 3), max_tokens=8)]
    alone = flat(engine.generate(plain))

    class Two(Turns):
        def allowed(self):
            bits = np.zeros(EXACT_MODEL.vocab_size, np.uint8)
            bits[[5, 9]] = 1
            return np.packbits(bits, bitorder="little")

    ask = constrained(constrain=Two, max_tokens=8, logprobs=2)
    ours, *theirs = flat(engine.generate([ask, *plain]))
    assert drawn(theirs) == drawn(alone)
    assert set(ours.tokens) <= {5, 9}
    for token, score, top in zip(ours.tokens, ours.log_probs, ours.top_log_probs, strict=True):
        assert top.keys() == {5, 9}
        np.testing.assert_allclose(score, top[token], atol=1e-5)
        np.testing.assert_allclose(np.exp(list(top.values())).sum(), 1, atol=1e-5)


def test_what_could_not_end_or_is_not_asked_is_refused():
    engine = make()
    assert Balancer([engine]).constrains
    with pytest.raises(ValueError, match=r"min_tokens=2.* a constrained sample ends"):
        engine.submit([constrained(min_tokens=2)])
    with pytest.raises(ValueError, match=r"stop_token_ids=\(\): a constrained sample ends"):
        engine.submit([constrained(stop_token_ids=())])
    assert not hasattr(RecomputeEngine, "constrains")
    with pytest.raises(ValueError, match="this engine asks no constraint; the native one does"):
        Request((1,), ((0, 0),), constrained().sampling, constrain=Turns).check(None, True)
    assert LLAMA.vocab_size == VOCAB
