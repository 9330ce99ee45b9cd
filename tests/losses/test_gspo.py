"""GSPO in its token form."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.array_ops import masked_sum
from jaxrl.losses.gspo import gspo

CONFIG = SimpleNamespace(eps_clip_low=0.2, eps_clip_high=0.25)


def loss_and_grad(log_probs, old, advantages, mask, weights=None, config=CONFIG):
    """Loss [B, T], and the gradient of sum(loss * weights); weights = the mask if not given."""
    weights = mask if weights is None else weights

    def objective(log_probs):
        loss, metrics = gspo(log_probs, old, advantages, config, loss_mask=mask)
        return masked_sum(loss, weights), (loss, metrics["clip_ratio"])

    grad, (loss, clipped) = jax.grad(objective, has_aux=True)(log_probs)
    return loss, clipped, grad


# Token ratios and mask of four sequences; the ratio of a sequence is the geometric mean of its
# tokens' ratios: sqrt(2 / 2) = 1, sqrt(4 * 1) = 2 twice, sqrt(1/4 * 1) = 1/2.
RATIOS = np.array([[2, 0.5, 7], [4, 1, 1 / 7], [4, 1, 9], [0.25, 1, 1]], np.float32)
MASK = np.array([[1, 1, 0]] * 4, np.float32)
ADVANTAGES = np.repeat(np.array([[3], [1], [-1], [-2]], np.float32), 3, axis=1)
OLD = np.full_like(RATIOS, np.log(0.125))
NEW = OLD + np.log(RATIOS)


def test_literal_value_gradient_and_clip_ratio():
    # bounds 0.8 and 1.25; every token has its row's ratio r; dL/dlogp = -r A where unclipped
    #   r = 1.0, A =  3: -min( 3,  3)    = -3.00, gradient -3 (its tokens moved by 2 and 1/2)
    #   r = 2.0, A =  1: -min( 2,  1.25) = -1.25, gradient  0, clipped
    #   r = 2.0, A = -1: -min(-2, -1.25) =  2.00, gradient  2
    #   r = 0.5, A = -2: -min(-1, -1.6)  =  1.60, gradient  0, clipped
    loss, clipped, grad = loss_and_grad(NEW, OLD, ADVANTAGES, MASK)
    expected = np.array([[-3.0], [-1.25], [2.0], [1.6]])
    np.testing.assert_allclose(loss * MASK, expected * MASK, rtol=1e-6)
    np.testing.assert_allclose(grad, np.array([[-3.0], [0], [2.0], [0]]) * MASK, rtol=1e-6)
    np.testing.assert_array_equal(clipped * MASK, np.array([[0], [1], [0], [1]]) * MASK)


def test_without_a_mask_all_tokens_count():
    # third token of the second row: (4 * 1 * 1/7)^(1/3) = 0.5714^(1/3) = 0.82983, A = 1: -0.82983
    loss, _ = gspo(NEW, OLD, ADVANTAGES, CONFIG)
    np.testing.assert_allclose(loss[1], [-0.8298265] * 3, rtol=1e-5)


def test_the_bounds_are_separate():
    # r = 2 twice and 0.5: A = 1 feels 1 + 0.5, A = -1 feels neither, A = -2 feels 1 - 0.1
    config = SimpleNamespace(eps_clip_low=0.1, eps_clip_high=0.5)
    loss, _, _ = loss_and_grad(NEW, OLD, ADVANTAGES, MASK, config=config)
    np.testing.assert_allclose(loss[1:, 0], [-1.5, 2.0, 1.8], rtol=1e-6)


def test_on_policy_gradient_is_minus_advantage_times_weight():
    rng = np.random.default_rng(0)
    log_probs = rng.normal(-2, 1, (3, 5)).astype(np.float32)
    advantages = np.repeat(rng.normal(0, 1, (3, 1)), 5, axis=1).astype(np.float32)
    mask = np.array([[1, 1, 1, 1, 1], [0, 1, 1, 0, 1], [1, 1, 0, 0, 0]], np.float32)
    weights = rng.uniform(0.1, 1, (3, 5)).astype(np.float32) * mask
    _, clipped, grad = loss_and_grad(log_probs, log_probs, advantages, mask, weights)
    np.testing.assert_allclose(grad, -advantages * weights, rtol=1e-6)
    assert not clipped.any()


def test_what_is_masked_reaches_neither_value_nor_gradient():
    # as in the literal test: rows of 2 tokens with losses -3, -1.25, 2, 1.6: 2 * -0.65 = -1.3
    old = OLD.copy()
    old[:, 2] = [np.nan, -np.inf, np.inf, np.nan]
    loss, _, grad = loss_and_grad(NEW, old, ADVANTAGES, MASK)
    np.testing.assert_allclose(masked_sum(loss, MASK), -1.3, rtol=1e-6)
    np.testing.assert_allclose(grad, np.array([[-3.0], [0], [2.0], [0]]) * MASK, rtol=1e-6)


def test_an_empty_row_has_no_loss():
    loss, _ = gspo(NEW, OLD, ADVANTAGES, CONFIG, loss_mask=np.zeros_like(MASK))
    np.testing.assert_array_equal(loss, np.zeros_like(MASK))


def test_the_exponent_is_bounded_by_ten():
    # mean log ratio 30 is taken for 10, without gradient: A = -1, exp(10) = 22026.4658
    log_probs, old = np.full((1, 2), 30.0, np.float32), np.zeros((1, 2), np.float32)
    loss, _, grad = loss_and_grad(log_probs, old, -np.ones((1, 2)), np.ones((1, 2)))
    np.testing.assert_allclose(loss, [[22026.4658] * 2], rtol=1e-5)
    np.testing.assert_array_equal(grad, [[0, 0]])


def test_bfloat16_log_probs_give_a_float32_ratio():
    # log ratios 0.5 and 0.25, mean 0.375; exp(0.375) = 1.4549914; bfloat16 would say 1.453125
    log_probs = jnp.asarray([[-1.0, -1.0]], "bfloat16")
    old = jnp.asarray([[-1.5, -1.25]], "bfloat16")
    config = SimpleNamespace(eps_clip_low=0.2, eps_clip_high=1.0)
    for mask in (None, np.ones((1, 2), np.float32)):
        loss, _ = gspo(log_probs, old, jnp.ones((1, 2), "bfloat16"), config, loss_mask=mask)
        assert loss.dtype == jnp.float32
        np.testing.assert_allclose(loss, [[-1.4549914] * 2], rtol=1e-6)


def test_jit_equals_eager():
    inputs = (NEW, OLD, ADVANTAGES, MASK)
    for eager, jitted in zip(loss_and_grad(*inputs), jax.jit(loss_and_grad)(*inputs), strict=True):
        np.testing.assert_allclose(jitted, eager, rtol=1e-6)


def test_all_tokens_of_a_sequence_are_on_the_same_side_of_the_clip():
    # A log ratio of 3.9992e-4, just inside the paper's 4e-4, on tokens whose own log-probs are up
    # to -23.7: lp + (s - lp) would be s rounded to a multiple of 1.9e-6. One token moved by 4 s.
    log_probs = np.array([[-23.7, -3.1, -0.01, -0.5]], np.float32)
    old = np.array([[-23.7, -3.1, -0.01, -0.5 - 4 * 3.9992e-4]], np.float32)
    config = SimpleNamespace(eps_clip_low=3e-4, eps_clip_high=4e-4)
    loss, clipped, grad = loss_and_grad(
        log_probs, old, np.ones((1, 4)), np.ones((1, 4)), None, config
    )
    assert len(set(np.asarray(loss[0]).tolist())) == 1
    np.testing.assert_allclose(loss, [[-1.00039992] * 4], rtol=1e-7)
    np.testing.assert_array_equal(clipped, [[0, 0, 0, 0]])
    np.testing.assert_allclose(grad, [[-1.0004] * 4], rtol=1e-6)
