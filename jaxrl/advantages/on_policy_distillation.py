"""How much likelier a teacher finds each token."""

from typing import Any

import jax.numpy as jnp

from jaxrl.advantages.row import Estimator
from jaxrl.array_ops import FloatBT, IntB, MaskBT, assert_per_token


def on_policy_distillation(
    token_level_rewards: FloatBT,
    response_mask: MaskBT,
    index: IntB,
    values: FloatBT | None = None,
    config: Any = None,
    *,
    old_log_probs: FloatBT,
    ref_log_probs: FloatBT,
    loss_mask: MaskBT | None = None,
    **_: Any,
) -> tuple[FloatBT, FloatBT]:
    """Let the student sample and the reference model teach: on-policy distillation.

        A_t = log pi_teacher(a_t | s_t) - log pi_student(a_t | s_t)

    Its mean is minus the reverse KL per token, so raising it draws the student to the teacher on
    the student's own samples. Agarwal et al., 2023, https://arxiv.org/abs/2306.13649, with the
    reverse KL estimated from the sampled token alone, as in
    https://thinkingmachines.ai/blog/on-policy-distillation/: no token is credited with what it
    makes of later ones. Rewards of the environment do not count.

    Args:
        response_mask: [B, T] float.
        old_log_probs: [B, T] of the policy that is trained, before the step.
        ref_log_probs: [B, T] of the teacher.
        loss_mask: [B, T] tokens that the policy sampled; None = the whole response.
        token_level_rewards, index, values, config: not used.

    Returns:
        advantages [B, T], 0 outside the mask; the same as returns.
    """
    assert_per_token(old_log_probs, ref_log_probs, mask=response_mask)
    mask = response_mask if loss_mask is None else loss_mask * response_mask
    advantages = jnp.where(mask != 0, ref_log_probs - old_log_probs, 0)
    return advantages, advantages


ROW = Estimator(
    on_policy_distillation,
    lambda s, group: "A = ref_log_probs - old_log_probs; rewards do not count",
    paper="https://arxiv.org/abs/2306.13649",
    per_token=True,
    needs_teacher=True,
    uses_rewards=False,
)
