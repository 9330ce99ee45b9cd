"""Estimators of KL(pi_theta || pi_ref) from one sample per token, and the KL in the reward.

Schulman, http://joschu.net/blog/kl-approx.html.
"""

import jax
import jax.numpy as jnp

from jaxrl.array_ops import (
    Array,
    FloatBT,
    FloatScalar,
    MaskBT,
    absolute,
    clamp,
    safe_exp,
    zero_masked,
)

KL_ESTIMATORS = ("k1", "k2", "k3", "k3+", "abs")
UNBIASED = ("k1", "k3")  # in expectation over the policy's own tokens they are the KL


def approximate_kl(
    log_probs: FloatBT, ref_log_probs: FloatBT, loss_mask: MaskBT | None = None, kind: str = "k3"
) -> FloatBT:
    """Estimate the KL per token [B, T], 0 where masked; the gradient flows through `log_probs`.

        d   = log pi_theta(a_t | s_t) - log pi_ref(a_t | s_t)
        k1  = d                  unbiased; as a loss its gradient does not know pi_ref
        k2  = d^2 / 2
        k3  = exp(-d) + d - 1    unbiased, non-negative; -d clamped to +-20, the result to +-10
        k3+ = k2 - sg(k2) + sg(k3)           the value of k3 with the gradient of k2, as in verl
        abs = |d|

    As a loss, averaged over the policy's own tokens, k3 has the gradient of KL(pi_ref || pi_theta),
    the other direction, and k2 that of KL(pi_theta || pi_ref); the gradient of k1 is 0 in
    expectation. Tokens of an older policy need an importance weight: `unbiased_kl`.

    Args:
        log_probs, ref_log_probs: [B, T] float.
        loss_mask: [B, T]; masked positions may hold NaN without harm to value or gradient.
        kind: one of `KL_ESTIMATORS`.

    Raises:
        ValueError: unknown kind.
    """
    log_probs, ref_log_probs = zero_masked(loss_mask, log_probs, ref_log_probs)
    delta = log_probs - ref_log_probs
    if kind == "k1":
        kl = delta
    elif kind == "k2":
        kl = jnp.square(delta) / 2
    elif kind in ("k3", "k3+"):
        exponent = clamp(-delta, -20.0, 20.0)
        kl = clamp(_exp_above_tangent(exponent), -10.0, 10.0)
        if kind == "k3+":
            slope = jnp.square(delta) / 2
            kl = slope + jax.lax.stop_gradient(kl - slope)
    elif kind == "abs":
        kl = absolute(delta)
    else:
        raise ValueError(
            f"Invalid KL estimator type '{kind}'. Must be one of {list(KL_ESTIMATORS)}"
        )
    return kl if loss_mask is None else kl * loss_mask


def unbiased_kl(
    log_probs: FloatBT,
    old_log_probs: FloatBT,
    ref_log_probs: FloatBT,
    loss_mask: MaskBT | None = None,
    kind: str = "k3",
) -> FloatBT:
    """Weigh the estimate by the ratio, so that value and gradient are those of the KL.

        kl_t = r_t k_t          r_t = pi_theta(a_t | s_t) / pi_old(a_t | s_t), with its gradient

    DeepSeek-AI, 2025, https://arxiv.org/abs/2512.02556 (eq. 7), with k3. Averaged over tokens of
    pi_old both are those of KL(pi_theta || pi_ref) of the next token, however far apart the two
    policies are, where k is unbiased (k1, k3). At pi_theta = pi_old too: there r is 1, but not its
    gradient 0, which is what `approximate_kl` leaves out. The log ratio is clamped to +-20.

    Args:
        log_probs, old_log_probs, ref_log_probs: [B, T] float.
        loss_mask: [B, T]; what is masked may be NaN.
        kind: one of `UNBIASED`.

    Returns:
        [B, T], 0 where masked.
    """
    new, old = zero_masked(loss_mask, log_probs, old_log_probs)
    return safe_exp(new - old) * approximate_kl(log_probs, ref_log_probs, loss_mask, kind)


@jax.custom_jvp
def _exp_above_tangent(x: Array) -> Array:
    """Return exp(x) - 1 - x; near 0 that is x^2 / 2, not what rounding leaves of exp(x) - 1."""
    return jnp.expm1(x) - x


@_exp_above_tangent.defjvp
def _exp_above_tangent_jvp(primals: tuple, tangents: tuple) -> tuple[Array, Array]:
    (x,), (tangent,) = primals, tangents
    return _exp_above_tangent(x), jnp.exp(x) * tangent - tangent


def penalized_rewards(
    rewards: FloatBT, kl: FloatBT, mask: MaskBT, coef: FloatScalar | float
) -> FloatBT:
    """Take the KL to the reference model off the token rewards.

        r'_t = r_t - max(0, coef) kl_t m_t

    Ouyang et al., 2022, https://arxiv.org/abs/2203.02155 (eq. 2).

    Args:
        rewards: [B, T] float.
        kl: [B, T] `approximate_kl` of the OLD policy: rewards carry no gradient.
        mask: [B, T] tokens that the policy sampled; masked NaN does no harm.
        coef: the controller's coefficient.
    """
    (kl,) = zero_masked(mask, kl)
    return rewards - jnp.maximum(coef, 0.0) * kl * mask


def adaptive_kl_coef(
    coef: FloatScalar | float,
    kl: FloatScalar | float,
    *,
    kl_target: float,
    horizon: float,
    rows: int,
) -> FloatScalar:
    """Return the coefficient after a batch with KL `kl`: it rises while the KL is over its target.

        coef' = coef (1 + clip(kl / kl_target - 1, -0.2, 0.2) rows / horizon)

    Ziegler et al., 2019, https://arxiv.org/abs/1909.08593 (sec. 2.2).

    Args:
        coef: the coefficient so far.
        kl: mean KL of the batch, in nats per token.
        kl_target: KL to aim at, > 0.
        horizon: rows in which a KL 20 % or more off changes the coefficient by 20 %, > 0.
        rows: trajectories in the batch.

    Raises:
        ValueError: kl_target or horizon not positive.
    """
    for name, value in (("kl_target", kl_target), ("horizon", horizon)):
        if value <= 0:
            raise ValueError(f"kl_ctrl.{name}={value} must be > 0")
    error = jnp.clip(jnp.asarray(kl) / kl_target - 1, -0.2, 0.2)
    return coef * (1 + error * rows / horizon)
