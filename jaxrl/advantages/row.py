"""Define the row of facts of an advantage estimator: what is true of it and not of the others."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple


class Estimator(NamedTuple):
    """Say what is true of one advantage estimator.

    Attributes:
        fn: see `jaxrl.advantages`.
        formula: (settings, what a group is) -> the advantage of a token with the numbers of a
            config, for the objective card. Settings are gamma, lambd, grpo_norm_by_std and the
            function's keyword-only parameters: their defaults, or the `advantage_kwargs`.
        paper: that it is from.
        per_token: rewards, values or the number of tokens count, so a trajectory must be one row.
        per_turn: rows are turns, and each has an advantage of its own.
        needs_values: of a critic.
        needs_teacher: a reference that is another model.
        needs_terms: rewards by name, each on its own.
        needs_greedy: what the greedy answer to each prompt earns.
        uses_rewards: rewards have a part in it.
        binary_rewards: it is made for rewards of 0 and 1.
        normalises: over the batch.
        alone: the advantage in a group that is too small; "": groups have no part in it.
        least_samples: settings -> the samples of the smallest group that is not too small.
    """

    fn: Callable[..., Any]
    formula: Callable[[Mapping[str, Any], str], str]
    paper: str = ""
    per_token: bool = False
    per_turn: bool = False
    needs_values: bool = False
    needs_teacher: bool = False
    needs_terms: bool = False
    needs_greedy: bool = False
    uses_rewards: bool = True
    binary_rewards: bool = False
    normalises: bool = False
    alone: str = ""
    least_samples: Callable[[Mapping[str, Any]], int] = lambda settings: 2


def relative(settings: Mapping[str, Any]) -> str:
    """Return GRPO's advantage of a score R, divided by the deviation where that is asked for."""
    if settings["grpo_norm_by_std"]:
        return f"(R - mean_G R) / (std_G R + {settings['epsilon']})"
    return "R - mean_G R"
