"""Weights and masks for rollouts of another policy."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxrl.config import OffPolicyCorrectionConfig
from jaxrl.losses.off_policy import correction_enabled, off_policy_correction

# w = pi_old / pi_rollout, by row: 1, 2, 1/2, (8); 1, 1, 1, (8); 4, 1, 1, (8); the last is masked.
# Products 1, 1, 4; geometric means 1, 1, 4^(1/3) = 1.5874011
W = np.array([[1, 2, 0.5, 8], [1, 1, 1, 8], [4, 1, 1, 8]], np.float32)
MASK = np.array([[1, 1, 1, 0]] * 3, np.float32)
ROLLOUT = np.full_like(W, -5.0)
OLD = ROLLOUT + np.log(W)


def correct(mask=MASK, old=OLD, **settings):
    return off_policy_correction(old, ROLLOUT, mask, OffPolicyCorrectionConfig(**settings))


def test_nothing_asked_nothing_done():
    weights, mask, metrics = correct()
    np.testing.assert_array_equal(weights, np.ones_like(W))
    np.testing.assert_array_equal(mask, MASK)
    assert metrics == {}


def test_any_part_turns_it_on():
    assert not correction_enabled(OffPolicyCorrectionConfig())
    assert not correction_enabled(OffPolicyCorrectionConfig(renormalize=True))
    for field in dataclasses.fields(OffPolicyCorrectionConfig):
        if field.default is None:
            assert correction_enabled(OffPolicyCorrectionConfig(**{field.name: 1}))


def test_literal_metrics_of_the_ratio_skip_masked_tokens():
    # nine ratios 1, 2, 1/2, 1, 1, 1, 4, 1, 1: sum 12.5, mean 1.3888889, sum of squares 26.25,
    # variance (26.25 - 9 * 1.3888889^2) / 8 = 1.1111111, std 1.0540926
    _, _, metrics = correct(tis_ratio_type="token")
    assert metrics["is_ratio_max"] == 4
    np.testing.assert_allclose(metrics["is_ratio_min"], 0.5, rtol=1e-6)
    np.testing.assert_allclose(metrics["is_ratio_mean"], 1.3888889, rtol=1e-6)
    np.testing.assert_allclose(metrics["is_ratio_std"], 1.0540926, rtol=1e-5)


def test_an_empty_mask_has_metrics_of_zero():
    _, mask, metrics = correct(np.zeros_like(MASK), tis_ratio_type="token")
    assert not mask.any()
    assert all(value == 0 for value in metrics.values())


def test_literal_token_weights():
    # min(w, 1.5); 2 of 9 tokens are over the cap
    weights, mask, metrics = correct(tis_ratio_type="token", token_tis_ratio_clip_high=1.5)
    np.testing.assert_allclose(weights[:, :3], [[1, 1.5, 0.5], [1, 1, 1], [1.5, 1, 1]], rtol=1e-6)
    np.testing.assert_array_equal(mask, MASK)
    np.testing.assert_allclose(metrics["tis_token_clip_high_ratio"], 2 / 9, rtol=1e-6)


def test_literal_sequence_weights():
    # products 1, 1, 4, the last limited to 3; 1 of 3 rows
    weights, _, metrics = correct(tis_ratio_type="sequence", sequence_tis_ratio_clip_high=3.0)
    np.testing.assert_allclose(weights, np.array([[1], [1], [3]]) * np.ones(4), rtol=1e-5)
    np.testing.assert_allclose(metrics["tis_seq_clip_high_ratio"], 1 / 3, rtol=1e-6)


def test_literal_geometric_mask():
    # 1.587 is over 1.5; 0.9 to 1.5 keeps the others
    _, mask, metrics = correct(
        sequence_mask_metric="geometric", geo_mask_low=0.9, geo_mask_high=1.5
    )
    np.testing.assert_array_equal(mask, MASK * [[1], [1], [0]])
    np.testing.assert_allclose(metrics["geo_sequence_mask_masked_ratio"], 1 / 3, rtol=1e-6)
    np.testing.assert_allclose(metrics["geo_sequence_mask_over_high_ratio"], 1 / 3, rtol=1e-6)
    assert metrics["geo_sequence_mask_under_low_ratio"] == 0


def test_literal_product_mask():
    # 1 is under 1.5, 4 is not over 5
    _, mask, metrics = correct(
        sequence_mask_metric="product", product_mask_low=1.5, product_mask_high=5.0
    )
    np.testing.assert_array_equal(mask, MASK * [[0], [0], [1]])
    np.testing.assert_allclose(metrics["product_sequence_mask_under_low_ratio"], 2 / 3, rtol=1e-6)


def test_literal_outlier_mask():
    # high 3: row 2 has a 4; low 0.6: row 0 has a 0.5; masked ratios of 8 do not count
    for bounds, kept in (
        ({"outlier_token_is_threshold_high": 3.0}, [[1], [1], [0]]),
        ({"outlier_token_is_threshold_low": 0.6}, [[0], [1], [1]]),
    ):
        _, mask, metrics = correct(**bounds)
        np.testing.assert_array_equal(mask, MASK * kept)
        np.testing.assert_allclose(metrics["outlier_seq_masked_ratio"], 1 / 3, rtol=1e-6)


def test_literal_token_mask():
    # 0.6 to 2.5 drops the 1/2 and the 4: 2 of 9; bounds that are met keep their token
    settings = {"token_mask_is_threshold_low": 0.6, "token_mask_is_threshold_high": 2.5}
    _, mask, metrics = correct(**settings)
    np.testing.assert_array_equal(mask, [[1, 1, 0, 0], [1, 1, 1, 0], [0, 1, 1, 0]])
    np.testing.assert_allclose(metrics["token_mask_ratio"], 2 / 9, rtol=1e-6)
    exact = {"token_mask_is_threshold_low": 1.0, "token_mask_is_threshold_high": 1.0}
    _, mask, _ = correct(old=ROLLOUT, **exact)
    np.testing.assert_array_equal(mask, MASK)


def test_one_token_bound_without_the_other_is_refused():
    with pytest.raises(ValueError, match="needs both token_mask_is_threshold_low and _high"):
        correct(token_mask_is_threshold_low=0.5)
    with pytest.raises(ValueError, match="got None and 2.0"):
        correct(token_mask_is_threshold_high=2.0)


def test_each_step_sees_the_mask_of_the_one_before():
    # the token mask drops the 4, so the product of row 2 is 1 and the sequence mask keeps it
    _, mask, _ = correct(
        token_mask_is_threshold_low=0.1,
        token_mask_is_threshold_high=3.0,
        sequence_mask_metric="product",
        product_mask_high=2.0,
    )
    np.testing.assert_array_equal(mask, [[1, 1, 1, 0], [1, 1, 1, 0], [0, 1, 1, 0]])


@pytest.mark.parametrize("field", ["tis_ratio_type", "sequence_mask_metric"])
def test_an_unknown_name_is_refused(field):
    with pytest.raises(ValueError, match=f"{field}='tokens' must be"):
        correct(**{field: "tokens"})


def test_masked_nan_and_log_ratios_beyond_20():
    # exp is limited to exp(20) = 485165195 before the cap
    old = OLD.copy()
    old[:, 3] = [np.nan, np.inf, -np.inf]
    old[0, 0] = 100.0
    weights, mask, metrics = correct(old=old, tis_ratio_type="token", token_tis_ratio_clip_high=1e9)
    np.testing.assert_allclose(weights[0, 0], 485165195, rtol=1e-6)
    assert np.isfinite(weights).all() and all(np.isfinite(v) for v in metrics.values())
    np.testing.assert_array_equal(mask, MASK)


def test_it_is_a_constant_for_the_gradient():
    def total(old):
        return correct(old=old, tis_ratio_type="sequence")[0].sum()

    assert not jax.grad(total)(OLD).any()


def test_rows_do_not_depend_on_each_other():
    settings = {"tis_ratio_type": "sequence", "sequence_mask_metric": "geometric"}
    weights, mask, _ = correct(**settings)
    for row in range(3):
        part = slice(row, row + 1)
        one, kept, _ = off_policy_correction(
            OLD[part], ROLLOUT[part], MASK[part], OffPolicyCorrectionConfig(**settings)
        )
        np.testing.assert_array_equal(one, weights[part])
        np.testing.assert_array_equal(kept, mask[part])
