"""How many slots of the engine's cache fit into the memory of its devices."""

import math
import os
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxrl.data.packing import round_up
from jaxrl.models.transformer import TransformerConfig, abstract_params
from jaxrl.parallel import ShardingRules
from jaxrl.parallel.rules import batch_devices

GIB = 2**30
TPU_LANES = 128  # a multiple of which the minor dim of an array takes


def slots_that_fit(
    config: TransformerConfig,
    mesh: Mesh,
    dtype: jnp.dtype,
    length: int,
    utilization: float,
    memory: float | None = None,
    resident: float = 0,
) -> int:
    """Return how many slots fit, beside the decode weights, into a share of the free memory.

    Args:
        length: positions that are allocated for a slot.
        utilization: share of what is free.
        memory: bytes of a device; None = as it says itself.
        resident: bytes of a device that are not free.

    Raises:
        ValueError: not even one on each device.
    """
    tensor, groups = mesh.shape["tensor"], batch_devices(mesh, ShardingRules())
    size = jnp.dtype(dtype).itemsize
    elements = sum(math.prod(x.shape) for x in jax.tree.leaves(abstract_params(config)))
    weights = elements * size / tensor
    position = config.num_layers * config.num_kv_heads * size / tensor
    row = 2 * position * config.head_dim * length
    if mesh.devices.flat[0].platform == "tpu" and config.head_dim % TPU_LANES:
        # values lie transposed, and are padded for the kernel while a block is decoded
        row += position * round_up(config.head_dim, TPU_LANES) * length
    whole = device_memory(mesh.devices.flat[0]) if memory is None else memory
    budget = utilization * (whole - resident)
    each = int((budget - weights) // row)
    if each < 1:
        raise ValueError(
            f"generator.inference_engine.gpu_memory_utilization={utilization}: {budget / GIB:.2f} "
            f"GiB per device, of {whole / GIB:.2f} with {resident / GIB:.2f} of the trainer's, "
            f"hold {weights / GIB:.2f} GiB of weights but not one row of {length} tokens "
            f"({row / GIB:.2f} GiB); raise it or tensor_parallel_size, offload the optimizer, or "
            "shorten prompts or responses"
        )
    return each * groups


def device_memory(device: Any) -> float:
    """Return the bytes of a device; host devices share the machine's."""
    if device.platform == "cpu":
        whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return whole / jax.local_device_count("cpu")
    return (device.memory_stats() or {}).get("bytes_limit", math.inf)
