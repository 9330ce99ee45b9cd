"""How far the policy has moved from the one that sampled: ratios of token probabilities.

They are counted before any clip or mask of the loss: what a loss leaves out is where a run breaks.
A microbatch adds its part of sums, so that no number depends on how a minibatch was cut; quantiles
come from the number of tokens under fixed bounds.
"""

from collections.abc import Mapping, Sequence

import jax.numpy as jnp
import numpy as np

from jaxrl.array_ops import Array, FloatBT, clamp, masked_sum, safe_exp, zero_masked
from jaxrl.types import TrainBatch

QUANTILES = (0.01, 0.05, 0.5, 0.95, 0.99)
_STEPS = np.geomspace(1e-4, 10.0, 41)  # eight for each power of ten
BOUNDS = np.concatenate([-_STEPS[::-1], [0.0], _STEPS]).astype(np.float32)  # of log-ratios


def ratio_sums(log_probs: FloatBT, batch: TrainBatch, low: float, high: float) -> dict[str, Array]:
    """Sum over the sampled tokens of a microbatch, to be added over microbatches and updates.

    Args:
        log_probs: [B, T] of the policy as it is in this update.
        batch: ratios are to old_log_probs, 1 without them; importance weights to rollout_log_probs,
            or where there are none to the old policy.
        low, high: of the clip: ratios below 1 - low and above 1 + high are counted.

    Returns:
        "under" [len(BOUNDS)] tokens whose log-ratio is at most the bound; the others [].
    """
    old = log_probs if batch.old_log_probs is None else batch.old_log_probs
    sampler = old if batch.rollout_log_probs is None else batch.rollout_log_probs
    mask, moved, apart = zero_masked(
        batch.loss_mask, batch.loss_mask, log_probs - old, log_probs - sampler
    )
    ratio, weight, tokens = safe_exp(moved), safe_exp(apart), mask != 0
    return {
        "tokens": mask.sum(),
        "under": ((moved[..., None] <= BOUNDS) & tokens[..., None]).sum((0, 1), jnp.float32),
        "approx_kl": masked_sum(jnp.expm1(clamp(moved, -20.0, 20.0)) - moved, mask),
        "below_clip": masked_sum(ratio < 1 - low, mask),
        "above_clip": masked_sum(ratio > 1 + high, mask),
        "weight": masked_sum(weight, mask),
        "weight_squared": masked_sum(jnp.square(weight), mask),
        "ratio_max": jnp.max(ratio, initial=0.0, where=tokens),
        "ratio_min": jnp.min(ratio, initial=jnp.inf, where=tokens),
    }


def add_ratio_sums(parts: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Return the sums of a whole from those of its parts; `_max` and `_min` by name."""
    merge = {"_max": np.max, "_min": np.min}
    return {
        name: merge.get(name[-4:], np.sum)(np.stack([part[name] for part in parts]), axis=0)
        for name in parts[0]
    }


def ratio_metrics(sums: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Return the metrics of a step from the sums over its updates; none without a sampled token.

    ratio_p01 ... ratio_p99: quantiles. clip_fraction_low, clip_fraction_high: tokens beyond the
    clip, whatever the sign of their advantage. approx_kl: of the old policy from this one, mean of
    r - 1 - log r (Schulman, http://joschu.net/blog/kl-approx.html). effective_sample_size:
    (sum w)^2 / (n sum w^2) of the importance weights w, 1 on-policy.
    """
    tokens = float(sums["tokens"])
    if not tokens:
        return {}
    lowest, highest = float(sums["ratio_min"]), float(sums["ratio_max"])
    points = np.interp(QUANTILES, sums["under"] / tokens, BOUNDS)
    quantiles = np.clip(np.exp(points), lowest, highest)
    return {
        **{f"ratio_p{100 * q:02.0f}": float(x) for q, x in zip(QUANTILES, quantiles, strict=True)},
        "ratio_max": highest,
        "ratio_min": lowest,
        "approx_kl": float(sums["approx_kl"]) / tokens,
        "clip_fraction_low": float(sums["below_clip"]) / tokens,
        "clip_fraction_high": float(sums["above_clip"]) / tokens,
        "effective_sample_size": float(sums["weight"] ** 2 / (tokens * sums["weight_squared"])),
    }
