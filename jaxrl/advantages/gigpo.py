"""Group-relative advantages of trajectories, and of turns that began in the same state."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl.advantages.grpo import counted_rows
from jaxrl.advantages.row import Estimator, Problem, Settings, check_group_epsilon
from jaxrl.array_ops import (
    Array,
    BoolB,
    FloatB,
    FloatBT,
    IntB,
    MaskBT,
    assert_per_token,
    group_centred,
    group_std,
    group_sum,
)


def gigpo(
    token_level_rewards: FloatBT,
    response_mask: MaskBT,
    index: IntB,
    values: FloatBT | None = None,
    config: Any = None,
    *,
    turn_rewards: FloatB,
    turn_states: IntB,
    trajectory: IntB,
    step_weight: float = 1.0,
    step_gamma: float = 0.95,
    grpo_norm_by_std: bool = True,
    epsilon: float = 1e-6,
    loss_mask: MaskBT | None = None,
    valid_mask: BoolB | None = None,
    **_: Any,
) -> tuple[FloatBT, FloatBT]:
    """Compare trajectories, and turns from equal states: group-in-group policy optimization.

        R_t = sum_{k >= t} step_gamma^(k - t) r_k              over the turns of a trajectory
        A_E = (s_i - mean_G s) / (std_G s + epsilon)           s_i = sum of rewards, G of a prompt
        A_S = (R_t - mean_S R) / (std_S R + epsilon)           S turns of G from the same state
        A   = A_E + step_weight A_S                            std with n - 1; without it: 1

    Feng et al., 2025, https://arxiv.org/abs/2505.10978 (eq. 3, 6-8). A row is a turn
    (generator.step_wise_trajectories), its state what the environment said before it, word for
    word; that of first turns is the prompt. A turn whose state no other has, and a prompt with one
    sample, get 0 of that part. The authors' code by default does not divide, counts a trajectory
    once per turn in A_E's mean and deviation, and leaves a lone sample its score.

    Args:
        token_level_rewards: [B, T] float, of which a trajectory's sum is s.
        response_mask: [B, T] float.
        index: [B] int prompt of each row, in [0, B).
        values, config: not used.
        turn_rewards: [B] what each turn earned.
        turn_states: [B] int in [0, B), equal for turns of a prompt from the same state.
        trajectory: [B] int, its turns neighbours and in order.
        step_weight: omega in the paper.
        step_gamma: discount per turn.
        grpo_norm_by_std: divide by the deviations.
        loss_mask, valid_mask: which rows count, see `counted_rows`; the others get 0.

    Returns:
        advantages [B, T], the same number on every response token of a turn, 0 elsewhere; returns,
        equal to them.
    """
    assert_per_token(token_level_rewards, mask=response_mask)
    counted = counted_rows(response_mask, loss_mask, valid_mask)
    goes_on = jnp.append(trajectory[1:] == trajectory[:-1], False)
    scores = group_sum(token_level_rewards.sum(-1), trajectory)

    def relative(x: FloatB, groups: IntB, of: BoolB) -> FloatB:
        centred = group_centred(x, groups, of)
        return centred / (group_std(centred, groups, of) + epsilon) if grpo_norm_by_std else centred

    of_last = relative(scores, index, counted & ~goes_on)  # each trajectory once
    episode = jnp.where(counted, group_sum(of_last, trajectory), 0)
    step = relative(turn_returns(turn_rewards, goes_on, step_gamma), turn_states, counted)
    advantages = (episode + step_weight * step)[:, None] * response_mask
    return advantages, advantages


def turn_returns(rewards: FloatB, goes_on: BoolB, gamma: float) -> FloatB:
    """Return the discounted sum of a turn's and the later rewards of its trajectory, [B].

    Args:
        goes_on: [B] whether the next row is the next turn of the same trajectory.
    """

    def step(later: Array, now: tuple[Array, Array]) -> tuple[Array, Array]:
        reward, more = now
        total = reward + jnp.where(more, gamma * later, 0)
        return total, total

    return jax.lax.scan(step, jnp.zeros_like(rewards[0]), (rewards, goes_on), reverse=True)[1]


def _check(s: Settings) -> Iterable[Problem]:
    yield from check_group_epsilon(s)
    if not s["step_weight"] >= 0:
        yield "step_weight", "must not be negative: good turns would be punished; e.g. 1.0"
    if not 0 <= s["step_gamma"] <= 1:
        yield "step_gamma", "must be in [0, 1]; 1.0 is no discount"


ROW = Estimator(
    gigpo,
    lambda s, group: (
        f"A = (s - mean_G s) / std_G s + {s['step_weight']:g} (R - mean_S R) / std_S R, s = sum of "
        f"r, R = r + {s['step_gamma']:g} R of the next turn, S turns from the same state, {group}"
    ),
    paper="https://arxiv.org/abs/2505.10978",
    per_turn=True,
    alone="0",
    check=_check,
)
