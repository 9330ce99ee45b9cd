"""Several reward terms by name: those of an environment, those of the user's functions, their sum.

A rubric: what a response earns is the weighted sum of its terms, each of which is recorded on its
own.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl.functions import called_name, import_call
from jaxrl.registry import accepted_keywords

Reward = float | list[float]  # for the whole turn, or one per response token
PLAIN = "environment"  # the term of an environment that gives a reward without a name


class RewardTermError(ValueError):
    """Signal that the terms given are not those that `environment.reward_weights` weighs."""


class NoOpinion(ValueError):
    """Say that no term that counts says anything of a turn."""


class RewardTerms:
    """Hold the weights of terms by name, and the functions that judge beside the environment.

    Args:
        weights: of every term; empty = each counts once.
        functions: paths "my_pkg.my_module:my_reward", or with arguments "...:my_reward(a=1)". Each
            is called after every turn with those of `registry.contracts.REWARD_KEYWORDS` that it
            names, and returns a reward, whose name is the function's, or rewards by name. One whose
            annotation says so, `-> float | None`, may give None: it has no opinion of the turn.
    """

    def __init__(
        self, weights: Mapping[str, float] | None = None, functions: Sequence[str] = ()
    ) -> None:
        self.weights = dict(weights or {})
        self.functions = {
            called_name(path): import_call(path, "reward function") for path in functions
        }

    def calls(self, **offered: Any) -> list[tuple[str, Callable[..., Any], dict[str, Any]]]:
        """Return name, function and keywords of each function that judges a turn."""
        return [(n, f, accepted_keywords(f, offered)) for n, f in self.functions.items()]

    @property
    def abstaining(self) -> list[str]:
        """Return the names of functions that may have no opinion."""
        return [name for name, function in self.functions.items() if may_abstain(function)]

    def weigh(self, terms: Mapping[str, Reward | None], label: str) -> Reward:
        """Return the weighted sum of terms: a number, or one per token where a term is.

        Terms that are a single number then go to the last token. Where a term is None, the weights
        of the others grow in proportion, to the same sum of sizes.

        Args:
            terms: rewards by name, all lists equally long; None = no opinion.
            label: names environment and prompt in errors.

        Raises:
            RewardTermError: a term without a weight, or a weight without a term.
            NoOpinion: all terms that count are None.
        """
        weights = self.weights or dict.fromkeys(terms, 1.0)
        for name in terms.keys() - weights.keys():
            raise RewardTermError(
                f"{label} gave the reward term '{name}', environment.reward_weights is "
                f"{weights}: add a weight for it (0 only records it), or do not give it"
            )
        for name in weights.keys() - terms.keys():
            raise RewardTermError(
                f"{label} gave no reward term '{name}', which environment.reward_weights has; it "
                f"gave {sorted(terms)}. Give every weighted term on every turn, 0.0 where it says "
                "nothing, or remove the weight"
            )
        said = {name: x for name, x in terms.items() if x is not None}
        if len(said) < len(terms) and any(weights.values()):
            counted = sum(abs(weights[name]) for name in said)
            if not counted:
                raise NoOpinion(f"none of {sorted(terms)} has an opinion of the turn")
            scale = sum(map(abs, weights.values())) / counted
            weights = {name: scale * weight for name, weight in weights.items()}
        whole = float(sum(weights[n] * x for n, x in said.items() if not isinstance(x, list)))
        lists = [weights[n] * np.array(x) for n, x in said.items() if isinstance(x, list)]
        if not lists:
            return whole
        total = np.sum(lists, axis=0)
        total[-1:] += whole
        return total.tolist()


def may_abstain(function: Callable[..., Any]) -> bool:
    """Return whether the annotation of a function says that it may give None, among others."""
    returned = inspect.formatannotation(inspect.signature(function).return_annotation)
    return returned != "None" and ("None" in returned or "Optional" in returned)


def named(reward: Any, name: str) -> dict[str, Any]:
    """Return rewards by name: as they were given, or the only one as `name`."""
    return dict(reward) if isinstance(reward, Mapping) else {name: reward}
