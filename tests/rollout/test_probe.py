"""The probe: rounding passes, other weights do not."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.models.transformer import logical_axes
from jaxrl.parallel import Placement, make_mesh, param_shardings
from jaxrl.rollout.protocol import Completion, Sampling
from jaxrl.rollout.remote.probe import (
    Expected,
    Probe,
    Scores,
    WeightMismatch,
    after_filters,
    make_score,
)
from tests.rollout.test_native import LLAMA, engine_of, random_params

SAID = Completion([5, 6, 7], [-0.5, -1.0, -2.0], "length", [3] * 3)
# to the trainer the second token is no more than the second best; 9 stands at that place too
OF_ALL = np.full((3, 10), -9.0)
OF_ALL[[0, 1, 2], [5, 6, 7]] = [-0.5, -1.01, -2.0]
OF_ALL[1, 9] = -0.99
EXPECTED = Expected([5, 6, 7], Scores([-0.5, -1.01, -2.0], OF_ALL))


def test_the_scores_are_those_of_the_engine_on_one_device_and_on_eight():
    engine, params = engine_of("llama"), random_params(LLAMA)
    probe = Probe(make_score(LLAMA, jnp.float32, None, 16), LLAMA.vocab_size)
    ((said,),) = engine.generate([probe.request])
    expected = probe.expect(params, said)
    np.testing.assert_allclose(expected.scores.log_probs, said.log_probs, atol=1e-4)
    best = expected.scores.of_all.max(-1)
    np.testing.assert_allclose(best, said.log_probs, atol=1e-4)  # it was greedy
    assert probe.check("server", 3, said, expected) <= 1e-4

    placement = Placement(make_mesh(fsdp=4, tensor=2))
    shardings = param_shardings(placement.mesh, logical_axes(LLAMA), params, placement.rules)
    score = make_score(LLAMA, jnp.float32, placement, 16)
    tokens = [*probe.request.prompt_tokens, *said.tokens]
    split = score(jax.device_put(params, shardings), tokens, 8)
    np.testing.assert_allclose(split.log_probs, expected.scores.log_probs, atol=1e-4)


FILTERS = [
    {},
    {"temperature": 0.6},
    {"temperature": 1.3, "top_k": 5},
    {"temperature": 0.8, "top_p": 0.7, "min_p": 0.02},
]


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_the_scores_are_those_of_the_engine_after_temperature_and_filters(filters):
    engine, params = engine_of("llama"), random_params(LLAMA)
    score = make_score(LLAMA, jnp.float32, None, 16)
    probe = Probe(score, LLAMA.vocab_size, sampling=Sampling(8, **filters))
    ((said,),) = engine.generate([probe.request])
    expected = probe.expect(params, said)
    assert expected.difference(said) <= 1e-4
    # another server that draws otherwise at the second place, held against the same expectation
    prompt, other = probe.request.prompt_tokens, int(np.argsort(expected.scores.of_all[1])[-2])
    row = [*prompt, said.tokens[0], other]
    parted = Completion(
        row[8:], probe.expect(params, Completion(row[8:], [], "", [])).scores[0], "length", [3] * 2
    )
    assert expected.difference(parted) <= 1e-4


def test_literal_log_probs_after_filters():
    # p = 1/2, 1/4, 1/8, 1/8; top_k 2 leaves 1/2 and 1/4: 2/3, 1/3. What is dropped is counted as if
    # it were left beside them: 1/8 of 7/8 = 1/7. At temperature 1/2 p^2 = 16, 4, 1, 1 of 22.
    table = np.log([[0.5, 0.25, 0.125, 0.125]])
    found = np.exp(after_filters(table, Sampling(1, top_k=2)))
    np.testing.assert_allclose(found, [[2 / 3, 1 / 3, 1 / 7, 1 / 7]], rtol=1e-5)
    found = np.exp(after_filters(table, Sampling(1, temperature=0.5)))
    np.testing.assert_allclose(found, [[16 / 22, 4 / 22, 1 / 22, 1 / 22]], rtol=1e-5)
    greedy = after_filters(table, Sampling(1, temperature=0.0, top_k=2))
    np.testing.assert_allclose(greedy, table, rtol=1e-5)


def test_differences():
    """|-1 - -1.01| = 0.01."""
    assert EXPECTED.difference(SAID) == pytest.approx(0.01)
    # they part at the second token; there |-1.2 - -0.99| = 0.21, and what follows says nothing
    parted = Completion([5, 9, 7], [-0.5, -1.2, -9.0], "length", [3] * 3)
    assert EXPECTED.difference(parted) == pytest.approx(0.21)


def test_without_log_probs_the_trainer_says_how_good_the_tokens_are():
    """Best minus said of the second token: -0.99 - -1.01 = 0.02."""
    silent = dataclasses.replace(SAID, log_probs=[])
    assert EXPECTED.difference(silent) == pytest.approx(0.02)
    assert EXPECTED.difference(dataclasses.replace(silent, tokens=[5, 9, 7])) == np.inf


@pytest.mark.parametrize("log_prob", [-1.2, float("nan")])
def test_a_difference_beyond_the_bound_is_an_error(log_prob):
    probe = Probe(make_score(LLAMA, jnp.float32, None, 16), LLAMA.vocab_size, bound=0.1)
    wrong = dataclasses.replace(SAID, log_probs=[-0.5, log_prob, -2.0])
    with pytest.raises(WeightMismatch, match="http://a has stale or wrong weights.*version 3"):
        probe.check("http://a", 3, wrong, EXPECTED)
