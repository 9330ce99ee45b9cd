"""Define the row of facts of a policy loss: what is true of it and not of the others.

The config's checks, the objective card, the generated pages and the enum of names all read it.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple

from jaxrl.functions import Function, keyword_defaults

Anchor = Literal["old", "rollout"]
Problem = tuple[str, str]  # field under trainer.algorithm, and what it must be

PER_TOKEN = "r = exp(log_probs - {anchor}_log_probs)"
PER_ROW = "r = exp(mean_t (log_probs - {anchor}_log_probs)), per row"


class Loss(NamedTuple):
    """Say what is true of one policy loss.

    A callable below takes the `AlgorithmConfig`.

    Attributes:
        fn: see `jaxrl.losses`.
        formula: the loss of a token with the numbers of a config, for the objective card.
        paper: that it is from.
        anchor: the policy that the ratio is taken against: "old", the policy at the start of the
            step, recomputed by the trainer; "rollout", the sampler, by the log-probs that it
            recorded; None, there is no ratio. `algorithm.old_log_probs` may put the sampler in the
            place of "old".
        ratio: lines about the ratio, with {anchor} in them; the card adds whose log-probs the
            anchor's are, unless the loss has several lines and says it.
        reductions: the only values of loss_reduction with which it means something; () = all.
        usual_reduction: with which it is defined, though others mean something; "" = all.
        uncorrected: why there is no off-policy correction of it; "" = there is.
        corrects_itself: it weighs the difference between trainer and sampler, whatever its anchor.
        anchor_setting: what makes its ratio one against the sampler; "" = nothing does.
        whole_batch: it looks at the whole minibatch: its means, its highest covariances.
        demonstrations: what it makes of answers that the data gives, see
            `generator.demonstrations`: "in the group" = samples are compared with them, "apart" =
            not, and no estimator or critic sees them; "" = it has no place for them.
        plain_at_one: where the ratio is 1 its gradient is that of the surrogate without a clip.
        check: what is wrong with the fields that it reads.
        odd: what is legal and seldom meant.
        odd_alone: the same, where a batch has one update.
    """

    fn: Callable[..., Any]
    formula: Callable[[Any], str]
    paper: str = ""
    anchor: Callable[[Any], Anchor | None] = lambda config: "old"
    ratio: Callable[[Any], Sequence[str]] = lambda config: [PER_TOKEN]
    reductions: tuple[str, ...] = ()
    usual_reduction: str = ""
    uncorrected: str = ""
    corrects_itself: bool = False
    anchor_setting: str = ""
    whole_batch: bool = False
    demonstrations: Literal["", "in the group", "apart"] = ""
    plain_at_one: bool = False
    check: Callable[[Any], Iterable[Problem]] = lambda config: ()
    odd: Callable[[Any], Iterable[str]] = lambda config: ()
    odd_alone: Callable[[Any], Iterable[str]] = lambda config: ()


def hyperparameters(fn: Function, config: Any) -> dict[str, Any]:
    """Return those of a loss whose own parameters they are: its defaults, unless a config has more.

    Args:
        config: its `policy_loss_kwargs` are what it sets.
    """
    return {**keyword_defaults(fn), **config.policy_loss_kwargs}


def surrogate(config: Any) -> str:
    """Return the formula of the clipped surrogate."""
    return f"-min(r A, clip(r, {1 - config.eps_clip_low:g}, {1 + config.eps_clip_high:g}) A)"


def bounds(config: Any) -> str:
    """Return the two bounds of the clip, as an oddity names them."""
    return f"eps_clip_low={config.eps_clip_low:g}, eps_clip_high={config.eps_clip_high:g}"


def odd_bounds(config: Any) -> Iterable[str]:
    """Yield what is odd about the bounds of a ratio."""
    if (low := config.eps_clip_low) >= 1:
        yield f"eps_clip_low={low:g}: ratios are positive; 1 - {low:g} is no lower bound"
