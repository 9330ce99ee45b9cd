"""What every field of SkyRL's config does in jaxrl: one row for every field or group of fields.

The meaning of a field is the docstring under it in the schema; this table adds what differs.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

Status = Literal["implemented", "mapped", "inert", "planned"]
SAME_DEFAULT = "same as SkyRL"


@dataclass(frozen=True)
class FieldStatus:
    """A row.

    Attributes:
        status: implemented: as in SkyRL. mapped: the JAX counterpart, see `note`. inert: no
            counterpart, accepted with a warning. planned: rejected until it exists.
        prefix: dotted path of the group; `*` stands for one name.
        names: field names in it, separated by spaces; a trailing `*` takes everything that starts
            so, deeper levels included.
        note: the difference from SkyRL, or the reason.
        only_with: the setting without which the field has no effect. That setting is the one
            `validate` rejects; the field itself may have any value.
        skyrl_default: SkyRL's default where ours differs.
        skyrl_only: False for fields that SkyRL does not have.
    """

    status: Status
    prefix: str
    names: str
    note: str = ""
    only_with: str = ""
    skyrl_default: Any = SAME_DEFAULT
    skyrl_only: bool = True

    def covers(self, key: str) -> bool:
        """Whether the row is about the dotted key."""
        head, tail = key.split("."), self.prefix.split(".")
        if len(head) <= len(tail) or any(
            p not in ("*", h) for h, p in zip(head, tail, strict=False)
        ):
            return False
        name = ".".join(head[len(tail) :])
        return any(
            name.startswith(n[:-1]) if n.endswith("*") else name == n for n in self.names.split()
        )


def status_of(key: str) -> FieldStatus | None:
    """The row of a dotted key; None for a field of a user's own config class."""
    return next((row for row in TABLE if row.covers(key)), None)


_CRITIC = "trainer.critic.model.path"
_ENGINE = "generator.inference_engine"
_ALGORITHM = "trainer.algorithm"
_CORRECTION = "trainer.algorithm.off_policy_correction"
_MEGATRON = "trainer.*.megatron_config"
_NEW = "not in SkyRL's reference"
_LATER = "in SkyRL since August 2026"

_implemented = partial(FieldStatus, "implemented")
_mapped = partial(FieldStatus, "mapped")
_inert = partial(FieldStatus, "inert")
_planned = partial(FieldStatus, "planned")

_MODELS = (
    _implemented("data", "train_data val_data"),
    _implemented("trainer.policy.model", "path"),
    _implemented("trainer.ref.model", "path", "loaded only for a KL term"),
    _implemented("trainer.policy.model", "random_init", _NEW, skyrl_only=False),
    _implemented(
        "trainer.ref.model", "random_init", f"{_NEW}; the policy's if no path", skyrl_only=False
    ),
    _planned("trainer.critic.model", "path", "a critic"),
    _planned("trainer.critic.model", "random_init", _NEW, only_with=_CRITIC, skyrl_only=False),
    _implemented("trainer.policy.model.lora", "rank alpha dropout init_method"),
    _implemented("trainer.policy.model.lora", "target_modules exclude_modules", "also a list"),
    *(
        row
        for role in ("trainer.ref", "trainer.critic")
        for row in (
            _planned(f"{role}.model.lora", "rank", "adapters of other models than the policy"),
            _planned(
                f"{role}.model.lora",
                "alpha dropout target_modules exclude_modules init_method",
                only_with="lora.rank > 0",
            ),
        )
    ),
    _implemented(
        "trainer.*.model.lora",
        "lora_sync_path",
        "the policy's, with backend='vllm'; None: adapters are merged into the weights",
        only_with="lora.rank > 0",
        skyrl_default="/tmp/skyrl_lora_sync",
    ),
    _implemented(
        "trainer.policy.optimizer_config",
        "lr adam_betas weight_decay max_grad_norm num_warmup_steps",
    ),
    _implemented(
        "trainer.policy.optimizer_config", "scheduler", "linear and cosine end at the last update"
    ),
    _implemented(
        "trainer.policy.optimizer_config",
        "offload_after_step",
        "also between the minibatches of a step; no effect without pinned_host memory",
        skyrl_default=True,
    ),
    _planned(
        "trainer.critic.optimizer_config",
        "offload_after_step",
        only_with=_CRITIC,
        skyrl_default=True,
    ),
    _planned(
        "trainer.critic.optimizer_config",
        "lr adam_betas weight_decay max_grad_norm num_warmup_steps scheduler",
        only_with=_CRITIC,
    ),
    _planned(
        "trainer.critic",
        "fsdp_config.* sequence_parallel_size model_config_kwargs",
        only_with=_CRITIC,
    ),
    _implemented(
        "trainer.policy.fsdp_config",
        "cpu_offload",
        "weights and optimizer state, computed with on the device; no effect without pinned_host",
    ),
    _implemented("trainer.ref.fsdp_config", "cpu_offload", "on the device during its forward"),
    *(
        row
        for role in ("trainer.policy", "trainer.ref")
        for row in (
            _planned(f"{role}.mesh", "context expert", only_with="later axes", skyrl_only=False),
            _implemented(f"{role}.mesh", "data fsdp tensor", _NEW, skyrl_only=False),
            _mapped(f"{role}.fsdp_config", "fsdp_size", "mesh.fsdp, with mesh.data=-1"),
        )
    ),
    _implemented("trainer.ref", "mesh", _NEW, skyrl_only=False),
    *(
        row
        for role in ("trainer.policy", "trainer.ref")
        for row in (
            _planned(
                f"{role}.fsdp_config", "mixed_precision mixed_precision.*", "use trainer.bf16"
            ),
            _inert(f"{role}.fsdp_config", "reshard_after_forward wrap_policy", "XLA decides"),
            _planned(role, "sequence_parallel_size", "sequences split over devices"),
            _implemented(role, "model_config_kwargs", "an unknown field is an error"),
        )
    ),
    _inert("trainer.policy", "use_torch_compile", "everything is jitted"),
    _planned("trainer.policy", "record_memory", "device memory profiles"),
    _mapped(_MEGATRON, "tensor_model_parallel_size", "mesh.tensor"),
    _planned(
        _MEGATRON,
        "pipeline_model_parallel_size",
        "its stages would idle in every microbatch; mesh.fsdp and mesh.tensor hold any model",
    ),
    _planned(
        _MEGATRON,
        "context_parallel_size expert_model_parallel_size expert_tensor_parallel_size",
        "mesh.context and mesh.expert are later axes",
    ),
    _planned(_MEGATRON, "moe_*", "mixture-of-experts models"),
    _planned(_MEGATRON, "model_config_kwargs", "changes to the model config"),
    _planned(_MEGATRON, "lora_config.lora_type", only_with="lora.rank > 0"),
    _inert(
        _MEGATRON,
        "ddp_config.* torch_profiler_config.* optimizer_config_kwargs transformer_config_kwargs "
        "empty_cuda_cache dist_ckpt_optim_fully_reshardable",
        "Megatron's own",
    ),
)

_ALGORITHMS = (
    _implemented(_ALGORITHM, "advantage_estimator policy_loss_type", 'also "module:function"'),
    _implemented(_ALGORITHM, "policy_loss_kwargs", _NEW, skyrl_only=False),
    _implemented(_ALGORITHM, "advantage_kwargs", _NEW, skyrl_only=False),
    _implemented(
        _ALGORITHM,
        "kl_estimator_type use_kl_loss kl_loss_coef use_entropy_loss entropy_loss_coef",
        "averages over the whole minibatch",
    ),
    _implemented(_ALGORITHM, "temperature", "also applied to the reference model's logits"),
    _implemented(_ALGORITHM, "loss_reduction", "counts of the minibatch, not of the microbatch"),
    _implemented(_ALGORITHM, "max_seq_len", "must be set when max_turns > 1"),
    _implemented(
        _ALGORITHM, "grpo_norm_by_std eps_clip_low eps_clip_high clip_ratio_c gamma lambd"
    ),
    _implemented(_ALGORITHM, "use_kl_in_reward", "excludes use_kl_loss"),
    _implemented(_ALGORITHM, "kl_ctrl.*", "the coefficient is in the checkpoint"),
    _implemented(_ALGORITHM, "advantage_batch_normalize", "over sampled tokens, not padding"),
    _implemented(_ALGORITHM, "zero_variance_filter", "also of rewards per token"),
    _implemented(_ALGORITHM, "zero_variance_filter_tol", _LATER, skyrl_only=False),
    _implemented(_ALGORITHM, "overlong_buffer", _NEW, skyrl_only=False),
    _planned(_ALGORITHM, "value_head_prefix value_clip", only_with=_CRITIC),
    _mapped(_ALGORITHM, "use_tis tis_imp_ratio_cap", "off_policy_correction; deprecated"),
    _implemented(_CORRECTION, "renormalize", _NEW, skyrl_only=False),
    _implemented(_CORRECTION, "token_mask_*", "both bounds or neither"),
    _implemented(_CORRECTION, "tis_* sequence_* outlier_* token_tis_* geo_* product_*"),
    _implemented(_ALGORITHM, "sapo.* clip_cov.* kl_cov.*"),
    _implemented(_ALGORITHM, "dppo.*", _LATER, skyrl_only=False),
    _implemented(f"{_ALGORITHM}.cispo", "cispo_anchor", _LATER, skyrl_only=False),
    *(
        _implemented(
            f"{_ALGORITHM}.cispo",
            name,
            "SkyRL's later default; 0 and 5 would bound the weight to [1, 6]",
            skyrl_default=default,
        )
        for name, default in (("cispo_eps_clip_low", 0.0), ("cispo_eps_clip_high", 5.0))
    ),
    _implemented(f"{_ALGORITHM}.dynamic_sampling", "*", "a prompt drawn twice is two groups"),
)

_TRAINER = (
    _planned("trainer.placement", "colocate_all", "one engine, on the trainer's mesh"),
    _planned(
        "trainer.placement",
        "colocate_policy_ref",
        "devices of the reference's own would idle while the policy trains; ref.mesh cuts it "
        "differently over all of them, ref.fsdp_config.cpu_offload clears their memory",
    ),
    _planned("trainer.placement", "policy_num_nodes ref_num_nodes", "more than one host"),
    _inert(
        "trainer.placement",
        "policy_num_gpus_per_node ref_num_gpus_per_node",
        "all devices of the process are used",
    ),
    _planned("trainer.placement", "critic_num_nodes critic_num_gpus_per_node", only_with=_CRITIC),
    _inert("trainer", "sequence_parallel_backend", "one value only"),
    _mapped("trainer", "strategy", "there is one backend", skyrl_default="fsdp2"),
    _planned("trainer", "fully_async.*", only_with="the asynchronous trainer"),
    _inert("trainer", "gradient_checkpointing_use_reentrant", "torch only"),
    _inert("trainer", "project_name", "no logger that has projects yet"),
    _implemented("trainer", "sharding_rules", _NEW, skyrl_only=False),
    _implemented(
        "trainer",
        "gradient_checkpointing seed resume_mode resume_path ckpt_path ckpt_interval "
        "max_ckpts_to_keep hf_save_interval export_path epochs update_epochs_per_batch "
        "train_batch_size policy_mini_batch_size eval_batch_size eval_before_train eval_interval "
        "max_prompt_length run_name dump_eval_results",
    ),
    _implemented(
        "trainer",
        "micro_train_batch_size_per_gpu micro_forward_batch_size_per_gpu",
        "changes memory and speed, never the gradient",
    ),
    _implemented(
        "trainer",
        "max_training_steps print_example_interval compilation_cache_path",
        _NEW,
        skyrl_only=False,
    ),
    _mapped("trainer", "log_path", "the run's records, not logs of engines"),
    _mapped(
        "trainer",
        "bf16",
        "data type of the computation; off until measured on accelerators",
        skyrl_default=True,
    ),
    _planned("trainer", "critic_mini_batch_size", only_with=_CRITIC),
    _planned("trainer", "update_ref_every_epoch", "a moving reference model"),
    _implemented(
        "trainer",
        "use_sample_packing",
        "by segment ids; at most 16 trajectories per row; off until measured on accelerators",
        skyrl_default=True,
    ),
    _implemented("trainer", "packed_length", _NEW, skyrl_only=False),
    _implemented(
        "trainer", "max_tokens_per_microbatch", f"{_LATER}; counts all devices", skyrl_only=False
    ),
    _implemented(
        "trainer",
        "flash_attn",
        "an error where the backend's kernel cannot run the model; plain attention on CPUs",
        skyrl_default=True,
    ),
    _implemented("trainer", "remat_policy", _NEW, skyrl_only=False),
    _inert("trainer", "disable_fast_tokenizer", "transformers 5 has one kind"),
    _implemented(
        "trainer", "logger", "wandb, mlflow and swanlab come later", skyrl_default="wandb"
    ),
    _planned("trainer", "dump_data_batch", "batches on disk"),
    _implemented("trainer", "rope_scaling rope_theta", "of policy, reference and engine"),
)

_GENERATOR = (
    _implemented(_ENGINE, "backend", skyrl_default="vllm"),
    _implemented(
        _ENGINE, "model_dtype", "the trainer's, for equal log-probs", skyrl_default="bfloat16"
    ),
    _implemented(
        _ENGINE,
        "max_num_seqs max_num_batched_tokens gpu_memory_utilization",
        "slots over all engines, at most the trajectories of a batch; prompt tokens between two "
        "blocks of decoding; decode weights and cache, fewer slots where it does not hold them",
    ),
    _implemented(_ENGINE, "num_engines tensor_parallel_size", "parts of the trainer's devices"),
    _mapped(_ENGINE, "data_parallel_size", "an engine spreads its slots over all its devices"),
    _implemented(
        _ENGINE,
        "enable_prefix_caching",
        "between requests; the samples of a prompt always share its prefill",
        skyrl_default=True,
    ),
    _mapped(_ENGINE, "enable_chunked_prefill", "always on", skyrl_default=True),
    _mapped(_ENGINE, "engine_init_kwargs", "arguments of our engines, or flags of vLLM servers"),
    _implemented(_ENGINE, "run_engines_locally remote_urls"),
    _implemented(_ENGINE, "external_proxy_url external_server_urls", "of servers that run already"),
    _implemented(
        _ENGINE,
        "recompute_kv_on_update vllm_python engine_devices weights_folder probe_bound "
        "request_timeout_seconds api_token_env",
        _NEW,
        skyrl_only=False,
    ),
    _mapped(_ENGINE, "pipeline_parallel_size enforce_eager", "of vLLM servers started here"),
    _planned(_ENGINE, "expert_parallel_size", "mixture-of-experts models"),
    _implemented(_ENGINE, "enable_http_endpoint", "also sessions; a token off loopback"),
    _implemented(
        _ENGINE,
        "http_endpoint_host http_endpoint_port served_model_name",
        "also of `python -m jaxrl.serve`",
        only_with="enable_http_endpoint",
    ),
    _inert(
        _ENGINE,
        "weight_sync_backend weight_transfer_threshold_cuda_ipc_GB override_existing_update_group",
        "weights are shared in one process, and go through a folder to others",
    ),
    _inert(
        _ENGINE,
        "async_engine vllm_v1_disable_multiproc fully_sharded_loras "
        "enable_ray_prometheus_stats distributed_executor_backend",
        "vLLM only",
    ),
    _implemented(
        "generator",
        "n_samples_per_prompt max_input_length chat_template_kwargs eval_sampling_params "
        "eval_n_samples_per_prompt zero_reward_on_non_stop",
    ),
    _implemented("generator", "apply_overlong_filtering", "by stop_reason, not by the last token"),
    _implemented("generator", "batched", "a single-turn batch is always one call"),
    _implemented("generator", "max_turns", "also ends conversations that the environment does not"),
    _mapped(
        "generator.chat_template",
        "source name_or_path",
        "nothing is tokenised again, so no named templates that rewrite earlier turns",
    ),
    *(
        row
        for group in ("generator.sampling_params", "generator.eval_sampling_params")
        for row in (
            _implemented(
                group, "max_generate_length temperature top_p top_k min_p stop repetition_penalty"
            ),
            _implemented(group, "logprobs", "None: the trainer's own are all there is"),
            _mapped(group, "additional_kwargs", "min_tokens alone"),
            _implemented(group, "stop_token_ids keep_sampling_mask", _NEW, skyrl_only=False),
        )
    ),
    _implemented(
        "generator",
        "use_conversation_multi_turn append_eos_token_after_stop_str_in_multi_turn",
        "an appended token is masked",
    ),
    _implemented("generator", "rope_scaling rope_theta", "must equal the trainer's"),
    _implemented("generator", "step_wise_trajectories", "the last row has the reward of all turns"),
    _implemented("generator", "merge_stepwise_output", _LATER, skyrl_only=False),
    _implemented("environment", "env_class", 'also "my_pkg.my_module:MyEnv"'),
    _implemented("environment.skyrl_gym", "max_env_workers"),
    _implemented("environment.skyrl_gym", "env_timeout_seconds", _NEW, skyrl_only=False),
    _implemented(
        "serve",
        "token_env token_file weights_root max_num_seqs max_model_len steps_per_dispatch "
        "max_body_bytes max_samples max_samples_per_request request_seconds max_sessions "
        "session_seconds",
        _NEW,
        skyrl_only=False,
    ),
    _planned(
        "environment.skyrl_gym",
        "text2sql.* llm_as_a_judge.* search.*",
        only_with="these environments",
    ),
)

TABLE = (*_MODELS, *_ALGORITHMS, *_TRAINER, *_GENERATOR)
