"""Corrections for rollouts that another policy sampled: weights and masks, no loss.

The sampler differs from the trainer by its kernels, its number format and its age. All here is a
function of pi_old / pi_rollout, a constant of the batch; the caller multiplies the token weights of
the objective with what comes out.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl.array_ops import (
    Array,
    BoolB,
    BoolBT,
    FloatBT,
    MaskBT,
    assert_per_token,
    clamp,
    masked_mean,
    masked_sum,
    safe_exp,
    zero_masked,
)
from jaxrl.config_error import fail

Metrics = dict[str, Array]

# Statistics of a token that rejections of verl's grid bound, of x = log w.
_K: dict[str, Callable[[Array], Array]] = {
    "k1": lambda x: -x,
    "k2": lambda x: jnp.square(x) / 2,
    "k3": lambda x: jnp.expm1(x) - x,
}
REJECTIONS = tuple(
    f"{level}_{k}"
    for level in ("token", "seq_sum", "seq_mean", "seq_max")
    for k in _K
    if (level, k) != ("seq_max", "k1")
)
_GEO = {"sequence_mask_metric": "geometric", "geo_mask_low": 0.999, "geo_mask_high": 1.001}
_K3 = {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": "0.01"}
_TOKEN_TIS = {"tis_ratio_type": "token", "token_tis_ratio_clip_high": 2.0}
_SEQ_TIS = {"tis_ratio_type": "sequence", "sequence_tis_ratio_clip_high": 2.0}
# Corrections that the field has a name for, with the thresholds of where they are from.
PRESETS: dict[str, dict[str, Any]] = {
    "token_tis": _TOKEN_TIS,
    "seq_tis": _SEQ_TIS,
    "icepop": {
        "tis_ratio_type": "token",
        "token_tis_ratio_clip_high": 5.0,
        "token_mask_is_threshold_low": 0.5,
        "token_mask_is_threshold_high": 5.0,
    },
    "seq_mis": {
        **_SEQ_TIS,
        "sequence_mask_metric": "product",
        "product_mask_low": 0.5,
        "product_mask_high": 2.0,
    },
    "geo_rs": _GEO,
    "geo_rs_token_tis": _GEO | _TOKEN_TIS,
    "geo_rs_seq_tis": _GEO | _SEQ_TIS,
    "k3_rs": _K3,
    "k3_rs_token_tis": _K3 | _TOKEN_TIS,
    "k3_rs_seq_tis": _K3 | _SEQ_TIS,
    # NeMo-RL's: rows that are kept have whole weights, which are e^20 at most
    "seq_mask_tis": _GEO
    | {"geo_mask_high": 1.002, "tis_ratio_type": "token", "token_tis_ratio_clip_high": 1e9},
}


def correction_enabled(config: Any) -> bool:
    """Return whether an OffPolicyCorrectionConfig asks for anything."""
    settings = (
        config.tis_ratio_type,
        config.sequence_mask_metric,
        config.outlier_token_is_threshold_low,
        config.outlier_token_is_threshold_high,
        config.token_mask_is_threshold_low,
        config.token_mask_is_threshold_high,
        config.rollout_rs,
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
                        with rollout_is_batch_normalize divided by their mean
        sequence mask   rows with low <= W <= high;  "geometric": W = (prod_t w_t)^(1/tokens),
                        "product": W = prod_t w_t
        rejections      of rollout_rs, see `rejection_bounds`: tokens, or rows by the sum, mean or
                        largest of their tokens, with a statistic within its bounds

    Means and products are over the tokens that the steps before left, those of the rejections over
    all of loss_mask. Truncated weights: Yao et
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
        ValueError: unknown tis_ratio_type, sequence_mask_metric or rollout_rs; one token bound
            without the other.
    """
    assert_per_token(old_log_probs, rollout_log_probs, mask=loss_mask)
    sampled, old, rollout = zero_masked(loss_mask, loss_mask, old_log_probs, rollout_log_probs)
    mask = sampled
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
    for option, bounds in rejection_bounds(config).items():
        kept = _within(log_ratio, sampled, option, bounds)
        mask = mask * kept
        metrics[f"{option}_masked_ratio"] = masked_mean(~kept, sampled)
    return weights, mask, metrics


def rejection_bounds(config: Any) -> dict[str, tuple[float, float]]:
    """Return the bounds of each statistic of rollout_rs: verl's rejection grid, all of which hold.

        k1 = -log w_t           k2 = (log w_t)^2 / 2           k3 = w_t - 1 - log w_t

    of a token, or their sum, mean or largest in a row. Bounds of k1, "low_high", are those of
    exp(k1), which is the ratio the other way round, pi_rollout / pi_old; one number is the upper
    one, and the lower one its inverse. Those of k2 and k3 are upper ones.
    https://verl.readthedocs.io/en/latest/algo/rollout_corr.html

    Args:
        config: the OffPolicyCorrectionConfig; rollout_rs and rollout_rs_threshold are lists with
            commas, the second also one entry for all.

    Returns:
        By name (low, high): of exp(k1), of k2 and k3; these have low 0, as they are not negative.

    Raises:
        ConfigError: an unknown statistic, a number of thresholds, or a threshold that is none.
    """
    if config.rollout_rs is None:
        return {}
    options = config.rollout_rs.replace(" ", "").split(",")
    if unknown := [name for name in options if name not in REJECTIONS]:
        known = ", ".join(REJECTIONS)
        fail("rollout_rs", config.rollout_rs, f"{unknown[0]!r} is none of {known}")
    limits = str(config.rollout_rs_threshold).replace(" ", "").split(",")
    limits = limits * len(options) if len(limits) == 1 else limits
    if len(limits) != len(options):
        remedy = f"give one threshold, or one for each of the {len(options)} in rollout_rs"
        fail("rollout_rs_threshold", config.rollout_rs_threshold, remedy)
    return {name: _bounds(name, limit) for name, limit in zip(options, limits, strict=True)}


def _bounds(option: str, limit: str) -> tuple[float, float]:
    try:
        numbers = [float(x) for x in limit.split("_")]
    except ValueError:
        numbers = []
    if option.endswith("k1") and numbers:
        low, high = [1 / numbers[0], *numbers][-2:] if numbers[0] else (0.0, 0.0)
        if 0 < low <= 1 <= high and low < high and len(numbers) <= 2:
            return low, high
        remedy = f"of {option!r}: give a band of ratios around 1, such as 0.5_2.0, or its upper end"
        fail("rollout_rs_threshold", limit, remedy)
    if len(numbers) != 1 or not numbers[0] > 0:
        remedy = f"of {option!r}: give an upper bound > 0, such as 0.01"
        fail("rollout_rs_threshold", limit, remedy)
    return 0.0, numbers[0]


def _within(log_ratio: FloatBT, mask: MaskBT, option: str, bounds: tuple[float, float]) -> BoolBT:
    level, k = option.rsplit("_", 1)
    statistic = _K[k](clamp(log_ratio, -20.0, 20.0))
    if level == "seq_sum":
        statistic = masked_sum(statistic, mask, -1)[:, None]
    elif level == "seq_mean":
        statistic = masked_mean(statistic, mask, -1)[:, None]
    elif level == "seq_max":
        statistic = jnp.max(statistic, -1, initial=0.0, where=mask > 0)[:, None]
    low, high = bounds
    if k == "k1":
        kept = (statistic >= jnp.log(low)) & (statistic <= jnp.log(high))
    else:  # not negative but for rounding, near w = 1
        kept = statistic <= high
    return jnp.broadcast_to(kept, mask.shape)


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
    weights = jnp.minimum(weights, cap)
    if config.rollout_is_batch_normalize:
        rows = (mask > 0).any(-1)[:, None].astype(mask.dtype)
        weights = weights / masked_mean(weights, mask if weights.shape == mask.shape else rows)
    return jnp.broadcast_to(weights, mask.shape), metrics


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
