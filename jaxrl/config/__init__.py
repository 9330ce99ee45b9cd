"""The one config schema: dataclasses, overrides, recipes, checks, the objective card.

config = apply_overrides(load_config_file(path), overrides)
config = resolve(config)
validate(config, num_devices)
print(objective_card(config, num_devices))
"""

import importlib
from typing import TYPE_CHECKING, Any

from jaxrl.config.algorithm import (
    AlgorithmConfig,
    CISPOConfig,
    ClipCovConfig,
    DecoupledPPOConfig,
    DPPOConfig,
    DynamicSamplingConfig,
    KLCovConfig,
    KLCtrlConfig,
    OffPolicyCorrectionConfig,
    OverlongBufferConfig,
    SAPOConfig,
)
from jaxrl.config.backend import (
    FSDPConfig,
    MegatronConfig,
    MegatronDDPConfig,
    MegatronLoraConfig,
    MegatronTorchProfilerConfig,
    MeshConfig,
    MixedPrecisionConfig,
)
from jaxrl.config.constraints import check_constraints
from jaxrl.config.data import DataConfig, SFTConfig
from jaxrl.config.dataclass_config import BaseConfig, get_config_as_dict, get_config_as_yaml_str
from jaxrl.config.environment import (
    EnvironmentConfig,
    GSM8kLLMJudgeEnvConfig,
    SearchEnvConfig,
    SkyRLGymConfig,
    Text2SQLEnvConfig,
)
from jaxrl.config.generator import (
    ChatTemplateConfig,
    GeneratorConfig,
    InferenceEngineConfig,
    SamplingParams,
    engine_dtype,
    engine_hosts,
    engine_tensor,
)
from jaxrl.config.model import ModelConfig, OptimizerConfig, SkyRLLoraConfig
from jaxrl.config.overrides import apply_overrides, parse_command_line
from jaxrl.config.platform import (
    ENGINE_SIZES,
    EVAL_PROMPTS,
    KNOWN_IDS,
    ON_CPU,
    auto_fields,
    with_settled,
)
from jaxrl.config.recipe import (
    default_config,
    load_config_file,
    read_command_line,
    read_early,
    to_train_config,
    with_row_files,
    write_row_files,
)
from jaxrl.config.rollouts import (
    by_transfer,
    by_versions,
    carries,
    check_engines,
    engine_parts,
    evaluates,
    exact_parts,
    exact_rows,
    group_bytes,
    in_process,
    keeps_pages,
    least_hosts,
    leaves_out_ids,
    longest_row,
    longest_wait,
    overlaps,
    rows_at_once,
    runs_free,
    sends_adapters,
    spans_hosts,
    starts_own_engine,
)
from jaxrl.config.serving import ServeConfig, TinkerConfig
from jaxrl.config.train_config import (
    SkyRLTrainConfig,
    TrainConfig,
    make_config,
    resolve,
)
from jaxrl.config.trainer import (
    ClusterConfig,
    CriticConfig,
    FullyAsyncConfig,
    PlacementConfig,
    PolicyConfig,
    RefConfig,
    TrainerConfig,
    compute_dtype,
    logger_names,
    model_overrides,
    nothing_to_do,
    run_folder,
)
from jaxrl.config.watching import WatchingConfig

if TYPE_CHECKING:
    from jaxrl.config.card import folded_card, objective_card
    from jaxrl.config.placement import batch_groups, check_nodes, device_ranges, sharding_rules
    from jaxrl.config.supervised import check_lengths, resolve_sft, sft_card, validate_sft
    from jaxrl.config.validation import validate

# They ask losses, estimators and meshes, which are made of JAX: it takes a second, so they are
# imported when somebody wants one.
_WITH_JAX = {
    "card": {"folded_card", "objective_card"},
    "placement": {"batch_groups", "check_nodes", "device_ranges", "sharding_rules"},
    "supervised": {"check_lengths", "resolve_sft", "sft_card", "validate_sft"},
    "validation": {"validate"},
}


def __getattr__(name: str) -> Any:
    """Import what has waited for it."""
    for module, names in _WITH_JAX.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "AlgorithmConfig",
    "BaseConfig",
    "CISPOConfig",
    "ChatTemplateConfig",
    "ClipCovConfig",
    "ClusterConfig",
    "CriticConfig",
    "DPPOConfig",
    "DecoupledPPOConfig",
    "DataConfig",
    "DynamicSamplingConfig",
    "EnvironmentConfig",
    "FSDPConfig",
    "FullyAsyncConfig",
    "GSM8kLLMJudgeEnvConfig",
    "GeneratorConfig",
    "InferenceEngineConfig",
    "KLCovConfig",
    "KLCtrlConfig",
    "MegatronConfig",
    "MeshConfig",
    "MegatronDDPConfig",
    "MegatronLoraConfig",
    "MegatronTorchProfilerConfig",
    "MixedPrecisionConfig",
    "ENGINE_SIZES",
    "EVAL_PROMPTS",
    "KNOWN_IDS",
    "ON_CPU",
    "ModelConfig",
    "OffPolicyCorrectionConfig",
    "OptimizerConfig",
    "OverlongBufferConfig",
    "PlacementConfig",
    "PolicyConfig",
    "RefConfig",
    "SAPOConfig",
    "SFTConfig",
    "SamplingParams",
    "SearchEnvConfig",
    "ServeConfig",
    "TinkerConfig",
    "SkyRLGymConfig",
    "SkyRLLoraConfig",
    "SkyRLTrainConfig",
    "Text2SQLEnvConfig",
    "TrainConfig",
    "TrainerConfig",
    "WatchingConfig",
    "apply_overrides",
    "auto_fields",
    "check_constraints",
    "check_engines",
    "check_lengths",
    "check_nodes",
    "compute_dtype",
    "default_config",
    "device_ranges",
    "engine_dtype",
    "engine_hosts",
    "engine_tensor",
    "engine_parts",
    "exact_parts",
    "evaluates",
    "exact_rows",
    "spans_hosts",
    "batch_groups",
    "get_config_as_dict",
    "get_config_as_yaml_str",
    "group_bytes",
    "by_transfer",
    "by_versions",
    "carries",
    "in_process",
    "keeps_pages",
    "leaves_out_ids",
    "least_hosts",
    "load_config_file",
    "longest_row",
    "longest_wait",
    "logger_names",
    "run_folder",
    "model_overrides",
    "make_config",
    "folded_card",
    "nothing_to_do",
    "objective_card",
    "parse_command_line",
    "read_command_line",
    "read_early",
    "resolve",
    "resolve_sft",
    "sft_card",
    "overlaps",
    "rows_at_once",
    "runs_free",
    "to_train_config",
    "sends_adapters",
    "starts_own_engine",
    "sharding_rules",
    "validate",
    "validate_sft",
    "with_row_files",
    "with_settled",
    "write_row_files",
]
