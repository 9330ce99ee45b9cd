"""Guessed tokens: what is drawn is what would have been drawn without them, in fewer steps."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.config import TrainConfig, validate
from jaxrl.models.exact import choose_tiles
from jaxrl.models.transformer import init_params
from jaxrl.parallel import make_mesh
from jaxrl.rollout.native.decode import draft
from jaxrl.rollout.native.engine import NativeEngine
from jaxrl.rollout.protocol import Request, Sampling
from tests.models.test_exact import KINDS, MODEL as EXACT_MODEL, parameters, rows_of, scored
from tests.rollout.test_engine import make
from tests.rollout.test_native import LLAMA, flat
from tests.rollout.test_states import DELTA

guessed = jax.jit(draft, static_argnums=2)


def test_what_came_after_the_last_tokens_before():
    history = [
        [1, 2, 3, 4, 1, 2, 3, -1],  # 1 2 3 came before: then 4 1 2
        [5, 5, 5, -1, -1, -1, -1, -1],  # 5 5 came one before, and repeats
        [1, 2, 3, 4, 5, 6, 7, 8],  # nothing comes again
        [7, 1, 2, 9, 1, 2, -1, -1],  # 1 2 came before: 9 1 2
        [2, 1, 7, 1, 8, 1, -1, -1],  # 1 came before, but nothing of two tokens
        [1, 2, 3, 1, 2, 4, 1, 2],  # twice: the later one
    ]
    found = guessed(jnp.array(history), jnp.array([6, 2, 7, 5, 5, 7]), 3)
    none = [-1, -1, -1]
    assert found.tolist() == [[4, 1, 2], [5, 5, 5], none, [9, 1, 2], none, [4, 1, 2]]


def test_what_came_after_the_last_tokens_in_other_texts():
    history = [
        [9, 1, 2, -1, -1, -1],  # the second text goes on 6 7, then it ends
        [9, 1, 2, -1, -1, -1],  # 9 1 2 is longer than 1 2
        [1, 2, 5, 5, 1, 2],  # 1 2 in the row itself: that goes before
        [4, 3, 1, -1, -1, -1],  # nothing; 1 alone is not enough
        [1, 2, -1, -1, -1, -1],  # of a text and the row's first token nothing is made: 8 | 1 2
    ]
    references = [
        [1, 2, 3, 4, -1, 1, 2, 6, 7, -1],
        [9, 1, 2, 3, -1, 8, 1, 2, 6, -1],
        [1, 2, 3, 4, 5, 6, 7, 8, 9, -1],
        [8, 1, 2, 3, -1, -1, -1, -1, -1, -1],
        [7, 7, 7, 7, 7, 7, 7, 7, 7, 8],
    ]
    position = jnp.array([2, 2, 5, 2, 1])
    found = guessed(jnp.array(history), position, 3, jnp.array(references))
    assert found.tolist() == [[6, 7, -1], [3, -1, -1], [5, 5, 1], [-1, -1, -1], [-1, -1, -1]]


def test_guesses_from_earlier_answers():
    """The same tokens, and where the answer is known nearly as few steps as can be."""
    asks = [Request((3 + i, 9, 1), ((5, i),), Sampling(24, temperature=0.9)) for i in range(8)]
    expected = flat(make().generate(asks))
    known = [
        dataclasses.replace(ask, references=(*ask.prompt_tokens, *answer.tokens, -1))
        for ask, answer in zip(asks, expected, strict=True)
    ]
    steps = {}
    for name, asked in {"unknown": asks, "known": known}.items():
        engine = make(speculative_tokens=3, speculative_history=32)
        found = flat(engine.generate(asked))
        assert_the_same(found, expected)
        steps[name] = sum(c.steps for c in found)
    tokens = sum(len(c.tokens) for c in expected)
    assert steps["known"] < 0.4 * tokens < steps["unknown"]  # 24 tokens in 6 steps are 0.25


def test_nothing_is_guessed_where_no_request_asks_for_it():
    asks = [dataclasses.replace(ask, guesses=False) for ask in requests()]
    found = flat(make(speculative_tokens=3).generate(asks))
    assert_the_same(found, flat(make().generate(asks)))
    assert not any(c.steps for c in found)


def requests(number=16, **sampling):
    """Prompts of two equal halves; every other one is greedy, which soon repeats itself."""
    draw = np.random.default_rng(0)
    return [
        Request(
            tuple(draw.integers(0, 20, draw.integers(2, 12)).tolist() * 2),
            ((3, i),),
            Sampling(int(draw.integers(5, 40)), **{"temperature": i % 2 * 0.8, **sampling}),
        )
        for i in range(number)
    ]


def assert_the_same(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert one.tokens == other.tokens
        assert one.stop_reason == other.stop_reason
        assert one.sampling_mask_ids == other.sampling_mask_ids
        for name in ("log_probs", "raw_log_probs"):
            np.testing.assert_allclose(getattr(one, name), getattr(other, name), atol=1e-4)
        assert [x.keys() for x in one.top_log_probs] == [x.keys() for x in other.top_log_probs]


ASKED = {
    "nothing else": {},
    "alternatives": {"logprobs": 3, "raw_log_probs": True},
    "a set": {"top_k": 6, "top_p": 0.9, "keep_sampling_mask": True, "temperature": 1.0},
    "penalties": {"repetition_penalty": 1.3, "min_tokens": 4, "stop_token_ids": (3, 4, 5, 6)},
}


@pytest.mark.some(1)
@pytest.mark.parametrize(("number", "name"), itertools.product((3, 1), ASKED))
def test_tokens_are_the_same_in_fewer_steps(name, number):
    asks = requests(**ASKED[name])
    expected = flat(make().generate(asks))
    found = flat(make(speculative_tokens=number).generate(asks))
    assert_the_same(found, expected)
    tokens, steps = sum(len(c.tokens) for c in found), sum(c.steps for c in found)
    assert not any(c.steps for c in expected)
    assert steps < tokens


def test_a_stop_string_among_what_was_guessed():
    options = {"decode_text": lambda tokens: "".join(chr(97 + t % 26) for t in tokens)}
    free = flat(make().generate(requests()))
    text = options["decode_text"](free[0].tokens)
    asks = requests(stop=(text[3:5],))
    expected = flat(make(**options).generate(asks))
    assert any(c.stop_reason == "stop" for c in expected)
    assert_the_same(flat(make(speculative_tokens=3, **options).generate(asks)), expected)


@pytest.mark.parametrize(
    "options",
    [
        {"ahead": True},
        {"max_model_len": 64, "enable_prefix_caching": True},
        {"devices": {"fsdp": 2, "tensor": 2, "devices": jax.devices()[:4]}},
    ],
    ids=["blocks ahead", "prefixes", "over devices"],
)
@pytest.mark.some(1)
def test_wherever_it_runs(options):
    asks = requests()
    expected = flat(make(**options).generate(asks))
    assert_the_same(flat(make(speculative_tokens=3, **options).generate(asks)), expected)


@pytest.mark.slow
def test_rows_that_make_room_for_others(monkeypatch):
    monkeypatch.setattr("jaxrl.rollout.native.engine.pages_that_fit", lambda *_, **__: 4)
    asks = [dataclasses.replace(r, sampling=Sampling(60)) for r in requests()]
    engine = make(speculative_tokens=3, max_model_len=128)
    found = flat(engine.generate(asks))
    assert engine.suspended
    assert_the_same(found, flat(make(max_model_len=128).generate(asks)))


@pytest.mark.slow
def test_routes_are_those_of_the_tokens_that_were_kept():
    model, mesh = KINDS["experts"], make_mesh(devices=jax.devices()[:1])
    found = []
    for number in (0, 3):
        settings = {"max_num_seqs": 6, "speculative_tokens": number, "keep_routes": True}
        engine = NativeEngine(model, mesh, **settings)
        engine.update_weights(init_params(model, 0), 0)
        found.append(flat(engine.generate(requests())))
    assert_the_same(*found)
    for one, other in zip(*found, strict=True):
        assert np.array_equal(one.routes, other.routes)


@pytest.mark.slow
@pytest.mark.usefixtures("as_users_compile")
def test_in_the_exact_mode_to_the_last_bit():
    tiles = choose_tiles("log_probs", "cpu", tokens=None, parts=1)
    asks, found = requests(), []
    for number in (0, 1, 3, 7):
        settings = {"dtype": jnp.bfloat16, "tiles": tiles, "speculative_tokens": number}
        engine = NativeEngine(
            EXACT_MODEL, make_mesh(devices=jax.devices()[:1]), max_num_seqs=6, **settings
        )
        engine.update_weights(init_params(EXACT_MODEL, 0), 0)
        found.append(flat(engine.generate(asks)))
    for others in found[1:]:
        assert [(c.tokens, c.log_probs) for c in others] == [
            (c.tokens, c.log_probs) for c in found[0]
        ]
    pairs = [(list(r.prompt_tokens), c) for r, c in zip(asks, found[2], strict=True)]
    cold = [pair for pair, r in zip(pairs, asks, strict=True) if r.sampling.temperature == 0.8]
    rows, expected = rows_of(cold)
    params = init_params(EXACT_MODEL, 0)
    assert np.array_equal(scored(EXACT_MODEL, tiles, jnp.bfloat16, rows, params), expected)


@pytest.mark.slow
@pytest.mark.usefixtures("as_users_compile")
def test_in_the_exact_mode_samples_of_a_group_are_guessed_from_each_other():
    """Greedy ones say the same: the second of two begins when a short neighbour has ended, and
    catches up with the first by guessing what that has drawn."""
    tiles = choose_tiles("log_probs", "cpu", tokens=None, parts=1)
    short = Request((5, 3), ((2, 0),), Sampling(8, temperature=0.0))
    ask = Request((4, 2, 7), ((1, 0), (1, 1)), Sampling(24, temperature=0.0))
    found = []
    for history in (0, 64):
        engine = NativeEngine(
            EXACT_MODEL,
            make_mesh(devices=jax.devices()[:1]),
            max_num_seqs=2,
            steps_per_dispatch=2,
            tiles=tiles,
            speculative_tokens=3,
            speculative_history=history,
        )
        engine.update_weights(parameters(EXACT_MODEL), 0)
        found.append(engine.generate([short, ask])[1])
    alone, together = found
    for one, other in zip(alone, together, strict=True):
        assert (one.tokens, one.log_probs) == (other.tokens, other.log_probs)
    assert together[0].steps == alone[0].steps
    assert together[1].steps < alone[1].steps


def test_what_cannot_be_guessed_is_refused():
    with pytest.raises(ValueError, match="speculative_tokens=-1 must be at least 0"):
        make(speculative_tokens=-1)
    mesh = make_mesh(devices=jax.devices()[:1])
    with pytest.raises(ValueError, match="speculative_tokens=2: a state cannot go back"):
        NativeEngine(DELTA, mesh, speculative_tokens=2)
    tiles = choose_tiles("log_probs", "cpu", tokens=None, parts=1)
    with pytest.raises(
        ValueError, match="speculative_tokens=2: with trainer.exact .*set 1, 3 or 7"
    ):
        NativeEngine(LLAMA, mesh, speculative_tokens=2, tiles=tiles)
    engine = "generator.inference_engine"
    settings = {f"{engine}.backend": "vllm", f"{engine}.speculative_tokens": 3}
    with pytest.raises(ValueError, match="speculative_tokens=3: is for the backend 'native'"):
        validate(TrainConfig.from_cli_overrides(settings))
