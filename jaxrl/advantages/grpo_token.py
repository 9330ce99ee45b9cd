"""Group-relative advantages per token."""

from typing import Any

from jaxrl.advantages.grpo import counted_rows, group_relative
from jaxrl.advantages.row import Estimator, check_group_epsilon, relative
from jaxrl.array_ops import BoolB, FloatBT, IntB, MaskBT, assert_per_token, discounted_sums


def grpo_token(
    token_level_rewards: FloatBT,
    response_mask: MaskBT,
    index: IntB,
    values: FloatBT | None = None,
    config: Any = None,
    *,
    gamma: float = 1.0,
    grpo_norm_by_std: bool = True,
    epsilon: float = 1e-6,
    loss_mask: MaskBT | None = None,
    valid_mask: BoolB | None = None,
    **_: Any,
) -> tuple[FloatBT, FloatBT]:
    """Compare what a sample earns from a token on with its group: GRPO with rewards per token.

        R_it = sum_{u >= t} gamma^(u - t) r_iu
        A_it = (R_it - mean_G R_t) / (std_G R_t + epsilon)          std with n - 1

    A sample that has ended earns 0. After the process supervision of Shao et al., 2024,
    https://arxiv.org/abs/2402.03300 (sec. 4.1.3), which normalises each reward by all rewards of
    the group and then sums; here the sums are normalised, so that an easy and a hard position have
    baselines of their own. The samples of a group share their prompt, so equal columns are
    equal positions of the response. With one reward at the end this is `grpo` for every
    token before the shortest response ends.

    Args:
        token_level_rewards, response_mask: [B, T] float.
        index: [B] int group ids in [0, B).
        values, config: not used.
        gamma: discount; 0 when each token has a reward of its own that the others do not change.
        grpo_norm_by_std: divide by the group's standard deviation.
        loss_mask, valid_mask: which rows count, see `counted_rows`; the others get 0.

    Returns:
        advantages [B, T], 0 outside the response; returns R [B, T].
    """
    assert_per_token(token_level_rewards, mask=response_mask)
    returns = discounted_sums(token_level_rewards, gamma)
    counted = counted_rows(response_mask, loss_mask, valid_mask)
    advantages = group_relative(returns, index, counted, by_std=grpo_norm_by_std, epsilon=epsilon)
    return advantages * response_mask, returns * response_mask


ROW = Estimator(
    grpo_token,
    lambda s, group: f"A = {relative(s)}, R = r_t + {s['gamma']:g} R_t+1, {group}",
    paper="https://arxiv.org/abs/2402.03300",
    per_token=True,
    alone="the reward itself",
    check=check_group_epsilon,
)
