"""Whether a run and what it finds in its folders are one: which fields of their configs differ."""

import fnmatch
import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from jaxrl import config as cfg
from jaxrl.files import FolderError
from jaxrl.functions import present_path
from jaxrl.parallel import agree, is_first

# What may change between a run and its continuation: where things go, how often, how far.
MAY_CHANGE = (
    "data.val_data",
    "trainer.*.fsdp_config.*",  # where and in which parts the same numbers are computed
    "trainer.*.megatron_config.tensor_model_parallel_size",
    "trainer.*.mesh*",
    "trainer.*.offload_after_step",
    "trainer.*_interval",
    "trainer.ckpt_path",
    "trainer.cluster.*",
    "trainer.compilation_cache_path",
    "trainer.dump_*",
    "trainer.epochs",
    "trainer.eval_*",
    "trainer.export_path",
    "trainer.few_shapes",
    "trainer.flash_attn",
    "trainer.fully_async.num_parallel_generation_workers",
    "trainer.ledger.*",
    "trainer.gradient_checkpointing*",
    "trainer.log*",
    "trainer.max_ckpts_to_keep",
    "trainer.max_tokens_per_microbatch",
    "trainer.max_training_steps",
    "trainer.micro_*",
    "trainer.packed_length",
    "trainer.placement.*",
    "trainer.policy.model.path",  # the architecture is compared by itself
    "trainer.policy.model.random_init",
    "trainer.critic.model.path",
    "trainer.critic.model.random_init",
    "trainer.project_name",
    "trainer.remat_policy",
    "trainer.resume_*",
    "trainer.run_name",
    "trainer.sharding_rules*",
    "trainer.policy.record_memory",
    "trainer.strategy",
    "trainer.use_sample_packing",
    "trainer.watching.*",
    "generator.eval_*",
    "generator.inference_engine.*",
    # where servers of environments are, how patiently they are asked, how many calls at a time
    "environment.rejudge_fraction",
    "environment.skyrl_gym.*_workers",
    "environment.skyrl_gym.env_timeout_seconds",
    "environment.skyrl_gym.search.search_url",
    "environment.skyrl_gym.search.timeout",
    "environment.skyrl_gym.search.log_requests",
    "environment.skyrl_gym.llm_as_a_judge.base_url",
    "environment.skyrl_gym.llm_as_a_judge.api_key_env",
    "environment.skyrl_gym.llm_as_a_judge.timeout",
    "environment.skyrl_gym.llm_as_a_judge.max_attempts",
    "environment.skyrl_gym.llm_as_a_judge.max_requests",
)
OWN_FOLDERS = (
    "choose another trainer.run_name (and trainer.ckpt_path and trainer.export_path, if set)"
)


def changed_fields(old: dict[str, Any], new: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the fields, by dotted name, in which two configs differ: (old, new).

    Those of MAY_CHANGE are left out.

    A field that is newer than the old config was at its default.
    """
    before, now = _flat(old), _flat(new)
    defaults = _flat(cfg.get_config_as_dict(cfg.TrainConfig()))
    newer = {key: value for key, value in defaults.items() if key in now and key not in before}
    return {
        key: pair
        for key, pair in differences(newer | before, now).items()
        if ".mixed_precision" in key or not any(fnmatch.fnmatch(key, p) for p in MAY_CHANGE)
    }


def fingerprint(rows: Iterable[Any]) -> str:
    """Return the SHA-256 of a data set in its order.

    With it a resumed run finds other rows in old files.

    What JSON cannot say of a row counts by its type alone.

    Args:
        rows: dataclass instances, `Prompt` or `Conversation`.
    """
    digest = hashlib.sha256()
    for row in rows:
        try:
            text = json.dumps(vars(row), default=_plain)
        except TypeError:  # keys that JSON does not have
            text = json.dumps(row.tokens)
        digest.update(text.encode())
    return digest.hexdigest()


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else type(value).__name__


def refuse_records_of_another(config: cfg.TrainConfig) -> None:
    """Refuse to write over the steps of another run in the run folder; a collective.

    The same config may start again there: the run was killed before its first checkpoint, or is
    done once more.

    Raises:
        FolderError: the run folder holds steps of a run with another config, or of one whose
            config cannot be read; names the folder, the fields and both values.
    """
    folder = cfg.run_folder(config.trainer)
    problem = _other_records(folder, cfg.get_config_as_dict(config)) if is_first() else None
    if problem := agree(problem):
        raise FolderError(
            f"the run folder {str(folder)!r} holds the steps of {problem}. This run would write "
            f"over them: {OWN_FOLDERS}, or undo the change"
        )


def _other_records(folder: Path, config: dict[str, Any]) -> str | None:
    """Return whose steps the folder holds, in words; None: those of this config, or none."""
    lines, rollouts = folder / "metrics.jsonl", (folder / "rollouts").glob("step_*.npz")
    if not (lines.exists() and lines.stat().st_size) and not any(rollouts):
        return None
    try:
        old = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        return f"a run whose config.yaml cannot be read ({type(error).__name__})"
    if not isinstance(old, dict):
        return "a run whose config.yaml is no config"
    changed = changed_fields(old, config)
    return f"a run with another config; (there, this run): {changed}" if changed else None


def differences(saved: dict[str, Any], now: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the dotted keys whose values differ: (saved, now). Lists and tuples are the same."""
    left, right = (json.loads(json.dumps(_flat(values))) for values in (saved, now))
    return {
        key: (left.get(key), right.get(key))
        for key in sorted({*left, *right})
        if left.get(key) != right.get(key)
    }


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat = {}
    for key, value in values.items():
        nested = isinstance(value, dict) and value
        flat |= _flat(value, f"{prefix}{key}.") if nested else {f"{prefix}{key}": _present(value)}
    return flat


def _present(value: Any) -> Any:
    """Return a value with the modules in it named as this version names them."""
    if isinstance(value, list | tuple):
        return [_present(item) for item in value]
    return present_path(value) if isinstance(value, str) else value
