"""Define the row of facts of an advantage estimator: what is true of it and not of the others."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from jaxrl.functions import keyword_defaults

Settings = Mapping[str, Any]
Problem = tuple[str, str]  # hyperparameter, and what it must be


class Estimator(NamedTuple):
    """Say what is true of one advantage estimator.

    Settings are by name, see `hyperparameters`.

    Attributes:
        fn: see `jaxrl.advantages`.
        formula: (settings, what a group is) -> the advantage of a token with the numbers of a
            config, for the objective card. These settings have gamma, lambd and grpo_norm_by_std of
            the config, too.
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
        check: settings -> what is wrong with them. That they are of the right type, finite, and
            gamma and lambd in [0, 1], is asked of every estimator.
        odd: (settings, samples of a prompt) -> what is legal and seldom meant.
    """

    fn: Callable[..., Any]
    formula: Callable[[Settings, str], str]
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
    least_samples: Callable[[Settings], int] = lambda settings: 2
    check: Callable[[Settings], Iterable[Problem]] = lambda settings: ()
    odd: Callable[[Settings, int], Iterable[str]] = lambda settings, samples: ()

    def hyperparameters(self, given: Settings) -> dict[str, Any]:
        """Return those of the function: their defaults, unless `advantage_kwargs` has others."""
        return {**keyword_defaults(self.fn), **given}


def check_epsilon(settings: Settings) -> Iterable[Problem]:
    """Yield what is wrong with an epsilon beside a deviation that may be 0."""
    if not settings["epsilon"] > 0:
        yield "epsilon", "must be positive: equal scores have the deviation 0; e.g. 1e-6"


def check_group_epsilon(settings: Settings) -> Iterable[Problem]:
    """Yield what is wrong with an epsilon beside a group's deviation, where that divides."""
    return check_epsilon(settings) if settings["grpo_norm_by_std"] else ()


def check_small_epsilon(settings: Settings) -> Iterable[Problem]:
    """Yield what is wrong with an epsilon beside a divisor that is asked whether it is 0."""
    if not settings["epsilon"] >= 0:
        yield "epsilon", "must not be negative: advantages would change their sign; e.g. 1e-6"


def relative(settings: Settings) -> str:
    """Return GRPO's advantage of a score R, divided by the deviation where that is asked for."""
    if settings["grpo_norm_by_std"]:
        return f"(R - mean_G R) / (std_G R + {settings['epsilon']})"
    return "R - mean_G R"
