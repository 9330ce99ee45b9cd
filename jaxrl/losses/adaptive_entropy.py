"""The coefficient of the entropy term, moved until the entropy is what is asked for."""

import jax.numpy as jnp

from jaxrl.array_ops import FloatScalar


def adaptive_entropy_coef(
    coef: FloatScalar | float,
    entropy: FloatScalar | float,
    *,
    target: float,
    delta: float,
    maximum: float,
) -> FloatScalar:
    """Return the coefficient after a step whose entropy was `entropy`: up below the target.

        c' = clip(c + delta, 0, maximum)  where H <= target,  else clip(c - delta, 0, maximum)

    He et al., 2025, https://arxiv.org/abs/2505.22312. The term counts only while the
    entropy is at its target or below: see `used_entropy_coef`.

    Args:
        coef: the coefficient so far, >= 0.
        entropy: mean entropy of the sampled tokens, in nats.
        target, delta, maximum: the entropy to hold, the change of a step, the largest coefficient.
    """
    moved = jnp.where(jnp.asarray(entropy) <= target, coef + delta, coef - delta)
    return jnp.clip(moved, 0.0, maximum)


def used_entropy_coef(
    coef: FloatScalar | float, entropy: FloatScalar | float, *, target: float
) -> FloatScalar:
    """Return the coefficient that the next step uses: 0 while the entropy is above its target."""
    return jnp.where(jnp.asarray(entropy) <= target, coef, 0.0)
