"""Checks of a config before anything is loaded: every error names the field, the value, the fix."""

import math
import warnings
from typing import Any

from jaxrl.config.async_checks import check_async
from jaxrl.config.cluster import check_cluster
from jaxrl.config.conversation_checks import check_conversations
from jaxrl.config.critic_checks import check_critic, check_moving_reference
from jaxrl.config.data import check_data
from jaxrl.config.dataclass_config import flatten
from jaxrl.config.errors import check_choice, fail
from jaxrl.config.field_status import status_of
from jaxrl.config.generator import GeneratorConfig, SamplingParams, engine_dtype
from jaxrl.config.ledger import check_ledger
from jaxrl.config.microbatching import check_microbatches
from jaxrl.config.model import SCHEDULERS
from jaxrl.config.model_checks import check_models
from jaxrl.config.objective_checks import check_objective, warn_of_objective
from jaxrl.config.objective_requirements import has_critic
from jaxrl.config.placement import batch_groups, check_mesh, check_placement, check_processes
from jaxrl.config.platform import AUTO
from jaxrl.config.rollouts import check_engines
from jaxrl.config.serving import check_serving
from jaxrl.config.sft import SFTConfig
from jaxrl.config.train_config import TrainConfig, resolve
from jaxrl.config.trainer import compute_dtype, logger_names
from jaxrl.config.watching import check_watching
from jaxrl.data.conversations import OVERLONG, TRAIN_ON_WHAT
from jaxrl.losses.kl import KL_ESTIMATORS
from jaxrl.losses.reduction import REDUCTIONS
from jaxrl.models.lora import INIT_METHODS
from jaxrl.models.remat import REMAT_POLICIES

STRATEGIES = ("jax", "fsdp", "fsdp2", "megatron")

_CHOICES = {
    "trainer.strategy": STRATEGIES,
    "trainer.remat_policy": tuple(REMAT_POLICIES),
    "trainer.resume_mode": (None, "none", "latest", "from_path"),
    "trainer.policy.model.lora.init_method": INIT_METHODS,
    "trainer.critic.model.lora.init_method": INIT_METHODS,
    "trainer.algorithm.kl_estimator_type": KL_ESTIMATORS,
    "trainer.algorithm.loss_reduction": REDUCTIONS,
    "trainer.algorithm.kl_ctrl.type": ("fixed", "adaptive"),
    "trainer.algorithm.dynamic_sampling.type": (None, "filter", "replace"),
    "trainer.algorithm.cispo.cispo_anchor": ("old", "rollout"),
    "trainer.algorithm.dppo.dppo_type": ("binary_tv", "binary_kl"),
    "trainer.algorithm.decoupled_ppo.proximal": ("forward", "log_linear"),
    "trainer.algorithm.old_log_probs": ("trainer", "rollout"),
    "trainer.algorithm.off_policy_correction.tis_ratio_type": (None, "token", "sequence"),
    "trainer.algorithm.off_policy_correction.sequence_mask_metric": (
        None,
        "geometric",
        "product",
    ),
    "generator.inference_engine.backend": ("native", "vllm", "jetstream"),
    "generator.inference_engine.model_dtype": ("float32", "bfloat16", AUTO),
    "generator.inference_engine.weight_transport": ("folder", "transfer"),
    "generator.chat_template.source": ("name", "file"),
    "generator.sampling_params.logprobs": (None, 0, 1),
    "generator.eval_sampling_params.logprobs": (None, 0, 1),
    "sft.overlong": OVERLONG,
    "sft.train_on_what": TRAIN_ON_WHAT,
}
_LATER = {  # SkyRL's values of implemented fields, so that the message can say that they will come
    "generator.inference_engine.backend": ("sglang",),
    "trainer.policy.model.lora.init_method": ("xavier", "normal", "zero"),  # Megatron's
    "trainer.critic.model.lora.init_method": ("xavier", "normal", "zero"),
}
_POSITIVE = """
    trainer.policy.model.lora.alpha trainer.critic.model.lora.alpha
    trainer.train_batch_size trainer.policy_mini_batch_size trainer.critic_mini_batch_size
    trainer.epochs
    trainer.update_epochs_per_batch trainer.micro_train_batch_size_per_gpu
    trainer.micro_forward_batch_size_per_gpu trainer.eval_batch_size trainer.max_prompt_length
    generator.max_turns generator.n_samples_per_prompt
    generator.eval_n_samples_per_prompt
    generator.max_input_length generator.inference_engine.max_num_seqs
    generator.inference_engine.pipeline_parallel_size generator.inference_engine.probe_bound
    generator.inference_engine.request_timeout_seconds
    generator.sampling_params.max_generate_length
    generator.eval_sampling_params.max_generate_length
"""
_INTERVALS = """
    trainer.ckpt_interval trainer.hf_save_interval trainer.eval_interval
    trainer.print_example_interval trainer.max_ckpts_to_keep trainer.max_tokens_per_microbatch
"""
_NOT_NEGATIVE = """
    trainer.policy.model.lora.rank trainer.critic.model.lora.rank
    trainer.algorithm.kl_loss_coef trainer.algorithm.entropy_loss_coef
    trainer.algorithm.eps_clip_low trainer.algorithm.eps_clip_high
"""


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
        fail("sft", config.sft, "is for `python -m jaxrl.sft` alone; leave it at its defaults")
    check_fields(config)
    check_processes(config, num_devices, num_processes)
    shares = check_placement(config, num_devices // num_processes)
    check_mesh(config, shares, num_processes)
    check_conversations(config)
    check_engines(config, len(shares.engine))
    check_async(config, len(shares.engine))
    check_serving(config.serve)
    check_watching(config.trainer.watching, logger_names(config.trainer.logger))
    check_ledger(config.trainer.ledger)
    check_cluster(config.trainer.cluster, config.trainer.placement.policy_num_nodes)
    groups = [
        batch_groups(config, len(devices) * num_processes, role)
        for role, devices in shares.of_roles()
    ]
    check_microbatches(config, max(groups))
    check_objective(config)
    check_critic(config)
    check_moving_reference(config.trainer)
    warn_of_objective(config)
    _warn_of_sampling(config)
    _check_sampling(config.generator.sampling_params, "generator.sampling_params", greedy=False)
    eval_params = config.generator.eval_sampling_params
    assert eval_params is not None
    _check_sampling(eval_params, "generator.eval_sampling_params", greedy=True)
    _check_pass_at_k(config.generator)


def check_fields(config: TrainConfig) -> None:
    """Check what every run needs of its fields alone: available, in range, files and folders.

    Args:
        config: resolved.
    """
    values = flatten(config)
    _check_nan(values)
    _check_status(values)
    _check_choices(values)
    _check_ranges(values)
    _check_batch(config)
    check_models(config.trainer)
    _check_rope(config)
    _check_files(config)


def _check_nan(values: dict[str, Any]) -> None:
    """Refuse NaN: comparisons with it are false, so it would pass checks."""
    for field, value in values.items():
        inner = value if isinstance(value, dict) else {}
        for name, x in {field: value, **{f"{field}.{k}": v for k, v in inner.items()}}.items():
            if isinstance(x, float) and math.isnan(x):
                fail(name, x, "is not a number; set one")


def _check_status(values: dict[str, Any]) -> None:
    """Refuse planned features that are on; warn once of all fields without a counterpart."""
    defaults = flatten(resolve(TrainConfig()))
    ignored = []
    for field, value in values.items():
        row = status_of(field)
        if row is None or row.only_with or (field in defaults and value == defaults[field]):
            continue
        if row.status == "planned":
            fail(field, value, f"not available yet ({row.note}); set it to {defaults[field]!r}")
        if row.status == "inert":
            ignored.append(f"{field}={value!r} ({row.note})")
    if ignored:
        warnings.warn(f"config fields without effect in jaxrl: {'; '.join(ignored)}", stacklevel=3)


def _check_choices(values: dict[str, Any]) -> None:
    for field, choices in _CHOICES.items():
        check_choice(field, values[field], choices, _LATER.get(field, ()))


def _check_ranges(values: dict[str, Any]) -> None:
    for field in _POSITIVE.split():
        if values[field] <= 0:
            fail(field, values[field], "must be positive; set it to 1 or more")
    for field in _INTERVALS.split():
        if values[field] != -1 and values[field] <= 0:
            meaning = "all" if field.endswith("to_keep") else "off"
            fail(field, values[field], f"must be positive, or -1 ({meaning})")
    for field in _NOT_NEGATIVE.split():
        if values[field] < 0:
            fail(field, values[field], "must not be negative; set it to 0 or more")
    for field, meaning in (("trainer.max_training_steps", "all epochs"), ("sft.max_length", "any")):
        if (value := values[field]) is not None and value <= 0:
            fail(field, value, f"must be positive, or None ({meaning})")
    for role in ("policy", "critic"):
        field = f"trainer.{role}.model.lora.dropout"
        if not 0 <= values[field] < 1:
            fail(field, values[field], "must be in [0, 1); 0.0 is off")
        _check_optimizer(values, f"trainer.{role}.optimizer_config")


def _check_optimizer(values: dict[str, Any], group: str) -> None:
    for name in ("lr", "weight_decay", "num_warmup_steps"):
        if (value := values[f"{group}.{name}"]) < 0:
            fail(f"{group}.{name}", value, "must not be negative; set it to 0 or more")
    if (norm := values[f"{group}.max_grad_norm"]) <= 0:
        fix = "must be positive; a large number such as 1e9 turns clipping off"
        fail(f"{group}.max_grad_norm", norm, fix)
    betas = values[f"{group}.adam_betas"]
    if len(betas) != 2 or not all(0 <= b < 1 for b in betas):
        fail(f"{group}.adam_betas", betas, "must be two numbers in [0, 1), e.g. [0.9, 0.999]")
    check_choice(f"{group}.scheduler", values[f"{group}.scheduler"], SCHEDULERS)


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


def _check_rope(config: TrainConfig) -> None:
    """Check that the RoPE of the engine is the trainer's, so that both compute the same."""
    for name in ("rope_scaling", "rope_theta"):
        ours, theirs = getattr(config.generator, name), getattr(config.trainer, name)
        if ours != theirs:
            fail(
                f"generator.{name}",
                ours,
                f"differs from trainer.{name}={theirs!r}: sampler and trainer would be different "
                "models; leave it None and set the trainer's",
            )
    theta = config.trainer.rope_theta
    if theta is not None and theta <= 1:
        fail("trainer.rope_theta", theta, "must be > 1, e.g. 10000.0; None keeps the model's own")


def _warn_of_sampling(config: TrainConfig) -> None:
    """Warn where the sampler's distribution is not the trainer's."""
    sampling_params = config.generator.sampling_params
    off = {"repetition_penalty": 1.0, "additional_kwargs": None}
    if not sampling_params.keep_sampling_mask:
        off |= {"top_k": -1, "top_p": 1.0, "min_p": 0.0}
    values = {name: getattr(sampling_params, name) for name in off}
    filters = {name: value for name, value in values.items() if value != off[name]}
    if filters:
        fix = (
            "; generator.sampling_params.keep_sampling_mask, with a top_k, e.g. 64, trains what "
            "top_k, top_p, min_p left"
        )
        warnings.warn(
            f"generator.sampling_params {filters}: tokens come from a filtered distribution and "
            "the loss trains the whole one; policy/rollout_train_logprobs_abs_diff then measures "
            "the filter too" + fix * any(name in filters for name in ("top_k", "top_p", "min_p")),
            stacklevel=3,
        )
    sampled_dtype = engine_dtype(config.generator.inference_engine)
    trained_dtype = compute_dtype(config.trainer, "policy")
    if sampled_dtype != trained_dtype:
        warnings.warn(
            f"generator.inference_engine.model_dtype={sampled_dtype!r}, and the trainer computes "
            f"in {trained_dtype} (trainer.bf16={config.trainer.bf16}): their log-probs will differ",
            stacklevel=3,
        )


def _check_sampling(params: SamplingParams, field: str, *, greedy: bool) -> None:
    if params.temperature < 0 or (params.temperature == 0 and not greedy):
        fix = "must be 0 (greedy) or more" if greedy else "must be > 0 to train, e.g. 1.0"
        fail(f"{field}.temperature", params.temperature, fix)
    if not 0 < params.top_p <= 1:
        fail(f"{field}.top_p", params.top_p, "must be in (0, 1]; 1.0 is off")
    if not 0 <= params.min_p <= 1:
        fail(f"{field}.min_p", params.min_p, "must be in [0, 1]; 0.0 is off")
    if params.top_k != -1 and params.top_k <= 0:
        fail(f"{field}.top_k", params.top_k, "must be positive, or -1 (off)")
    if params.keep_sampling_mask and params.top_k == -1:
        fix = "needs top_k, which bounds what is recorded of each token; set it, e.g. to 64"
        fail(f"{field}.keep_sampling_mask", True, fix)
    if params.repetition_penalty <= 0:
        fail(f"{field}.repetition_penalty", params.repetition_penalty, "must be > 0; 1.0 is off")
    more = params.additional_kwargs or {}
    if set(more) - {"min_tokens"} or not isinstance(more.get("min_tokens", 0), int):
        fix = "the native engine takes 'min_tokens', a number of tokens, and nothing else"
        fail(f"{field}.additional_kwargs", params.additional_kwargs, fix)


def _check_pass_at_k(generator: GeneratorConfig) -> None:
    samples, field = generator.eval_n_samples_per_prompt, "generator.eval_pass_at_k"
    if wrong := [k for k in generator.eval_pass_at_k or [] if not 1 <= k <= samples]:
        fix = f"of generator.eval_n_samples_per_prompt={samples} samples; set k between 1 and that"
        fail(field, wrong, fix)
    assert generator.eval_sampling_params is not None  # resolved
    if samples > 1 and generator.eval_sampling_params.temperature == 0:
        warnings.warn(
            f"generator.eval_n_samples_per_prompt={samples} greedy samples of a prompt are all the "
            "same; set generator.eval_sampling_params.temperature above 0, or take one sample",
            stacklevel=3,
        )


def _check_files(config: TrainConfig) -> None:
    trainer, template = config.trainer, config.generator.chat_template
    if trainer.policy.model.path is None:
        fail("trainer.policy.model.path", None, "set a Hugging Face model folder, or a hub id")
    for field in ("export_path", "log_path"):
        if "://" in getattr(trainer, field):
            fail(f"trainer.{field}", getattr(trainer, field), "must be a local folder")
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
