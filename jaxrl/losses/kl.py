"""Estimators of KL(pi_theta || pi_ref) from one sample per token.

Schulman, http://joschu.net/blog/kl-approx.html.
"""

import jax.numpy as jnp

from jaxrl.array_ops import Array, clamp

KL_ESTIMATORS = ("k1", "k2", "k3", "abs")


def approximate_kl(
    log_probs: Array, ref_log_probs: Array, loss_mask: Array | None = None, kind: str = "k3"
) -> Array:
    """Per-token KL estimate [B, T], 0 where masked; the gradient flows through `log_probs`.

        d   = log pi_theta(a_t | s_t) - log pi_ref(a_t | s_t)
        k1  = d                  unbiased; as a loss its gradient does not know pi_ref
        k2  = d^2 / 2
        k3  = exp(-d) + d - 1    unbiased, non-negative; -d clamped to +-20, the result to +-10
        abs = |d|

    Args:
        log_probs, ref_log_probs: [B, T] float.
        loss_mask: [B, T]; masked positions may hold NaN without harm to value or gradient.
        kind: one of `KL_ESTIMATORS`.

    Raises:
        ValueError: unknown kind.
    """
    delta = log_probs - ref_log_probs
    if loss_mask is not None:
        delta = jnp.where(
            loss_mask != 0, delta, 0.0
        )  # before the formula: k2's gradient of NaN is NaN
    if kind == "k1":
        kl = delta
    elif kind == "k2":
        kl = jnp.square(delta) / 2
    elif kind == "k3":
        exponent = clamp(-delta, -20.0, 20.0)
        kl = clamp(jnp.exp(exponent) - exponent - 1, -10.0, 10.0)
    elif kind == "abs":
        kl = delta * jnp.sign(delta)  # gradient 0 at 0; jax.grad(jnp.abs)(0.) is 1
    else:
        raise ValueError(
            f"Invalid KL estimator type '{kind}'. Must be one of {list(KL_ESTIMATORS)}"
        )
    return kl if loss_mask is None else kl * loss_mask
