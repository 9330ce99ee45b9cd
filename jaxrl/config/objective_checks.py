"""Checks of the objective: values without a meaning, corrections counted twice, legal oddities."""

import inspect
import warnings
from typing import Any

from jaxrl.config.algorithm import AlgorithmConfig, OffPolicyCorrectionConfig
from jaxrl.config.anchor_checks import check_old_log_probs, check_recorded
from jaxrl.config.errors import fail
from jaxrl.config.objective_requirements import (
    allowed_reductions,
    corrects_itself,
    estimator_name,
    estimator_row,
    kl_in_loss,
    kl_in_reward,
    loss_name,
    loss_row,
    ratio_anchor,
    reduces_by_itself,
    updates_per_step,
)
from jaxrl.config.train_config import TrainConfig
from jaxrl.losses.off_policy import correction_enabled
from jaxrl.registry import AdvantageEstimatorRegistry, PolicyLossRegistry, bind_estimator
from jaxrl.registry.bind import make_policy_loss

_ALGORITHM = "trainer.algorithm"
_CORRECTION = f"{_ALGORITHM}.off_policy_correction"


def check_objective(config: TrainConfig) -> None:
    """Refuse an objective that is incoherent.

    Raises:
        ValueError: names the field, the value and the fix.
    """
    algorithm = config.trainer.algorithm
    _check_discounts(algorithm)
    _check_loss(algorithm)
    _check_reduction(algorithm)
    _check_kl(algorithm)
    check_old_log_probs(algorithm)
    _check_correction(algorithm)
    _check_log_probs(config)
    _check_filters(config)
    _check_functions(algorithm)
    _check_one_number(config)
    _check_teacher(config)
    sampling = config.generator.sampling_params.temperature
    if algorithm.temperature != sampling:
        fail(
            f"{_ALGORITHM}.temperature",
            algorithm.temperature,
            f"differs from generator.sampling_params.temperature={sampling}: the loss would train "
            "another distribution than the one sampled; leave it None",
        )


def _check_discounts(algorithm: AlgorithmConfig) -> None:
    given = algorithm.advantage_kwargs
    discounts = {"gamma": algorithm.gamma, "lambd": algorithm.lambd}
    discounts |= {f"advantage_kwargs.{k}": given[k] for k in discounts if k in given}
    for field, value in discounts.items():
        if not 0 <= value <= 1:
            fail(f"{_ALGORITHM}.{field}", value, "must be in [0, 1]; 1.0 is no discount")


def _check_loss(algorithm: AlgorithmConfig) -> None:
    """Check the hyperparameters of the chosen loss; those of others may have any value."""
    row = loss_row(algorithm)
    for field, fix in row.check(algorithm) if row else ():
        value: Any = algorithm
        for part in field.split("."):
            value = getattr(value, part)
        fail(f"{_ALGORITHM}.{field}", value, fix)


def _check_reduction(algorithm: AlgorithmConfig) -> None:
    field, kind = f"{_ALGORITHM}.loss_reduction", algorithm.loss_reduction
    allowed = allowed_reductions(algorithm.policy_loss_type)
    if kind not in allowed:
        why = f"policy_loss_type={algorithm.policy_loss_type!r} is defined with "
        fail(field, kind, f"{why}{' or '.join(map(repr, allowed))} only; set that")
    if kind == "seq_mean_token_sum_norm" and not (
        algorithm.max_seq_len and algorithm.max_seq_len > 0
    ):
        fail(
            f"{_ALGORITHM}.max_seq_len",
            algorithm.max_seq_len,
            "loss_reduction='seq_mean_token_sum_norm' divides by it; set it to the longest "
            "sequence, in tokens",
        )


def _check_kl(algorithm: AlgorithmConfig) -> None:
    if algorithm.use_kl_in_reward and algorithm.use_kl_loss:
        fail(
            f"{_ALGORITHM}.use_kl_in_reward",
            True,
            "the KL would count twice, in the reward and in the loss; set use_kl_loss to False",
        )
    if algorithm.use_kl_in_reward or algorithm.kl_ctrl.type == "adaptive":
        fields, fix = "kl_ctrl.kl_target kl_ctrl.horizon", "must be > 0, e.g. 0.1 and 10000"
        _require(algorithm, fields, lambda x: x > 0, fix)


def _check_correction(algorithm: AlgorithmConfig) -> None:
    correction, name = algorithm.off_policy_correction, loss_name(algorithm)
    if algorithm.use_tis:
        _check_use_tis(algorithm)
    row = loss_row(algorithm)
    if correction_enabled(correction) and row and row.uncorrected:
        fix = f"no off-policy correction is defined for it: {row.uncorrected}; turn off "
        fail(f"{_ALGORITHM}.policy_loss_type", name, f"{fix}{_CORRECTION}.*")
    if correction.tis_ratio_type is not None:
        if corrects_itself(algorithm):
            fail(
                f"{_CORRECTION}.tis_ratio_type",
                correction.tis_ratio_type,
                f"policy_loss_type={name!r} takes its ratio against the rollout policy already: "
                "the difference between trainer and sampler would count twice; set it to None",
            )
        cap = f"off_policy_correction.{correction.tis_ratio_type}_tis_ratio_clip_high"
        _require(algorithm, cap, lambda x: x > 0, "must be > 0: it caps weights, e.g. 2.0")
    low, high = correction.token_mask_is_threshold_low, correction.token_mask_is_threshold_high
    if (low is None) != (high is None):
        side, other = ("low", "high") if high is None else ("high", "low")
        field = f"{_CORRECTION}.token_mask_is_threshold_{side}"
        value, fix = (low if high is None else high), "the token mask has two bounds; set also"
        fail(field, value, f"{fix} token_mask_is_threshold_{other}, or neither")
    _check_bands(correction)


def _check_log_probs(config: TrainConfig) -> None:
    """Refuse what needs the sampler's log-probs where rollouts carry none."""
    algorithm = config.trainer.algorithm
    if config.generator.sampling_params.logprobs is not None:
        return
    func = inspect.signature(PolicyLossRegistry.resolve(algorithm.policy_loss_type)).parameters
    required = any(
        name in func and func[name].default is inspect.Parameter.empty
        for name in ("rollout_log_probs", "rollout_logprobs")
    )
    without = (
        "needs the sampler's log-probs, and generator.sampling_params.logprobs=None: rollouts "
    )
    without += "carry none"
    check_recorded(algorithm, without)
    if corrects_itself(algorithm) or required:
        fix = f"{without}; choose a loss whose ratio is against old_log_probs, e.g. 'regular'"
        fail(f"{_ALGORITHM}.policy_loss_type", algorithm.policy_loss_type, fix)
    if correction_enabled(algorithm.off_policy_correction):
        fail(_CORRECTION, "on", f"{without}; turn it off")


def _check_bands(correction: OffPolicyCorrectionConfig) -> None:
    """Check that a band of weights holds 1, where trainer and sampler agree, and is not empty."""
    masks = "token_mask_is_threshold outlier_token_is_threshold geo_mask product_mask"
    for mask in masks.split():
        low, high = (getattr(correction, f"{mask}_{side}") for side in ("low", "high"))
        if low is not None and high is not None and low >= high:
            fix = f"must be below {mask}_high={high}: nothing would be left"
            fail(f"{_CORRECTION}.{mask}_low", low, fix)
        fix = "would drop what trainer and sampler agree on, whose ratio is 1; must be "
        if low is not None and low > 1:
            fail(f"{_CORRECTION}.{mask}_low", low, f"{fix}1 or less")
        if high is not None and high < 1:
            fail(f"{_CORRECTION}.{mask}_high", high, f"{fix}1 or more")


def _check_use_tis(algorithm: AlgorithmConfig) -> None:
    """Check that `resolve` mapped use_tis to the token weights of off_policy_correction."""
    cap, correction = algorithm.tis_imp_ratio_cap, algorithm.off_policy_correction
    if cap <= 0:
        fail(
            f"{_ALGORITHM}.tis_imp_ratio_cap",
            cap,
            "must be > 0: it caps importance weights, and a negative one turns the loss around; "
            f"leave use_tis and set {_CORRECTION}.tis_ratio_type='token'",
        )
    if (correction.tis_ratio_type, correction.token_tis_ratio_clip_high) != ("token", cap):
        fail(
            f"{_ALGORITHM}.use_tis",
            True,
            f"at odds with {_CORRECTION}, which it is the deprecated form of; set it to False",
        )


def _check_filters(config: TrainConfig) -> None:
    algorithm, length = config.trainer.algorithm, config.generator.sampling_params
    sampling = algorithm.dynamic_sampling
    if sampling.max_sample_batches != -1 and sampling.max_sample_batches <= 0:
        field = f"{_ALGORITHM}.dynamic_sampling.max_sample_batches"
        fail(field, sampling.max_sample_batches, "must be positive, or -1 (never give up)")
    field, fix = "dynamic_sampling.min_replace_ratio", "must be in [0, 1], e.g. 0.3"
    _require(algorithm, field, lambda x: 0 <= x <= 1, fix)
    _require(algorithm, "zero_variance_filter_tol", lambda x: x >= 0, "must be 0 or more")
    buffer, turns = algorithm.overlong_buffer, config.generator.max_turns
    if buffer is None:
        return
    if turns > 1:
        fix = (
            f"with generator.max_turns={turns}: the length that is punished is that of the whole "
            "response, max_generate_length bounds one turn of it; set it to None"
        )
        fail(f"{_ALGORITHM}.overlong_buffer", buffer, fix)
    if not 0 < buffer.len <= length.max_generate_length:
        longest = length.max_generate_length
        fix = f"must be in (0, generator.sampling_params.max_generate_length={longest}]"
        fail(f"{_ALGORITHM}.overlong_buffer.len", buffer.len, fix)
    field = "overlong_buffer.penalty_factor"
    _require(algorithm, field, lambda x: x >= 0, "must be 0 or more; it is subtracted")


def _check_functions(algorithm: AlgorithmConfig) -> None:
    """Check that names resolve to functions, which can be called with what they will get."""
    _function("policy_loss_type", algorithm.policy_loss_type, PolicyLossRegistry)
    make_policy_loss(algorithm)
    value = algorithm.advantage_estimator
    _function("advantage_estimator", value, AdvantageEstimatorRegistry)
    bind_estimator(algorithm)


def _check_one_number(config: TrainConfig) -> None:
    algorithm = config.trainer.algorithm
    if reduces_by_itself(config) and correction_enabled(algorithm.off_policy_correction):
        fail(
            f"{_ALGORITHM}.policy_loss_type",
            algorithm.policy_loss_type,
            f"it returns one number: {_CORRECTION} weighs the loss of each token and would have no "
            "effect. Return the loss of each token [B, T], or turn the correction off",
        )


def _check_teacher(config: TrainConfig) -> None:
    """Refuse distillation from oneself, which teaches nothing."""
    trainer, row = config.trainer, estimator_row(config.trainer.algorithm)
    policy, teacher = trainer.policy.model, trainer.ref.model
    same = (policy.path, policy.random_init) == (teacher.path, teacher.random_init)
    if row and row.needs_teacher and same:
        name = estimator_name(trainer.algorithm)
        fix = f"is the policy's own model, and advantage_estimator={name!r} needs a teacher; set it"
        fail("trainer.ref.model.path", teacher.path, fix)


def _function(name: str, value: str, registry: Any) -> Any:
    try:
        return registry.resolve(value)
    except ValueError as error:
        fix = 'Set a known name, register yours, or write "my_pkg.my_module:my_function"'
        said = f"{error}" if f"{error}".endswith("?") else f"{error}."
        raise ValueError(f"{_ALGORITHM}.{name}={value!r}: {said} {fix}") from error


def _require(algorithm: AlgorithmConfig, fields: str, holds: Any, fix: str) -> None:
    """Require that `holds` is true of every field."""
    for field in fields.split():
        value: Any = algorithm
        for part in field.split("."):
            value = getattr(value, part)
        if not holds(value):
            fail(f"{_ALGORITHM}.{field}", value, fix)


# ---------------------------------------------------------------- what is legal but seldom meant


def warn_of_objective(config: TrainConfig) -> None:
    """Warn of each oddity."""
    algorithm, samples = config.trainer.algorithm, config.generator.n_samples_per_prompt
    oddities = [*_odd_loss(algorithm), *_odd_kl(algorithm), *_odd_groups(algorithm, samples)]
    oddities += [*_odd_rewards(config), *_odd_updates(config)]
    correction = algorithm.off_policy_correction
    if algorithm.use_tis:
        oddities.append(f"use_tis=True is deprecated; set {_CORRECTION}.tis_ratio_type='token'")
    if correction.renormalize and not correction_enabled(correction):
        oddities.append("off_policy_correction.renormalize=True: there is no correction")
    if algorithm.loss_reduction == "token_mean_legacy":
        oddities.append(
            "loss_reduction='token_mean_legacy': the gradient depends on "
            "trainer.micro_train_batch_size_per_gpu; 'token_mean' does not"
        )
    for oddity in oddities:
        warnings.warn(f"{_ALGORITHM}.{oddity}", stacklevel=4)


def _odd_loss(algorithm: AlgorithmConfig) -> list[str]:
    row, reduction = loss_row(algorithm), algorithm.loss_reduction
    if row is None:
        return []
    odd = list(row.odd(algorithm))
    if row.usual_reduction and reduction != row.usual_reduction:
        name = loss_name(algorithm)
        odd.insert(
            0, f"loss_reduction={reduction!r}: {name} is defined with {row.usual_reduction!r}"
        )
    return odd


def _odd_kl(algorithm: AlgorithmConfig) -> list[str]:
    odd, coef = [], algorithm.kl_loss_coef
    if kl_in_loss(algorithm) and algorithm.kl_estimator_type == "k1":
        odd.append(
            "kl_estimator_type='k1': as a loss its gradient is that of log_probs, the same for "
            "every token whatever the reference says; set 'k2'"
        )
    default = AlgorithmConfig.kl_loss_coef
    if kl_in_loss(algorithm) and algorithm.kl_estimator_type == "k3" and coef > default:
        odd.append(
            f"kl_estimator_type='k3' with kl_loss_coef={coef:g}: as a loss its gradient is that of "
            "KL(reference | policy), which spreads the policy over all that the reference does; "
            "that of KL(policy | reference) is k2's"
        )
    if algorithm.kl_ctrl.type == "adaptive" and not algorithm.use_kl_in_reward:
        odd.append("kl_ctrl.type='adaptive' has no effect without use_kl_in_reward")
    estimator = estimator_row(algorithm)
    if kl_in_reward(algorithm) and estimator and not estimator.uses_rewards:
        name = estimator_name(algorithm)
        odd.append(f"use_kl_in_reward=True: {name!r} does not use rewards")
    if algorithm.use_kl_in_reward and algorithm.kl_loss_coef == 0:
        odd.append("kl_loss_coef=0: use_kl_in_reward has no effect")
    if kl_in_reward(algorithm) and algorithm.kl_estimator_type == "k3":
        odd.append(
            "kl_estimator_type='k3': as a reward its gradient is that of KL(policy | reference) - "
            "KL(reference | policy), which does not hold the KL down; set 'k1'"
        )
    return odd


def _odd_rewards(config: TrainConfig) -> list[str]:
    """Name what can give rewards beside 0 and 1 where the estimator is made for these."""
    algorithm, environment = config.trainer.algorithm, config.environment
    beside = {
        f"{_ALGORITHM}.use_kl_in_reward": kl_in_reward(algorithm),
        f"{_ALGORITHM}.overlong_buffer": algorithm.overlong_buffer is not None,
        "environment.reward_functions": bool(environment.reward_functions),
        "environment.reward_weights": bool(environment.reward_weights),
    }
    row = estimator_row(algorithm)
    if row is None or not row.binary_rewards or not any(beside.values()):
        return []
    return [
        f"advantage_estimator={estimator_name(algorithm)!r} divides by the mean reward, made for 0 "
        "and 1; with "
        f"{', '.join(field for field, holds in beside.items() if holds)} rewards can be others: a "
        "group whose mean is not positive gets 0, and one near 0 large advantages"
    ]


def _odd_updates(config: TrainConfig) -> list[str]:
    """Name what the number of updates on a batch makes useless or wrong."""
    trainer, algorithm = config.trainer, config.trainer.algorithm
    name, anchor, odd = loss_name(algorithm), ratio_anchor(algorithm), []
    row, several = loss_row(algorithm), updates_per_step(trainer) > 1
    if not several and anchor == "old" and row and row.plain_at_one:
        odd.append(
            f"policy_loss_type={name!r} with one update on each batch: its ratio is 1, where its "
            "gradient is that of 'regular'; set trainer.update_epochs_per_batch or a smaller "
            "trainer.policy_mini_batch_size, or 'regular'"
        )
    if not several and row:
        odd += row.odd_alone(algorithm)
    dropout = trainer.policy.model.lora.dropout if trainer.policy.model.lora.rank else 0
    if dropout and (anchor == "rollout" or (several and anchor == "old")):
        odd.append(
            f"policy_loss_type={name!r} and trainer.policy.model.lora.dropout={dropout:g}: the "
            "ratio is against log-probs without dropout, so it is not 1 where the weights are "
            "the same; set 0.0"
        )
    return odd


def _odd_groups(algorithm: AlgorithmConfig, samples: int) -> list[str]:
    name, odd = estimator_name(algorithm), []
    if algorithm.advantage_batch_normalize and name in ("gae", "reinforce++"):
        odd.append(f"advantage_batch_normalize=True: {name!r} normalises over the batch itself")
    if samples > 1:
        return odd
    if name in ("grpo", "grpo_token", "dr_grpo", "rloo", "maxrl"):
        effect = "0" if name == "rloo" else "the reward itself"
        odd.append(
            f"advantage_estimator={name!r} with generator.n_samples_per_prompt=1: in a group of "
            f"one the advantage of {name!r} is {effect}; set 2 or more"
        )
    filters = {
        "dynamic_sampling.type": algorithm.dynamic_sampling.type,
        "zero_variance_filter": algorithm.zero_variance_filter,
    }
    fix = "with generator.n_samples_per_prompt=1: a single sample never differs, all are kept"
    return odd + [f"{field}={value!r} {fix}" for field, value in filters.items() if value]
