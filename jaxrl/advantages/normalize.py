"""Normalisation of a batch's advantages."""

import jax
import jax.numpy as jnp

from jaxrl.array_ops import FloatBT, MaskBT, masked_mean, zero_masked


def normalize_advantages(advantages: FloatBT, mask: MaskBT) -> FloatBT:
    """Shift and scale advantages to mean 0 and variance 1 over the mask.

        A' = (A - mean A) / sqrt(max(var A, 1e-8))        var with n

    SkyRL's mean counts padding as zeros and leaves padding non-zero; here the mask holds for both.

    Args:
        advantages, mask: [B, T] of the whole batch; what is masked may be NaN.

    Returns:
        [B, T], 0 where masked.
    """
    (advantages,) = zero_masked(mask, advantages)
    centred = (advantages - masked_mean(advantages, mask)) * mask
    variance = masked_mean(jnp.square(centred), mask)
    return centred * jax.lax.rsqrt(jnp.maximum(variance, 1e-8))
