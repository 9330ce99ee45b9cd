"""Ratios of token probabilities: what is counted, and that the cut does not matter."""

import jax
import numpy as np
import pytest

from jaxrl.data.packing import empty_batch
from jaxrl.training.ratios import add_ratio_sums, ratio_metrics, ratio_sums


def batch_of(ratios, mask, rollout=None):
    """Log-probs of the policy are 0, so that those of the old policy are minus the log-ratios."""
    old = -np.log(np.asarray(ratios, np.float32))
    rollout = old if rollout is None else -np.log(np.asarray(rollout, np.float32))
    mask = np.asarray(mask, np.float32)
    batch = empty_batch(*mask.shape)
    return batch.replace(loss_mask=mask, old_log_probs=old, rollout_log_probs=rollout)


def metrics_of(batch, low=0.2, high=0.2):
    sums = ratio_sums(np.zeros_like(batch.loss_mask), batch, low, high)
    return ratio_metrics(add_ratio_sums([jax.device_get(sums)]))


def test_ratios_literal():
    # ratios to the old policy 0.5, 1, 1, 2; the fifth is masked. r - 1 - log r is 0.1931, 0, 0,
    # 0.3069, mean 0.125. One is below 0.8, one above 1.2. Weights against the sampler 1, 1, 1, 3:
    # 6^2 / (4 x 12) = 0.75
    batch = batch_of([[0.5, 1.0, 1.0], [2.0, 100.0, 1.0]], [[1, 1, 0], [1, 0, 1]])
    metrics = metrics_of(batch.replace(rollout_log_probs=-np.log([[1, 1, 9], [3, 9, 1.0]])))
    assert (metrics["ratio_min"], metrics["ratio_max"]) == pytest.approx((0.5, 2))
    assert metrics["approx_kl"] == pytest.approx(0.125, rel=1e-5)
    assert (metrics["clip_fraction_low"], metrics["clip_fraction_high"]) == (0.25, 0.25)
    assert metrics["effective_sample_size"] == pytest.approx(0.75, rel=1e-6)
    assert metrics["ratio_p50"] == pytest.approx(1, abs=1e-4)
    assert metrics["ratio_p99"] == pytest.approx(2, rel=0.1)  # the bounds are a third apart


def test_quantiles_are_those_of_the_tokens():
    log_ratios = np.random.default_rng(0).normal(0.0, 0.1, (64, 64))
    metrics = metrics_of(batch_of(np.exp(log_ratios), np.ones((64, 64))))
    for name, q in (("p01", 0.01), ("p05", 0.05), ("p50", 0.5), ("p95", 0.95), ("p99", 0.99)):
        assert metrics[f"ratio_{name}"] == pytest.approx(
            np.exp(np.quantile(log_ratios, q)), abs=0.02
        )


def test_on_policy_all_ratios_are_one():
    batch = batch_of(np.ones((2, 3)), np.ones((2, 3))).replace(
        old_log_probs=None, rollout_log_probs=None
    )
    metrics = metrics_of(batch)
    assert {metrics[f"ratio_{name}"] for name in ("p01", "p50", "p99", "min", "max")} == {1.0}
    assert metrics["effective_sample_size"] == 1
    assert metrics["approx_kl"] == 0


def test_the_kl_of_a_small_update_is_not_lost_in_rounding():
    # mean of d^2 / 2 over d = 1e-4, 2e-4, -3e-4: (1 + 4 + 9) / 6 * 1e-8; r - 1 - d in float32: 0
    batch = batch_of([[1.0, 1.0, 1.0]], [[1, 1, 1]])
    batch = batch.replace(old_log_probs=-np.array([[1e-4, 2e-4, -3e-4]], np.float32))
    assert metrics_of(batch)["approx_kl"] == pytest.approx(14e-8 / 6, rel=1e-3)


def test_the_cut_into_microbatches_does_not_matter():
    rng = np.random.default_rng(1)
    ratios, mask = rng.lognormal(0, 0.3, (8, 16)), rng.integers(0, 2, (8, 16))
    batch, whole = batch_of(ratios, mask), metrics_of(batch_of(ratios, mask))
    parts = []
    for start in (0, 4):
        part = jax.tree.map(lambda x, i=start: x[i : i + 4], batch)
        parts.append(jax.device_get(ratio_sums(0 * part.loss_mask, part, 0.2, 0.2)))
    assert ratio_metrics(add_ratio_sums(parts)) == pytest.approx(whole, rel=1e-5)


def test_what_is_masked_may_be_anything_and_no_token_has_no_metrics():
    batch = batch_of([[1.0, np.nan]], [[1, 0]])
    assert all(np.isfinite(x) for x in metrics_of(batch).values())
    assert metrics_of(batch.replace(loss_mask=np.zeros((1, 2), np.float32))) == {}
