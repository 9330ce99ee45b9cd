"""The device mesh of a config: SkyRL's fields mapped onto it, sizes and rules checked."""

import dataclasses
import math
from typing import TYPE_CHECKING, Any

from jaxrl.config.backend import MeshConfig
from jaxrl.config.errors import check_choice, fail
from jaxrl.config.trainer import CriticConfig, PolicyConfig, RefConfig
from jaxrl.parallel import ShardingRules, mesh_sizes
from jaxrl.parallel.mesh import AXES

if TYPE_CHECKING:
    from jaxrl.config.placement import DeviceShares
    from jaxrl.config.train_config import TrainConfig

_RULES = "trainer.sharding_rules"


def sharding_rules(overrides: dict[str, Any]) -> ShardingRules:
    """The default rules, changed by `trainer.sharding_rules`."""
    changes = {name: tuple(x) if isinstance(x, list) else x for name, x in overrides.items()}
    return ShardingRules(**changes)


def batch_groups(config: "TrainConfig", num_devices: int, role: str = "policy") -> int:
    """Groups of devices that hold different rows of a batch: data x fsdp by default.

    Args:
        role: "policy", "ref" or "critic".
    """
    mesh = getattr(config.trainer, role).mesh or config.trainer.policy.mesh
    sizes = mesh_sizes(num_devices, **dataclasses.asdict(mesh))
    rows = sharding_rules(config.trainer.sharding_rules).batch or ()
    return math.prod(size for axis, size in zip(AXES, sizes, strict=True) if axis in rows)


def check_mesh(config: "TrainConfig", shares: "DeviceShares", num_processes: int = 1) -> None:
    """Sizes that fit the devices, SkyRL's fields that agree with them, rules that can be placed.

    Raises:
        ValueError: with the field, its value and the fix.
    """
    trainer = config.trainer
    for name, devices in shares.of_roles():
        role = getattr(trainer, name)
        if role.mesh is None:
            continue
        field, sizes = f"trainer.{name}.mesh", dataclasses.asdict(role.mesh)
        try:
            mesh_sizes(len(devices) * num_processes, **sizes)
        except ValueError as error:
            said = {axis: size for axis, size in sizes.items() if size != 1}
            fail(field, said, str(error).partition(": ")[2] or str(error))
        for axis in ("context", "expert"):
            if sizes[axis] != 1:
                fail(f"{field}.{axis}", sizes[axis], "not available yet; set it to 1")
        for alias, axis, size in skyrl_sizes(role):
            if sizes[axis] != size:
                fix = (
                    f"trainer.{name}.{alias}={size} says otherwise; set one of them, or both alike"
                )
                fail(f"{field}.{axis}", sizes[axis], fix)
    _check_rules(trainer.sharding_rules)


def skyrl_sizes(role: PolicyConfig | RefConfig | CriticConfig) -> list[tuple[str, str, int]]:
    """SkyRL's size fields of a role that are set: (field, mesh axis, size)."""
    fields = [("fsdp_config.fsdp_size", "fsdp", role.fsdp_config.fsdp_size, -1)]
    if not isinstance(role, CriticConfig):  # SkyRL has no critic on Megatron
        tensor = role.megatron_config.tensor_model_parallel_size
        fields.append(("megatron_config.tensor_model_parallel_size", "tensor", tensor, 1))
    return [(field, axis, size) for field, axis, size, default in fields if size != default]


def map_mesh(role: PolicyConfig | RefConfig | CriticConfig) -> MeshConfig | None:
    """The mesh of a role with SkyRL's fields in it, where the mesh itself does not say."""
    default, sizes = MeshConfig(), skyrl_sizes(role)
    if not sizes:
        return role.mesh
    mesh = dataclasses.replace(role.mesh or default)
    for _, axis, size in sizes:
        if getattr(mesh, axis) == getattr(default, axis):
            setattr(mesh, axis, size)
    if mesh.fsdp != -1 and mesh.data == default.data:
        mesh.data = -1  # SkyRL copies the model over the devices that are left
    return mesh


def _check_rules(overrides: dict[str, Any]) -> None:
    """Rows and parameters over the axes of the batch, the width of the model over the others."""
    movable = ("batch", "embed", "vocab", "heads", "kv_heads", "mlp")
    for name, axes in overrides.items():
        check_choice(_RULES, name, movable)
        for axis in axes if isinstance(axes, list | tuple) else [axes]:
            check_choice(f"{_RULES}[{name!r}]", axis, (None, "data", "fsdp", "tensor"))
    rules = dataclasses.asdict(sharding_rules(overrides))
    names = {name: (x,) if isinstance(x, str) else x or () for name, x in rules.items()}
    batch = set(names["batch"])
    if not set(names["embed"]) <= batch:
        fix = f"must be among those of batch, {sorted(batch)}: parameters are gathered over them"
        fail(f"{_RULES}['embed']", rules["embed"], fix)
    for name in ("vocab", "heads", "kv_heads", "mlp"):
        if set(names[name]) & batch or len(names[name]) > 1:
            fix = f"must be one axis that is not of batch, {sorted(batch)}, or None (whole)"
            fail(f"{_RULES}[{name!r}]", rules[name], fix)
