"""Config of the training run: models, devices, batch sizes, checkpoints, logging."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from jaxrl.config.algorithm import AlgorithmConfig
from jaxrl.config.backend import PRECISIONS, FSDPConfig, MegatronConfig, MeshConfig
from jaxrl.config.constraints import must, not_negative, one_of, positive, positive_or
from jaxrl.config.dataclass_config import BaseConfig
from jaxrl.config.model import ModelConfig, OptimizerConfig
from jaxrl.config.watching import LOGGERS, WatchingConfig
from jaxrl.models.remat import REMAT_POLICIES

_local_folder = must(lambda path: "://" not in path, "must be a local folder")


@dataclass
class PlacementConfig(BaseConfig):
    """Describe which devices hold which model."""

    colocate_all: bool = True
    """Training and sampling share all devices; false = an engine in this process has the devices
    that policy_num_gpus_per_node leaves."""
    colocate_policy_ref: bool = True
    """Policy and reference model share devices; false = the reference has ref_num_gpus_per_node of
    its own, after the policy's."""
    policy_num_nodes: Annotated[int, positive] = 1
    """Hosts of the job, with all their devices; `jaxrl.cluster.launch` takes them of a cluster."""
    policy_num_gpus_per_node: int = 1
    """Devices of the policy where not all parts share all devices."""
    critic_num_nodes: int = 1
    """Hosts of the critic, which lies with the policy."""
    critic_num_gpus_per_node: int = 1
    """Devices per host of the critic."""
    ref_num_nodes: int = 1
    """Hosts of the reference model, which lies on those of the policy."""
    ref_num_gpus_per_node: int = 1
    """Devices of a reference model on its own."""
    rollout_num_nodes: Annotated[int, not_negative] = 0
    """Hosts that only sample, with backend "native" and colocate_all=false: the run starts a
    rollout worker on each. 0 = none."""


@dataclass
class PolicyConfig(BaseConfig):
    """Describe the model that is trained."""

    model: ModelConfig = field(
        default_factory=lambda: ModelConfig(path="Qwen/Qwen2.5-1.5B-Instruct")
    )
    """The model."""
    optimizer_config: OptimizerConfig = field(default_factory=OptimizerConfig)
    """Its optimizer."""
    mesh: MeshConfig = field(default_factory=MeshConfig)
    """Its device mesh."""
    fsdp_config: FSDPConfig = field(default_factory=FSDPConfig)
    """Its sharding."""
    sequence_parallel_size: int = 1
    """Devices that share each sequence."""
    use_torch_compile: bool = False
    """torch.compile of the logits."""
    record_memory: bool = False
    """Profile the device memory of every step, into <run folder>/profiles/memory."""
    megatron_config: MegatronConfig = field(default_factory=MegatronConfig)
    """Megatron settings."""
    model_config_kwargs: dict[str, Any] = field(default_factory=dict)
    """Changes to the Hugging Face model config."""


@dataclass
class CriticConfig(BaseConfig):
    """Describe the value model of actor-critic algorithms."""

    model: ModelConfig = field(default_factory=ModelConfig)
    """The model; no path, no critic. Its vocabulary must be the policy's, its size need not."""
    optimizer_config: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=5e-6))
    """Its optimizer."""
    mesh: MeshConfig | None = None
    """Its device mesh, over the same devices; None = the policy's."""
    fsdp_config: FSDPConfig = field(default_factory=FSDPConfig)
    """Its sharding."""
    sequence_parallel_size: int = 1
    """Devices that share each sequence."""
    model_config_kwargs: dict[str, Any] = field(default_factory=dict)
    """Changes to the Hugging Face model config."""


@dataclass
class RefConfig(BaseConfig):
    """Describe the frozen reference model of the KL term."""

    model: ModelConfig = field(default_factory=ModelConfig)
    """The model; no path = the policy's initial weights."""
    mesh: MeshConfig | None = None
    """Its device mesh; None = the policy's, or fsdp over devices of its own."""
    sequence_parallel_size: int = 1
    """Devices that share each sequence."""
    fsdp_config: FSDPConfig = field(default_factory=FSDPConfig)
    """Its sharding."""
    megatron_config: MegatronConfig = field(default_factory=MegatronConfig)
    """Megatron settings."""
    model_config_kwargs: dict[str, Any] = field(default_factory=dict)
    """Changes to the Hugging Face model config."""


@dataclass
class FullyAsyncConfig(BaseConfig):
    """Hold the settings of training while sampling continues, see docs/asynchrony.md."""

    enabled: bool = False
    """Sample later batches while a batch is trained."""
    schedule: Annotated[str, one_of("free", "lockstep")] = "free"
    """"free": prompts are trained in the order in which they are finished, and weights change while
    tokens are drawn. "lockstep": batches are sampled whole, each by a fixed version of the weights;
    a resumed run equals an undisturbed one bit for bit."""
    max_staleness_steps: Annotated[int, not_negative] = 4
    """Training steps that sampling may be ahead; 0 = nothing overlaps, as in synchronous runs."""
    num_parallel_generation_workers: int = 768
    """Prompts in generation at the same time, in the schedule "free"; the default is brought
    between train_batch_size and that times max_staleness_steps + 1, beyond which none has work."""


@dataclass
class LedgerConfig(BaseConfig):
    """Hold the settings of <run folder>/run.db: where every prompt ended, see docs/ledger.md."""

    record_rollouts: bool = True
    """Keep the trajectories of every step in <run folder>/rollouts, some 20 bytes a token: `replay`
    and `compare` read them."""
    record_checksums: bool = True
    """A checksum of every array of batch and state after every step: `replay` compares them."""
    lock_timeout_seconds: Annotated[float, positive] = 60.0
    """How long the run waits for a process that locks the database, before it stops."""


@dataclass
class ClusterConfig(BaseConfig):
    """Describe how `jaxrl.cluster.launch` starts and restarts processes, see docs/cluster.md."""

    processes_per_host: Annotated[int, positive] = 1
    """Processes on each host, which divide its devices; 1 on TPUs."""
    max_restarts: Annotated[int, not_negative] = 3
    """Restarts in a row without a new checkpoint; 0 = none. User errors are never tried again."""
    restart_backoff_seconds: Annotated[float, not_negative] = 10.0
    """Wait before a restart; twice as long for each further one in a row, at most 300 seconds."""
    start_seconds: Annotated[int, positive] = 300
    """Within which all hosts must be free and all processes must have joined the job."""
    heartbeat_seconds: Annotated[int, positive] = 100
    """After which a silent process counts as dead; the others then end, too."""


@dataclass
class TrainerConfig(BaseConfig):
    """Hold the settings of the training run."""

    placement: PlacementConfig = field(default_factory=PlacementConfig)
    """Which devices hold which model."""
    sequence_parallel_backend: str = "ulysses"
    """SkyRL's only sequence-parallel backend."""
    strategy: Annotated[str, one_of("jax", "fsdp", "fsdp2", "megatron")] = "jax"
    """"jax"; SkyRL's "fsdp", "fsdp2" and "megatron" mean the same here."""
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    """The model that is trained."""
    ref: RefConfig = field(default_factory=RefConfig)
    """The reference model."""
    critic: CriticConfig = field(default_factory=CriticConfig)
    """The value model."""
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    """The objective."""
    fully_async: FullyAsyncConfig = field(default_factory=FullyAsyncConfig)
    """Training while sampling continues."""
    sharding_rules: dict[str, Any] = field(default_factory=dict)
    """Mesh axes of logical axes, instead of those of `jaxrl.parallel.ShardingRules`."""
    gradient_checkpointing: bool = True
    """Recompute each layer's activations in the backward pass."""
    remat_policy: Annotated[str, one_of(*REMAT_POLICIES)] = "full"
    """What layers keep when gradient_checkpointing is on, see `jaxrl/models/remat.py`: "full",
    "attention", "dots", "none" or "offload"."""
    gradient_checkpointing_use_reentrant: bool = False
    """Variant of torch's gradient checkpointing."""
    seed: int = 42
    """Seed of initialisation, data order and sampling."""
    resume_mode: Annotated[str | None, one_of(None, "none", "latest", "from_path")] = "latest"
    """"latest" checkpoint in ckpt_path, "from_path", or "none"."""
    resume_path: str | None = None
    """Checkpoint for resume_mode "from_path"."""
    log_path: Annotated[str, _local_folder] = "runs"
    """Run folder: config.yaml, metrics.jsonl, curve.png, TensorBoard events."""
    ckpt_path: str = ""
    """Folder of the checkpoints; "" = checkpoints in the run folder."""
    max_ckpts_to_keep: Annotated[int, positive_or(-1, "all")] = -1
    """Checkpoints kept, the latest ones; -1 = all."""
    ckpt_interval: Annotated[int, positive_or(-1, "off")] = 10
    """Steps between checkpoints; -1 = none."""
    hf_save_interval: Annotated[int, positive_or(-1, "off")] = -1
    """Steps between exports in Hugging Face format; -1 = none."""
    export_path: Annotated[str, _local_folder] = ""
    """Folder of exported models and evaluation results; "" = exports in the run folder."""
    bf16: bool | Literal["auto"] = "auto"
    """Compute in bfloat16; master weights and optimizer state stay float32. "auto" = on TPUs and
    GPUs."""
    epochs: Annotated[int, positive] = 1
    """Passes over the training prompts."""
    max_training_steps: Annotated[int | None, positive_or(None, "all epochs")] = None
    """Stop after this many steps; None = all epochs."""
    update_epochs_per_batch: Annotated[int, positive] = 1
    """Passes over the batch of a step; after the first its prompts are shuffled into other
    minibatches."""
    train_batch_size: Annotated[int, positive] = 1024
    """Prompts per step."""
    policy_mini_batch_size: Annotated[int, positive] = 256
    """Prompts per optimizer update."""
    critic_mini_batch_size: Annotated[int, positive] = 256
    """Prompts per optimizer update of the critic."""
    micro_train_batch_size_per_gpu: Annotated[int, positive] = 1
    """Rows per device in one forward and backward pass."""
    micro_forward_batch_size_per_gpu: Annotated[int, positive] = 1
    """Rows per device in one gradient-free forward pass."""
    update_ref_every_epoch: bool = False
    """Copy the policy into the reference model after every epoch; the copy is in checkpoints."""
    use_sample_packing: bool | Literal["auto"] = "auto"
    """Several trajectories per row of the model's input. "auto" = on TPUs and GPUs, but not of a
    model that is a flax module."""
    packed_length: int | None = None
    """Tokens of a packed row; None = the length bucket of the batch's longest trajectory, or with
    few_shapes of the longest there can be."""
    few_shapes: bool | Literal["auto"] = "auto"
    """Compile few programs: packed rows have one length, that of the longest trajectory there can
    be, and a microbatch all or a quarter of its rows; rows of one trajectory have four lengths.
    "auto" = on TPUs and GPUs."""
    max_tokens_per_microbatch: Annotated[int, positive_or(-1, "off")] = -1
    """Rows x tokens of a forward pass over all devices, in place of row counts; -1 = row counts."""
    eval_batch_size: Annotated[int, positive] = 1024
    """Prompts per evaluation batch."""
    eval_before_train: bool = True
    """Evaluate before the first step."""
    eval_interval: Annotated[int, positive_or(-1, "off")] = 5
    """Steps between evaluations; -1 = none."""
    max_prompt_length: Annotated[int, positive] = 512
    """Longer prompts, in tokens, are dropped from the data."""
    flash_attn: bool | Literal["auto"] = "auto"
    """Fused attention kernel: splash on TPUs, Pallas-Triton on GPUs (bf16 only), none on CPUs.
    "auto" = on where the platform's kernel can run the models."""
    disable_fast_tokenizer: bool = False
    """Slow tokenizer of transformers."""
    project_name: str = "skyrl"
    """Project of the run: W&B's project, MLflow's experiment."""
    run_name: str = "test_run"
    """Name of the run."""
    logger: Annotated[str | list[str], one_of(*LOGGERS, later=("swanlab",))] = "console"
    """"console" (the progress bar), "jsonl", "tensorboard", "wandb", "mlflow": one or a list;
    metrics.jsonl and the curve are always written."""
    watching: WatchingConfig = field(default_factory=WatchingConfig)
    """Alarms, callbacks and profiles."""
    ledger: LedgerConfig = field(default_factory=LedgerConfig)
    """Where every prompt and trajectory ended."""
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    """How the processes of a job are started, and started again."""
    print_example_interval: Annotated[int, positive_or(-1, "off")] = 1
    """Steps between printed example trajectories; -1 = none."""
    dump_data_batch: bool = False
    """Write every training batch to export_path/dumped_data, a .npz per step."""
    dump_eval_results: bool = True
    """Write evaluation trajectories to export_path/dumped_evals, a folder per step."""
    compilation_cache_path: str | None = "~/.cache/jaxrl/compiled"
    """Where compiled programs are kept for later runs; JAX_COMPILATION_CACHE_DIR outranks it."""
    rope_scaling: dict[str, Any] | None = None
    """Rotary scaling, instead of the model's own."""
    rope_theta: Annotated[
        float | None,
        must(
            lambda base: base is None or base > 1,
            "must be > 1, e.g. 10000.0; None keeps the model's own",
        ),
    ] = None
    """Rotary base, instead of the model's own."""


def run_folder(trainer: TrainerConfig) -> Path:
    """Return where a run writes config.yaml, metrics.jsonl, curve.png and tensorboard/."""
    return Path(trainer.log_path) / trainer.run_name


def model_overrides(
    trainer: TrainerConfig, role: PolicyConfig | RefConfig | CriticConfig
) -> dict[str, Any]:
    """Return the entries of a model's config.json that the run replaces."""
    rope = {"rope_scaling": trainer.rope_scaling, "rope_theta": trainer.rope_theta}
    return role.model_config_kwargs | {k: v for k, v in rope.items() if v is not None}


def compute_dtype(trainer: TrainerConfig, role: str) -> str:
    """Return the data type in which a model computes, "bfloat16" or "float32".

    Args:
        role: "policy", "ref" or "critic".
    """
    own = getattr(trainer, role).fsdp_config.mixed_precision
    if own is None:
        return "bfloat16" if trainer.bf16 is True else "float32"
    return PRECISIONS[own.param_dtype]


def logger_names(logger: str | list[str]) -> list[str]:
    """Return `TrainerConfig.logger` as a list."""
    return [logger] if isinstance(logger, str) else list(logger)
