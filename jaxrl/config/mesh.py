"""Map SkyRL's size fields onto a mesh."""

import dataclasses
from typing import Any

from jaxrl.config.backend import MeshConfig
from jaxrl.config.trainer import CriticConfig, PolicyConfig, RefConfig


def skyrl_sizes(role: PolicyConfig | RefConfig | CriticConfig) -> list[tuple[str, str, int]]:
    """Return SkyRL's size fields of a role that are set: (field, mesh axis, size)."""
    fields: list[tuple[str, str, Any, Any]]
    fields = [
        ("fsdp_config.fsdp_size", "fsdp", role.fsdp_config.fsdp_size, -1),
        ("sequence_parallel_size", "context", role.sequence_parallel_size, 1),
    ]
    if not isinstance(role, CriticConfig):  # SkyRL has no critic on Megatron
        megatron = role.megatron_config
        tensor, experts = (
            megatron.tensor_model_parallel_size,
            megatron.expert_model_parallel_size,
        )
        fields.append(("megatron_config.tensor_model_parallel_size", "tensor", tensor, 1))
        context = megatron.context_parallel_size
        fields.append(("megatron_config.context_parallel_size", "context", context, 1))
        if experts > 1:  # Megatron's are over the devices of tensor, too; ours split each expert
            within = megatron.expert_tensor_parallel_size or tensor
            size = max(experts * within // tensor, 1)
            fields.append(("megatron_config.expert_model_parallel_size", "expert", size, 0))
    return [(field, axis, size) for field, axis, size, default in fields if size != default]


def map_mesh(role: PolicyConfig | RefConfig | CriticConfig) -> MeshConfig | None:
    """Return the mesh of a role with SkyRL's fields in it, where the mesh itself does not say."""
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
