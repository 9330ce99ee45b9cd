"""What stays in the devices' memory between the programs of a step."""

from dataclasses import dataclass
from typing import Any

import jax

from jaxrl import config as cfg
from jaxrl.critic import Critic
from jaxrl.offload import IN_HOST_MEMORY
from jaxrl.planning.phases import SAMPLING, Phase
from jaxrl.planning.run import Run, device_bytes, placed_params, reference_params, shares_base
from jaxrl.policy import Policy
from jaxrl.update import Updater


@dataclass(frozen=True)
class Resident:
    """Arrays that stay between programs.

    Attributes:
        size: bytes on one device; 0 for what waits in the host's memory.
        devices: that hold it.
        kinds: of the phases during which it is there; None = all.
    """

    name: str
    size: int
    devices: frozenset[Any]
    kinds: frozenset[str] | None = None


def residents(run: Run, found: list[Phase]) -> list[Resident]:
    """On the devices of policy, reference, critic and engine.

    The engine's weights and cache are dropped when the rollouts of a step are there, unless
    sampling goes on while the trainer trains.
    """
    kinds = None if cfg.overlaps(run.config) else SAMPLING
    policy, trainer = run.policy, run.config.trainer
    at = frozenset(policy.placement.mesh.devices.flat)
    stay = [
        _of_state("parameters", run.updater, run.state, "params", at),
        _of_state("optimizer", run.updater, run.state, "opt_state", at),
    ]
    if policy.lora:
        stay.append(_base("base", policy, trainer.policy, at))
    of_ref = frozenset(policy.ref_placement.mesh.devices.flat)
    if run.has_reference and not shares_base(run):
        size = 0 if trainer.ref.fsdp_config.cpu_offload else device_bytes(reference_params(run))
        stay.append(Resident("reference", size, of_ref))
    elif policy.moves_reference:  # adapters of its own, on the base
        stay.append(Resident("moved adapters", device_bytes(policy.reference_like()), of_ref))
    if critic := run.critic:
        at = frozenset(critic.placement.mesh.devices.flat)
        given = critic.updater, critic.like
        stay.append(_of_state("critic", *given, "params", at))
        stay.append(_of_state("critic optimizer", *given, "opt_state", at))
        if critic.lora:
            stay.append(_base("critic base", critic, trainer.critic, at))
    for decode in (phase for phase in found if phase.kind == "decode"):
        weights, cache = (device_bytes(x) for x in decode.call.args[:2])
        stay.append(Resident("engine weights", weights, decode.part.devices, kinds))
        stay.append(Resident("KV cache", cache, decode.part.devices, kinds))
    return stay


def _base(name: str, role: Policy | Critic, settings: Any, at: frozenset) -> Resident:
    """What adapters rest on."""
    size = device_bytes(placed_params(role.model, role.placement))
    return Resident(name, 0 if settings.fsdp_config.cpu_offload else size, at)


def _of_state(name: str, updater: Updater, state: Any, field: str, at: frozenset) -> Resident:
    resting = jax.tree.leaves(updater.resting.get(field))
    waits = any(sharding.memory_kind == IN_HOST_MEMORY for sharding in resting)
    return Resident(name, 0 if waits else device_bytes(getattr(state, field)), at)
