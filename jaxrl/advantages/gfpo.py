"""Group-relative advantages of the shortest samples."""

from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp

from jaxrl.advantages.grpo import counted_rows, grpo
from jaxrl.advantages.row import Estimator, Problem, Settings, check_group_epsilon, relative
from jaxrl.array_ops import Array, BoolB, FloatBT, IntB, MaskBT, assert_per_token

METRICS = ("length", "token_efficiency")


def gfpo(
    token_level_rewards: FloatBT,
    response_mask: MaskBT,
    index: IntB,
    values: FloatBT | None = None,
    config: Any = None,
    *,
    keep: int = 4,
    metric: str = "length",
    grpo_norm_by_std: bool = True,
    epsilon: float = 1e-6,
    loss_mask: MaskBT | None = None,
    valid_mask: BoolB | None = None,
    **_: Any,
) -> tuple[FloatBT, FloatBT]:
    """Learn from the shortest samples of each prompt alone: group filtered policy optimisation.

        A_i = (s_i - mean_K s) / (std_K s + epsilon) for i in K, else 0       s_i = sum_t r_it

    with K the `keep` samples of G with the least l_i (metric "length") or the largest s_i / l_i
    ("token_efficiency"); l_i are the tokens of the response. Shrivastava et al., 2025,
    https://arxiv.org/abs/2508.09726 (8 of 16 or 24 samples). Of equally good samples the shorter is
    kept, then the first. A group of `keep` samples or fewer gets what `grpo` gives it; with
    keep = 1 a larger one gets 0.

    Args:
        token_level_rewards, response_mask: [B, T] float.
        index: [B] int group ids in [0, B).
        values, config: not used.
        keep: samples of a group that are kept.
        metric: "length" or "token_efficiency".
        grpo_norm_by_std: divide by the standard deviation of those that are kept.
        loss_mask, valid_mask: which rows count, see `counted_rows`; the others get 0.

    Returns:
        advantages [B, T], the same number on every response token, 0 elsewhere; returns, equal to
        them.

    Raises:
        ValueError: another metric.
    """
    assert_per_token(token_level_rewards, mask=response_mask)
    scores = token_level_rewards.sum(-1)
    counted = counted_rows(response_mask, loss_mask, valid_mask)
    lengths = response_mask.sum(-1)
    if metric not in METRICS:
        raise ValueError(
            f"metric of advantage estimator 'gfpo' must be one of {list(METRICS)}, got {metric!r}"
        )
    worth = -lengths if metric == "length" else scores / jnp.maximum(lengths, 1)
    order = jnp.lexsort((lengths, -worth, ~counted, index))
    return grpo(
        token_level_rewards,
        response_mask,
        index,
        grpo_norm_by_std=grpo_norm_by_std,
        epsilon=epsilon,
        valid_mask=counted & (_places(index, order) < keep),
    )


def _places(index: IntB, order: Array) -> Array:
    """Return the place of each row in its group, from 0: [B] -> [B].

    Args:
        order: the rows, group by group.
    """
    groups = index[order]
    places = jnp.arange(len(order)) - jnp.searchsorted(groups, groups)
    return jnp.zeros_like(places).at[order].set(places)


def _check(s: Settings) -> Iterable[Problem]:
    yield from check_group_epsilon(s)
    if s["keep"] < 2:
        yield "keep", "must be 2 or more: a sample that is kept alone is compared with no other"
    if s["metric"] not in METRICS:
        yield "metric", f"must be {' or '.join(map(repr, METRICS))}"


def _odd(s: Settings, samples: int) -> Iterable[str]:
    if 1 < samples <= s["keep"]:
        yield (
            f"advantage_kwargs.keep={s['keep']} with generator.n_samples_per_prompt={samples}: all "
            "are kept, which is 'grpo'; keep fewer, or set more samples"
        )


ROW = Estimator(
    gfpo,
    lambda s, group: (
        f"A = {relative(s).replace('_G', '_K')}, 0 outside of K, the {s['keep']} of G with the "
        f"{'least' if s['metric'] == 'length' else 'largest'} {s['metric']}, {group}"
    ),
    paper="https://arxiv.org/abs/2508.09726",
    per_token=True,
    alone="the reward itself",
    check=_check,
    odd=_odd,
)
