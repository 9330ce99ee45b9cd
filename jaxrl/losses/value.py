"""The critic's loss."""

import jax.numpy as jnp

from jaxrl.array_ops import Array, FloatBT, MaskBT, assert_per_token, clamp, zero_masked


def value_loss(
    values: FloatBT,
    old_values: FloatBT,
    returns: FloatBT,
    value_clip: float | None,
    loss_mask: MaskBT | None = None,
) -> tuple[FloatBT, dict[str, Array]]:
    """Return half the squared error of the values, clipped as PPO clips the policy.

        c_t = V_old,t + clip(V_t - V_old,t, -value_clip, value_clip)
        L_t = max((V_t - R_t)^2, (c_t - R_t)^2) / 2

    Schulman et al., 2017, https://arxiv.org/abs/1707.06347, as in the authors' code (baselines,
    ppo2). SkyRL averages it over sequences (reduction "sequence_mean").

    Args:
        values, old_values, returns: [B, T] float.
        value_clip: half width of the band around the old values; None = no clip.
        loss_mask: [B, T] or None; what is masked may be NaN.

    Returns:
        loss [B, T], unmasked and unreduced; {"clipfrac": [B, T] 0/1 where the clip took effect}.
    """
    assert_per_token(values, old_values, returns)
    values, old_values, returns = zero_masked(loss_mask, values, old_values, returns)
    error = jnp.square(values - returns)
    if value_clip is None:
        return error / 2, {"clipfrac": jnp.zeros_like(error)}
    change = values - old_values
    limited = clamp(change, -value_clip, value_clip)
    clipped_error = jnp.square(old_values + limited - returns)
    # old + (v - old) differs from v by rounding: that is no clip
    clipped = (limited != change) & (clipped_error > error)
    return jnp.maximum(error, clipped_error) / 2, {"clipfrac": clipped}
