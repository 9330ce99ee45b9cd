"""What stays in the devices' memory between the programs of a step, counted from shapes alone."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxrl import config as cfg
from jaxrl.config.objective_requirements import has_critic, needs_reference
from jaxrl.models.adapter import AdaptedModel
from jaxrl.models.transformer import Params, TransformerConfig, abstract_params, logical_axes
from jaxrl.parallel import Placement, param_shardings
from jaxrl.parallel.offload import IN_HOST_MEMORY
from jaxrl.training.build import assemble_policy, assemble_update
from jaxrl.training.critic import Critic
from jaxrl.training.policy import Policy
from jaxrl.training.update import Updater


@dataclass(frozen=True)
class Resident:
    """Hold arrays that stay between programs.

    Attributes:
        size: bytes on one device; 0 for what waits in the host's memory.
        devices: that hold it.
        kinds: of the phases during which it is there; None = all.
    """

    name: str
    size: int
    devices: frozenset[Any]
    kinds: frozenset[str] | None = None


def beside_the_engine(
    config: cfg.TrainConfig,
    model: TransformerConfig,
    mesh: jax.sharding.Mesh,
    engine: frozenset[Any],
) -> int:
    """Return the bytes that a run in training keeps on a device of its engine while it samples.

    Args:
        config: resolved and validated.
        model: architecture of the policy.
        mesh: of training.
        engine: its devices.
    """
    policy, forward_pass, _ = assemble_policy(config, model, mesh)
    _, state, updater = assemble_update(config, forward_pass, policy.placement, 1, policy.trained)
    critic = Critic(config, policy.placement, 0, 1) if has_critic(config.trainer) else None
    stay = of_training(config, policy, updater, state, critic)
    return sum(resident.size for resident in stay if resident.devices & engine)


def of_training(
    config: cfg.TrainConfig, policy: Policy, updater: Updater, state: Any, critic: Critic | None
) -> Iterator[Resident]:
    """Yield what policy, reference and critic keep, whatever the engine does.

    Args:
        state: shapes and shardings of the policy's `TrainState`.
    """
    trainer = config.trainer
    at = frozenset(policy.placement.mesh.devices.flat)
    yield _of_state("parameters", updater, state, "params", at)
    yield _of_state("optimizer", updater, state, "opt_state", at)
    if policy.lora:
        yield _base("base", policy, trainer.policy, at)
    of_ref = frozenset(policy.ref_placement.mesh.devices.flat)
    if needs_reference(trainer.algorithm) and not shares_base(trainer, policy):
        size = device_bytes(placed_params(policy.ref_model, policy.ref_placement))
        yield Resident("reference", 0 if trainer.ref.fsdp_config.cpu_offload else size, of_ref)
    elif policy.moves_reference:  # adapters of its own, on the base
        yield Resident("moved adapters", device_bytes(policy.reference_like()), of_ref)
    if critic is None:
        return
    at = frozenset(critic.placement.mesh.devices.flat)
    yield _of_state("critic", critic.updater, critic.like, "params", at)
    yield _of_state("critic optimizer", critic.updater, critic.like, "opt_state", at)
    if critic.lora:
        yield _base("critic base", critic, trainer.critic, at)


def _base(name: str, role: Policy | Critic, settings: Any, at: frozenset) -> Resident:
    """Return what adapters rest on."""
    size = device_bytes(placed_params(role.model, role.placement))
    return Resident(name, 0 if settings.fsdp_config.cpu_offload else size, at)


def _of_state(name: str, updater: Updater, state: Any, field: str, at: frozenset) -> Resident:
    resting = jax.tree.leaves(updater.resting.get(field))
    waits = any(sharding.memory_kind == IN_HOST_MEMORY for sharding in resting)
    return Resident(name, 0 if waits else device_bytes(getattr(state, field)), at)


def shares_base(trainer: cfg.TrainerConfig, policy: Policy) -> bool:
    """Return whether the reference is the base of the adapters, see `Policy.reference`."""
    same = trainer.ref.model.path == trainer.policy.model.path
    return policy.lora is not None and same and policy.ref_placement == policy.placement


def placed_params(model: TransformerConfig | AdaptedModel, placement: Placement) -> Params:
    """Return the shapes of a model's parameters, with their shardings."""
    shapes = abstract_params(model)
    shardings = param_shardings(placement.mesh, logical_axes(model), shapes, placement.rules)
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings
    )


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
