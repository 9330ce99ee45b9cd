"""Whether a run and what it finds in its folders are one: which fields of their configs differ."""

import dataclasses
import fnmatch
import hashlib
import json
import math
import re
from collections.abc import Iterable
from typing import Any

import numpy as np

from jaxrl import config as cfg
from jaxrl.config.constraints import NO_BOUND
from jaxrl.functions import present_path

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
    "trainer.export_dtype",
    "trainer.export_path",
    "trainer.expert_exchange",
    "trainer.few_shapes",
    "trainer.flash_attn",
    "trainer.fully_async.num_parallel_generation_workers",
    "trainer.ledger.*",
    "trainer.gradient_checkpointing*",
    "trainer.kernels*",
    "trainer.log*",
    "trainer.max_ckpts_to_keep",
    "trainer.max_tokens_per_microbatch",
    "trainer.max_training_steps",
    "trainer.micro_*",
    "trainer.packed_length",
    "trainer.placement.*",
    "trainer.policy.model.lora.merge_exports",
    "trainer.critic.model.lora.merge_exports",
    "trainer.policy.model.path",  # the architecture is compared by itself
    "trainer.policy.model.random_init",
    "trainer.critic.model.path",
    "trainer.critic.model.random_init",
    "trainer.prefix_sharing",
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
    "generator.longest_first",
    "environment.rows_may_name_code",
    # where servers of environments are, how patiently they are asked, how many calls at a time
    "environment.rejudge_fraction",
    "environment.skyrl_gym.*_workers",
    "environment.skyrl_gym.env_timeout_seconds",
    "environment.skyrl_gym.search.search_url",
    "environment.skyrl_gym.search.api_key_env",
    "environment.skyrl_gym.search.timeout",
    "environment.skyrl_gym.search.log_requests",
    "environment.skyrl_gym.llm_as_a_judge.base_url",
    "environment.skyrl_gym.llm_as_a_judge.api_key_env",
    "environment.skyrl_gym.llm_as_a_judge.timeout",
    "environment.skyrl_gym.llm_as_a_judge.max_attempts",
    "environment.skyrl_gym.llm_as_a_judge.max_requests",
)
_ROWS = re.compile(r"(?<=[/\\]data[/\\])rows-[0-9a-f]{16}\.jsonl$")  # of `config.given.Rows`
OWN_FOLDERS = (
    "choose another trainer.run_name (and trainer.ckpt_path and trainer.export_path, if set)"
)


def changed_fields(old: dict[str, Any], new: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the fields, by dotted name, in which two configs differ: (old, new).

    Those of MAY_CHANGE are left out.

    A field that is newer than the old config was at its default. Infinite bounds, which are refused
    by now, are as good as the large ones that an error names in their place.
    """
    before, now = _flat(old), _flat(new)
    for key, value in before.items():
        if isinstance(value, float) and math.isinf(value):
            here = now.get(key)
            large = isinstance(here, int | float) and math.copysign(1, value) * here >= NO_BOUND
            before[key] = here if large else value
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

    What JSON cannot say of a row counts by its type alone; what rows are not compared by, as the
    name of its file, does not.

    Args:
        rows: dataclass instances, `Prompt` or `Conversation`.
    """
    digest = hashlib.sha256()
    for row in rows:
        try:
            said = {f.name: getattr(row, f.name) for f in dataclasses.fields(row) if f.compare}
            text = json.dumps(said, default=_plain)
        except TypeError:  # keys that JSON does not have
            text = json.dumps(row.tokens)
        digest.update(text.encode())
    return digest.hexdigest()


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else type(value).__name__


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
    """Return a value with the modules in it named as this version names them.

    Given rows are named by what they hold, wherever their file is.
    """
    if isinstance(value, list | tuple):
        return [_present(item) for item in value]
    if not isinstance(value, str):
        return value
    return rows[0] if (rows := _ROWS.search(value)) else present_path(value)
