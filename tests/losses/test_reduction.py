"""The weights that turn a per-token loss into the objective."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.array_ops import masked_sum
from jaxrl.losses.reduction import REDUCTIONS, reduction_weights

MASK = np.array([[1, 1, 1, 0], [0, 1, 0, 0]], np.float32)

# 4 tokens; rows of 3 and 1 tokens, B = 2; max_seq_len 8:
#   token_mean 1/4; sequence_mean 1/(2 * 3) and 1/(2 * 1); seq_mean_token_sum_norm 1/(2 * 8);
#   token_mean_legacy in blocks of one row as sequence_mean; prompt_mean with one prompt 1/4
WEIGHTS = {
    "token_mean": [[1 / 4, 1 / 4, 1 / 4, 0], [0, 1 / 4, 0, 0]],
    "sequence_mean": [[1 / 6, 1 / 6, 1 / 6, 0], [0, 1 / 2, 0, 0]],
    "token_mean_legacy": [[1 / 6, 1 / 6, 1 / 6, 0], [0, 1 / 2, 0, 0]],
    "prompt_mean": [[1 / 4, 1 / 4, 1 / 4, 0], [0, 1 / 4, 0, 0]],
    "seq_mean_token_sum_norm": [[1 / 16, 1 / 16, 1 / 16, 0], [0, 1 / 16, 0, 0]],
}
# losses 1 2 3 (9) and (9) 5 (9 9):
#   (1 + 2 + 3 + 5) / 4 = 2.75; ((1 + 2 + 3) / 3 + 5) / 2 = 3.5; 11 / 16 = 0.6875
LOSS = np.array([[1, 2, 3, 9], [9, 5, 9, 9]], np.float32)
VALUES = {
    "token_mean": 2.75,
    "token_mean_legacy": 3.5,
    "sequence_mean": 3.5,
    "seq_mean_token_sum_norm": 0.6875,
    "prompt_mean": 2.75,
}
NEEDED = {"max_seq_len": 8, "group_ids": np.array([1, 1]), "microbatch_rows": 1}


def test_every_reduction_is_tested():
    assert set(WEIGHTS) == set(VALUES) == set(REDUCTIONS)


@pytest.mark.parametrize("kind", REDUCTIONS)
def test_literal_weights_value_and_gradient(kind):
    weights = reduction_weights(MASK, kind, **NEEDED)
    np.testing.assert_allclose(weights, WEIGHTS[kind], rtol=1e-6)
    value, grad = jax.value_and_grad(lambda x: masked_sum(x, weights))(LOSS)
    np.testing.assert_allclose(value, VALUES[kind], rtol=1e-6)
    np.testing.assert_allclose(grad, WEIGHTS[kind], rtol=1e-6)


@pytest.mark.parametrize("kind", REDUCTIONS)
def test_what_is_masked_reaches_neither_value_nor_gradient(kind):
    poisoned = LOSS.copy()
    poisoned[MASK == 0] = [np.nan, np.inf, -np.inf, np.nan]
    weights = reduction_weights(MASK, kind, **NEEDED)
    value, grad = jax.value_and_grad(lambda x: masked_sum(x, weights))(poisoned)
    np.testing.assert_allclose(value, VALUES[kind], rtol=1e-6)
    np.testing.assert_allclose(grad, WEIGHTS[kind], rtol=1e-6)


@pytest.mark.parametrize("kind", REDUCTIONS)
def test_slices_of_a_minibatch_add_up_to_it(kind):
    weights = reduction_weights(MASK, kind, **NEEDED)
    parts = [masked_sum(LOSS[row : row + 1], weights[row : row + 1]) for row in (0, 1)]
    np.testing.assert_allclose(sum(parts), VALUES[kind], rtol=1e-6)


def test_an_empty_row_counts_as_a_sequence_but_not_as_a_token():
    # rows of 2 and 0 tokens: token_mean 1/2; sequence_mean 1/(2 * 2)
    mask = np.array([[1, 1], [0, 0]], np.float32)
    np.testing.assert_array_equal(reduction_weights(mask, "token_mean"), [[0.5, 0.5], [0, 0]])
    np.testing.assert_array_equal(reduction_weights(mask, "sequence_mean"), [[0.25, 0.25], [0, 0]])


@pytest.mark.parametrize("kind", REDUCTIONS)
def test_an_empty_minibatch_weighs_nothing(kind):
    empty = np.zeros((2, 3), np.float32)
    np.testing.assert_array_equal(reduction_weights(empty, kind, **NEEDED), empty)


@pytest.mark.parametrize("kind", REDUCTIONS)
def test_jit_equals_eager(kind):
    weigh = partial(reduction_weights, kind=kind, **NEEDED)
    np.testing.assert_allclose(jax.jit(weigh)(MASK), weigh(MASK), rtol=1e-6)


def test_an_unknown_kind_is_refused_with_the_known_ones():
    with pytest.raises(
        ValueError, match=r"'mean'. Must be one of \['token_mean', 'token_mean_legacy'"
    ):
        reduction_weights(jnp.ones((1, 1)), "mean")


@pytest.mark.parametrize("max_seq_len", [None, 0])
def test_the_constant_length_has_no_default(max_seq_len):
    with pytest.raises(ValueError, match="needs max_seq_len > 0"):
        reduction_weights(jnp.ones((1, 1)), "seq_mean_token_sum_norm", max_seq_len=max_seq_len)


def test_the_last_block_of_token_mean_legacy_may_be_shorter():
    # blocks of rows 0-1 (3 tokens) and row 2 (2 tokens): 1/(2 * 3) and 1/(2 * 2)
    mask = np.array([[1, 1], [1, 0], [1, 1]], np.float32)
    weights = reduction_weights(mask, "token_mean_legacy", microbatch_rows=2)
    np.testing.assert_allclose(weights, [[1 / 6, 1 / 6], [1 / 6, 0], [1 / 4, 1 / 4]], rtol=1e-6)
    whole = reduction_weights(mask, "token_mean_legacy", microbatch_rows=8)
    np.testing.assert_allclose(whole, mask / 5, rtol=1e-6)


def test_prompts_count_alike_however_many_tokens_and_rows_they_have():
    # prompt 0: rows 0 and 2, 4 tokens; prompt 3: row 1, 1 token; prompt 2: row 3, none, but it
    # counts: 1/(3 * 4), 1/(3 * 1)
    mask = np.array([[1, 1], [1, 0], [1, 1], [0, 0]], np.float32)
    weights = reduction_weights(mask, "prompt_mean", group_ids=np.array([0, 3, 0, 2]))
    expected = [[1 / 12, 1 / 12], [1 / 3, 0], [1 / 12, 1 / 12], [0, 0]]
    np.testing.assert_allclose(weights, expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("kind", "needed"), [("prompt_mean", "group_ids"), ("token_mean_legacy", "microbatch_rows")]
)
def test_what_a_kind_needs_is_named(kind, needed):
    with pytest.raises(ValueError, match=f"loss_reduction='{kind}' needs {needed}"):
        reduction_weights(jnp.ones((1, 1)), kind)


def test_counts_do_not_overflow_in_bfloat16():
    # 300 tokens: bfloat16 counts to 256
    weights = reduction_weights(jnp.ones((1, 300), "bfloat16"), "token_mean")
    np.testing.assert_allclose(weights, np.full((1, 300), 1 / 300), rtol=1e-6)
