"""Config of the device mesh, and of SkyRL's two training backends, which are mapped onto it."""

from dataclasses import dataclass, field
from typing import Annotated, Any

from jaxrl.config.constraints import one_of
from jaxrl.config.dataclass_config import BaseConfig
from jaxrl.config.status import implemented, inert, mapped, new

_MEGATRONS_OWN = inert("Megatron's own")
_MEGATRONS_EXPERTS = inert("Megatron's own way; ours has no other, and the model says the rest")
_FLOAT32_ALONE = mapped("fp32 alone: gradients are summed in it, so that no mesh changes them")


@dataclass
class MeshConfig(BaseConfig):
    """Hold the axis sizes of a device mesh. One may be -1: it takes the devices that are left."""

    data: Annotated[int, new()] = 1
    """Groups of devices with a copy of the parameters each and other rows of the batch."""
    fsdp: Annotated[int, new()] = -1
    """Devices that share one copy of parameters and optimizer state, with other rows each."""
    tensor: Annotated[int, new()] = 1
    """Devices that share the rows, and split heads, MLP width and vocabulary."""
    context: Annotated[int, new()] = 1
    """Devices that split the tokens of each row, for rows that one device does not hold; they share
    the parameters as those of fsdp do."""
    expert: Annotated[int, new()] = 1
    """Devices that split the experts of each layer, with other rows each; they share all other
    parameters as those of fsdp do."""


# values of MixedPrecisionConfig, as NumPy names them
PRECISIONS = {"bf16": "bfloat16", "bfloat16": "bfloat16", "fp32": "float32", "float32": "float32"}


@dataclass
class MixedPrecisionConfig(BaseConfig):
    """Hold the data types of FSDP."""

    param_dtype: Annotated[str, one_of(*PRECISIONS)] = "bf16"
    """Data type of the computation, "bf16" or "fp32", in place of that of `trainer.bf16`."""
    reduce_dtype: Annotated[str, one_of("fp32", "float32"), _FLOAT32_ALONE] = "fp32"
    """Data type in which gradients are summed over devices."""
    buffer_dtype: Annotated[str, one_of("fp32", "float32"), _FLOAT32_ALONE] = "fp32"
    """Data type of non-trained buffers."""


@dataclass
class FSDPConfig(BaseConfig):
    """Hold the sharding of weights and optimizer state over devices."""

    cpu_offload: Annotated[
        bool,
        implemented(
            "weights and optimizer state, computed with on the device; no effect without "
            "pinned_host"
        ),
    ] = False
    """Keep weights and optimizer state in host memory."""
    reshard_after_forward: Annotated[bool | int, inert("XLA decides")] = True
    """Free gathered weights after the forward pass."""
    fsdp_size: Annotated[int, mapped("mesh.fsdp, with mesh.data=-1")] = -1
    """Size of the mesh axis `fsdp`; -1 = all devices. The axis `data` gets the rest."""
    mixed_precision: Annotated[
        MixedPrecisionConfig | None,
        implemented("of the computation; weights and optimizer state stay float32"),
    ] = None
    """Data types of this model, in place of those of `trainer.bf16`; None = these."""
    wrap_policy: Annotated[dict[str, Any], inert("XLA decides")] = field(default_factory=dict)
    """Which torch modules are sharded as one unit."""


@dataclass
class MegatronDDPConfig(BaseConfig):
    """Hold the settings of Megatron's gradient reduction."""

    grad_reduce_in_fp32: bool = True
    """Sum gradients in float32."""
    overlap_grad_reduce: bool = False
    """Overlap the gradient reduction with the backward pass."""
    overlap_param_gather: bool = False
    """Overlap the weight gather with the forward pass."""
    average_in_collective: bool = True
    """Average inside the collective, not after it."""


@dataclass
class MegatronTorchProfilerConfig(BaseConfig):
    """Hold the settings of torch.profiler traces."""

    enable: bool = False
    """Record traces."""
    ranks: list[int] = field(default_factory=list)
    """Ranks that record."""
    save_path: str | None = None
    """Folder of the traces."""


@dataclass
class MegatronLoraConfig(BaseConfig):
    """Hold the settings of Megatron's adapters."""

    lora_type: Annotated[
        str, inert("every Hugging Face matrix has adapters of its own, as with canonical_lora")
    ] = "lora"
    """"lora" or "canonical_lora"."""


def _optimizer_kwargs() -> dict[str, Any]:
    return {
        "overlap_cpu_optimizer_d2h_h2d": False,
        "use_precision_aware_optimizer": False,
        "optimizer_cpu_offload": False,
        "optimizer_offload_fraction": 0.0,
    }


def _transformer_kwargs() -> dict[str, Any]:
    return {
        "recompute_granularity": "full",
        "recompute_modules": ["core_attn"],
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    }


@dataclass
class MegatronConfig(BaseConfig):
    """Hold Megatron's parallelism, mixture-of-experts and recomputation settings."""

    tensor_model_parallel_size: Annotated[int, mapped("mesh.tensor")] = 1
    """Devices that share each weight matrix."""
    pipeline_model_parallel_size: Annotated[
        int,
        mapped("its devices join those of mesh.fsdp, which hold any model and never idle"),
    ] = 1
    """Pipeline stages."""
    context_parallel_size: Annotated[int, mapped("mesh.context")] = 1
    """Devices that share each sequence."""
    expert_model_parallel_size: Annotated[
        int, mapped("mesh.expert, times expert_tensor over tensor_model_parallel_size")
    ] = 1
    """Devices that share the experts."""
    expert_tensor_parallel_size: Annotated[
        int | None, mapped("to mesh.expert; mesh.tensor splits each expert as all else")
    ] = None
    """Devices that share each expert matrix; None = tensor_model_parallel_size."""
    moe_token_dispatcher_type: Annotated[str, _MEGATRONS_EXPERTS] = "alltoall"
    """How tokens travel to experts."""
    moe_router_load_balancing_type: Annotated[str, _MEGATRONS_EXPERTS] = "none"
    """Auxiliary loss of the router."""
    moe_grouped_gemm: Annotated[bool, _MEGATRONS_EXPERTS] = True
    """One grouped matrix product for all experts."""
    moe_router_score_function: Annotated[str | None, _MEGATRONS_EXPERTS] = None
    """Router score, instead of the model's own."""
    moe_router_enable_expert_bias: Annotated[bool | None, _MEGATRONS_EXPERTS] = None
    """Router bias, instead of the model's own setting."""
    ddp_config: Annotated[MegatronDDPConfig, _MEGATRONS_OWN] = field(
        default_factory=MegatronDDPConfig
    )
    """Gradient reduction."""
    torch_profiler_config: Annotated[MegatronTorchProfilerConfig, _MEGATRONS_OWN] = field(
        default_factory=MegatronTorchProfilerConfig
    )
    """torch.profiler traces."""
    lora_config: MegatronLoraConfig = field(default_factory=MegatronLoraConfig)
    """Adapters."""
    optimizer_config_kwargs: Annotated[dict[str, Any], _MEGATRONS_OWN] = field(
        default_factory=_optimizer_kwargs
    )
    """Arguments of Megatron's optimizer."""
    transformer_config_kwargs: Annotated[dict[str, Any], _MEGATRONS_OWN] = field(
        default_factory=_transformer_kwargs
    )
    """Arguments of Megatron's transformer, activation recomputation among them."""
    empty_cuda_cache: Annotated[bool | None, _MEGATRONS_OWN] = None
    """Empty the CUDA cache after a step."""
    model_config_kwargs: Annotated[
        dict[str, Any], mapped("added to the role's model_config_kwargs")
    ] = field(default_factory=dict)
    """Changes to the Hugging Face model config."""
    dist_ckpt_optim_fully_reshardable: Annotated[bool, _MEGATRONS_OWN] = False
    """Checkpoint layout that can be loaded on another mesh."""
