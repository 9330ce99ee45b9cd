"""Corrections for rollouts that another policy sampled: weights and masks, no loss.

The sampler differs from the trainer by its kernels, its number format and its age. All here is a
function of pi_old / pi_rollout, a constant of the batch; the caller multiplies the token weights of
the objective with what comes out.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxrl.array_ops import (
    Array,
    BoolB,
    FloatBT,
    MaskBT,
    assert_per_token,
    masked_mean,
    masked_sum,
    safe_exp,
    zero_masked,
)

Metrics = dict[str, Array]


def correction_enabled(config: Any) -> bool:
    """Return whether an OffPolicyCorrectionConfig asks for anything."""
    settings = (
        config.tis_ratio_type,
        config.sequence_mask_metric,
        config.outlier_token_is_threshold_low,
        config.outlier_token_is_threshold_high,
        config.token_mask_is_threshold_low,
        config.token_mask_is_threshold_high,
    )
    return any(setting is not None for setting in settings)


def off_policy_correction(
    old_log_probs: FloatBT, rollout_log_probs: FloatBT, loss_mask: MaskBT, config: Any
) -> tuple[FloatBT, MaskBT, Metrics]:
    """Weigh and mask by importance w_t = pi_old(a_t | s_t) / pi_rollout(a_t | s_t), in this order.

        outlier mask    rows without any w_t < outlier_low or > outlier_high
        token mask      tokens with token_low <= w_t <= token_high
        weights         "token":    min(w_t, token_cap)
                        "sequence": min(prod_t w_t, sequence_cap)
        sequence mask   rows with low <= W <= high;  "geometric": W = (prod_t w_t)^(1/tokens),
                        "product": W = prod_t w_t

    Means and products are over the tokens that the steps before left. Truncated weights: Yao et
    al., 2025, https://fengyao.notion.site/off-policy-rl; geometric mask and outliers: Liu et al.,
    2025, https://richardli.xyz/rl-collapse. Log ratios are clamped to +-20 before exp. Rows do not
    depend on each other, the metrics apart.

    Args:
        old_log_probs, rollout_log_probs: [B, T] float.
        loss_mask: [B, T]; what is masked may be NaN.
        config: the OffPolicyCorrectionConfig; its `renormalize` is the caller's: whether the mask
            that comes out, or the one that went in, is counted in the reduction.

    Returns:
        weights [B, T], 1 where nothing is asked for; mask [B, T], a part of loss_mask; metrics [],
        under SkyRL's names (`is_ratio_*` over the tokens of loss_mask).

    Raises:
        ValueError: unknown tis_ratio_type or sequence_mask_metric; one token bound without the
            other.
    """
    assert_per_token(old_log_probs, rollout_log_probs, mask=loss_mask)
    mask, old, rollout = zero_masked(loss_mask, loss_mask, old_log_probs, rollout_log_probs)
    weights = jnp.ones_like(old)
    if not correction_enabled(config):
        return weights, mask, {}
    log_ratio = jax.lax.stop_gradient(old - rollout)
    ratio = safe_exp(log_ratio)
    metrics = _ratio_metrics(ratio, mask)
    for step in (_outlier_mask, _token_mask):
        mask, new = step(ratio, mask, config)
        metrics |= new
    if config.tis_ratio_type is not None:
        weights, new = _truncated_weights(log_ratio, mask, config)
        metrics |= new
    if config.sequence_mask_metric is not None:
        mask, new = _sequence_mask(log_ratio, mask, config)
        metrics |= new
    return weights, mask, metrics


def _ratio_metrics(ratio: FloatBT, mask: MaskBT) -> Metrics:
    valid, mean = mask > 0, masked_mean(ratio, mask)
    squares = masked_sum(jnp.square(ratio - mean), mask)
    return {
        "is_ratio_mean": mean,
        "is_ratio_std": jnp.sqrt(squares / jnp.maximum(mask.sum() - 1, 1)),
        "is_ratio_max": jnp.max(ratio, initial=0.0, where=valid),
        "is_ratio_min": jnp.where(valid.any(), jnp.min(jnp.where(valid, ratio, jnp.inf)), 0.0),
    }


def _outlier_mask(ratio: FloatBT, mask: MaskBT, config: Any) -> tuple[Array, Metrics]:
    low, high = config.outlier_token_is_threshold_low, config.outlier_token_is_threshold_high
    if low is None and high is None:
        return mask, {}
    valid = mask > 0
    over = ((ratio > (jnp.inf if high is None else high)) & valid).any(-1)
    under = ((ratio < (-jnp.inf if low is None else low)) & valid).any(-1)
    return _without_rows(mask, over, under, "outlier_seq")


def _token_mask(ratio: FloatBT, mask: MaskBT, config: Any) -> tuple[Array, Metrics]:
    low, high = config.token_mask_is_threshold_low, config.token_mask_is_threshold_high
    if low is None and high is None:
        return mask, {}
    if low is None or high is None:
        raise ValueError(
            "off_policy_correction needs both token_mask_is_threshold_low and _high or neither, "
            f"got {low} and {high}"
        )
    outside = (ratio < low) | (ratio > high)
    return mask * ~outside, {"token_mask_ratio": masked_mean(outside, mask)}


def _truncated_weights(log_ratio: FloatBT, mask: MaskBT, config: Any) -> tuple[Array, Metrics]:
    if config.tis_ratio_type == "token":
        weights, cap = safe_exp(log_ratio), config.token_tis_ratio_clip_high
        metrics = {"tis_token_clip_high_ratio": masked_mean(weights > cap, mask)}
    elif config.tis_ratio_type == "sequence":
        weights, cap = (
            safe_exp(masked_sum(log_ratio, mask, -1)),
            config.sequence_tis_ratio_clip_high,
        )
        metrics = {"tis_seq_clip_high_ratio": jnp.mean(weights > cap, dtype=mask.dtype)}
        weights = weights[:, None]
    else:
        raise ValueError(
            f"off_policy_correction.tis_ratio_type='{config.tis_ratio_type}' must be 'token', "
            "'sequence' or None"
        )
    return jnp.broadcast_to(jnp.minimum(weights, cap), mask.shape), metrics


def _sequence_mask(log_ratio: FloatBT, mask: MaskBT, config: Any) -> tuple[Array, Metrics]:
    if config.sequence_mask_metric == "geometric":
        exponent, name = masked_mean(log_ratio, mask, -1), "geo_sequence_mask"
        low, high = config.geo_mask_low, config.geo_mask_high
    elif config.sequence_mask_metric == "product":
        exponent, name = masked_sum(log_ratio, mask, -1), "product_sequence_mask"
        low, high = config.product_mask_low, config.product_mask_high
    else:
        raise ValueError(
            f"off_policy_correction.sequence_mask_metric='{config.sequence_mask_metric}' must be "
            "'geometric', 'product' or None"
        )
    ratio = safe_exp(exponent)
    return _without_rows(mask, ratio > high, ratio < low, name)


def _without_rows(mask: MaskBT, over: BoolB, under: BoolB, name: str) -> tuple[MaskBT, Metrics]:
    """Return the mask without the rows that are over or under [B], and the fractions of rows."""
    dropped = over | under
    fractions = {"masked": dropped, "over_high": over, "under_low": under}
    metrics = {f"{name}_{k}_ratio": jnp.mean(v, dtype=mask.dtype) for k, v in fractions.items()}
    return mask * ~dropped[:, None], metrics
