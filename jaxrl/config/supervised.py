"""The config of a supervised run: what it sets, what it leaves out, its checks and its card."""

import fnmatch
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl.config.card import format_card, microbatch_lines, optimizer_line
from jaxrl.config.dataclass_config import BaseConfig, flatten
from jaxrl.config.formulas import loss_lines, reduction_line
from jaxrl.config.microbatching import check_rows
from jaxrl.config.placement import batch_groups, check_mesh, check_placement, check_processes
from jaxrl.config.platform import ENGINE_SIZES, ON_CPU
from jaxrl.config.train_config import TrainConfig, resolve
from jaxrl.config.validation import check_fields, check_kernels
from jaxrl.config_error import fail

# What supervised fine-tuning reads; everything else of the schema is about rollouts.
_READ = """
    data.* sft.* trainer.policy.* generator.chat_template*
    trainer.sharding_rules trainer.gradient_checkpointing* trainer.remat_policy trainer.seed
    trainer.resume_* trainer.log_path trainer.ckpt_path trainer.max_ckpts_to_keep
    trainer.ckpt_interval trainer.hf_save_interval trainer.export_* trainer.bf16 trainer.epochs
    trainer.max_training_steps trainer.train_batch_size trainer.micro_* trainer.use_sample_packing
    trainer.packed_length trainer.few_shapes trainer.max_tokens_per_microbatch trainer.eval_*
    trainer.prefix_sharing trainer.flash_attn trainer.kernels* trainer.expert_exchange
    trainer.disable_fast_tokenizer
    trainer.project_name trainer.run_name trainer.logger trainer.compilation_cache_path
    trainer.rope_* trainer.strategy
    trainer.watching.display
"""


def resolve_sft(config: TrainConfig) -> TrainConfig:
    """Return a copy with every field that follows from another one set.

    The objective is that of supervised learning, whatever `trainer.algorithm` says: cross-entropy,
    averaged over the imitated tokens of a batch, which is one minibatch.
    """
    builtin, result = flatten(TrainConfig()), type(config)()
    for key, value in flatten(config).items():
        if _is_read(key) or _field(key, builtin) is None:
            _set(result, key, value)
    trainer, algorithm = result.trainer, result.trainer.algorithm
    trainer.policy_mini_batch_size = trainer.train_batch_size
    algorithm.policy_loss_type, algorithm.loss_reduction = "cross_entropy", "token_mean"
    algorithm.use_kl_loss = False
    result.generator.n_samples_per_prompt = 1
    return resolve(result)


def validate_sft(config: TrainConfig, num_devices: int = 1, num_processes: int = 1) -> None:
    """Check the config of a supervised run; warn of fields without a counterpart.

    Args:
        config: is not changed.
        num_devices: devices that the run will use.
        num_processes: that have them, equally many each.

    Raises:
        ValueError: a field is out of range, not available, at odds with another one, or set
            although nothing reads it.
    """
    resolved = resolve_sft(config)
    defaults, expected = flatten(TrainConfig()), flatten(resolved)
    unread = {}
    for key, value in flatten(config).items():
        field = _field(key, defaults)
        # the config of an earlier run has what the platform made of it, or the default of its time
        if field in ON_CPU or (field in ENGINE_SIZES and value == 1):
            continue
        if field is not None and value not in (defaults[field], expected.get(key)):
            unread[key] = value, defaults[field]
    for key, (value, default) in unread.items():
        fix = f"has no effect in supervised fine-tuning; leave it {default!r}"
        if len(unread) > 2:
            fix += (
                f", as {len(unread) - 1} other fields. Is this a recipe of jaxrl.train? Those of "
                "jaxrl.sft are configs/sft_*.py"
            )
        fail(key, value, fix)
    check_fields(resolved)
    check_kernels(resolved.trainer, sampling=False)
    check_processes(resolved, num_devices, num_processes)
    ranges = check_placement(resolved, num_devices // num_processes)
    check_mesh(resolved, ranges, num_processes)
    if (replay := resolved.trainer.policy.router_replay) != "off":
        fix = "there is no sampler whose experts could be replayed; set it to 'off'"
        fail("trainer.policy.router_replay", replay, fix)
    if (known := resolved.trainer.policy.known_ids) is not None:
        fail("trainer.policy.known_ids", known, "nothing is drawn here, and all ids are scored")
    if resolved.trainer.policy.record_memory:
        fail("trainer.policy.record_memory", True, "is of reinforcement learning; set it to False")


def check_lengths(config: TrainConfig, num_devices: int, longest: int) -> None:
    """Refuse rows that cannot hold every conversation, and a budget without a row per device.

    Args:
        config: resolved.
        longest: tokens of the longest conversation.
    """
    groups = batch_groups(config, num_devices)
    check_rows(config.trainer, groups, longest, f"the longest conversation of {longest} tokens")


def sft_card(
    config: TrainConfig, num_devices: int, longest: int, platform: Sequence[str] = ()
) -> str:
    """Return the objective of a supervised run in plain text.

    Args:
        config: resolved.
        num_devices: devices that the run will use.
        longest: tokens of the longest conversation.
        platform: see `objective_card`.
    """
    trainer, sft = config.trainer, config.sft
    size = trainer.train_batch_size
    what = sft.train_on_what.replace("_", " ")
    limit = "any" if sft.max_length is None else f"at most {sft.max_length}, longer: {sft.overlong}"
    parts: list[tuple[str, list[str]]] = [
        ("minimise", ["sum_bt w_bt l_bt      (batch of B rows b, tokens t, loss mask m)"]),
        ("loss", loss_lines(trainer)),
        ("loss mask", [f"{what}, with the token that ends the turn"]),
        ("reduction", [reduction_line(config)]),
        ("length", [f"{limit}; the longest has {longest} tokens"]),
        ("optimizer", [optimizer_line(trainer.policy.optimizer_config)]),
        (
            "batch",
            [
                f"{size} conversations = 1 optimizer update per step",
                *microbatch_lines(config, size, num_devices, longest),
            ],
        ),
        ("platform", list(platform)),
    ]
    return format_card(parts)


def _is_read(key: str) -> bool:
    return any(fnmatch.fnmatch(key, pattern) for pattern in _READ.split())


def _field(key: str, builtin: Mapping[str, Any]) -> str | None:
    """Return the schema field that a key belongs to, or None: it is of a user's own class.

    A group that is off by default is a field there, and has keys of its own where it is on.
    """
    parts = key.split(".")
    names = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
    return next((name for name in names if name in builtin), None)


def _set(config: BaseConfig, key: str, value: Any) -> None:
    *groups, name = key.split(".")
    for group in groups:
        config = getattr(config, group)
    setattr(config, name, value)
