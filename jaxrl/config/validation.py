"""Refuse a config before anything is loaded: every error names the field, the value and the fix.

What a field may be whatever the others are stands at the field, see `constraints`. Here is what
fields must be together, in the order in which `validate` looks at it. What is legal but seldom
meant is in `oddities`.
"""

import inspect
import operator
import typing
import warnings
from typing import Any

from jaxrl.advantages import ESTIMATORS
from jaxrl.config.algorithm import (
    AlgorithmConfig,
    DistillationConfig,
    OffPolicyCorrectionConfig,
)
from jaxrl.config.constraints import check_choice, check_constraints, check_finite
from jaxrl.config.data import SFTConfig, check_data
from jaxrl.config.dataclass_config import convert, flatten
from jaxrl.config.environment import check_environment
from jaxrl.config.field_status import status_of
from jaxrl.config.generator import SamplingParams, engine_dtype, engine_hosts, engine_tensor
from jaxrl.config.microbatching import check_hindsight, check_microbatches
from jaxrl.config.objective_requirements import (
    allowed_reductions,
    corrects_for_sampler,
    corrects_itself,
    distills_hindsight,
    estimator_name,
    estimator_row,
    has_critic,
    is_builtin_loss,
    kl_in_reward,
    loss_name,
    loss_row,
    needs_greedy,
    ratio_anchor,
    reduces_by_itself,
    requires_values,
    takes_values,
    unbiased_kl_in_loss,
)
from jaxrl.config.oddities import warn_of_oddities
from jaxrl.config.placement import batch_groups, check_mesh, check_placement, check_processes
from jaxrl.config.rollouts import (
    carries,
    check_engines,
    in_process,
    longest_row,
    overlaps,
    starts_own_engine,
)
from jaxrl.config.train_config import TrainConfig, resolve
from jaxrl.config.trainer import TrainerConfig, compute_dtype
from jaxrl.config_error import ConfigError, fail
from jaxrl.functions import Function
from jaxrl.losses import LOSSES, ROWS
from jaxrl.losses.kl import UNBIASED
from jaxrl.losses.off_policy import correction_enabled, rejection_bounds
from jaxrl.losses.row import hyperparameters
from jaxrl.registry import AdvantageEstimatorRegistry, PolicyLossRegistry, bind_estimator
from jaxrl.registry.bind import check_pure_functions, make_policy_loss
from jaxrl.registry.contracts import asks_for

_ALGORITHM = "trainer.algorithm"
_CORRECTION = f"{_ALGORITHM}.off_policy_correction"
_CORRECTED = {f"{_CORRECTION}.tis_ratio_type": "token"}  # mends what samples from older weights


def validate(config: TrainConfig, num_devices: int = 1, num_processes: int = 1) -> None:
    """Check a config, its derived defaults filled in by `resolve`; warn of fields without effect.

    Args:
        config: is not changed.
        num_devices: devices that the run will use.
        num_processes: that have them, equally many each.

    Raises:
        ValueError: a field is out of range, not available, or at odds with another one.
    """
    config = resolve(config)
    if config.sft != SFTConfig():
        changed = {k: x for k, x in flatten(config.sft).items() if x != flatten(SFTConfig())[k]}
        fail("sft", changed, "is for `python -m jaxrl.sft` alone; leave it at its defaults")
    check_fields(config)
    check_processes(config, num_devices, num_processes)
    ranges = check_placement(config, num_devices // num_processes)
    check_mesh(config, ranges, num_processes)
    _check_conversations(config)
    check_kernels(config.trainer, sampling=starts_own_engine(config))
    check_environment(config.environment)
    check_engines(config, len(ranges.engine), num_processes)
    _check_exact(config)
    _check_eight_bits(config)
    _check_partial_rollouts(config, num_processes)
    check_async(config, len(ranges.engine))
    groups = [
        batch_groups(config, len(devices) * num_processes, role)
        for role, devices in ranges.of_roles()
    ]
    check_microbatches(config, max(groups))
    if distills_hindsight(config.trainer.algorithm):
        check_hindsight(config, max(groups))
    check_objective(config)
    _check_greedy_answers(config)
    _check_demonstrations(config)
    _check_critic(config)
    _check_moving_reference(config.trainer)
    _check_sampling(config)
    _check_pure(config)
    warn_of_oddities(config)


def check_fields(config: TrainConfig) -> None:
    """Check what every run needs of its fields alone: available, in range, files and folders.

    Args:
        config: resolved.
    """
    check_constraints(config)
    _check_status(flatten(config))
    _check_names(config.trainer.algorithm)
    _check_batch(config)
    _check_models(config.trainer)
    _check_rope(config)
    _check_files(config)


def _check_status(values: dict[str, Any]) -> None:
    """Warn once of all fields without a counterpart that are set."""
    defaults = flatten(resolve(TrainConfig()))
    ignored = []
    for field, value in values.items():
        row = status_of(field)
        if row is None or row.only_with or (field in defaults and value == defaults[field]):
            continue
        if row.status == "inert":
            ignored.append(f"{field}={value!r} ({row.note})")
    if ignored:
        warnings.warn(f"config fields without effect in jaxrl: {'; '.join(ignored)}", stacklevel=3)


def _check_batch(config: TrainConfig) -> None:
    prompts = config.trainer.train_batch_size
    for role in ("policy", "critic") if has_critic(config.trainer) else ("policy",):
        name = f"{role}_mini_batch_size"
        mini, rest = getattr(config.trainer, name), prompts % getattr(config.trainer, name)
        if prompts < mini:
            fix = (
                f"a step has fewer prompts than one minibatch (trainer.{name}={mini}); set {name} "
                f"to {prompts} or less"
            )
            fail("trainer.train_batch_size", prompts, fix)
        if rest:
            fix = (
                f"not a multiple of trainer.{name}={mini} ({prompts} = {prompts // mini} x {mini} "
                f"+ {rest}); set it to {prompts - rest} or {prompts - rest + mini}"
            )
            fail("trainer.train_batch_size", prompts, fix)


def _check_models(trainer: TrainerConfig) -> None:
    """Refuse changes to a model that are at odds, and a reference with adapters of nowhere."""
    for name, role in (("policy", trainer.policy), ("ref", trainer.ref)):
        megatrons, changes = role.megatron_config.model_config_kwargs, role.model_config_kwargs
        for key in megatrons.keys() & changes.keys():
            if megatrons[key] != changes[key]:
                field = f"trainer.{name}.megatron_config.model_config_kwargs[{key!r}]"
                fix = f"trainer.{name}.model_config_kwargs says {changes[key]!r}; set one of them"
                fail(field, megatrons[key], fix)
    if trainer.ref.model.lora.rank and trainer.ref.model.path == trainer.policy.model.path:
        fix = "needs trainer.ref.model.path, the PEFT folder of these adapters; set it, or 0"
        fail("trainer.ref.model.lora.rank", trainer.ref.model.lora.rank, fix)


def _check_rope(config: TrainConfig) -> None:
    """Check that the RoPE of the engine is the trainer's, so that both compute the same."""
    for name in ("rope_scaling", "rope_theta"):
        sampled, trained = getattr(config.generator, name), getattr(config.trainer, name)
        if sampled != trained:
            fix = (
                f"differs from trainer.{name}={trained!r}: sampler and trainer would be different "
                "models; leave it None and set the trainer's"
            )
            fail(f"generator.{name}", sampled, fix)


def _check_files(config: TrainConfig) -> None:
    trainer, template = config.trainer, config.generator.chat_template
    if trainer.policy.model.path is None:
        fail("trainer.policy.model.path", None, "set a Hugging Face model folder, or a hub id")
    check_data(config.data)
    if trainer.resume_mode == "from_path" and not trainer.resume_path:
        fail(
            "trainer.resume_path",
            trainer.resume_path,
            "trainer.resume_mode='from_path' needs it; set the folder of a checkpoint",
        )
    if template.source == "file" and not template.name_or_path:
        fail(
            "generator.chat_template.name_or_path",
            template.name_or_path,
            "generator.chat_template.source='file' needs it; set the path of a jinja file",
        )
    if template.source == "name" and template.name_or_path:
        fail(
            "generator.chat_template.name_or_path",
            template.name_or_path,
            "named templates are not available yet; set generator.chat_template.source='file' "
            "and a jinja file, or leave it None",
        )


def check_kernels(trainer: TrainerConfig, *, sampling: bool) -> None:
    """Refuse kernels that do not exist, and those of operations that no program of the run has.

    Args:
        sampling: the run starts an engine of jaxrl.
    """
    if not trainer.kernels:
        return
    # after the check: it imports Pallas
    from jaxrl.models.kernels import OPERATIONS, PAGED_ATTENTION

    unread = {} if sampling else {PAGED_ATTENTION.name: "no engine of jaxrl is started here"}
    for operation, name in trainer.kernels.items():
        if operation == "decode_attention":  # of versions whose cache had no pages
            fail("trainer.kernels", operation, f"is gone; name {PAGED_ATTENTION.name!r} instead")
        check_choice("trainer.kernels", operation, OPERATIONS)
        field = f"trainer.kernels[{operation!r}]"
        check_choice(field, name, OPERATIONS[operation].implementations)
        if operation in unread:
            fail(field, name, f"has no effect, {unread[operation]}; leave it out")


def _check_conversations(config: TrainConfig) -> None:
    """Refuse lengths and turns that conversations cannot have."""
    generator, prompt_length = config.generator, config.trainer.max_prompt_length
    field, length = "generator.max_input_length", generator.max_input_length
    assert length is not None  # resolved
    if generator.max_turns == 1 and length != prompt_length:
        fix = f"with one turn it must equal trainer.max_prompt_length={prompt_length}"
        fail(field, length, f"{fix}; leave it None")
    if length < prompt_length:
        fix = f"shorter than a prompt (trainer.max_prompt_length={prompt_length})"
        fail(field, length, f"{fix}; set it to {prompt_length} or more")
    if generator.batched and generator.max_turns > 1:
        fix = f"with generator.max_turns={generator.max_turns}: turns depend on each other"
        fail("generator.batched", True, f"{fix}; set it to False")
    if generator.merge_stepwise_output and not generator.step_wise_trajectories:
        fix = "there is nothing to merge without generator.step_wise_trajectories; set it to False"
        fail("generator.merge_stepwise_output", True, fix)
    if generator.step_wise_trajectories:
        _check_step_wise(config)
    row = estimator_row(config.trainer.algorithm)
    if row and row.per_turn:
        name = estimator_name(config.trainer.algorithm)
        fix = f"advantage_estimator={name!r} compares turns, each of them a row; set it to "
        if not generator.step_wise_trajectories:
            fail("generator.step_wise_trajectories", False, f"{fix}True")
        if generator.merge_stepwise_output:
            fail("generator.merge_stepwise_output", True, f"{fix}False")


def _check_step_wise(config: TrainConfig) -> None:
    """Refuse what a row per turn cannot have: one advantage is for all rows of a trajectory."""
    generator, algorithm = config.generator, config.trainer.algorithm
    estimator, reduction = estimator_name(algorithm), algorithm.loss_reduction
    row = estimator_row(algorithm)
    excluded: tuple[tuple[str, Any, bool, str], ...] = (
        ("generator.batched", True, generator.batched, "set it to False"),
        (
            "generator.use_conversation_multi_turn",
            False,
            not generator.use_conversation_multi_turn,
            "a turn is then no message of its own; set it to True",
        ),
        (
            "trainer.algorithm.advantage_estimator",
            estimator,
            row is not None and row.per_token,
            "it needs all of a trajectory in one row; set 'grpo', 'rloo' or 'maxrl'",
        ),
        (
            "trainer.algorithm.loss_reduction",
            reduction,
            reduction == "token_mean_legacy",
            "its blocks are of whole trajectories; set 'token_mean'",
        ),
        (
            "trainer.algorithm.use_kl_in_reward",
            True,
            algorithm.use_kl_in_reward,
            "only the last turn's KL would count; set use_kl_loss",
        ),
        (
            "trainer.algorithm.advantage_batch_normalize",
            True,
            algorithm.advantage_batch_normalize,
            "not available for a row per turn; set it to False",
        ),
    )
    for field, value, holds, fix in excluded:
        if holds:
            fail(field, value, f"with generator.step_wise_trajectories=True: {fix}")


def check_async(config: TrainConfig, num_devices: int) -> None:
    """Refuse what cannot be sampled ahead.

    Args:
        config: resolved.
        num_devices: of the engine.

    Raises:
        ValueError: names the field, the value and the fix.
    """
    trainer, settings = config.trainer, config.trainer.fully_async
    if not settings.enabled:
        return
    size = trainer.train_batch_size
    for role in ("policy", "critic") if has_critic(trainer) else ("policy",):
        name, mini = f"{role}_mini_batch_size", getattr(trainer, f"{role}_mini_batch_size")
        if mini != size:
            fix = (
                f"an asynchronous run counts its staleness in updates, one a batch: set it to "
                f"trainer.train_batch_size={size}"
            )
            fail(f"trainer.{name}", mini, fix)
    if (kind := trainer.algorithm.dynamic_sampling.type) is not None:
        fix = "an asynchronous run takes every prompt once, in no fixed batches; set it to None"
        fail("trainer.algorithm.dynamic_sampling.type", kind, fix)
    check_staleness(trainer.algorithm, settings.max_staleness_steps)
    if settings.schedule == "free":
        _check_free_schedule(config)
    elif overlaps(config) and config.generator.inference_engine.enable_prefix_caching:
        fix = (
            "what is reused depends on the clock, and schedule='lockstep' promises the same bits; "
            "set it to False, or trainer.fully_async.schedule='free'"
        )
        fail("generator.inference_engine.enable_prefix_caching", True, fix)
    _check_shared_devices(config, num_devices)


def _check_free_schedule(config: TrainConfig) -> None:
    if config.generator.batched:
        fix = "needs prompts that are sampled one by one; set it to False"
        fail("generator.batched", True, f"trainer.fully_async.schedule='free' {fix}")
    settings, size = config.trainer.fully_async, config.trainer.train_batch_size
    workers = settings.num_parallel_generation_workers
    most = size * (settings.max_staleness_steps + 1)
    if not size <= workers <= most:
        fix = (
            f"must be between trainer.train_batch_size={size} and {most}, which is that times "
            f"max_staleness_steps + 1 and the most that may be in flight; set it to {most}"
        )
        fail("trainer.fully_async.num_parallel_generation_workers", workers, fix)


def _check_shared_devices(config: TrainConfig, num_devices: int) -> None:
    """Refuse two programs with collectives on the same devices: they could wait for ever.

    An engine over several processes samples while the trainer waits.
    """
    engine = config.generator.inference_engine
    tensor, alone = engine_tensor(engine), engine_hosts(engine) == 1
    shared = in_process(config) and config.trainer.placement.colocate_all and alone
    if shared and num_devices > 1 and tensor > 1 and config.trainer.fully_async.max_staleness_steps:
        fix = (
            "an engine that samples beside training on the same devices must not be split over "
            "them; set it to 1, or trainer.placement.colocate_all=False"
        )
        fail("generator.inference_engine.tensor_parallel_size", tensor, fix)


def check_staleness(algorithm: AlgorithmConfig, max_staleness_steps: int) -> None:
    """Refuse a loss that takes rollouts of an older policy for the trainer's own.

    Its ratio would be against the policy at the start of the step, which did not sample them, so
    nothing would tell how much more or less probable they have become. Allowed are losses whose
    ratio is against the sampler or that weigh the difference themselves, truncated importance
    weights beside any other ratio, and losses of users, who are offered all log-probs.

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
    else:
        why = "its ratio is against the policy at the start of the step, and an older one sampled"
        choices += f"; or {_ALGORITHM}.old_log_probs='rollout'"
    mended = {} if ROWS[name].uncorrected else _CORRECTED
    if mended:
        choices += f" or {_CORRECTION}.tis_ratio_type='token'"
    fail(f"{_ALGORITHM}.policy_loss_type", name, f"{stale}{why}; set {choices}", mended)


def check_objective(config: TrainConfig) -> None:
    """Refuse an objective that is incoherent.

    Raises:
        ValueError: names the field, the value and the fix.
    """
    algorithm = config.trainer.algorithm
    _check_names(algorithm)
    _check_loss(algorithm)
    make_policy_loss(algorithm)  # it can be called with what it will get
    bind_estimator(algorithm)
    _check_estimator(algorithm)
    _check_reduction(algorithm)
    _check_kl(algorithm)
    _check_terms(config)
    _check_old_log_probs(algorithm)
    _check_correction(algorithm)
    _check_log_probs(config)
    _check_overlong_buffer(config)
    _check_one_number(config)
    _check_teacher(config)
    _check_distillation(config)
    sampling = config.generator.sampling_params.temperature
    if algorithm.temperature != sampling:
        fail(
            f"{_ALGORITHM}.temperature",
            algorithm.temperature,
            f"differs from generator.sampling_params.temperature={sampling}: the loss would train "
            "another distribution than the one sampled; leave it None",
        )


def _check_estimator(algorithm: AlgorithmConfig) -> None:
    """Check the hyperparameters of the chosen estimator."""
    given, group = algorithm.advantage_kwargs, f"{_ALGORITHM}.advantage_kwargs"
    row = estimator_row(algorithm)
    if row:
        _check_types(group, row.fn, given)
    for name in ("gamma", "lambd"):
        if not 0 <= (value := given.get(name, 1.0)) <= 1:
            fail(f"{group}.{name}", value, "must be in [0, 1]; 1.0 is no discount")
    if row:
        settings = {
            "grpo_norm_by_std": algorithm.grpo_norm_by_std,
            **row.hyperparameters(given),
        }
        for name, fix in row.check(settings):
            fail(f"{group}.{name}", settings[name], fix)


def _check_types(group: str, func: Function, given: dict[str, Any]) -> None:
    """Refuse hyperparameters of a built-in function that are of another type, or not finite."""
    types, parameters = typing.get_type_hints(func), inspect.signature(func).parameters.values()
    for name in [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.name in given]:
        value, field = given[name], f"{group}.{name}"
        if convert(value, types[name], field) != value:  # a number in quotes
            fail(field, value, f"is text; write {float(value):g}")
        check_finite(field, value)


def _check_loss(algorithm: AlgorithmConfig) -> None:
    """Check the hyperparameters of the chosen loss; those of others may have any value."""
    if (row := loss_row(algorithm)) is None:
        return
    _check_types(f"{_ALGORITHM}.policy_loss_kwargs", row.fn, algorithm.policy_loss_kwargs)
    for field, fix in row.check(algorithm):
        section, _, name = field.rpartition(".")
        if section == "policy_loss_kwargs":
            value = hyperparameters(row.fn, algorithm).get(name)
        else:
            value = operator.attrgetter(field)(algorithm)
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
        for name in ("kl_target", "horizon"):
            if not (value := getattr(algorithm.kl_ctrl, name)) > 0:
                fail(f"{_ALGORITHM}.kl_ctrl.{name}", value, "must be > 0, e.g. 0.1 and 10000")

    kind = algorithm.kl_estimator_type
    if unbiased_kl_in_loss(algorithm) and kind not in UNBIASED:
        fix = f"use_unbiased_kl weighs an estimate that is unbiased; set {' or '.join(UNBIASED)}"
        fail(f"{_ALGORITHM}.kl_estimator_type", kind, fix)


def _check_terms(config: TrainConfig) -> None:
    """Refuse settings of terms that have no effect, or not the one that is meant."""
    algorithm = config.trainer.algorithm
    anchored = ratio_anchor(algorithm) is not None
    if algorithm.opsm_delta is not None and not anchored:
        fix = f"policy_loss_type={loss_name(algorithm)!r} uses no advantages; set None"
        fail(f"{_ALGORITHM}.opsm_delta", algorithm.opsm_delta, fix)
    if algorithm.entropy_ctrl.type == "adaptive" and not algorithm.use_entropy_loss:
        fix = "has no effect without use_entropy_loss; set that, or 'fixed'"
        fail(f"{_ALGORITHM}.entropy_ctrl.type", "adaptive", fix)
    if algorithm.positive_nll_coef and config.generator.step_wise_trajectories:
        fix = (
            "rows with a reward are the last ones of their trajectories alone where "
            "generator.step_wise_trajectories; set 0.0, or that to False"
        )
        fail(f"{_ALGORITHM}.positive_nll_coef", algorithm.positive_nll_coef, fix)

    row = estimator_row(algorithm)
    shaped = {
        "trainer.algorithm.use_kl_in_reward": kl_in_reward(algorithm),
        "trainer.algorithm.overlong_buffer": algorithm.overlong_buffer is not None,
        "generator.zero_reward_on_non_stop": config.generator.zero_reward_on_non_stop,
    }
    for field, on in shaped.items():
        if on and row and row.needs_terms:
            name = estimator_name(algorithm)
            fix = "changes the sum of the rewards, of which "
            fail(field, "on", f"{fix}advantage_estimator={name!r} looks at each; turn it off")


def _check_old_log_probs(algorithm: AlgorithmConfig) -> None:
    """Refuse a correction where the sampler's log-probs are the old ones: it would be 1."""
    corrected = correction_enabled(algorithm.off_policy_correction)
    if algorithm.old_log_probs == "rollout" and corrected:
        fix = (
            "off_policy_correction weighs by old_log_probs - rollout_log_probs, which is then 0, "
            "and the ratio of the loss is against the rollout policy already; set 'trainer', or "
            f"turn off {_CORRECTION}.*"
        )
        fail(f"{_ALGORITHM}.old_log_probs", "rollout", fix)


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
        cap = f"{correction.tis_ratio_type}_tis_ratio_clip_high"
        if not (value := getattr(correction, cap)) > 0:
            fail(f"{_CORRECTION}.{cap}", value, "must be > 0: it caps weights, e.g. 2.0")
    low, high = correction.token_mask_is_threshold_low, correction.token_mask_is_threshold_high
    if (low is None) != (high is None):
        side, other = ("low", "high") if high is None else ("high", "low")
        field = f"{_CORRECTION}.token_mask_is_threshold_{side}"
        value, fix = (low if high is None else high), "the token mask has two bounds; set also"
        fail(field, value, f"{fix} token_mask_is_threshold_{other}, or neither")
    _check_bands(correction)
    if (threshold := correction.rollout_rs_threshold) is not None and correction.rollout_rs is None:
        fail(f"{_CORRECTION}.rollout_rs_threshold", threshold, "has no effect without rollout_rs")
    if correction.rollout_is_batch_normalize and correction.tis_ratio_type is None:
        field = f"{_CORRECTION}.rollout_is_batch_normalize"
        fail(field, True, "has no effect without tis_ratio_type: there are no weights")
    try:
        rejection_bounds(correction)
    except ConfigError as error:
        raise error.inside(_CORRECTION) from error


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
        "carry none"
    )
    if algorithm.old_log_probs == "rollout":
        fail(f"{_ALGORITHM}.old_log_probs", "rollout", f"{without}; set 'trainer'")
    if corrects_itself(algorithm) or required:
        fix = f"{without}; choose a loss whose ratio is against old_log_probs, e.g. 'regular'"
        fail(f"{_ALGORITHM}.policy_loss_type", algorithm.policy_loss_type, fix)
    if correction_enabled(algorithm.off_policy_correction):
        fail(_CORRECTION, "on", f"{without}; turn it off")
    if algorithm.opsm_delta is not None:
        fail(f"{_ALGORITHM}.opsm_delta", algorithm.opsm_delta, f"{without}; set None")


def _check_overlong_buffer(config: TrainConfig) -> None:
    longest = config.generator.sampling_params.max_generate_length
    buffer, turns = config.trainer.algorithm.overlong_buffer, config.generator.max_turns
    if buffer is None:
        return
    if turns > 1:
        fix = (
            f"with generator.max_turns={turns}: the length that is punished is that of the whole "
            "response, max_generate_length bounds one turn of it; set it to None"
        )
        fail(f"{_ALGORITHM}.overlong_buffer", buffer, fix)
    if not 0 < buffer.len <= longest:
        fix = f"must be in (0, generator.sampling_params.max_generate_length={longest}]"
        fail(f"{_ALGORITHM}.overlong_buffer.len", buffer.len, fix)


def _check_names(algorithm: AlgorithmConfig) -> None:
    """Check that loss and estimator are there: what comes after asks what is true of them."""
    loss, estimator = algorithm.policy_loss_type, algorithm.advantage_estimator
    an_estimator = (
        f"is an advantage estimator: set {_ALGORITHM}.advantage_estimator={loss!r}, and here a "
        "loss; 'regular' is that of GRPO"
    )
    a_loss = (
        f"is a policy loss: set {_ALGORITHM}.policy_loss_type={estimator!r}, and here an "
        "estimator, such as 'grpo'"
    )
    meant = an_estimator if loss in ESTIMATORS else None
    _check_name("policy_loss_type", loss, PolicyLossRegistry, meant)
    meant = a_loss if estimator in LOSSES else None
    _check_name("advantage_estimator", estimator, AdvantageEstimatorRegistry, meant)


def _check_pure(config: TrainConfig) -> None:
    """Refuse a loss or an estimator that keeps something where no checkpoint has it."""
    trainer, samples = config.trainer, config.generator.n_samples_per_prompt
    check_pure_functions(
        trainer.algorithm,
        rows=trainer.train_batch_size * samples,
        minibatch_rows=trainer.policy_mini_batch_size * samples,
        tokens=longest_row(config),
        has_values=has_critic(trainer),
    )


def _check_name(name: str, value: str, registry: Any, meant: str | None) -> None:
    try:
        registry.resolve(value)
    except ValueError as error:
        if meant:  # a name of the other kind
            fail(f"{_ALGORITHM}.{name}", value, meant)
        fix = 'Set a known name, register yours, or write "my_pkg.my_module:my_function"'
        message = str(error)
        message += "" if message.endswith(("?", ".")) else "."
        raise ConfigError(f"{_ALGORITHM}.{name}", value, f"{message} {fix}") from error


def _check_one_number(config: TrainConfig) -> None:
    algorithm = config.trainer.algorithm
    of_tokens = {
        _CORRECTION: correction_enabled(algorithm.off_policy_correction),
        f"{_ALGORITHM}.opsm_delta": algorithm.opsm_delta is not None,
        f"{_ALGORITHM}.top_entropy_quantile": algorithm.top_entropy_quantile < 1,
    }
    for field, asked in of_tokens.items():
        if asked and reduces_by_itself(config):
            fail(
                f"{_ALGORITHM}.policy_loss_type",
                algorithm.policy_loss_type,
                f"it returns one number: {field} weighs the loss of each token and would have no "
                "effect. Return the loss of each token [B, T], or turn that off",
            )


def _check_distillation(config: TrainConfig) -> None:
    """Refuse a teacher who has nothing to say, or says it to nobody."""
    trainer, generator = config.trainer, config.generator
    settings, name = trainer.algorithm.distillation, f"{_ALGORITHM}.distillation"
    if not settings.coef:
        if settings != DistillationConfig():
            fix = "0.0 is no teacher, and the other fields have no effect; set it to 1.0"
            fail(f"{name}.coef", settings.coef, fix)
        return
    if trainer.exact != "off":
        fix = "log-probs of more than the sampled ids are not computed exactly; set 0.0, or "
        fail(f"{name}.coef", settings.coef, f"{fix}trainer.exact='off'")
    if settings.teacher == "ref":
        for field in ("solution_hint", "feedback_hint", "right_reward", "max_hint_tokens"):
            if (value := getattr(settings, field)) != getattr(DistillationConfig(), field):
                fail(f"{name}.{field}", value, "has no effect with teacher='ref'; leave it out")
        return
    if generator.step_wise_trajectories:
        fix = "a row with the end of a conversation alone says whether it was right; set 'ref'"
        fail(f"{name}.teacher", "hindsight", fix)
    for field, key in (("solution_hint", "{solution}"), ("feedback_hint", "{feedback}")):
        hint = getattr(settings, field)
        if hint and key not in hint:
            fail(f"{name}.{field}", hint, f"must have {key} in it, or be empty")
    if not (settings.solution_hint or settings.feedback_hint):
        fail(f"{name}.solution_hint", "", "there would be nothing to read; set one of the hints")
    if generator.n_samples_per_prompt == 1 and not settings.feedback_hint:
        fix = "with generator.n_samples_per_prompt=1 there is no other sample; set more samples"
        fail(f"{name}.solution_hint", settings.solution_hint, fix)


def _check_teacher(config: TrainConfig) -> None:
    """Refuse distillation from oneself, which teaches nothing."""
    trainer, row = config.trainer, estimator_row(config.trainer.algorithm)
    policy, teacher = trainer.policy.model, trainer.ref.model
    same = (policy.path, policy.random_init) == (teacher.path, teacher.random_init)
    learnt = trainer.algorithm.distillation
    if learnt.coef and not learnt.policy_loss_coef and learnt.teacher == "ref" and same:
        fix = "is the policy's own model, and all that is learnt is what it says; set a teacher"
        fail("trainer.ref.model.path", teacher.path, fix)
    if row and row.needs_teacher and same:
        name = estimator_name(trainer.algorithm)
        fix = f"is the policy's own model, and advantage_estimator={name!r} needs a teacher; set it"
        fail("trainer.ref.model.path", teacher.path, fix)


def _check_greedy_answers(config: TrainConfig) -> None:
    """Refuse an estimator that asks for greedy answers where a step cannot have them."""
    if not needs_greedy(config.trainer.algorithm):
        return
    generator, name = config.generator, estimator_name(config.trainer.algorithm)
    engine = generator.inference_engine
    if engine.backend == "jetstream" and not engine.run_engines_locally:
        fix = f"its servers sample at one temperature, and {name!r} asks for greedy answers"
        fail("generator.inference_engine.backend", "jetstream", f"{fix}; set another")
    if carries(config):
        fix = f"advantage_estimator={name!r} compares with the greedy answer of the step in which "
        field, most = "max_tokens_per_step", generator.partial_rollouts.max_tokens_per_step
        fail(f"generator.partial_rollouts.{field}", most, f"{fix}a prompt was answered; unset it")


def _check_demonstrations(config: TrainConfig) -> None:
    """Refuse answers of the data that no loss has a place for, and a loss that has none of them."""
    trainer, generator = config.trainer, config.generator
    algorithm, row = trainer.algorithm, loss_row(trainer.algorithm)
    field = "generator.demonstrations"
    if not generator.demonstrations:
        if row and row.demonstrations:
            fix = f"learns from demonstrations, and {field}=False; set that to True"
            fail(f"{_ALGORITHM}.policy_loss_type", algorithm.policy_loss_type, fix)
        return
    if generator.n_samples_per_prompt == 1:
        fix = "with generator.n_samples_per_prompt=1 nothing would be sampled; set more"
        fail(field, True, fix)
    loss = PolicyLossRegistry.resolve(algorithm.policy_loss_type)
    if not asks_for(loss, "demonstrated"):
        name = algorithm.policy_loss_type
        fix = f"policy_loss_type={name!r} takes them for sampled; set 'luffy' or 'chord', or a"
        fail(field, True, f"{fix} loss of yours that asks for `demonstrated`")
    settings = {
        "generator.max_turns": (generator.max_turns, 1),
        "generator.partial_rollouts.max_tokens_per_step": (
            generator.partial_rollouts.max_tokens_per_step,
            None,
        ),
        "trainer.fully_async.enabled": (trainer.fully_async.enabled, False),
        "trainer.exact": (trainer.exact, "off"),
        f"{_ALGORITHM}.old_log_probs": (algorithm.old_log_probs, "trainer"),
    }
    for other, (value, needed) in settings.items():
        if value != needed:
            fix = f"is for {other}={needed!r}: a demonstration is one answer, which nobody sampled"
            fail(field, True, fix)


def _check_critic(config: TrainConfig) -> None:
    """Refuse values that nobody computes, and a critic that cannot be trained as it is told to."""
    trainer, algorithm = config.trainer, config.trainer.algorithm
    field, name = f"{_ALGORITHM}.advantage_estimator", algorithm.advantage_estimator
    if not has_critic(trainer):
        if trainer.critic_warmup_steps:
            fix = "has no effect without trainer.critic.model.path; set 0, or that"
            fail("trainer.critic_warmup_steps", trainer.critic_warmup_steps, fix)
        if requires_values(algorithm):
            fix = (
                "needs the values of a critic, and trainer.critic.model.path=None; set that, e.g. "
                "to the policy's model, or an estimator without values, e.g. 'grpo' or "
                "'reinforce++'"
            )
            fail(field, name, fix)
        return
    prefix, clip = algorithm.value_head_prefix, algorithm.value_clip
    if not prefix.isidentifier() or prefix in ("model", "lm_head"):
        fix = "must be a name that no other weight begins with, e.g. 'value_head'"
        fail(f"{_ALGORITHM}.value_head_prefix", prefix, fix)
    if clip is not None and clip <= 0:
        fail(f"{_ALGORITHM}.value_clip", clip, "must be > 0, e.g. 0.2; None is no clip")
    if takes_values(algorithm) and config.generator.step_wise_trajectories:
        fix = (
            "a trajectory's advantage is that of its last row, so the values of the rows before it "
            f"would not be looked at; set it to False, or {field} to one without values"
        )
        fail("generator.step_wise_trajectories", True, fix)


def _check_moving_reference(trainer: TrainerConfig) -> None:
    """Refuse a moving reference on another base than that of a policy with adapters."""
    if not trainer.update_ref_every_epoch:
        return
    field, lora = "trainer.update_ref_every_epoch", trainer.policy.model.lora.rank > 0
    ref, policy = trainer.ref, trainer.policy
    if lora and (ref.model.path, ref.model.random_init) != (
        policy.model.path,
        policy.model.random_init,
    ):
        fix = "with trainer.policy.model.lora the reference has adapters on the policy's base, and "
        fail(field, True, f"{fix}trainer.ref.model.path={ref.model.path!r} is another; set it None")
    if lora and not trainer.placement.colocate_policy_ref:
        fix = "with trainer.policy.model.lora needs trainer.placement.colocate_policy_ref=True; "
        fail(field, True, f"{fix}set it, or this one to False")
    if lora and ref.mesh is not None:
        fail(field, True, "with trainer.policy.model.lora needs trainer.ref.mesh=None")


def _check_exact(config: TrainConfig) -> None:
    """Refuse what makes the numbers of sampler and trainer differ in the exact mode."""
    trainer, generator = config.trainer, config.generator
    engine, mesh = generator.inference_engine, trainer.policy.mesh
    if trainer.exact == "off":
        if trainer.exact_tile is not None:
            fail("trainer.exact_tile", trainer.exact_tile, "has no effect with trainer.exact='off'")
        if trainer.exact_checked_rows:
            fix = "has no effect with trainer.exact='off', where all rows are scored or none"
            fail("trainer.exact_checked_rows", trainer.exact_checked_rows, fix)
        return
    dtypes = compute_dtype(trainer, "policy"), engine_dtype(engine)
    sampling, of = generator.sampling_params, "generator.sampling_params"
    filters = sampling.top_k != -1 or sampling.top_p < 1 or sampling.min_p > 0
    masked = not filters or sampling.keep_sampling_mask
    for holds, why in (
        (in_process(config), "the engine must be ours, in the trainer's processes"),
        (len(set(dtypes)) == 1, f"trainer and engine must compute in one dtype, not {dtypes}"),
        (trainer.policy.model.lora.rank == 0, "the sampler adds adapters to their matrices"),
        (mesh.context == 1, "trainer.policy.mesh.context must be 1"),
        (mesh.expert == 1, "trainer.policy.mesh.expert must be 1"),
        (mesh.tensor != -1, "trainer.policy.mesh.tensor must be a number"),
        (engine.expert_parallel_size == 1, "expert_parallel_size must be 1"),
        (
            sampling.repetition_penalty == 1,
            f"{of}.repetition_penalty must be 1",
        ),
        (
            not sampling.additional_kwargs,
            f"{of}.additional_kwargs must be None",
        ),
        (masked, f"top_k, top_p and min_p need {of}.keep_sampling_mask=True"),
        (sampling.logprobs is not None, f"{of}.logprobs must be 1"),
    ):
        if not holds:
            fail("trainer.exact", trainer.exact, f"{why}; or set 'off'")
    rows = trainer.micro_train_batch_size_per_gpu
    if trainer.exact == "full" and (rows & (rows - 1) or trainer.max_tokens_per_microbatch != -1):
        fix = "trainer.exact='full' needs 2^k rows in each, and no budget of tokens in their place"
        fail("trainer.micro_train_batch_size_per_gpu", rows, fix)


def _check_eight_bits(config: TrainConfig) -> None:
    """Refuse a sampler in 8 bits where it is not ours, or where nothing corrects for it."""
    trainer, engine = config.trainer, config.generator.inference_engine
    algorithm = trainer.algorithm
    ours = in_process(config) and engine.backend == "native"
    for name, off in (("quantization", None), ("kv_cache_dtype", "auto")):
        field, value = f"generator.inference_engine.{name}", getattr(engine, name)
        if ours and name in engine.engine_init_kwargs:
            given = engine.engine_init_kwargs
            fix = f"{name} is a field, whose value is checked against the objective; set {field}"
            fail("generator.inference_engine.engine_init_kwargs", given, fix)
        if value == off:
            continue
        if not ours:
            fix = (
                "is for jaxrl's own engine in the trainer's processes (backend='native', "
                "run_engines_locally=True, trainer.placement.rollout_num_nodes=0; vLLM's servers "
                f"take it in engine_init_kwargs); set {off!r}"
            )
            fail(field, value, fix)
        if trainer.exact != "off":
            fix = f"trainer.exact={trainer.exact!r} promises the trainer's bits; set {off!r}"
            fail(field, value, fix)
        if not corrects_for_sampler(algorithm):
            fix = (
                "samples from another distribution than the policy, and nothing in the objective "
                f"corrects for it: set {_CORRECTION}.tis_ratio_type='token' or one of its masks, a "
                f"loss whose ratio is against the sampler ({_ALGORITHM}.old_log_probs='rollout', "
                f"policy_loss_type='decoupled_ppo'), or {off!r}"
            )
            fail(field, value, fix, _CORRECTED)


def _check_partial_rollouts(config: TrainConfig, num_processes: int) -> None:
    """Refuse samples that go on in the next step where they could not, or nothing corrects."""
    trainer, generator = config.trainer, config.generator
    group, settings = "generator.partial_rollouts", generator.partial_rollouts
    if not carries(config):
        if settings.extra_prompts:
            fix = "has no effect without max_tokens_per_step; set both, or 0"
            fail(f"{group}.extra_prompts", settings.extra_prompts, fix)
        return
    field, most = f"{group}.max_tokens_per_step", settings.max_tokens_per_step
    if not settings.extra_prompts:
        fix = f"must be at least 1 with {field}={most}: else nothing can be carried"
        fail(f"{group}.extra_prompts", 0, fix)
    if generator.inference_engine.backend == "jetstream":
        fix = "is not for the backend 'jetstream', whose prompts have a most; leave it unset"
        fail(field, most, fix)
    if trainer.fully_async.enabled:
        fix = (
            "is for the synchronous trainer (trainer.fully_async.enabled=False): the schedule "
            "'free' waits for no answer anyway; leave it unset"
        )
        fail(field, most, fix)
    if generator.max_turns > 1:
        fix = "needs generator.max_turns=1: the state of an environment cannot be kept; leave it"
        fail(field, most, f"{fix} unset")
    if generator.sampling_params.stop:
        fix = (
            f"with generator.sampling_params.stop={generator.sampling_params.stop}: a string that "
            "reaches over two steps would not be seen; use stop_token_ids, or leave it unset"
        )
        fail(field, most, fix)
    if trainer.exact != "off":
        fix = (
            f"with trainer.exact={trainer.exact!r}, which takes the sampler for the policy: an "
            "answer is of several policies; leave it unset"
        )
        fail(field, most, fix)
    if num_processes > 1 and trainer.policy.router_replay != "off":
        fix = "with trainer.policy.router_replay needs a job of one process; leave it unset"
        fail(field, most, fix)
    if not corrects_for_sampler(trainer.algorithm):
        fix = (
            "trains on tokens of older policies, and nothing in the objective corrects for it: set "
            f"{_CORRECTION}.tis_ratio_type='token' or one of its masks, a loss whose ratio is "
            f"against the sampler ({_ALGORITHM}.old_log_probs='rollout'), or leave it unset"
        )
        fail(field, most, fix, _CORRECTED)


def _check_sampling(config: TrainConfig) -> None:
    """Refuse sampling that cannot be trained on, and a pass@k of more samples than there are."""
    generator = config.generator
    if generator.sampling_params.temperature == 0:
        field, fix = "generator.sampling_params.temperature", "must be > 0 to train, e.g. 1.0"
        fail(field, generator.sampling_params.temperature, fix)
    for name in ("sampling_params", "eval_sampling_params"):
        params: SamplingParams = getattr(generator, name)
        if params.keep_sampling_mask and params.top_k == -1:
            fix = "needs top_k, which bounds what is recorded of each token; set it, e.g. to 64"
            fail(f"generator.{name}.keep_sampling_mask", True, fix)
    samples = generator.eval_n_samples_per_prompt
    if wrong := [k for k in generator.eval_pass_at_k or [] if not 1 <= k <= samples]:
        fix = f"of generator.eval_n_samples_per_prompt={samples} samples; set k between 1 and that"
        fail("generator.eval_pass_at_k", wrong, fix)
