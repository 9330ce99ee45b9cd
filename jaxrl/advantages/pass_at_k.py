"""Advantages of samples in sets of k."""

from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp

from jaxrl.advantages.grpo import counted_rows
from jaxrl.advantages.row import Estimator, Problem, Settings
from jaxrl.array_ops import Array, BoolB, FloatBT, IntB, MaskBT, assert_per_token, group_sum


def pass_at_k(
    token_level_rewards: FloatBT,
    response_mask: MaskBT,
    index: IntB,
    values: FloatBT | None = None,
    config: Any = None,
    *,
    k: int = 4,
    threshold: float = 0.0,
    loss_mask: MaskBT | None = None,
    valid_mask: BoolB | None = None,
    **_: Any,
) -> tuple[FloatBT, FloatBT]:
    """Reward sets of k samples of a prompt in which one is right: pass@k training.

        F   = C(N-, k) / C(N, k)                   sets without a right sample, of all in G
        F-  = C(N- - 1, k - 1) / C(N - 1, k - 1)   of those that a wrong sample is in
        A_i = F / sqrt(F (1 - F)) if right, (F - F-) / sqrt(F (1 - F)) if wrong

    with N samples in G, N- of them wrong; 0 where F is 0 or 1: where too few are wrong to fill a
    set, where all are, and where G has no more than k samples. Chen et al., 2025,
    https://arxiv.org/abs/2508.10751 (the analytical derivation; its mean reward is 1 - F): a set
    earns 1 if one of it is right, else 0, its advantage is relative to all sets of G, over their
    deviation, and a sample has the mean of the sets that it is in. With k = 1 this is `grpo` with a
    deviation that divides by n. The authors' code adds 1e-6 to the root.

    Args:
        token_level_rewards, response_mask: [B, T] float.
        index: [B] int group ids in [0, B).
        values, config: not used.
        k: samples of a set.
        threshold: a sample is right if its score is larger.
        loss_mask, valid_mask: which rows count, see `counted_rows`; the others get 0.

    Returns:
        advantages [B, T], the same number on every response token, 0 elsewhere; returns, equal to
        them.

    Raises:
        ValueError: k < 1.
    """
    if k < 1:
        raise ValueError(f"advantage estimator 'pass_at_k' needs k >= 1, got {k}")
    assert_per_token(token_level_rewards, mask=response_mask)
    scores = token_level_rewards.sum(-1)
    counted = counted_rows(response_mask, loss_mask, valid_mask)
    right = counted & (scores > threshold)
    n = group_sum(counted.astype(scores.dtype), index)
    wrong = n - group_sum(right.astype(scores.dtype), index)
    fail = _share_of_sets(wrong, n, k)
    fail_with_wrong = _share_of_sets(wrong - 1, n - 1, k - 1)
    std = jnp.sqrt(fail * (1 - fail))
    advantages = jnp.where(right, fail, fail - fail_with_wrong) / jnp.where(std > 0, std, 1)
    advantages = jnp.where(counted & (std > 0), advantages, 0)
    advantages = advantages[:, None] * response_mask
    return advantages, advantages


def _share_of_sets(some: Array, n: Array, k: int) -> Array:
    """Return C(some, k) / C(n, k), exactly 0 where some < k: [B] -> [B]."""
    i = jnp.arange(k)
    return jnp.prod(jnp.maximum(some[:, None] - i, 0) / jnp.maximum(n[:, None] - i, 1), axis=-1)


def _check(s: Settings) -> Iterable[Problem]:
    if s["k"] < 1:
        yield "k", "must be 1 or more: a set has so many samples"


ROW = Estimator(
    pass_at_k,
    lambda s, group: (
        f"A = F / sqrt(F (1 - F)) if R > {s['threshold']:g}, else (F - F-) / sqrt(F (1 - F)); F of "
        f"the sets of {s['k']} in G are all wrong, F- of those that hold one wrong sample, {group}"
    ),
    paper="https://arxiv.org/abs/2508.10751",
    alone="0",
    least_samples=lambda s: s["k"] + 1,
    check=_check,
)
