"""How many devices and processes make an engine, where the config leaves it to their memory."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl import config as cfg
from jaxrl.array_ops import DTYPES
from jaxrl.models.transformer import TransformerConfig, abstract_params
from jaxrl.parallel import engine_meshes
from jaxrl.rollout.native.programs import pages_that_fit, weight_bytes


class Sizes(NamedTuple):
    """Hold of how many processes an engine has the devices, and how many share each matrix."""

    hosts: int
    tensor: int


def sizes_that_fit(
    config: cfg.TrainConfig,
    model: TransformerConfig,
    processes: Sequence[Sequence[Any]],
    *,
    resident: float,
    memory: float,
    platform: str | None = None,
    before: Sizes | None = None,
) -> Sizes:
    """Return the sizes of the native engine: the smallest that memory allows.

    These are the fewest processes, and of their devices the fewest that share each matrix, on which
    the weights and the cache of the longest row fit beside what stays there. An engine of one
    process must also have room for its weights twice while they are laid out, and for its part of
    the copy that a process of a job makes of them. What the config says stays. Where nothing fits
    it is the most devices for each matrix: the engine then says what is missing.

    Args:
        config: validated.
        processes: of the job, the devices of the sampler of each.
        resident: bytes that others keep on a device while the engine samples.
        memory: bytes of a device.
        platform: see `Programs`.
        before: sizes that are kept if they are possible and fit.
    """
    settings, devices = config.generator.inference_engine, len(processes[0])
    dtype = DTYPES[cfg.engine_dtype(settings)]
    elements = sum(x.size for x in jax.tree.leaves(abstract_params(model)))
    copy = elements * jnp.dtype(dtype).itemsize / devices * (len(processes) > 1)

    def fits(sizes: Sizes) -> bool:
        own = [device for process in processes[: sizes.hosts] for device in process]
        number, experts = settings.num_engines, settings.expert_parallel_size
        mesh = engine_meshes(own, number, sizes.tensor, experts)[0]
        laid_out = weight_bytes(model, mesh, dtype)
        laid_out += weight_bytes(model, mesh, dtype, settings.quantization)
        if sizes.hosts == 1 and resident + copy + laid_out > memory:
            return False
        try:
            pages_that_fit(
                model,
                mesh,
                dtype,
                max_model_len=cfg.longest_row(config),
                utilization=settings.gpu_memory_utilization,
                memory=memory,
                resident=resident,
                platform=platform,
                keep_routes=config.trainer.policy.router_replay != "off",
                quantization=settings.quantization,
                kv_cache_dtype=settings.kv_cache_dtype,
            )
        except ValueError:
            return False
        return True

    possible = list(_possible(config, model.num_heads, devices, len(processes)))
    tried = [before, *possible] if before in possible else possible
    return next(filter(fits, tried), max(possible, key=lambda sizes: sizes.tensor))


def _possible(config: cfg.TrainConfig, heads: int, devices: int, processes: int) -> Iterator[Sizes]:
    """Yield the sizes that part the devices and the heads, the fewest processes first.

    An engine that samples beside training on the same devices is not split over them.

    Args:
        devices: of the sampler in a process.
        processes: of the job.
    """
    settings = config.generator.inference_engine
    experts, alone = settings.expert_parallel_size, cfg.overlaps(config)
    alone &= config.trainer.placement.colocate_all
    most = processes if cfg.spans_hosts(config) else 1
    for hosts in [settings.hosts_per_engine] if settings.hosts_per_engine else range(1, most + 1):
        each = devices * hosts // settings.num_engines
        widths = [n for n in range(1, each + 1) if heads % n == 0 and (n == 1 or not alone)]
        for tensor in [settings.tensor_parallel_size] if settings.tensor_parallel_size else widths:
            parts = max(tensor, experts)
            if processes % hosts == each % parts == parts % tensor == 0:
                yield Sizes(hosts, tensor)
