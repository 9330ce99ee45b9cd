"""Checks of a config before anything is loaded: every error names the field, the value, the fix."""

import math
import warnings
from typing import Any

from jaxrl.config.conversation_checks import check_conversations
from jaxrl.config.dataclass_config import flatten
from jaxrl.config.errors import check_choice, fail
from jaxrl.config.field_status import status_of
from jaxrl.config.generator import SamplingParams
from jaxrl.config.mesh import batch_groups, check_mesh
from jaxrl.config.microbatching import check_microbatches
from jaxrl.config.objective_checks import check_objective, warn_of_objective
from jaxrl.config.rollouts import check_engines
from jaxrl.config.serving import check_serving
from jaxrl.config.sft import SFTConfig
from jaxrl.config.train_config import TrainConfig, resolve
from jaxrl.data.conversations import OVERLONG, TRAIN_ON_WHAT
from jaxrl.losses.kl import KL_ESTIMATORS
from jaxrl.losses.reduction import REDUCTIONS
from jaxrl.models.lora import INIT_METHODS
from jaxrl.models.remat import REMAT_POLICIES

STRATEGIES = ("jax", "fsdp", "fsdp2", "megatron")
LOGGERS = ("console", "tensorboard")

_CHOICES = {
    "trainer.strategy": STRATEGIES,
    "trainer.remat_policy": tuple(REMAT_POLICIES),
    "trainer.resume_mode": (None, "none", "latest", "from_path"),
    "trainer.policy.optimizer_config.scheduler": (
        "constant",
        "constant_with_warmup",
        "linear",
        "cosine",
    ),
    "trainer.policy.model.lora.init_method": INIT_METHODS,
    "trainer.algorithm.kl_estimator_type": KL_ESTIMATORS,
    "trainer.algorithm.loss_reduction": REDUCTIONS,
    "trainer.algorithm.kl_ctrl.type": ("fixed", "adaptive"),
    "trainer.algorithm.dynamic_sampling.type": (None, "filter", "replace"),
    "trainer.algorithm.cispo.cispo_anchor": ("old", "rollout"),
    "trainer.algorithm.dppo.dppo_type": ("binary_tv", "binary_kl"),
    "trainer.algorithm.off_policy_correction.tis_ratio_type": (None, "token", "sequence"),
    "trainer.algorithm.off_policy_correction.sequence_mask_metric": (
        None,
        "geometric",
        "product",
    ),
    "generator.inference_engine.backend": ("native", "vllm", "jetstream"),
    "generator.inference_engine.model_dtype": ("float32", "bfloat16"),
    "generator.chat_template.source": ("name", "file"),
    "generator.sampling_params.logprobs": (None, 0, 1),
    "generator.eval_sampling_params.logprobs": (None, 0, 1),
    "sft.overlong": OVERLONG,
    "sft.train_on_what": TRAIN_ON_WHAT,
}
_LATER = {  # SkyRL's values of implemented fields, so that the message can say that they will come
    "generator.inference_engine.backend": ("sglang",),
    "trainer.logger": ("wandb", "mlflow", "swanlab"),
    "trainer.policy.model.lora.init_method": ("xavier", "normal", "zero"),  # Megatron's
}
_POSITIVE = """
    trainer.policy.model.lora.alpha
    trainer.train_batch_size trainer.policy_mini_batch_size trainer.epochs
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
    trainer.policy.model.lora.rank trainer.policy.optimizer_config.lr
    trainer.policy.optimizer_config.weight_decay trainer.policy.optimizer_config.num_warmup_steps
    trainer.algorithm.kl_loss_coef trainer.algorithm.entropy_loss_coef
    trainer.algorithm.eps_clip_low trainer.algorithm.eps_clip_high
"""


def validate(config: TrainConfig, num_devices: int = 1) -> None:
    """Check a config, its derived defaults filled in by `resolve`; warn of fields without effect.

    Args:
        config: is not changed.
        num_devices: devices that the run will use.

    Raises:
        ValueError: a field is out of range, not available, or at odds with another one.
    """
    config = resolve(config)
    if config.sft != SFTConfig():
        fail("sft", config.sft, "is for `python -m jaxrl.sft` alone; leave it at its defaults")
    check_fields(config)
    check_mesh(config, num_devices)
    check_conversations(config)
    check_engines(config, num_devices)
    check_serving(config.serve)
    groups = (batch_groups(config, num_devices, role) for role in ("policy", "ref"))
    check_microbatches(config, max(groups))
    check_objective(config)
    warn_of_objective(config)
    _warn_of_sampling(config)
    _check_sampling(config.generator.sampling_params, "generator.sampling_params", greedy=False)
    eval_params = config.generator.eval_sampling_params
    assert eval_params is not None
    _check_sampling(eval_params, "generator.eval_sampling_params", greedy=True)


def check_fields(config: TrainConfig) -> None:
    """What every run needs of its fields by themselves: available, in range, files and folders.

    Args:
        config: resolved.
    """
    values = flatten(config)
    _check_nan(values)
    _check_status(values)
    _check_choices(values)
    _check_ranges(values)
    _check_batch(config)
    _check_rope(config)
    _check_files(config)


def _check_nan(values: dict[str, Any]) -> None:
    """Comparisons with NaN are false: it would pass checks."""
    for field, value in values.items():
        inner = value if isinstance(value, dict) else {}
        for name, x in {field: value, **{f"{field}.{k}": v for k, v in inner.items()}}.items():
            if isinstance(x, float) and math.isnan(x):
                fail(name, x, "is not a number; set one")


def _check_status(values: dict[str, Any]) -> None:
    """Planned features must be off; fields without a counterpart are named in one warning."""
    defaults = flatten(resolve(TrainConfig()))
    ignored = []
    for field, value in values.items():
        row = status_of(field)
        if row is None or row.only_with or (field in defaults and value == defaults[field]):
            continue
        if row.status == "planned":
            if field in defaults:
                fix = f"set it to {defaults[field]!r}"
            else:  # a field of an optional group that is off by default
                fix = f"set {field.rpartition('.')[0]} to None"
            fail(field, value, f"not available yet ({row.note}); {fix}")
        if row.status == "inert":
            ignored.append(f"{field}={value!r} ({row.note})")
    if ignored:
        warnings.warn(f"config fields without effect in jaxrl: {'; '.join(ignored)}", stacklevel=3)


def _check_choices(values: dict[str, Any]) -> None:
    for field, choices in _CHOICES.items():
        check_choice(field, values[field], choices, _LATER.get(field, ()))
    loggers = values["trainer.logger"]
    for name in [loggers] if isinstance(loggers, str) else loggers:
        check_choice("trainer.logger", name, LOGGERS, _LATER["trainer.logger"])


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
    norm = values["trainer.policy.optimizer_config.max_grad_norm"]
    if norm <= 0:
        fail(
            "trainer.policy.optimizer_config.max_grad_norm",
            norm,
            "must be positive; a large number such as 1e9 turns clipping off",
        )
    dropout = values["trainer.policy.model.lora.dropout"]
    if not 0 <= dropout < 1:
        fail("trainer.policy.model.lora.dropout", dropout, "must be in [0, 1); 0.0 is off")
    betas = values["trainer.policy.optimizer_config.adam_betas"]
    if len(betas) != 2 or not all(0 <= b < 1 for b in betas):
        fail(
            "trainer.policy.optimizer_config.adam_betas",
            betas,
            "must be two numbers in [0, 1), e.g. [0.9, 0.999]",
        )


def _check_batch(config: TrainConfig) -> None:
    prompts, mini = config.trainer.train_batch_size, config.trainer.policy_mini_batch_size
    if prompts < mini:
        fail(
            "trainer.train_batch_size",
            prompts,
            f"a step has fewer prompts than one minibatch (trainer.policy_mini_batch_size={mini}); "
            f"set policy_mini_batch_size to {prompts} or less",
        )
    if prompts % mini:
        fail(
            "trainer.train_batch_size",
            prompts,
            f"not a multiple of trainer.policy_mini_batch_size={mini} ({prompts} = "
            f"{prompts // mini} x {mini} + {prompts % mini}); set it to {prompts - prompts % mini} "
            f"or {prompts - prompts % mini + mini}",
        )


def _check_rope(config: TrainConfig) -> None:
    """The engine computes what the trainer computes."""
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
    """Where the sampler's distribution is not the trainer's."""
    sampling_params = config.generator.sampling_params
    off = {"repetition_penalty": 1.0, "additional_kwargs": None}
    if not sampling_params.keep_sampling_mask:
        off |= {"top_k": -1, "top_p": 1.0, "min_p": 0.0}
    values = {name: getattr(sampling_params, name) for name in off}
    filters = {name: value for name, value in values.items() if value != off[name]}
    if filters:
        fix = "; generator.sampling_params.keep_sampling_mask trains what top_k, top_p, min_p left"
        warnings.warn(
            f"generator.sampling_params {filters}: tokens come from a filtered distribution and "
            "the loss trains the whole one; policy/rollout_train_logprobs_abs_diff then measures "
            "the filter too" + fix * any(name in filters for name in ("top_k", "top_p", "min_p")),
            stacklevel=3,
        )
    engine_dtype = config.generator.inference_engine.model_dtype
    if (engine_dtype == "bfloat16") != config.trainer.bf16:
        warnings.warn(
            f"generator.inference_engine.model_dtype={engine_dtype!r} and trainer.bf16="
            f"{config.trainer.bf16}: sampler and trainer compute in different precision, their "
            "log-probs will differ",
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


def _check_files(config: TrainConfig) -> None:
    trainer, template = config.trainer, config.generator.chat_template
    if trainer.policy.model.path is None:
        fail("trainer.policy.model.path", None, "set a Hugging Face model folder, or a hub id")
    for field in ("export_path", "log_path"):
        if "://" in getattr(trainer, field):
            fail(f"trainer.{field}", getattr(trainer, field), "must be a local folder")
    if not config.data.train_data:
        fail("data.train_data", [], "set at least one Parquet or JSONL file")
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
