"""Estimators of the KL divergence, the KL in the reward, its controller."""

from functools import partial

import jax
import numpy as np
import pytest

from jaxrl.array_ops import masked_sum
from jaxrl.losses.kl import (
    KL_ESTIMATORS,
    UNBIASED,
    adaptive_kl_coef,
    approximate_kl,
    penalized_rewards,
    unbiased_kl,
)

# Four tokens with d = log pi_theta - log pi_ref = log 2, -log 2, 0, -3, where log 2 = 0.6931472:
#   k1   d
#   k2   d^2 / 2: 0.4804530 / 2 = 0.2402265; 9 / 2 = 4.5             gradient d
#   k3   exp(-d) + d - 1: 1/2 + 0.6931472 - 1 = 0.1931472; 2 - 0.6931472 - 1 = 0.3068528; 0;
#        exp(3) - 3 - 1 = 16.09, limited to 10                       gradient 1 - exp(-d), 0 beyond
#   abs  |d|                                                         gradient sign(d)
LOG_2 = 0.6931472
DELTA = np.array([[LOG_2, -LOG_2, 0, -3]], np.float32)
KL = {
    "k1": [[LOG_2, -LOG_2, 0, -3]],
    "k2": [[0.2402265, 0.2402265, 0, 4.5]],
    "k3": [[0.1931472, 0.3068528, 0, 10]],
    "k3+": [[0.1931472, 0.3068528, 0, 10]],  # the value of k3
    "abs": [[LOG_2, LOG_2, 0, 3]],
}
GRADIENT = {
    "k1": [[1, 1, 1, 1]],
    "k2": [[LOG_2, -LOG_2, 0, -3]],
    "k3": [[0.5, -1, 0, 0]],
    "k3+": [[LOG_2, -LOG_2, 0, -3]],  # the gradient of k2
    "abs": [[1, -1, 0, -1]],
}
REF = np.full_like(DELTA, -4.0)


def test_every_estimator_is_tested():
    assert set(KL) == set(GRADIENT) == set(KL_ESTIMATORS)


@pytest.mark.parametrize("kind", KL_ESTIMATORS)
def test_literal_value_and_gradient(kind):
    value, grad = jax.value_and_grad(lambda x: approximate_kl(x, REF, kind=kind).sum())(REF + DELTA)
    np.testing.assert_allclose(
        approximate_kl(REF + DELTA, REF, kind=kind), KL[kind], rtol=1e-5, atol=1e-6
    )
    np.testing.assert_allclose(value, np.sum(KL[kind]), rtol=1e-5)
    np.testing.assert_allclose(grad, GRADIENT[kind], rtol=1e-5, atol=1e-6)


def test_the_default_is_k3():
    np.testing.assert_array_equal(
        approximate_kl(REF + DELTA, REF), approximate_kl(REF + DELTA, REF, kind="k3")
    )


@pytest.mark.parametrize("kind", KL_ESTIMATORS)
@pytest.mark.parametrize("poisoned", ["log_probs", "ref_log_probs"])
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_what_is_masked_reaches_neither_value_nor_gradient(kind, poisoned, poison):
    mask = np.array([[1, 1, 0, 1]], np.float32)
    weights = mask / 2
    inputs = {"log_probs": REF + DELTA, "ref_log_probs": REF.copy()}
    inputs[poisoned][0, 2] = poison
    ref = inputs["ref_log_probs"]

    def objective(log_probs):
        return masked_sum(approximate_kl(log_probs, ref, mask, kind), weights)

    value, grad = jax.value_and_grad(objective)(inputs["log_probs"])
    np.testing.assert_allclose(value, (np.array(KL[kind]) * weights).sum(), rtol=1e-5)
    np.testing.assert_allclose(grad, np.array(GRADIENT[kind]) * weights, rtol=1e-5, atol=1e-6)


def test_k1_and_k3_are_unbiased():
    # pi = (1/2, 1/4, 1/4), ref = (1/4, 1/4, 1/2):
    # KL = 1/2 log 2 + 1/4 log 1 + 1/4 log(1/2) = 1/4 log 2 = 0.1732868
    pi = np.array([[0.5, 0.25, 0.25]], np.float32)
    ref = np.array([[0.25, 0.25, 0.5]], np.float32)
    for kind in ("k1", "k3"):
        expectation = (pi * approximate_kl(np.log(pi), np.log(ref), kind=kind)).sum()
        np.testing.assert_allclose(expectation, 0.1732868, rtol=1e-6)


def test_the_gradient_of_k3_is_that_of_the_other_direction():
    """Expectations over three tokens whose logits are trained; slopes of KL by hand.

    pi = (1/2, 1/4, 1/4), ref = (1/4, 1/4, 1/2). d KL(ref | pi) / dz = pi - ref = (1/4, 0, -1/4).
    d KL(pi | ref) / dz = pi (log pi / ref - KL), KL = 1/4 log 2: (3/8, -1/16, -5/16) log 2.
    """
    pi, ref = np.array([0.5, 0.25, 0.25]), np.array([0.25, 0.25, 0.5])

    def slope(kind):
        def mean(logits):  # over samples of the policy, which have no gradient
            return (pi * approximate_kl(jax.nn.log_softmax(logits), np.log(ref), kind=kind)).sum()

        return jax.grad(mean)(np.log(pi).astype("float32"))

    np.testing.assert_allclose(slope("k3"), [0.25, 0, -0.25], atol=1e-6)
    np.testing.assert_allclose(slope("k2"), np.array([6, -1, -5]) / 16 * LOG_2, atol=1e-6)
    np.testing.assert_allclose(slope("k1"), [0, 0, 0], atol=1e-6)


@pytest.mark.parametrize("kind", UNBIASED)
@pytest.mark.parametrize("old", [[0.5, 0.25, 0.25], [0.2, 0.2, 0.6]], ids=["on", "off"])
def test_weighed_by_the_ratio_value_and_gradient_are_those_of_the_kl(kind, old):
    """Expectations over tokens of the old policy, which is the policy itself or another one.

    pi = (1/2, 1/4, 1/4), ref = (1/4, 1/4, 1/2): KL(pi | ref) = 1/4 log 2, and by the logits
    pi (log pi / ref - KL) = (3/8, -1/16, -5/16) log 2, as above.
    """
    pi, ref = np.array([0.5, 0.25, 0.25]), np.array([0.25, 0.25, 0.5])

    def mean(logits):
        kl = unbiased_kl(jax.nn.log_softmax(logits), np.log(old), np.log(ref), kind=kind)
        return (np.array(old) * kl).sum()

    value, slope = jax.value_and_grad(mean)(np.log(pi).astype("float32"))
    np.testing.assert_allclose(value, LOG_2 / 4, rtol=1e-6)
    np.testing.assert_allclose(slope, np.array([6, -1, -5]) / 16 * LOG_2, atol=1e-6)


def test_the_ratio_of_a_masked_token_reaches_nothing():
    mask = np.array([[1, 1, 0, 1]], np.float32)
    old = np.array([[-1, -1, np.nan, -1]], np.float32)

    def total(x):
        return masked_sum(unbiased_kl(x, old, REF, mask), mask)

    value, slope = jax.value_and_grad(total)(REF + DELTA)
    # r = exp(-4 + d + 1) = e^-3 (2, 1/2, ., e^-3) times k3 0.1931472, 0.3068528, 10
    expected = 0.0497871 * (2 * 0.1931472 + 0.5 * 0.3068528 + 0.0497871 * 10)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    assert np.isfinite(slope).all()
    assert slope[0, 2] == 0


def test_k3_of_a_vanishing_probability_is_finite():
    # d = -60: the exponent is limited to 20 and the result to 10; d = 60: 60 is taken for 20,
    # exp(-20) + 20 - 1 = 19, limited to 10
    log_probs = np.array([[-60.0, 60.0]], np.float32)
    np.testing.assert_array_equal(approximate_kl(log_probs, np.zeros_like(log_probs)), [[10, 10]])


def test_k3_of_almost_equal_policies_is_not_lost_in_rounding():
    # d^2 / 2 - d^3 / 6 for d = 3e-4 and -3e-4: 4.5e-8 -+ 4.5e-12. In float32 exp(-d) + d - 1 is 0.
    log_probs = np.array([[3e-4, -3e-4]], np.float32)
    value, grad = jax.value_and_grad(lambda x: approximate_kl(x, 0 * x).sum())(log_probs)
    found = approximate_kl(log_probs, np.zeros_like(log_probs))
    np.testing.assert_allclose(found, [[4.49955e-8, 4.50045e-8]], rtol=1e-3)
    np.testing.assert_allclose(value, 9e-8, rtol=1e-3)
    np.testing.assert_allclose(grad, [[2.99955e-4, -3.00045e-4]], rtol=1e-3)  # 1 - exp(-d)


@pytest.mark.parametrize("kind", KL_ESTIMATORS)
def test_jit_equals_eager(kind):
    mask = np.array([[1, 0, 1, 1]], np.float32)
    estimate = partial(approximate_kl, kind=kind)
    np.testing.assert_allclose(
        jax.jit(estimate)(REF + DELTA, REF, mask),
        estimate(REF + DELTA, REF, mask),
        rtol=1e-6,
        atol=1e-7,
    )


def test_an_unknown_kind_is_refused_with_the_known_ones():
    with pytest.raises(
        ValueError, match=r"'k4'. Must be one of \['k1', 'k2', 'k3', 'k3\+', 'abs'\]"
    ):
        approximate_kl(REF, REF, kind="k4")


def test_literal_penalized_rewards():
    # 1 - 0.5 * 2 = 0; masked: 2 stays, whatever the KL there; 0 - 0.5 * -1 = 0.5
    rewards = np.array([[1.0, 2.0, 0.0]], np.float32)
    kl = np.array([[2.0, np.nan, -1.0]], np.float32)
    mask = np.array([[1, 0, 1]], np.float32)
    np.testing.assert_allclose(penalized_rewards(rewards, kl, mask, 0.5), [[0, 2, 0.5]])
    np.testing.assert_allclose(penalized_rewards(rewards, kl, mask, -0.5), rewards)


@pytest.mark.parametrize(
    ("kl", "expected"),
    [
        (0.2, 0.204),  # 0.2 / 0.1 - 1 = 1, limited to 0.2: 0.2 (1 + 0.2 * 10 / 100)
        (0.11, 0.202),  # 0.1: 0.2 (1 + 0.1 * 10 / 100)
        (0.1, 0.2),
        (0.0, 0.196),  # -1, limited to -0.2
    ],
)
def test_literal_adaptive_coefficient(kl, expected):
    found = adaptive_kl_coef(0.2, kl, kl_target=0.1, horizon=100, rows=10)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize("name", ["kl_target", "horizon"])
def test_the_controller_refuses_what_it_would_divide_by(name):
    settings = {"kl_target": 0.1, "horizon": 100, name: 0}
    with pytest.raises(ValueError, match=f"kl_ctrl.{name}=0 must be > 0"):
        adaptive_kl_coef(0.2, 0.1, rows=1, **settings)
