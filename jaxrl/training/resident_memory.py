"""What stays in the devices' memory between the programs of a step, counted from shapes alone."""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxrl import config as cfg
from jaxrl.config.objective_requirements import has_critic, needs_reference
from jaxrl.models.placement import placed_params
from jaxrl.models.transformer import TransformerConfig
from jaxrl.parallel.offload import IN_HOST_MEMORY
from jaxrl.training.build import assemble_policy, assemble_reference, assemble_update
from jaxrl.training.critic import Critic
from jaxrl.training.reference import Reference
from jaxrl.training.update import Updater
from jaxrl.training.weights import Weights
from jaxrl.types import CriticState, TrainState


@dataclass(frozen=True)
class Resident:
    """Hold arrays that stay between programs.

    Attributes:
        size: bytes on one device; 0 for what waits in the host's memory.
        devices: that hold it.
        kinds: of the phases during which it is there; None = all.
        waits: bytes of one device's part that are in its host's memory.
    """

    name: str
    size: int
    devices: frozenset[Any]
    kinds: frozenset[str] | None = None
    waits: int = 0


def beside_the_engine(
    config: cfg.TrainConfig,
    model: TransformerConfig,
    mesh: jax.sharding.Mesh,
    engine: frozenset[Any],
    devices: Sequence[Any] | None = None,
) -> int:
    """Return the bytes that a run in training keeps on a device of its engine while it samples.

    Args:
        config: resolved and validated.
        model: architecture of the policy.
        mesh: of training.
        engine: its devices.
        devices: of the run; None = those of all its processes.
    """
    policy, forward_pass = assemble_policy(config, model, mesh)
    reference, _ = assemble_reference(config, policy, forward_pass, devices)
    _, state, updater = assemble_update(config, forward_pass, policy.placement, 1, policy.trained)
    critic = Critic(config, policy.placement, 0, 1) if has_critic(config.trainer) else None
    stay = of_training(policy, reference, updater, state, critic)
    return sum(resident.size for resident in stay if resident.devices & engine)


def of_training(
    policy: Weights,
    reference: Reference,
    updater: Updater,
    state: TrainState,
    critic: Critic | None,
) -> Iterator[Resident]:
    """Yield what policy, reference and critic keep, whatever the engine does.

    Args:
        state: shapes and shardings of the policy's `TrainState`.
    """
    at = frozenset(policy.placement.mesh.devices.flat)
    yield _of_state("parameters", updater, state, "params", at)
    yield _of_state("optimizer", updater, state, "opt_state", at)
    if policy.lora:
        yield _all_params("base", policy)
    if needs_reference(policy.trainer.algorithm) and not reference.is_base_of_policy:
        yield _all_params("reference", reference.weights)
    elif reference.moves:  # adapters of its own, on the base
        at = frozenset(reference.weights.placement.mesh.devices.flat)
        yield Resident("moved adapters", device_bytes(reference.abstract_moved()), at)
    if critic is None:
        return
    at = frozenset(critic.weights.placement.mesh.devices.flat)
    yield _of_state("critic", critic.updater, critic.abstract_state, "params", at)
    yield _of_state("critic optimizer", critic.updater, critic.abstract_state, "opt_state", at)
    if critic.weights.lora:
        yield _all_params("critic base", critic.weights)


def _all_params(name: str, weights: Weights) -> Resident:
    """Count the parameters of a model that is not trained: a reference, or a base of adapters."""
    size = device_bytes(placed_params(weights.model, weights.placement))
    at = frozenset(weights.placement.mesh.devices.flat)
    return _resident(name, size, at, waits=weights.settings.fsdp_config.cpu_offload)


def _of_state(
    name: str, updater: Updater, state: TrainState | CriticState, field: str, at: frozenset
) -> Resident:
    offloaded = jax.tree.leaves(updater.offloaded.get(field))
    waits = any(sharding.memory_kind == IN_HOST_MEMORY for sharding in offloaded)
    return _resident(name, device_bytes(getattr(state, field)), at, waits=waits)


def _resident(name: str, size: int, at: frozenset, *, waits: bool) -> Resident:
    return Resident(name, 0, at, waits=size) if waits else Resident(name, size, at)


def device_bytes(tree: Any, groups: int = 1) -> int:
    """Return the bytes of arrays on one device, of shapes with shardings; 0 for host memory.

    Args:
        groups: of devices, over which rows without a sharding are spread.
    """
    return sum(map(functools.partial(_device_bytes, groups), jax.tree.leaves(tree)))


def _device_bytes(groups: int, x: Any) -> int:
    if not isinstance(x, jax.ShapeDtypeStruct):  # a number or a key
        return 0
    if x.sharding is None:
        return x.size * x.dtype.itemsize // groups
    if x.sharding.memory_kind == IN_HOST_MEMORY:
        return 0
    return int(np.prod(x.sharding.shard_shape(x.shape))) * x.dtype.itemsize
