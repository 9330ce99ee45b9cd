"""The probe: rounding passes, other weights do not."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.models.transformer import logical_axes
from jaxrl.parallel import Placement, make_mesh, param_shardings
from jaxrl.rollout.probe import Expected, Probe, Scores, WeightMismatch, make_score
from jaxrl.rollout.protocol import Completion
from tests.rollout.test_native import LLAMA, engine_of, random_params

SAID = Completion([5, 6, 7], [-0.5, -1.0, -2.0], "length", [3] * 3)
# to the trainer the second token is no more than the second best
EXPECTED = Expected([5, 6, 7], Scores([-0.5, -1.01, -2.0], [-0.5, -0.99, -2.0]))


def test_the_scores_are_those_of_the_engine_on_one_device_and_on_eight():
    engine, params = engine_of("llama"), random_params(LLAMA)
    probe = Probe(make_score(LLAMA, jnp.float32, None, 16), LLAMA.vocab_size)
    ((said,),) = engine.generate([probe.request])
    expected = probe.expect(params, said)
    np.testing.assert_allclose(expected.scores.log_probs, said.log_probs, atol=1e-4)
    np.testing.assert_allclose(expected.scores.best, said.log_probs, atol=1e-4)  # it was greedy
    assert probe.check("server", 3, said, expected) <= 1e-4

    placement = Placement(make_mesh(fsdp=4, tensor=2))
    shardings = param_shardings(placement.mesh, logical_axes(LLAMA), params, placement.rules)
    score = make_score(LLAMA, jnp.float32, placement, 16)
    tokens = [*probe.request.prompt_tokens, *said.tokens]
    split = score(jax.device_put(params, shardings), tokens, 8)
    np.testing.assert_allclose(split.log_probs, expected.scores.log_probs, atol=1e-4)


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
