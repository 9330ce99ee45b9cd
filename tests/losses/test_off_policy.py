"""Weights and masks for rollouts of another policy."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxrl.config import OffPolicyCorrectionConfig, TrainConfig, resolve
from jaxrl.config.formulas import correction_lines
from jaxrl.losses.off_policy import (
    PRESETS,
    correction_enabled,
    off_policy_correction,
    rejection_bounds,
)

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
        # a preset is resolved to other fields, and a threshold is of what rollout_rs names
        if field.default is None and field.name not in ("preset", "rollout_rs_threshold"):
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


# log w of two rows: log 2, -log 2, and 0, 3 log 2 = 2.0794415; the last token is masked.
#   k1 = -log w         row 0: -0.6931, 0.6931, sum 0, mean 0
#                       row 1: 0, -2.0794, sum -2.0794, mean -1.0397
#   k2 = log^2 w / 2    0.2402, 0.2402, sum 0.4805, mean 0.2402
#                       0, 2.1620, sum 2.1620, mean 1.0810
#   k3 = w - 1 - log w  2 - 1 - 0.6931 = 0.3069, 0.5 - 1 + 0.6931 = 0.1931, sum 0.5, mean 0.25;
#                       0, 8 - 1 - 2.0794 = 4.9206, sum 4.9206, mean 2.4603
GRID_OLD = np.log(np.array([[2, 0.5, 1], [1, 8, 1]], np.float32))
GRID_MASK = np.array([[1, 1, 0], [1, 1, 0]], np.float32)


@pytest.mark.parametrize(
    ("option", "threshold", "kept"),
    [
        ("token_k1", "0.4_1.5", [[1, 0], [1, 0]]),  # pi_rollout / pi_old: 0.5, 2, 1, 0.125
        ("token_k1", "2.5", [[1, 1], [1, 0]]),  # [0.4, 2.5]
        ("token_k2", "1", [[1, 1], [1, 0]]),
        ("token_k3", "0.2", [[0, 1], [1, 0]]),
        ("seq_sum_k1", "0.2_5", [[1, 1], [0, 0]]),  # 1; 1 / 8 = 0.125
        ("seq_sum_k1", "0.1_5", [[1, 1], [1, 1]]),
        ("seq_sum_k2", "0.48", [[0, 0], [0, 0]]),
        ("seq_sum_k3", "1", [[1, 1], [0, 0]]),
        ("seq_mean_k1", "0.999_1.001", [[1, 1], [0, 0]]),
        ("seq_mean_k2", "0.25", [[1, 1], [0, 0]]),
        ("seq_mean_k3", "0.24", [[0, 0], [0, 0]]),
        ("seq_mean_k3", "2.47", [[1, 1], [1, 1]]),
        ("seq_max_k2", "0.25", [[1, 1], [0, 0]]),
        ("seq_max_k3", "0.3", [[0, 0], [0, 0]]),
        ("seq_max_k3,token_k1", "5,1.5", [[0, 0], [1, 0]]),  # both must hold
        ("token_k2, token_k3", "0.25", [[0, 1], [1, 0]]),  # one threshold for both
    ],
)
def test_rejections_of_verls_grid(option, threshold, kept):
    settings = OffPolicyCorrectionConfig(rollout_rs=option, rollout_rs_threshold=threshold)
    rollout = np.zeros_like(GRID_OLD)
    weights, mask, metrics = off_policy_correction(GRID_OLD, rollout, GRID_MASK, settings)
    np.testing.assert_array_equal(mask, np.pad(kept, ((0, 0), (0, 1))))
    np.testing.assert_array_equal(weights, 1)
    if "," not in option:
        dropped = 1 - np.mean(kept)
        assert metrics[f"{option}_masked_ratio"] == pytest.approx(dropped)


def test_rejections_look_at_tokens_that_other_masks_drop():
    # the token mask drops the 4; log^2 4 / 2 = 0.9609 rejects its row all the same: 3 of 9 tokens
    _, mask, metrics = correct(
        token_mask_is_threshold_low=0.1,
        token_mask_is_threshold_high=3.0,
        rollout_rs="seq_max_k2",
        rollout_rs_threshold="0.5",
    )
    np.testing.assert_array_equal(mask, MASK * [[1], [1], [0]])
    np.testing.assert_allclose(metrics["seq_max_k2_masked_ratio"], 1 / 3, rtol=1e-6)


@pytest.mark.parametrize(
    ("option", "threshold", "said"),
    [
        ("token_k4", "1", "'token_k4' is none of token_k1, token_k2"),
        ("seq_max_k1", "1", "'seq_max_k1' is none of"),
        ("token_k1", "1.5_2", "'token_k1': give a band of ratios around 1"),
        ("token_k1", "0", "'token_k1': give a band of ratios around 1"),
        ("token_k3", None, "'token_k3': give an upper bound > 0, such as 0.01"),
        ("token_k3", "0.1_0.2", "'token_k3': give an upper bound"),
        ("token_k1,token_k2,token_k3", "2,1", "one for each of the 3 in rollout_rs"),
    ],
)
def test_a_rejection_that_is_none_is_refused(option, threshold, said):
    settings = OffPolicyCorrectionConfig(rollout_rs=option, rollout_rs_threshold=threshold)
    with pytest.raises(ValueError, match=said):
        rejection_bounds(settings)


def test_normalised_weights_have_mean_one():
    # tokens: min(w, 4) = 2, 0.5, 1, 4: mean 1.875; rows: prod w = 1, min(8, 4) = 4: mean 2.5
    rollout = np.zeros_like(GRID_OLD)
    settings = {"token_tis_ratio_clip_high": 4.0, "sequence_tis_ratio_clip_high": 4.0}
    for kind, expected in (
        ("token", np.array([[2, 0.5], [1, 4]]) / 1.875),
        ("sequence", np.array([[1, 1], [4, 4]]) / 2.5),
    ):
        config = OffPolicyCorrectionConfig(
            tis_ratio_type=kind, rollout_is_batch_normalize=True, **settings
        )
        weights, _, _ = off_policy_correction(GRID_OLD, rollout, GRID_MASK, config)
        np.testing.assert_allclose(weights[:, :2], expected, rtol=1e-6)


def test_rows_without_tokens_do_not_count_in_the_mean_of_sequence_weights():
    # row 0 is an outlier, its 0.5 is below 0.6; of the others min(prod w, 3) = 1, 3: mean 2
    weights, _, _ = correct(
        outlier_token_is_threshold_low=0.6,
        tis_ratio_type="sequence",
        sequence_tis_ratio_clip_high=3.0,
        rollout_is_batch_normalize=True,
    )
    np.testing.assert_allclose(weights[1:], np.array([[0.5], [1.5]]) * np.ones(4), rtol=1e-6)


def test_a_preset_is_what_its_fields_are():
    # IcePop: whole weights inside of [0.5, 5], none outside: w = 2, 0.5, 1, 8
    config = TrainConfig()
    config.trainer.algorithm.off_policy_correction.preset = "icepop"
    settings = resolve(config).trainer.algorithm.off_policy_correction
    rollout = np.zeros_like(GRID_OLD)
    weights, mask, _ = off_policy_correction(GRID_OLD, rollout, GRID_MASK, settings)
    np.testing.assert_allclose((weights * mask)[:, :2], [[2, 0.5], [1, 0]], rtol=1e-6)
    assert resolve(resolve(config)) == resolve(config)


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_are_valid_and_shown(preset):
    config = TrainConfig()
    config.trainer.algorithm.off_policy_correction.preset = preset
    settings = resolve(config).trainer.algorithm.off_policy_correction
    assert correction_enabled(settings)
    assert correction_lines(settings) != ["off"]


def test_a_preset_and_a_field_that_disagree_are_refused():
    config = TrainConfig()
    correction = config.trainer.algorithm.off_policy_correction
    correction.preset, correction.token_tis_ratio_clip_high = "icepop", 3.0
    with pytest.raises(ValueError, match=r"token_tis_ratio_clip_high=3.0: preset='icepop' stands"):
        resolve(config)
