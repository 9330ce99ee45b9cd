"""Generalised advantage estimation with one lambda for the critic and one for the policy."""

from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp

from jaxrl.advantages.gae import error_sums
from jaxrl.advantages.row import Estimator, Problem, Settings
from jaxrl.array_ops import FloatBT, IntB, MaskBT, assert_per_token, whiten


def vapo(
    token_level_rewards: FloatBT,
    response_mask: MaskBT,
    index: IntB,
    values: FloatBT | None = None,
    config: Any = None,
    *,
    gamma: float = 1.0,
    lambd: float = 1.0,
    critic_lambd: float = 1.0,
    length_adaptive_alpha: float | None = 0.05,
    loss_mask: MaskBT | None = None,
    **_: Any,
) -> tuple[FloatBT, FloatBT]:
    """Take GAE with a lambda for the critic and, by length, one for each sample: VAPO.

        returns  = G + V                    with critic_lambd
        A        = (G - mean G) / sqrt(var G + 1e-8)        with lambda_i, over all sampled tokens
        lambda_i = 1 - 1 / (length_adaptive_alpha l_i)      l_i sampled tokens of sample i

    with G and V of `gae`. Yue et al., 2025, https://arxiv.org/abs/2504.05118 (length-adaptive GAE);
    without alpha both lambdas are fixed: the decoupled GAE of VC-PPO, Yuan et al., 2025,
    https://arxiv.org/abs/2503.01491, with a lambd below 1. A sample of 1 / alpha tokens, 20, or
    fewer has lambda 0: each token is judged by its reward and the next value alone. The other parts
    of VAPO are fields of the config: trainer.critic_warmup_steps, positive_nll_coef 0.1,
    loss_reduction "token_mean", eps_clip_high 0.28.

    Args:
        token_level_rewards, response_mask: [B, T] float.
        index, config: not used.
        values: [B, T] of the state before each token.
        gamma: discount per sampled token.
        lambd: of the advantages, if there is no alpha.
        critic_lambd: of the returns.
        length_adaptive_alpha: None = lambd for all samples.
        loss_mask: [B, T] tokens that the policy sampled; None = the whole response.

    Returns:
        advantages and returns [B, T], 0 outside the mask.

    Raises:
        ValueError: no values.
    """
    if values is None:
        raise ValueError("advantage estimator 'vapo' needs the values of a critic, got None")
    assert_per_token(token_level_rewards, values, mask=response_mask)
    mask = response_mask if loss_mask is None else loss_mask * response_mask
    rewards = jnp.where(response_mask != 0, token_level_rewards, 0)
    decay: Any = lambd
    if length_adaptive_alpha is not None:
        decay = 1 - 1 / jnp.maximum(length_adaptive_alpha * mask.sum(-1), 1)
    returns = error_sums(rewards, mask, values, gamma=gamma, lambd=critic_lambd)[1]
    sums = error_sums(rewards, mask, values, gamma=gamma, lambd=decay)[0]
    return whiten(sums, mask), returns


def _formula(s: Settings, group: str) -> str:
    gamma, alpha = f"{s['gamma']:g}", s["length_adaptive_alpha"]
    lambd = f"lambda = {s['lambd']:g}"
    if alpha is not None:
        lambd = f"lambda = 1 - 1 / ({alpha:g} l), l sampled tokens"
    return (
        f"A = normalised G_t = d_t + {gamma} lambda G_t+1, d_t = r_t + {gamma} V_t+1 - V_t, "
        f"{lambd}; of the returns {s['critic_lambd']:g}"
    )


def _check(s: Settings) -> Iterable[Problem]:
    if not 0 <= s["critic_lambd"] <= 1:
        yield "critic_lambd", "must be in [0, 1]; 1.0 is no discount"
    alpha = s["length_adaptive_alpha"]
    if alpha is not None and not alpha > 0:
        yield "length_adaptive_alpha", "must be positive, e.g. 0.05; None = lambd for all samples"


ROW = Estimator(
    vapo,
    _formula,
    paper="https://arxiv.org/abs/2504.05118",
    per_token=True,
    needs_values=True,
    normalises=True,
    check=_check,
)
