"""States of layers without attention in the engine: what is drawn, shared, and kept."""

import dataclasses
import functools
from concurrent.futures import Future

import jax
import numpy as np
import pytest

from jaxrl.models.transformer import init_params
from jaxrl.parallel import make_mesh
from jaxrl.rollout.jetstream.engine import TransformerEngine
from jaxrl.rollout.native.engine import NativeEngine
from jaxrl.rollout.native.programs import pages_that_fit, states_of
from jaxrl.rollout.protocol import Request, Sampling
from tests.models.test_recurrence import CONVOLUTION, DELTA
from tests.models.test_transformer import logits_of

PARAMS = {config: init_params(config, 0) for config in (DELTA, CONVOLUTION)}
PAGE = 64  # positions, on a CPU
WIDTH = 192


def engine_of(config=DELTA, slots=3, **options):
    mesh = make_mesh(devices=jax.devices()[: options.pop("devices", 1)], **options.pop("axes", {}))
    engine = NativeEngine(config, mesh, max_num_seqs=slots, shrink=False, **options)
    engine.update_weights(PARAMS[config], 1)
    return engine


@functools.cache
def shared_engine():
    """One engine for tests that leave nothing behind."""
    return engine_of()


def request(tokens, *keys, max_tokens=12, seed=0, **options):
    prompt = np.random.default_rng(seed).integers(0, 61, tokens).tolist()
    return Request(prompt, [(0, key) for key in keys], Sampling(max_tokens), **options)


def assert_scored(config, asked, completions):
    """The log-probs are those of the trainer's forward."""
    for completion in completions:
        row = [*asked.prompt_tokens, *completion.tokens]
        tokens = np.zeros((1, WIDTH), int)
        tokens[0, : len(row)] = row
        places = np.arange(WIDTH)[None]
        real = (places < len(row)).astype(int)
        scores = jax.nn.log_softmax(logits_of(config, PARAMS[config], tokens, places, real)[0])
        first = len(asked.prompt_tokens) - 1
        found = [scores[first + i, token] for i, token in enumerate(completion.tokens)]
        np.testing.assert_allclose(completion.log_probs, found, atol=1e-4)


def drawn(completions):
    return [(c.tokens, c.log_probs) for c in completions]


@pytest.mark.parametrize(
    "config", [DELTA, pytest.param(CONVOLUTION, marks=pytest.mark.slow)], ids=["delta", "conv"]
)
def test_a_group_prefills_its_prompt_once_and_draws_what_the_trainer_scores(config):
    """A group of five over three slots, prompts on both sides of a page's end, and of one token."""
    engine = shared_engine() if config is DELTA else engine_of(config)
    asked = [request(n, *range(n, n + k), seed=n) for n, k in ((150, 5), (65, 2), (64, 1), (1, 2))]
    before = engine.prefilled_tokens
    found = engine.generate(asked)
    assert engine.prefilled_tokens - before == 149 + 64 + 63
    for one, completions in zip(asked, found, strict=True):
        assert_scored(config, one, completions)


def test_what_is_shared_changes_no_bit():
    engine = shared_engine()
    group = request(100, 1, 2, 3, 4, seed=5)
    (found,) = engine.generate([group])
    for key, completion in zip(group.keys, found, strict=True):
        engine.table.forget(live=False)
        before = engine.prefilled_tokens
        (alone,) = engine.generate([dataclasses.replace(group, keys=[key])])
        assert engine.prefilled_tokens - before == 99
        assert drawn(alone) == drawn([completion])


def test_a_longer_prompt_begins_at_the_last_page_that_has_a_state():
    """Of 150 tokens 128 are whole pages; a prompt that parts ways behind them begins there."""
    engine = shared_engine()
    first = request(150, 1, seed=6)
    engine.generate([first])
    longer = dataclasses.replace(first, prompt_tokens=[*first.prompt_tokens[:140], 3, 4, 5, 6])
    before = engine.prefilled_tokens
    (found,) = engine.generate([longer])
    assert engine.prefilled_tokens - before == 143 - 128
    assert_scored(DELTA, longer, found)
    engine.table.forget(live=False)
    assert drawn(engine.generate([longer])[0]) == drawn(found)
    # of what was a whole page of that prompt, but not its last, no state is kept
    shorter = dataclasses.replace(first, prompt_tokens=[*first.prompt_tokens[:70], 3])
    before = engine.prefilled_tokens
    assert_scored(DELTA, shorter, *engine.generate([shorter]))
    assert engine.prefilled_tokens - before == 70


@pytest.mark.slow
@pytest.mark.parametrize("axes", [{"tensor": 2}, {"data": 2}, {"data": 2, "tensor": 2}])
def test_every_mesh_draws_the_same_tokens(axes):
    asked = [request(n, *range(n, n + 3), seed=n) for n in (70, 20)]
    spread = engine_of(slots=4, devices=int(np.prod([*axes.values()])), axes=axes)
    for one, completions in zip(asked, spread.generate(asked), strict=True):
        assert_scored(DELTA, one, completions)


def test_a_row_that_makes_room_takes_its_state_along(monkeypatch):
    """Four rows of up to 190 tokens, three pages each, where there are five pages."""
    asked = [request(40, key, max_tokens=150, seed=key) for key in range(4)]
    monkeypatch.setattr("jaxrl.rollout.native.engine.pages_that_fit", lambda *_, **__: 5)
    engine = engine_of(slots=4, max_model_len=192)
    alone = [drawn(engine.generate([one])[0]) for one in asked]
    assert not engine.suspended
    assert [drawn(c) for c in engine.generate(asked)] == alone
    assert engine.suspended
    (pool,) = engine.table.states
    assert not any(pool.references)


def test_a_conversation_goes_on_with_its_state_unless_its_past_changes():
    """Turns prefill what is new, from the host, too; a changed one begins at its first page."""
    engine, over = shared_engine(), Future()
    engine.table.forget(live=False)
    told, new = request(70, 1, seed=9).prompt_tokens, 69
    for on_the_host in (False, True):
        asked = Request(tuple(told), ((7, 1),), Sampling(12), conversations=(over,))
        before = engine.prefilled_tokens
        (said,) = engine.generate([asked])[0]
        assert engine.prefilled_tokens - before == new
        assert_scored(DELTA, asked, [said])
        if on_the_host:
            assert engine.table.put_by(0)
        told, new = [*told, *said.tokens, 3, 1, 4], 3
    changed = [*told[:80], (told[80] + 1) % 61, *told[81:]]
    asked = Request(tuple(changed), ((7, 1),), Sampling(12), conversations=(over,))
    before = engine.prefilled_tokens
    assert_scored(DELTA, asked, engine.generate([asked])[0])
    assert engine.prefilled_tokens - before == len(changed) - 1 - PAGE
    over.cancel()
    engine.table.let_go()
    (pool,) = engine.table.states
    assert not any(pool.references)


@pytest.mark.slow
def test_blocks_that_begin_ahead_draw_the_same():
    """A stop string is seen a block late: the state has gone on, and the next turn begins anew."""
    asked = [request(n, *range(n, n + 3), max_tokens=40, seed=n) for n in (70, 20)]
    expected = [drawn(c) for c in engine_of(steps_per_dispatch=4).generate(asked)]
    words = "abcdefghijklmnopqrstuvwxyz"
    ahead = engine_of(
        steps_per_dispatch=4,
        ahead=True,
        decode_text=lambda ids: "".join(words[i % 26] for i in ids),
    )
    assert [drawn(c) for c in ahead.generate(asked)] == expected
    over, told = Future(), request(70, 1, seed=9).prompt_tokens
    for _ in range(3):
        sampling = Sampling(40, stop=("a", "e", "i"))
        turn = Request(tuple(told), ((7, 1),), sampling, conversations=(over,))
        (said,) = ahead.generate([turn])[0]
        assert_scored(DELTA, turn, [said])
        told = [*told, *said.tokens, 3]
    over.cancel()


def test_new_weights_begin_with_no_old_state():
    engine = engine_of()
    asked = request(130, 1, 2, seed=8)
    engine.generate([asked])
    engine.update_weights(PARAMS[DELTA], 2)
    before = engine.prefilled_tokens
    engine.generate([asked])
    assert engine.prefilled_tokens - before == 129


def test_states_are_counted_as_they_are_allocated():
    """8 rows and 2 more of 4 * 8 * 12 float32 and 3 * 80 inputs."""
    assert states_of(DELTA, 8) == 10
    mesh = make_mesh(devices=jax.devices()[:1])
    given = {"max_model_len": 64, "utilization": 1.0, "memory": 2**20}
    page = 2 * PAGE * 2 * 8 * 4  # one layer with attention, two key/value heads of 8
    found = [pages_that_fit(DELTA, mesh, np.float32, slots=slots, **given) for slots in (0, 8)]
    states = [states_of(DELTA, n) * 4 * (4 * 8 * 12 + 3 * 80) for n in (0, 8)]
    left = 2**20 - 4 * sum(x.size for x in jax.tree.leaves(PARAMS[DELTA]))
    left -= 4 * 61 * 32  # the head, which the decode weights have beside the embeddings
    assert found == [(left - bytes_) // page for bytes_ in states]


def test_an_engine_of_jetstream_refuses_the_model():
    mesh = make_mesh(devices=jax.devices()[:1])
    with pytest.raises(ValueError, match="layers without attention.*backend='native'"):
        TransformerEngine(DELTA, mesh, slots=2, max_prefill_length=16, max_target_length=32)
