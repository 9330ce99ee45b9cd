"""Config of the training run: models, devices, batch sizes, checkpoints, logging."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from jaxrl.config.algorithm import AlgorithmConfig
from jaxrl.config.backend import PRECISIONS, FSDPConfig, MegatronConfig, MeshConfig
from jaxrl.config.constraints import (
    each_of,
    folder_in,
    must,
    named,
    not_negative,
    one_in,
    one_line,
    one_of,
    positive,
    positive_or,
)
from jaxrl.config.dataclass_config import BaseConfig
from jaxrl.config.model import ModelConfig, OptimizerConfig
from jaxrl.config.status import implemented, inert, later, mapped, new
from jaxrl.config.watching import LOGGERS, WatchingConfig

_COUNTED = mapped(
    "counted only where parts have devices of their own; else all parts have all devices"
)
CONTEXT_STRATEGIES = ("gather", "ring", "ulysses")
EXPERT_EXCHANGES = ("gather", "all_to_all")
_LIMIT = must(
    lambda value: value is None or value >= 0,
    "must be a number of seconds, 0 (no limit), or None (it follows from the run's phases)",
)
_OWN_FOLDER = "unset, in the run folder; of one run alone"
_SEQUENCE_PARALLEL = mapped("mesh.context")
_MODEL_CHANGES = implemented("an unknown field is an error")
_IN_PEFT_FOLDER = inert("read from the PEFT folder in ref.model.path")
_REF_MODEL = {
    "path": implemented("loaded only for a KL term"),
    "random_init": new("the policy's if no path"),
    "lora.rank": implemented("of the adapters in ref.model.path, then a PEFT folder"),
    "lora.alpha": _IN_PEFT_FOLDER,
    "lora.dropout": _IN_PEFT_FOLDER,
    "lora.target_modules": _IN_PEFT_FOLDER,
    "lora.exclude_modules": _IN_PEFT_FOLDER,
    "lora.init_method": _IN_PEFT_FOLDER,
}
_seed = must(lambda seed: 0 <= seed < 2**63, "must be 0 or more, and below 2**63")
_ids = must(lambda n: n is None or n > 0, "must be positive, or None (those of the tokenizer)")
_local_folder = must(lambda path: "://" not in path, "must be a local folder")


@dataclass
class PlacementConfig(BaseConfig):
    """Describe which devices hold which model."""

    colocate_all: Annotated[
        bool, implemented("of engines in this process; servers are never colocated")
    ] = True
    """Training and sampling share all devices; false = an engine in this process has the devices
    that policy_num_gpus_per_node leaves."""
    colocate_policy_ref: Annotated[bool, implemented("also with colocate_all")] = True
    """Policy and reference model share devices; false = the reference has ref_num_gpus_per_node of
    its own, after the policy's."""
    policy_num_nodes: Annotated[int, positive, mapped("of all parts; one process on each")] = 1
    """Hosts of the job, with all their devices; `jaxrl.cluster.launch` takes them of a cluster."""
    policy_num_gpus_per_node: Annotated[int, _COUNTED] = 1
    """Devices of the policy where not all parts share all devices."""
    critic_num_nodes: Annotated[int, inert("all parts are on all hosts")] = 1
    """Hosts of the critic, which lies with the policy."""
    critic_num_gpus_per_node: Annotated[int, inert("the critic lies with the policy")] = 1
    """Devices per host of the critic."""
    ref_num_nodes: Annotated[int, inert("all parts are on all hosts")] = 1
    """Hosts of the reference model, which lies on those of the policy."""
    ref_num_gpus_per_node: Annotated[int, _COUNTED] = 1
    """Devices of a reference model on its own."""
    rollout_num_nodes: Annotated[int, not_negative, new()] = 0
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
    sequence_parallel_size: Annotated[int, _SEQUENCE_PARALLEL] = 1
    """Devices that share each sequence."""
    use_torch_compile: Annotated[bool, inert("everything is jitted")] = False
    """torch.compile of the logits."""
    record_memory: Annotated[bool, mapped("pprof files, of every step")] = False
    """Profile the device memory of every step, into <run folder>/profiles/memory."""
    megatron_config: MegatronConfig = field(default_factory=MegatronConfig)
    """Megatron settings."""
    model_config_kwargs: Annotated[dict[str, Any], _MODEL_CHANGES] = field(default_factory=dict)
    """Changes to the Hugging Face model config."""
    router_replay: Annotated[str, one_of("off", "forward"), new()] = "off"
    """Send tokens of a mixture of experts to the experts that the sampler sent them to ("forward"),
    in training and for old log-probs; the weights of the experts are computed and learnt."""
    known_ids: Annotated[int | None, _ids, new()] = None
    """Ids that are sampled and scored, the first so many: the head's other rows are padding, of
    probability 0. None: those that the tokenizer has, where jaxrl's own engine samples; all, where
    another one does, or the run began without. As many as there are rows, or more: all."""


@dataclass
class CriticConfig(BaseConfig):
    """Describe the value model of actor-critic algorithms."""

    model: Annotated[
        ModelConfig, {"path": implemented("its head is drawn where the folder has none")}
    ] = field(default_factory=ModelConfig)
    """The model; no path, no critic. Its vocabulary must be the policy's, its size need not."""
    optimizer_config: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=5e-6))
    """Its optimizer."""
    mesh: Annotated[MeshConfig | None, new()] = None
    """Its device mesh, over the same devices; None = the policy's."""
    fsdp_config: FSDPConfig = field(default_factory=FSDPConfig)
    """Its sharding."""
    sequence_parallel_size: Annotated[int, _SEQUENCE_PARALLEL] = 1
    """Devices that share each sequence."""
    model_config_kwargs: Annotated[dict[str, Any], _MODEL_CHANGES] = field(default_factory=dict)
    """Changes to the Hugging Face model config."""


@dataclass
class RefConfig(BaseConfig):
    """Describe the frozen reference model of the KL term."""

    model: Annotated[ModelConfig, _REF_MODEL] = field(default_factory=ModelConfig)
    """The model; no path = the policy's initial weights."""
    mesh: Annotated[MeshConfig | None, new()] = None
    """Its device mesh; None = the policy's, or fsdp over devices of its own."""
    sequence_parallel_size: Annotated[int, _SEQUENCE_PARALLEL] = 1
    """Devices that share each sequence."""
    fsdp_config: Annotated[
        FSDPConfig, {"cpu_offload": implemented("on the device during its forward")}
    ] = field(default_factory=FSDPConfig)
    """Its sharding."""
    megatron_config: MegatronConfig = field(default_factory=MegatronConfig)
    """Megatron settings."""
    model_config_kwargs: Annotated[dict[str, Any], _MODEL_CHANGES] = field(default_factory=dict)
    """Changes to the Hugging Face model config."""


@dataclass
class FullyAsyncConfig(BaseConfig):
    """Hold the settings of training while sampling continues, see docs/asynchrony.md."""

    enabled: Annotated[bool, later()] = False
    """Sample later batches while a batch is trained."""
    schedule: Annotated[str, one_of("free", "lockstep"), new()] = "free"
    """"free": prompts are trained in the order in which they are finished, and weights change while
    tokens are drawn. "lockstep": batches are sampled whole, each by a fixed version of the weights;
    a resumed run equals an undisturbed one bit for bit."""
    max_staleness_steps: Annotated[
        int,
        not_negative,
        implemented(
            "also with an engine on the trainer's devices", only_with="trainer.fully_async.enabled"
        ),
    ] = 4
    """Training steps that sampling may be ahead; 0 = nothing overlaps, as in synchronous runs."""
    num_parallel_generation_workers: Annotated[
        int,
        implemented(
            "the default fits itself to the batch", only_with="trainer.fully_async.schedule='free'"
        ),
    ] = 768
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
    stall_seconds: Annotated[int | None, _LIMIT] = None
    """Seconds in which no process of the run does anything, after which all print their stacks;
    under the launcher they are started again. None = ten times the longest silence of earlier
    phases of the kind, at least 300; 3600 in the first of its kind, in callbacks and while it
    compiles or saves; 0 = no limit. What counts as done is a phase that begins or ends, a block of
    tokens, a trajectory, a compiled program: a number must be longer than the slowest of these."""


@dataclass
class TrainerConfig(BaseConfig):
    """Hold the settings of the training run."""

    placement: PlacementConfig = field(default_factory=PlacementConfig)
    """Which devices hold which model."""
    sequence_parallel_backend: Annotated[str, inert("one value only")] = "ulysses"
    """SkyRL's only sequence-parallel backend."""
    strategy: Annotated[
        str,
        one_of("jax", "fsdp", "fsdp2", "megatron"),
        mapped("there is one backend", skyrl_default="fsdp2"),
    ] = "jax"
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
    sharding_rules: Annotated[dict[str, Any], new()] = field(default_factory=dict)
    """Mesh axes of logical axes, instead of those of `jaxrl.parallel.ShardingRules`."""
    gradient_checkpointing: bool = True
    """Recompute each layer's activations in the backward pass."""
    remat_policy: Annotated[str, one_in("jaxrl.models.remat:REMAT_POLICIES"), new()] = "full"
    """What layers keep when gradient_checkpointing is on, see `jaxrl/models/remat.py`: "full",
    "attention", "dots", "none" or "offload"."""
    context_strategy: Annotated[str, one_of("auto", *CONTEXT_STRATEGIES), new()] = "auto"
    """How devices of mesh.context attend, whose tokens are of the same rows: "gather" keys and
    values, pass them round in a "ring", or exchange tokens for heads, "ulysses"; "auto" = the first
    while these are at most 1 GiB of a layer, then the second. All give the same numbers."""
    expert_exchange: Annotated[str, one_of("auto", *EXPERT_EXCHANGES), new()] = "auto"
    """How tokens come to the experts of other devices of mesh.expert: each device takes those of
    all ("gather"), or gets the ones that its experts need ("all_to_all"); "auto" = the second where
    it sends at most 3/4 of the bytes of a microbatch, and 1 MiB less in a layer. Both give the same
    numbers, up to the order of sums; an engine gathers."""
    gradient_checkpointing_use_reentrant: Annotated[bool, inert("torch only")] = False
    """Variant of torch's gradient checkpointing."""
    seed: Annotated[int, _seed] = 42
    """Seed of initialisation, data order and sampling."""
    resume_mode: Annotated[str | None, one_of(None, "none", "latest", "from_path")] = "latest"
    """"latest" checkpoint in ckpt_path, "from_path", or "none"."""
    resume_path: Annotated[str | None, one_line] = None
    """Checkpoint for resume_mode "from_path"."""
    log_path: Annotated[
        str,
        named,
        _local_folder,
        mapped("the run's records, not logs of engines", skyrl_default="/tmp/skyrl-logs"),
    ] = "runs"
    """Run folder: config.yaml, metrics.jsonl, curve.png, TensorBoard events."""
    ckpt_path: Annotated[
        str, one_line, implemented(_OWN_FOLDER, skyrl_default=os.path.expanduser("~/ckpts/"))
    ] = ""
    """Folder of the checkpoints; "" = checkpoints in the run folder."""
    max_ckpts_to_keep: Annotated[int, positive_or(-1, "all")] = -1
    """Checkpoints kept, the latest ones; -1 = all."""
    ckpt_interval: Annotated[int, positive_or(-1, "off")] = 10
    """Steps between checkpoints; one more at the end of each epoch and of the run. -1 = none."""
    hf_save_interval: Annotated[int, positive_or(-1, "off")] = -1
    """Steps between exports in Hugging Face format; one more after the last step. -1 = none."""
    export_path: Annotated[
        str,
        one_line,
        _local_folder,
        implemented(_OWN_FOLDER, skyrl_default=os.path.expanduser("~/exports/")),
    ] = ""
    """Folder of exported models and evaluation results; "" = exports in the run folder."""
    export_dtype: Annotated[
        str | None, one_of(None, "float32", "bfloat16", "float16"), new("adapters are float32")
    ] = None
    """Data type of exported weights; None = that of the checkpoint that training began from,
    float32 if it began from random weights, bfloat16 in the place of quantised ones."""
    bf16: Annotated[
        bool | Literal["auto"],
        mapped("data type of the computation; off on CPUs", skyrl_default=True),
    ] = "auto"
    """Compute in bfloat16; master weights and optimizer state stay float32. "auto" = on TPUs and
    GPUs."""
    epochs: Annotated[int, positive] = 1
    """Passes over the training prompts."""
    max_training_steps: Annotated[int | None, positive_or(None, "all epochs"), new()] = None
    """Stop after this many steps; None = all epochs."""
    update_epochs_per_batch: Annotated[
        int, positive, implemented("minibatches are drawn anew for each")
    ] = 1
    """Passes over the batch of a step; after the first its prompts are shuffled into other
    minibatches."""
    train_batch_size: Annotated[int, positive] = 1024
    """Prompts per step."""
    policy_mini_batch_size: Annotated[int, positive] = 256
    """Prompts per optimizer update."""
    critic_warmup_steps: Annotated[int, not_negative, new()] = 0
    """First steps in which the critic alone is trained, until critic/explained_variance has
    settled, https://arxiv.org/abs/2503.01491."""
    critic_mini_batch_size: Annotated[
        int, positive, implemented(only_with="trainer.critic.model.path")
    ] = 256
    """Prompts per optimizer update of the critic."""
    micro_train_batch_size_per_gpu: Annotated[
        int, positive, implemented("changes memory and speed, never the gradient")
    ] = 1
    """Rows per device in one forward and backward pass."""
    micro_forward_batch_size_per_gpu: Annotated[
        int, positive, implemented("changes memory and speed, never the gradient")
    ] = 1
    """Rows per device in one gradient-free forward pass."""
    update_ref_every_epoch: Annotated[bool, implemented("the reference is in the checkpoint")] = (
        False
    )
    """Copy the policy into the reference model after every epoch; the copy is in checkpoints."""
    use_sample_packing: Annotated[
        bool | Literal["auto"],
        implemented(
            "by segment ids; at most 16 trajectories per row; off on CPUs", skyrl_default=True
        ),
    ] = "auto"
    """Several trajectories per row of the model's input. "auto" = on TPUs and GPUs, but not of a
    model that is a flax module."""
    packed_length: Annotated[int | None, new()] = None
    """Tokens of a packed row; None = the length bucket of the batch's longest trajectory, or with
    few_shapes of the longest there can be."""
    few_shapes: Annotated[bool | Literal["auto"], new()] = "auto"
    """Compile few programs: packed rows have one length, that of the longest trajectory there can
    be, and a microbatch all or a quarter of its rows; rows of one trajectory have four lengths.
    "auto" = on TPUs and GPUs."""
    max_tokens_per_microbatch: Annotated[
        int, positive_or(-1, "off"), later("counts all devices")
    ] = -1
    """Rows x tokens of a forward pass over all devices, in place of row counts; -1 = row counts."""
    eval_batch_size: Annotated[int, positive] = 1024
    """Prompts per evaluation batch."""
    eval_before_train: bool = True
    """Evaluate before the first step."""
    eval_interval: Annotated[int, positive_or(-1, "off")] = 5
    """Steps between evaluations; one more after the last step. -1 = none, nor before the first."""
    max_prompt_length: Annotated[int, positive] = 512
    """Longer prompts, in tokens, are dropped from the data."""
    prefix_sharing: Annotated[str, one_of("auto", "on", "off"), new()] = "auto"
    """Compute once what trajectories begin with alike, in training and scoring: the prompt of a
    group's samples, the turns that step-wise rows repeat. "auto" = in batches whose longest row has
    128 tokens or more, where more than a fifth of the tokens are shared; "on" = where any are; see
    docs/prefix_sharing.md."""
    flash_attn: Annotated[
        bool | Literal["auto"],
        implemented(
            "False: plain attention; True: the platform's fastest kernel that can run the model, "
            "which is plain attention on CPUs",
            skyrl_default=True,
        ),
    ] = "auto"
    """Attention without the scores of all pairs of tokens, by the platform's fastest kernel; see
    docs/kernels.md. "auto" = on TPUs and GPUs."""
    kernels: Annotated[dict[str, str], new()] = field(default_factory=dict)
    """Kernels by operation, instead of the fastest that can: {"packed_attention": "chunked"}, which
    outranks flash_attn, {"head_log_probs": "xla"}, {"paged_attention": "xla"} of an engine of
    ours; see docs/kernels.md."""
    exact: Annotated[str, one_of("off", "log_probs", "full"), new()] = "off"
    """Sampler and trainer compute the same numbers, to the last bit: "log_probs": the log-probs of
    what was sampled are those of the trainer's forward pass, which is then left out; "full": the
    gradient, too, depends on no cut into microbatches, packed or not, nor on the mesh; see
    docs/exact.md."""
    exact_tile: Annotated[int | None, positive_or(None, "by the platform"), new()] = None
    """Tokens of a tile of trainer.exact; None = by the platform."""
    exact_checked_rows: Annotated[int, not_negative, new()] = 0
    """Rows of each batch that the trainer scores though trainer.exact leaves that out: their
    policy/rollout_train_logprobs_abs_diff_max is 0, or the promise is broken."""
    disable_fast_tokenizer: Annotated[bool, inert("transformers 5 has one kind")] = False
    """Slow tokenizer of transformers."""
    project_name: Annotated[str, named] = "skyrl"
    """Project of the run: W&B's project, MLflow's experiment."""
    run_name: Annotated[str, folder_in("trainer.log_path")] = "test_run"
    """Name of the run, and of its folder in log_path."""
    logger: Annotated[
        str | list[str],
        each_of(*LOGGERS, later=("swanlab",)),
        implemented(
            "a run needs no account unless it asks for one; no swanlab, which a callback can feed",
            skyrl_default="wandb",
        ),
    ] = "console"
    """"console" (the display), "jsonl", "tensorboard", "wandb", "mlflow": one or a list;
    metrics.jsonl and the curve are always written."""
    watching: Annotated[WatchingConfig, new()] = field(default_factory=WatchingConfig)
    """What is shown, alarms, callbacks and profiles."""
    ledger: Annotated[LedgerConfig, new()] = field(default_factory=LedgerConfig)
    """Where every prompt and trajectory ended."""
    cluster: Annotated[ClusterConfig, new()] = field(default_factory=ClusterConfig)
    """How the processes of a job are started, and started again."""
    print_example_interval: Annotated[int, positive_or(-1, "off"), new()] = 1
    """Steps between printed example trajectories; -1 = none."""
    dump_data_batch: bool = False
    """Write every training batch to export_path/dumped_data, a .npz per step.

    That of a job of several processes is without the experts of tokens, see trainer.ledger."""
    dump_eval_results: bool = True
    """Write evaluation trajectories to export_path/dumped_evals, a folder per step."""
    compilation_cache_path: Annotated[str | None, new()] = "~/.cache/jaxrl/compiled"
    """Where compiled programs are kept for later runs; JAX_COMPILATION_CACHE_DIR outranks it."""
    rope_scaling: Annotated[
        dict[str, Any] | None, implemented("of policy, reference and engine")
    ] = None
    """Rotary scaling, instead of the model's own."""
    rope_theta: Annotated[
        float | None,
        must(
            lambda base: base is None or base > 1,
            "must be > 1, e.g. 10000.0; None keeps the model's own",
        ),
        implemented("of policy, reference and engine"),
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
    mixed_precision = getattr(trainer, role).fsdp_config.mixed_precision
    if mixed_precision is None:
        return "bfloat16" if trainer.bf16 is True else "float32"
    return PRECISIONS[mixed_precision.param_dtype]


def nothing_to_do(trainer: TrainerConfig, step: int, total_steps: int) -> str:
    """Say that a run has ended already, and by which field."""
    limit = trainer.max_training_steps
    field = "epochs" if limit is None or limit > total_steps else "max_training_steps"
    return (
        f"nothing to do: {trainer.ckpt_path} holds step {step} of {total_steps}. Raise "
        f"trainer.{field}={getattr(trainer, field)}, or choose another trainer.run_name to start "
        "again"
    )


def logger_names(logger: str | list[str]) -> list[str]:
    """Return `TrainerConfig.logger` as a list."""
    return [logger] if isinstance(logger, str) else list(logger)
