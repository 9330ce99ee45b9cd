"""Several rewards, each compared with its group apart."""

from typing import Any

from jaxrl.advantages.grpo import counted_rows, group_relative
from jaxrl.advantages.row import Estimator, check_epsilon
from jaxrl.array_ops import BoolB, FloatBK, FloatBT, FloatK, IntB, MaskBT, whiten


def gdpo(
    token_level_rewards: FloatBT,
    response_mask: MaskBT,
    index: IntB,
    values: FloatBT | None = None,
    config: Any = None,
    *,
    reward_terms: FloatBK,
    reward_weights: FloatK,
    epsilon: float = 1e-6,
    loss_mask: MaskBT | None = None,
    valid_mask: BoolB | None = None,
    **_: Any,
) -> tuple[FloatBT, FloatBT]:
    """Normalise each reward by its group before they are added: GDPO, for several rewards.

        a_ik = (r_ik - mean_G r_k) / (std_G r_k + epsilon)          std with n - 1
        a_i  = sum_k w_k a_ik
        A_i  = (a_i - mean a) / sqrt(var a + 1e-8)                  over the batch, var with n - 1

    Liu et al., 2026, https://arxiv.org/abs/2601.05242. Normalised after they are added, as GRPO
    does, samples with other rewards and the same sum are the same; here each reward keeps its say,
    and the second step keeps the size of advantages whatever the number of rewards. A reward that
    is the same in a whole group has no part in it.

    Args:
        token_level_rewards, values, config: not used.
        response_mask: [B, T] float.
        index: [B] int group ids in [0, B).
        reward_terms: [B, K] rewards r, by name in alphabetical order, not weighted.
        reward_weights: [K] of environment.reward_weights.
        epsilon: of the division by the group's deviation.
        loss_mask, valid_mask: which rows count, see `counted_rows`; the others get 0.

    Returns:
        advantages [B, T], the same number on every response token, 0 elsewhere; returns, equal to
        them.
    """
    counted = counted_rows(response_mask, loss_mask, valid_mask)
    relative = group_relative(reward_terms, index, counted, by_std=True, epsilon=epsilon)
    total = whiten((relative @ reward_weights)[:, None], counted[:, None].astype(relative.dtype))
    advantages = total * response_mask
    return advantages, advantages


ROW = Estimator(
    gdpo,
    lambda s, group: (
        f"A = a less its mean in the batch, / std; a = sum_k w_k (r_k - mean_G r_k) / (std_G r_k + "
        f"{s['epsilon']}), k the rewards by name, {group}"
    ),
    paper="https://arxiv.org/abs/2601.05242",
    needs_terms=True,
    normalises=True,
    alone="its rewards, normalised over the batch",
    check=check_epsilon,
)
