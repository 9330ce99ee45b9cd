"""The geometric mean of a sequence's clipped ratios."""

from types import SimpleNamespace

import jax
import numpy as np

from jaxrl.array_ops import masked_sum
from jaxrl.losses.gmpo import gmpo
from jaxrl.losses.reduction import reduction_weights

CONFIG = SimpleNamespace(eps_clip_low=0.4, eps_clip_high=0.6)

# log ratios; the third token is masked
LOG_RATIO = np.array([[1.0, -1.0, 9], [1.0, -1.0, 9], [0.6, -0.4, 9], [0.2, 0.2, 9]], np.float32)
MASK = np.array([[1, 1, 0]] * 4, np.float32)
ADVANTAGES = np.repeat(np.array([[2], [-2], [1], [0]], np.float32), 3, axis=1)
OLD = np.full_like(LOG_RATIO, -3.0)


def test_literal_value_gradient_and_metrics():
    # row 0, A =  2: e = min(d, 0.6) = 0.6, -1: mean -0.2, r = exp(-0.2) = 0.8187308, L = -1.6374615
    # row 1, A = -2: e = max(d, -0.4) = 1, -0.4: mean 0.3, r = exp(0.3) = 1.3498588, L = 2.6997176
    # row 2, A =  1: at the bound, not over it: e = d, mean 0.1, r = 1.1051709, L = -1.1051709
    # row 3, A =  0: L = 0
    # sequence_mean: each row / 4; gradient of a token that is not clipped: -r A / 2 tokens / 4
    weights = reduction_weights(MASK, "sequence_mean")

    def objective(log_probs):
        loss, metrics = gmpo(log_probs, OLD, ADVANTAGES, CONFIG, MASK)
        return masked_sum(loss, weights), (loss, metrics)

    (total, (loss, metrics)), grad = jax.value_and_grad(objective, has_aux=True)(OLD + LOG_RATIO)
    rows = np.array([[-1.6374615], [2.6997176], [-1.1051709], [0]])
    np.testing.assert_allclose(loss * MASK, rows * MASK, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(total, rows.sum() / 4, rtol=1e-5)
    moves = np.array([[0, 1, 0], [1, 0, 0], [1, 1, 0], [0, 0, 0]])
    np.testing.assert_allclose(grad, rows * moves / 8, rtol=1e-5, atol=1e-7)
    np.testing.assert_array_equal(metrics["clip_ratio"] * MASK, [[1, 0, 0]] + [[0, 0, 0]] * 3)
    lower = [[0, 0, 0], [0, 1, 0], [0, 0, 0], [0, 0, 0]]
    np.testing.assert_array_equal(metrics["clip_ratio_lower"] * MASK, lower)


def test_without_a_mask_all_tokens_count():
    # row 3 with A = 1: d = 0.2, 0.2, 9 -> 0.6: mean 1/3, r = exp(1/3) = 1.3956124
    loss, _ = gmpo(OLD + LOG_RATIO, OLD, np.ones_like(OLD), CONFIG)
    np.testing.assert_allclose(loss[3], [-1.3956124] * 3, rtol=1e-5)
