"""Masked reductions, the clamp, and token distributions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.array_ops import (
    assert_per_token,
    clamp,
    discounted_sums,
    entropy,
    group_centred,
    group_std,
    group_sum,
    masked_mean,
    masked_sum,
    safe_exp,
    token_log_probs,
    top_tokens,
)

X = np.array([[1, 2, 4], [8, 16, 32]], np.float32)
MASK = np.array([[1, 0, 1], [0, 0, 0]], np.float32)


def test_masked_sum_and_mean_literals():
    # rows 1 + 4 = 5 and nothing = 0; means 5 / 2 and 0 by definition
    np.testing.assert_array_equal(masked_sum(X, MASK), 5)
    np.testing.assert_array_equal(masked_sum(X, MASK, axis=-1), [5, 0])
    np.testing.assert_array_equal(masked_mean(X, MASK), 2.5)
    np.testing.assert_array_equal(masked_mean(X, MASK, axis=-1), [2.5, 0])


def test_without_a_mask_everything_counts():
    # 1 + 2 + 4 + 8 + 16 + 32 = 63; rows 7 and 56
    np.testing.assert_array_equal(masked_sum(X, None), 63)
    np.testing.assert_array_equal(masked_mean(X, None), 10.5)
    np.testing.assert_allclose(masked_mean(X, None, axis=-1), [7 / 3, 56 / 3], rtol=1e-6)


def test_masks_may_be_weights():
    # 0.5 * 1 + 0.25 * 4 = 1.5
    np.testing.assert_array_equal(masked_sum(X[0], np.array([0.5, 0, 0.25], np.float32)), 1.5)


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_what_is_masked_reaches_neither_value_nor_gradient(poison):
    x = np.where(MASK != 0, X, poison)
    value, grad = jax.value_and_grad(lambda x: masked_sum(x, MASK))(x)
    np.testing.assert_array_equal(value, 5)
    np.testing.assert_array_equal(grad, MASK)
    value, grad = jax.value_and_grad(lambda x: masked_mean(x, MASK))(x)
    np.testing.assert_array_equal(value, 2.5)
    np.testing.assert_array_equal(grad, MASK / 2)


def test_clamp_has_gradient_one_inside_and_at_the_bounds_and_none_outside():
    x = np.array([-2, -1, 0, 1, 2], np.float32)
    np.testing.assert_array_equal(clamp(x, -1.0, 1.0), [-1, -1, 0, 1, 1])
    grad = jax.grad(lambda x: clamp(x, -1.0, 1.0).sum())(x)
    np.testing.assert_array_equal(grad, [0, 1, 1, 1, 0])


def test_clamp_between_equal_bounds_passes_the_gradient():
    # torch.clamp(x, 1, 1) does too; jnp.clip would pass a quarter
    np.testing.assert_array_equal(jax.grad(lambda x: clamp(x, 1.0, 1.0))(1.0), 1)


def test_clamp_of_nan_is_nan_without_gradient():
    value, grad = jax.value_and_grad(lambda x: clamp(x, -1.0, 1.0))(np.float32(np.nan))
    assert np.isnan(value)
    assert grad == 0


def test_safe_exp_is_exp_up_to_the_limit():
    # exp(1) = 2.7182818, exp(+-20) = 4.8516520e8 and 2.0611536e-9
    x = np.array([-100, -20, 0, 1, 20, 100], np.float32)
    expected = [2.0611536e-9, 2.0611536e-9, 1, 2.7182818, 4.8516520e8, 4.8516520e8]
    np.testing.assert_allclose(safe_exp(x), expected, rtol=1e-6)
    grad = jax.grad(lambda x: safe_exp(x).sum())(x)
    np.testing.assert_allclose(grad, [0, *expected[1:5], 0], rtol=1e-6)


def test_safe_exp_computes_in_float32_at_least():
    assert safe_exp(jnp.ones(1, "bfloat16")).dtype == jnp.float32
    with jax.enable_x64(True):
        assert safe_exp(jnp.ones(1, "float64")).dtype == jnp.float64


LOGITS = np.random.default_rng(0).normal(0, 3, (2, 5, 7)).astype(np.float32)
TOKENS = np.random.default_rng(1).integers(0, 7, (2, 5))


def log_softmax(x):
    x = x.astype(np.float64)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def test_token_log_probs_equal_numpy():
    expected = np.take_along_axis(log_softmax(LOGITS), TOKENS[..., None], axis=-1)[..., 0]
    np.testing.assert_allclose(token_log_probs(LOGITS, TOKENS), expected, rtol=1e-5, atol=1e-6)


def test_entropy_equals_numpy():
    log_p = log_softmax(LOGITS)
    np.testing.assert_allclose(entropy(LOGITS), -(np.exp(log_p) * log_p).sum(-1), rtol=1e-5)


def test_distribution_literals():
    # probabilities 1/2, 1/4, 1/4: entropy 1/2 log 2 + 2/4 log 4 = 1.5 log 2 = 1.0397208
    logits = np.log(np.array([2, 1, 1], np.float32)) + 100
    np.testing.assert_allclose(token_log_probs(logits, np.int32(1)), -1.3862944, rtol=1e-5)
    np.testing.assert_allclose(entropy(logits), 1.0397208, rtol=1e-5)


def test_bfloat16_logits_are_reduced_in_float32():
    logits = jnp.asarray(LOGITS, "bfloat16")
    upcast = np.asarray(logits, np.float32)
    assert token_log_probs(logits, TOKENS).dtype == entropy(logits).dtype == jnp.float32
    np.testing.assert_array_equal(token_log_probs(logits, TOKENS), token_log_probs(upcast, TOKENS))
    np.testing.assert_array_equal(entropy(logits), entropy(upcast))


def test_group_sum_literal():
    # group 0: 1 + 4 = 5; group 3: 2 + 8 = 10
    x, index = np.array([1, 2, 4, 8], np.float32), np.array([0, 3, 0, 3])
    np.testing.assert_array_equal(group_sum(x, index), [5, 10, 5, 10])
    np.testing.assert_array_equal(jax.jit(group_sum)(x, index), [5, 10, 5, 10])


def test_discounts_of_all_rows_and_of_each():
    # 1 + (2 + 4 / 2) / 2 = 3, 2 + 4 / 2 = 4, 4; with 0 each stands alone
    x = np.array([[1, 2, 4], [1, 2, 4]], np.float32)
    np.testing.assert_array_equal(discounted_sums(x, 0.5), [[3, 4, 4], [3, 4, 4]])
    rows = np.array([0.5, 0], np.float32)
    np.testing.assert_array_equal(discounted_sums(x, rows), [[3, 4, 4], [1, 2, 4]])


def test_groups_around_their_mean_and_its_deviation():
    # group 0: 1, 4 and one that is not counted: mean 2.5, variance 2 * 1.5^2 / 1 = 4.5;
    # group 1: 3, 3: 0; group 4: alone: 0
    x = np.array([1, 3, 4, 3, 99, 7], np.float32)
    index, counted = np.array([0, 1, 0, 1, 0, 4]), np.array([1, 1, 1, 1, 0, 1], bool)
    centred = group_centred(x, index, counted)
    np.testing.assert_array_equal(centred, [-1.5, 0, 1.5, 0, 0, 0])
    std = np.sqrt(4.5) * np.array([1, 0, 1, 0, 1, 0])
    np.testing.assert_allclose(group_std(centred, index, counted), std, rtol=1e-6)
    # weights 1 and 2: mean (1 + 2 * 4) / 3 = 3
    weights = counted * np.array([1, 1, 2, 7, 1, 1])
    np.testing.assert_array_equal(group_centred(x, index, weights), [-2, 0, 1, 0, 0, 0])


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.uint32])
def test_top_tokens_are_those_of_a_stable_sort(dtype):
    rng = np.random.default_rng(0)
    row_ids = np.array([3, 0, 2, 1])
    with jax.enable_x64(dtype is np.float64):
        for count in (0, 1, 5, 11, 99):
            keys = rng.integers(0, 4, (4, 5)).astype(dtype)  # many are equal
            if dtype is not np.uint32:
                keys = np.where(keys == 2, -0.0, keys - 2) * dtype(1.5)
            valid = rng.random((4, 5)) < 0.7
            rows, columns = np.broadcast_arrays(row_ids[:, None], np.arange(5))
            best = sorted(zip(-keys[valid].astype(float), rows[valid], columns[valid], strict=True))
            expected = {(row, column) for _, row, column in best[:count]}
            chosen = top_tokens(jnp.asarray(keys), jnp.asarray(valid), count, jnp.asarray(row_ids))
            assert {(row_ids[r], c) for r, c in np.argwhere(np.asarray(chosen))} == expected


def test_per_token_arrays_are_floats_of_one_shape_with_any_mask():
    floats = jnp.ones((2, 3))
    assert_per_token(floats, floats, mask=jnp.ones((2, 3), bool))
    with pytest.raises(AssertionError, match="has rank 1 .* but expected 2"):
        assert_per_token(floats, jnp.ones(3))
    with pytest.raises(AssertionError, match="int32"):
        assert_per_token(floats, jnp.ones((2, 3), int))
    with pytest.raises(AssertionError, match="different shapes"):
        assert_per_token(floats, mask=jnp.ones((2, 4)))
