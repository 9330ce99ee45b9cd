"""Alarms: rules over the metrics of a run that say when it is breaking, and what to try.

The rules and their thresholds are one table, `RULES`; each is a pure function of the numbers
logged so far, so a resumed run raises what an uninterrupted one would.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import fmean, median

REWARD = "reward/avg_raw_reward"
BEST, WORST = "reward/max_raw_reward", "reward/min_raw_reward"
ENTROPY = "policy/policy_entropy"
LENGTH, STOPPED = "generate/avg_num_tokens", "generate/stop_ratio"
MISMATCH = "policy/rollout_train_logprobs_abs_diff_mean"
STALENESS = "async/staleness_max"
SAME = "reward/zero_variance_ratio"
SKIPPED = "policy/skipped_updates"
REJUDGED = "reward/rejudged_differently"
FAILED = "generate/env_error_ratio"
FINITE = (REWARD, ENTROPY, "policy/final_loss", "policy/grad_norm", "loss/avg_raw_advantages_abs")
READ = (
    *(*FINITE, BEST, WORST, LENGTH, STOPPED),
    *(MISMATCH, STALENESS, SAME, SKIPPED, REJUDGED, FAILED),
)
SOLVED = 0.7  # of the way from the worst reward of the run to the best
START = 3  # steps that the entropy is compared with
WINDOW = 20  # steps that lengths are compared over, and that an alarm is silent before it repeats

SO_FAR = {BEST: max, WORST: min}  # metrics whose history is what they were at most, at least

History = Mapping[str, list[float]]  # of each metric the first START values and the last WINDOW


def _last(history: History, name: str, count: int = 3) -> float | None:
    """Return the mean of the last values; None before there are so many."""
    values = history.get(name, [])
    return fmean(values[-count:]) if len(values) >= count else None


def _is_solved(history: History) -> bool:
    """Return whether most samples earn about as much as any sample of the run did.

    A policy that is sure of right answers, or gives nothing else, has not collapsed.
    """
    reward = _last(history, REWARD, 1)
    best, worst = (history.get(name, [0.0])[-1] for name in (BEST, WORST))
    return reward is not None and best > worst and (reward - worst) / (best - worst) >= SOLVED


def entropy_left(history: History) -> float | None:
    """Return the entropy of the last three steps over that of the first three.

    None where it is solved.
    """
    now, start = _last(history, ENTROPY), history.get(ENTROPY, [])[:START]
    if now is None or fmean(start) <= 0 or _is_solved(history):
        return None
    return now / fmean(start)


def length_growth(history: History) -> float | None:
    """Return the mean length over that of some steps ago.

    None while most responses end by themselves.

    The last three of `WINDOW` steps over the median of their first five.
    """
    now, stopped = _last(history, LENGTH), _last(history, STOPPED)
    window = history.get(LENGTH, [])[-WINDOW:]
    if now is None or stopped is None or len(window) < 8 or stopped >= 0.5:
        return None
    return now / max(median(window[:5]), 1.0)


def mismatch(history: History) -> float | None:
    """Return mean |log p(sampler) - log p(trainer)| of the last three steps, in nats.

    None with rollouts of an older policy: the difference is then what was learnt since.
    """
    return None if _last(history, STALENESS, 1) else _last(history, MISMATCH)


def groups_without_variance(history: History) -> float | None:
    """Return the share of prompts whose samples all earned the same, over five steps.

    None where it is solved.
    """
    return None if _is_solved(history) else _last(history, SAME, 5)


def not_finite(history: History) -> float | None:
    """Return how many metrics of the last step are NaN or infinite.

    Updates that it skipped for that count, too.
    """
    skipped = _last(history, SKIPPED, 1) or 0.0
    return sum(not math.isfinite(x) for x in _wrong(history).values()) + skipped


def _wrong(history: History) -> dict[str, float]:
    """Return what of the last step is not finite, and how many updates it skipped."""
    last = {name: history[name][-1] for name in (*FINITE, SKIPPED) if history.get(name)}
    return {n: x for n, x in last.items() if not math.isfinite(x) or (n == SKIPPED and x)}


def rejudged_differently(history: History) -> float | None:
    """Return how many trajectories of the last step earned something else when judged again."""
    return _last(history, REJUDGED, 1)


def environments_fail(history: History) -> float | None:
    """Return the share of the last step's trajectories that were lost to their environment."""
    return _last(history, FAILED, 1)


@dataclass(frozen=True)
class Rule:
    """Describe when an alarm goes off.

    Attributes:
        measure: a number of the history, or None: nothing can be said.
        threshold: it goes off above it; with `below` under it.
        says: what the number is.
        advice: what to try.
        of: the metrics that it looks at, of which the message has the last values.
    """

    measure: Callable[[History], float | None]
    threshold: float
    says: str
    advice: str
    of: tuple[str, ...]
    below: bool = False

    def goes_off(self, history: History, threshold: float) -> float | None:
        """Return the number, where it is beyond the threshold; else None."""
        value = self.measure(history)
        if value is None:
            return None
        return value if (value < threshold if self.below else value > threshold) else None


RULES = {
    "entropy_collapse": Rule(
        entropy_left,
        0.05,
        "entropy over what it was at the start, without the rewards for it",
        "algorithm.use_entropy_loss or a larger entropy_loss_coef; a larger eps_clip_high; a "
        "smaller learning rate; clip_cov or kl_cov; another run from an export before the fall",
        (ENTROPY,),
        below=True,
    ),
    "length_explosion": Rule(
        length_growth,
        1.5,
        "mean response length over what it was some steps ago, most responses cut off",
        "generator.zero_reward_on_non_stop or algorithm.overlong_buffer; apply_overlong_filtering "
        "off; loss_reduction=seq_mean_token_sum_norm; look whether the reward pays for length",
        (LENGTH, STOPPED),
    ),
    "mismatch_growth": Rule(
        mismatch,
        0.1,
        "mean difference of the log-probs of sampler and trainer, in nats",
        "the same model_dtype and temperature for both; see that the sampler gets every update; "
        "algorithm.off_policy_correction.tis_ratio_type=token; fewer updates per batch",
        (MISMATCH,),
    ),
    "vanishing_reward_variance": Rule(
        groups_without_variance,
        0.95,
        "share of prompts whose samples all earned the same, far from the best reward seen",
        "look at printed examples: does the environment ever reward? easier prompts, more samples "
        "per prompt, a higher sampling temperature, algorithm.dynamic_sampling.type=filter",
        (SAME,),
    ),
    "not_finite": Rule(
        not_finite,
        0,
        "metrics that are NaN or infinite, and updates skipped for it",
        "another run from an export before it; a smaller learning rate or max_grad_norm; "
        "trainer.bf16=False; look for a log or a quotient of 0 in rewards or a loss of your own",
        (*FINITE, SKIPPED),
    ),
    "reward_not_deterministic": Rule(
        rejudged_differently,
        0,
        "trajectories that earned something else when judged again; the log has both rewards",
        "let a reward depend on prompt, extras and response alone: no clock, no unseeded random "
        "numbers, no state that conversations share, no sampled judge",
        (REJUDGED,),
    ),
    # A server that is away for some calls loses a few in a hundred. Beyond a tenth what is left is
    # a choice among the answers: those that the code can judge.
    "environments_fail": Rule(
        environments_fail,
        0.1,
        "share of trajectories lost to their environment or reward function",
        "look at the errors in the log; give such answers the reward 0 in place of raising, by "
        "catching the error where the answer is read; for time limits "
        "environment.skyrl_gym.env_timeout_seconds",
        (FAILED,),
    ),
}


@dataclass(frozen=True)
class Alarm:
    """Describe an alarm that went off."""

    name: str
    step: int
    value: float
    threshold: float
    found: Mapping[str, float]  # the metrics it is about, at this step

    def __str__(self) -> str:
        rule = RULES[self.name]
        side = "below" if rule.below else "above"
        found = ", ".join(f"{name} {value:.3g}" for name, value in self.found.items())
        return (
            f"ALARM {self.name} at step {self.step}: {self.value:.3g} is {side} "
            f"{self.threshold:g} ({rule.says}: {found}). Try: {rule.advice}"
        )


@dataclass
class Alarms:
    """Apply the rules over the steps of one run.

    Attributes:
        thresholds: instead of those of `RULES`; None switches a rule off.
    """

    thresholds: Mapping[str, float | None] = field(default_factory=dict)
    history: dict[str, list[float]] = field(default_factory=dict)
    last_beyond: dict[str, int] = field(default_factory=dict)

    def update(self, step: int, metrics: Mapping[str, float]) -> list[Alarm]:
        """Return the alarms that go off at this step.

        These are beyond the threshold as they were not for `WINDOW` steps.
        """
        if REWARD not in metrics:  # of an evaluation before the first step
            return []
        for name in READ:
            if name in metrics:
                values, value = self.history.setdefault(name, []), float(metrics[name])
                so_far = SO_FAR.get(name)
                values.append(so_far(values[-1], value) if so_far and values else value)
                if len(values) > START + WINDOW:
                    del values[START]
        alarms = []
        for name, rule in RULES.items():
            threshold = self.thresholds.get(name, rule.threshold)
            value = None if threshold is None else rule.goes_off(self.history, threshold)
            if threshold is None or value is None:
                continue
            if step - self.last_beyond.get(name, -WINDOW) >= WINDOW:
                last = {of: self.history[of][-1] for of in rule.of if of in self.history}
                found = _wrong(self.history) if name == "not_finite" else last
                alarms.append(Alarm(name, step, value, threshold, found))
            self.last_beyond[name] = step
        return alarms
