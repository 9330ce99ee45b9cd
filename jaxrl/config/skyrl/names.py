"""SkyRL's settings that the schema lacks: later ones, those of its examples, its entry points."""

import re
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple

OFF = (None, False, 0, -1, "none", [], {})


class Setting(NamedTuple):
    """Describe what became of a setting that is no field here.

    Attributes:
        kind: renamed; inert: without effect; refused, unless its value turns it off.
        names: dotted keys, separated by spaces; `*` takes anything, dots too.
        note: its name here, or the reason.
        neutral: further values that turn it off.
    """

    kind: Literal["renamed", "inert", "refused"]
    names: str
    note: str
    neutral: tuple[Any, ...] = ()

    def covers(self, key: str) -> bool:
        """Return whether the row is about the dotted key."""
        return any(fnmatchcase(key, name) for name in self.names.split())


_MEGATRON = tuple(f"trainer.{role}.megatron_config." for role in ("policy", "ref"))
_ENGINE = "generator.inference_engine."


def _each(prefixes: tuple[str, ...], names: str) -> str:
    return " ".join(prefix + name for prefix in prefixes for name in names.split())


SETTINGS = (
    Setting("renamed", "trainer.remove_microbatch_padding", "trainer.use_sample_packing"),
    Setting("renamed", "trainer.log_example_interval", "trainer.print_example_interval"),
    *(
        Setting(
            "renamed",
            f"trainer.algorithm.overlong_buffer_{name}",
            f"trainer.algorithm.overlong_buffer.{name}",
        )
        for name in ("len", "penalty_factor")
    ),
    *(
        Setting("renamed", f"generator.{old}", f"{_ENGINE}{new}")
        for old, new in (
            ("num_inference_engines", "num_engines"),
            ("remote_inference_engine_urls", "remote_urls"),
            *(
                (f"inference_engine_{kind}_parallel_size", f"{kind}_parallel_size")
                for kind in ("tensor", "pipeline", "data", "expert")
            ),
        )
    ),
    Setting(
        "renamed",
        "trainer.fully_async.clear_kv_cache_on_weight_sync",
        "generator.inference_engine.recompute_kv_on_update",
    ),
    Setting("inert", "generator.model_name", "the policy is what samples"),
    Setting("inert", "trainer.*.deepspeed_config.*", "one backend, by trainer.*.mesh"),
    Setting("inert", "data.dataloader.*", "prompts are in memory"),
    Setting(
        "inert",
        "trainer.use_expandable_segments trainer.enable_ray_gpu_monitor trainer.placement.reward_*",
        "torch, Ray and vLLM only",
    ),
    Setting(
        "inert",
        "trainer.tags trainer.num_logger_eval_samples trainer.num_logger_train_samples",
        "of W&B tables; runs dump answers to files",
    ),
    Setting(
        "inert",
        "trainer.logprobs_chunk_size trainer.vocab_entropy_chunk_* trainer.fused_lm_head_*",
        "log-probs are always computed in chunks",
    ),
    Setting(
        "inert",
        "trainer.recompute_old_logprobs_per_minibatch",
        "log-probs do not depend on how the batch was cut",
    ),
    Setting("inert", "trainer.policy.inference_only_init", "jaxrl.evaluate loads no optimizer"),
    Setting(
        "inert",
        "trainer.policy.language_model_only trainer.ref.language_model_only "
        f"{_ENGINE}language_model_only",
        "there are text models only",
    ),
    Setting(
        "inert",
        "trainer.policy.torch_profiler_config.*",
        "trainer.watching.trace_steps=[...] traces steps",
    ),
    Setting(
        "inert",
        _each(
            _MEGATRON,
            "hf_export_config.* lora_config.merge_lora moe_per_layer_logging moe_router_dtype "
            "async_dist_ckpt_* async_save_prestage_to_cpu",
        ),
        "Megatron's own",
    ),
    Setting(
        "inert",
        _each((_ENGINE,), "enable_pd num_prefill router_init_kwargs* offload_kv_for_weight_sync")
        + f" {_ENGINE}use_expandable_segments {_ENGINE}speculative_config* "
        f"{_ENGINE}delta_weight_sync* generator.use_cache_salt",
        "how vLLM samples fast, not what it samples",
    ),
    Setting("refused", "trainer.mtp.*", "no multi-token prediction heads", (1, 0.1)),
    Setting(
        "refused",
        _each(_MEGATRON, "mtp_* freeze_moe_router"),
        "routers are trained as all else; no multi-token prediction",
    ),
    Setting(
        "refused",
        f"{_each(_MEGATRON, 'moe_enable_routing_replay')} {_ENGINE}enable_return_routed_experts",
        "trainer.policy.router_replay='forward' does both",
    ),
    Setting(
        "refused",
        _each(_MEGATRON, "moe_aux_loss_coeff"),
        "Megatron's is of a microbatch; trainer.algorithm.router_balance_loss_coef is of each "
        "trajectory",
    ),
    Setting("refused", "trainer.policy.model.fake_int4_qat.*", "no quantised training"),
    Setting("refused", "generator.vision_language_generator", "text models only"),
    Setting(
        "refused",
        "trainer.fully_async.simulate_*",
        "no simulated trainer; `python -m jaxrl.plan` computes what a step costs",
    ),
    Setting(
        "refused",
        "trainer.fully_async.sample_full_batch",
        "groups without a gradient are kept, and masked by zero_variance_filter",
    ),
)


class EntryPoint(NamedTuple):
    """Hold what an entry point of SkyRL adds to its config.

    Attributes:
        sets: values of our config.
        note: what its code did, or what to do instead.
        refused: whether that is left out.
    """

    sets: dict[str, Any]
    note: str = ""
    refused: bool = False

    @property
    def own_code(self) -> bool:
        """Return whether it is none of SkyRL's: what it registers is not known."""
        return self.note == _OWN_CODE


# What SkyRL itself has under these names: no entry point can register another.
SKYRLS_NAMES = {
    "environment.env_class": {
        *("aime", "gsm8k", "gsm8k_multi_turn", "lcb", "llm_as_a_judge", "search", "searchcode"),
        "text2sql",
    },
    "trainer.algorithm.policy_loss_type": {
        *("regular", "dual_clip", "gspo", "sapo", "cispo", "dppo", "clip_cov", "kl_cov"),
        *("cross_entropy", "importance_sampling", "rollout_is"),
    },
    "trainer.algorithm.advantage_estimator": {"grpo", "gae", "rloo", "reinforce++", "maxrl"},
}

_DAPO = {
    "trainer.algorithm.overlong_buffer.len": 512,
    "trainer.algorithm.overlong_buffer.penalty_factor": 1.0,
}
_FREE = {"trainer.fully_async.enabled": True}
_LOCKSTEP = _FREE | {
    "trainer.fully_async.schedule": "lockstep",
    "trainer.fully_async.max_staleness_steps": 1,
}
_DISTILLATION = {
    "trainer.algorithm.advantage_estimator": "on_policy_distillation",
    "trainer.algorithm.use_kl_in_reward": False,
    "trainer.algorithm.use_kl_loss": False,
}
_OWN_CODE = (
    "an entry point of its own: what its code adds (an environment, a loss, a trainer) is not in "
    "its arguments; name it in the config, as in docs/migrating_from_skyrl.md"
)
_ENTRY_POINTS = {
    "main_base": EntryPoint({}),
    "main_dapo": EntryPoint(_DAPO, "soft overlong punishment is trainer.algorithm.overlong_buffer"),
    "main_tis_dapo": EntryPoint(_DAPO, "soft overlong punishment, as with main_dapo"),
    "main_async": EntryPoint(_LOCKSTEP, "one step off policy is a schedule"),
    "main_fully_async": EntryPoint(_FREE, "the fully asynchronous trainer is a schedule"),
    "main_dapo_fully_async": EntryPoint(_DAPO | _FREE, "overlong_buffer, and a schedule"),
    "main_on_policy_distill": EntryPoint(_DISTILLATION, "the teacher is trainer.ref.model.path"),
    "main_generate": EntryPoint({}, "evaluation alone: `python -m jaxrl.evaluate` with this file"),
}


def setting_of(key: str) -> Setting | None:
    """Return the row of a dotted key that is no field here; None for one that SkyRL lacks too."""
    return next((row for row in SETTINGS if row.covers(key)), None)


_LOADABLE_EXPERTS = (
    r"Qwen1\.5-MoE|Qwen2-\d+B-A|Qwen3-(Coder-|Next-)?\d+B-A|Qwen3\.5-\d+B-A|Mixtral|OLMoE"
)
_UNLOADABLE = {
    rf"^(?!.*({_LOADABLE_EXPERTS})).*"
    r"(-A\d+(\.\d+)?B\b|MoE|DeepSeek-(V\d|R1$)|Moonlight|Kimi-K)": (
        "a mixture of experts of another family than those of docs/models.md"
    ),
    r"\bVL\b|-VL-|Vision|LLaVA|Omni": "a model of images",
}


def unloadable(model: str) -> str:
    """Say what the name of a hub model tells that jaxrl cannot load; "" where it tells nothing."""
    for pattern, kind in _UNLOADABLE.items():
        if re.search(pattern, model, re.IGNORECASE):
            return kind
    return ""


def entry_points() -> dict[str, EntryPoint]:
    """Return last part of an entry point's module -> what it adds to the config."""
    return dict(_ENTRY_POINTS)


def entry_point(command: list[str]) -> tuple[str, EntryPoint]:
    """Return the module or file that a command runs, and what it adds to the config.

    Raises:
        ValueError: it does not train.
    """
    module = next((b for a, b in zip(command, command[1:], strict=False) if a == "-m"), None)
    module = module or next((w for w in command if w.endswith(".py")), "main_base")
    name = module.removesuffix(".py").replace("/", ".").rpartition(".")[2]
    if name == "main_sft":
        raise ValueError(f"{module} is supervised fine-tuning: write a recipe for it, docs/sft.md")
    if name in ("serve", "api") or ".verl." in module:
        raise ValueError(f"{module} is no training run of SkyRL; there is nothing to convert")
    return module, _ENTRY_POINTS.get(name, EntryPoint({}, _OWN_CODE, refused=True))
