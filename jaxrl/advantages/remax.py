"""Advantages relative to the policy's greedy answer."""

from typing import Any

from jaxrl.advantages.row import Estimator
from jaxrl.array_ops import FloatB, FloatBT, IntB, MaskBT, assert_per_token


def remax(
    token_level_rewards: FloatBT,
    response_mask: MaskBT,
    index: IntB,
    values: FloatBT | None = None,
    config: Any = None,
    *,
    greedy_rewards: FloatB,
    **_: Any,
) -> tuple[FloatBT, FloatBT]:
    """Compare each sample with the greedy answer to its prompt: ReMax.

        A_i = s_i - s_greedy                                   s_i = sum_t r_it

    Li et al., 2023, https://arxiv.org/abs/2310.10505 (Algorithm 1). One answer more is sampled of
    every prompt, at temperature 0, judged by the environment, and not learnt from: a baseline that
    does not depend on the sample, so one sample of a prompt is enough. What punishes long or cut
    off samples has no part in it.

    Args:
        token_level_rewards, response_mask: [B, T] float.
        index, values, config: not used.
        greedy_rewards: [B] what the greedy answer to the row's prompt earned.

    Returns:
        advantages [B, T], the same number on every response token, 0 elsewhere; returns, equal to
        them.
    """
    assert_per_token(token_level_rewards, mask=response_mask)
    scores = token_level_rewards.sum(-1) - greedy_rewards
    advantages = scores[:, None] * response_mask
    return advantages, advantages


ROW = Estimator(
    remax,
    lambda s, group: "A = R - R of the greedy answer to the prompt",
    paper="https://arxiv.org/abs/2310.10505",
    needs_greedy=True,
)
