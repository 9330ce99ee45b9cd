"""Checks of what the loss compares the policy with, where another one may have sampled."""

from jaxrl.config.algorithm import AlgorithmConfig
from jaxrl.config.errors import fail
from jaxrl.config.objective_requirements import (
    corrects_itself,
    is_builtin_loss,
    loss_name,
    ratio_anchor,
)
from jaxrl.losses import ROWS
from jaxrl.losses.off_policy import correction_enabled

_ALGORITHM = "trainer.algorithm"


def check_old_log_probs(algorithm: AlgorithmConfig) -> None:
    """Refuse what has no meaning where the sampler's log-probs are the old ones.

    Raises:
        ValueError: names the field, the value and the fix.
    """
    if algorithm.old_log_probs != "rollout":
        return
    field, value = f"{_ALGORITHM}.old_log_probs", "rollout"
    if correction_enabled(algorithm.off_policy_correction):
        fix = (
            "off_policy_correction weighs by old_log_probs - rollout_log_probs, which is then 0, "
            "and the ratio of the loss is against the rollout policy already; set 'trainer', or "
            f"turn off {_ALGORITHM}.off_policy_correction.*"
        )
        fail(field, value, fix)


def check_recorded(algorithm: AlgorithmConfig, without: str) -> None:
    """Refuse the sampler's log-probs as the old ones where it records none.

    Args:
        without: says so.

    Raises:
        ValueError: names the field, the value and the fix.
    """
    if algorithm.old_log_probs == "rollout":
        fail(f"{_ALGORITHM}.old_log_probs", "rollout", f"{without}; set 'trainer'")


def check_anchor(algorithm: AlgorithmConfig, max_staleness_steps: int) -> None:
    """Refuse a loss that takes rollouts of an older policy for the trainer's own.

    Its ratio would be against the policy at the start of the step, which did not sample them, so
    nothing would tell how much more or less probable they have become. Allowed are losses whose
    ratio is against the sampler, `decoupled_ppo`, truncated importance weights beside any other
    ratio, and losses of users, who are offered all log-probs.

    Args:
        algorithm: resolved.
        max_staleness_steps: of an asynchronous run; 0 = rollouts are the trainer's own.

    Raises:
        ValueError: names the loss and what can be set instead.
    """
    name = loss_name(algorithm)
    if max_staleness_steps == 0 or not is_builtin_loss(name) or corrects_itself(algorithm):
        return
    if algorithm.off_policy_correction.tis_ratio_type is not None:
        return
    default = AlgorithmConfig()
    others = [
        repr(other)
        for other, row in ROWS.items()
        if row.corrects_itself or row.anchor(default) == "rollout"
    ]
    others += [f"{n!r} with {row.anchor_setting}" for n, row in ROWS.items() if row.anchor_setting]
    choices = f"policy_loss_type={', '.join(others[:-1])} or {others[-1]}"
    stale = f"with trainer.fully_async.max_staleness_steps={max_staleness_steps}: "
    if ratio_anchor(algorithm) is None:
        why = "it has no ratio, and learns what an older policy said as if it were the policy's own"
        fail(f"{_ALGORITHM}.policy_loss_type", name, f"{stale}{why}; set {choices}")
    fix = f"{choices}; or {_ALGORITHM}.old_log_probs='rollout'"
    if not ROWS[name].uncorrected:
        fix += f" or {_ALGORITHM}.off_policy_correction.tis_ratio_type='token'"
    why = "its ratio is against the policy at the start of the step, and an older one sampled"
    fail(f"{_ALGORITHM}.policy_loss_type", name, f"{stale}{why}; set {fix}")
