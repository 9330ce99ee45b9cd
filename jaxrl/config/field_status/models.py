"""The rows of models: weights, optimizers, adapters, meshes."""

from jaxrl.config.field_status.row import NEW, implemented, inert, mapped, planned

_MEGATRON = "trainer.*.megatron_config"

ROWS = (
    implemented("data", "train_data val_data"),
    implemented("data", "shuffle", NEW, skyrl_only=False),
    implemented("trainer.policy.model", "path"),
    implemented("trainer.ref.model", "path", "loaded only for a KL term"),
    implemented("trainer.policy.model", "random_init", NEW, skyrl_only=False),
    implemented(
        "trainer.ref.model", "random_init", f"{NEW}; the policy's if no path", skyrl_only=False
    ),
    implemented("trainer.critic.model", "path", "its head is drawn where the folder has none"),
    implemented("trainer.critic.model", "random_init", NEW, skyrl_only=False),
    implemented("trainer.policy.model.lora", "rank alpha dropout init_method"),
    implemented("trainer.policy.model.lora", "target_modules exclude_modules", "also a list"),
    implemented(
        "trainer.ref.model.lora", "rank", "of the adapters in ref.model.path, then a PEFT folder"
    ),
    inert(
        "trainer.ref.model.lora",
        "alpha dropout target_modules exclude_modules init_method",
        "read from the PEFT folder in ref.model.path",
    ),
    planned("trainer.critic.model.lora", "rank", "adapters of the critic"),
    planned(
        "trainer.critic.model.lora",
        "alpha dropout target_modules exclude_modules init_method",
        only_with="lora.rank > 0",
    ),
    implemented(
        "trainer.*.model.lora",
        "lora_sync_path",
        "the policy's, with backend='vllm'; None: adapters are merged into the weights",
        only_with="lora.rank > 0",
        skyrl_default="/tmp/skyrl_lora_sync",
    ),
    *(
        row
        for role in ("trainer.policy", "trainer.critic")
        for row in (
            implemented(
                f"{role}.optimizer_config",
                "lr adam_betas weight_decay max_grad_norm num_warmup_steps",
            ),
            implemented(
                f"{role}.optimizer_config", "scheduler", "linear and cosine end at the last update"
            ),
            implemented(
                f"{role}.optimizer_config",
                "offload_after_step",
                "off: two transfers an update, wasted where the memory suffices; also between the "
                "minibatches of a step; no effect without pinned_host memory",
                skyrl_default=True,
            ),
            implemented(
                f"{role}.fsdp_config",
                "cpu_offload",
                "weights and optimizer state, computed with on the device; no effect without "
                "pinned_host",
            ),
        )
    ),
    implemented("trainer.ref.fsdp_config", "cpu_offload", "on the device during its forward"),
    *(
        row
        for role in ("trainer.policy", "trainer.ref", "trainer.critic")
        for row in (
            planned(f"{role}.mesh", "context expert", only_with="later axes", skyrl_only=False),
            implemented(f"{role}.mesh", "data fsdp tensor", NEW, skyrl_only=False),
            mapped(f"{role}.fsdp_config", "fsdp_size", "mesh.fsdp, with mesh.data=-1"),
        )
    ),
    implemented("trainer.ref", "mesh", NEW, skyrl_only=False),
    implemented("trainer.critic", "mesh", NEW, skyrl_only=False),
    *(
        row
        for role in ("trainer.policy", "trainer.ref", "trainer.critic")
        for row in (
            implemented(
                f"{role}.fsdp_config",
                "mixed_precision mixed_precision.param_dtype",
                "of the computation; weights and optimizer state stay float32",
            ),
            mapped(
                f"{role}.fsdp_config",
                "mixed_precision.reduce_dtype mixed_precision.buffer_dtype",
                "fp32 alone: gradients are summed in it, so that no mesh changes them",
            ),
            inert(f"{role}.fsdp_config", "reshard_after_forward wrap_policy", "XLA decides"),
            planned(role, "sequence_parallel_size", "mesh.context is a later axis"),
            implemented(role, "model_config_kwargs", "an unknown field is an error"),
        )
    ),
    inert("trainer.policy", "use_torch_compile", "everything is jitted"),
    mapped("trainer.policy", "record_memory", "pprof files, of every step"),
    mapped(_MEGATRON, "tensor_model_parallel_size", "mesh.tensor"),
    planned(
        _MEGATRON,
        "pipeline_model_parallel_size",
        "its stages would idle in every microbatch; mesh.fsdp and mesh.tensor hold any model",
    ),
    planned(
        _MEGATRON,
        "context_parallel_size expert_model_parallel_size expert_tensor_parallel_size",
        "mesh.context and mesh.expert are later axes",
    ),
    inert(_MEGATRON, "moe_*", "Megatron's mixture-of-experts layers; our models are dense"),
    mapped(_MEGATRON, "model_config_kwargs", "added to the role's model_config_kwargs"),
    inert(
        _MEGATRON,
        "lora_config.lora_type",
        "every Hugging Face matrix has adapters of its own, as with canonical_lora",
    ),
    inert(
        _MEGATRON,
        "ddp_config.* torch_profiler_config.* optimizer_config_kwargs transformer_config_kwargs "
        "empty_cuda_cache dist_ckpt_optim_fully_reshardable",
        "Megatron's own",
    ),
)
