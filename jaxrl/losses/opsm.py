"""OPSM: no loss on bad rows that the policy has moved away from."""

import jax

from jaxrl.array_ops import Array, FloatBT, MaskBT, assert_per_token, masked_mean, zero_masked


def off_policy_sequence_mask(
    log_probs: FloatBT,
    rollout_log_probs: FloatBT,
    advantages: FloatBT,
    loss_mask: MaskBT,
    delta: float,
) -> tuple[MaskBT, dict[str, Array]]:
    """Mark the tokens that are learnt from: off-policy sequence masking drops bad, old rows.

        M_it = 0  where A_it < 0 and mean_t (log pi_rollout - log pi_theta)(a_t | s_t) > delta
        M_it = 1  elsewhere

    DeepSeek-AI, 2025, https://arxiv.org/abs/2512.02556 (eq. 9), against the policy that sampled,
    as there. A row looks at itself alone; what it is divided by does not change.

    Args:
        log_probs, rollout_log_probs, advantages: [B, T] float; the gradient does not pass.
        loss_mask: [B, T]; what is masked may be NaN.
        delta: nats per token.

    Returns:
        mask [B, T] of 0 and 1; {"opsm_dropped": [B, T] the tokens without a loss}.
    """
    assert_per_token(log_probs, rollout_log_probs, advantages, mask=loss_mask)
    given = jax.lax.stop_gradient((log_probs, rollout_log_probs, advantages))
    new, rollout, advantages = zero_masked(loss_mask, *given)
    drift = masked_mean(rollout - new, loss_mask, -1)
    dropped = (advantages < 0) & (drift > delta)[:, None]
    return (~dropped).astype(new.dtype), {"opsm_dropped": dropped}
