"""Which devices of the process train, score with the reference, and sample."""

import dataclasses
import math
from typing import Any, NamedTuple

from jaxrl.config.constraints import check_choice
from jaxrl.config.generator import engine_hosts
from jaxrl.config.mesh import skyrl_sizes
from jaxrl.config.rollouts import in_process, runs_free
from jaxrl.config.train_config import TrainConfig
from jaxrl.config_error import ConfigError, fail
from jaxrl.parallel import ShardingRules, mesh_sizes
from jaxrl.parallel.mesh import AXES

_PLACEMENT = "trainer.placement"
_RULES = "trainer.sharding_rules"


def sharding_rules(overrides: dict[str, Any]) -> ShardingRules:
    """Return the default rules, changed by `trainer.sharding_rules`."""
    changes = {name: tuple(x) if isinstance(x, list) else x for name, x in overrides.items()}
    rules = ShardingRules(**changes)
    if "batch" not in changes or "embed" in changes:
        return rules
    batch = (rules.batch,) if isinstance(rules.batch, str) else rules.batch or ()
    default = ShardingRules().embed or ()  # as far as it is over the axes of tokens
    tokens = (*batch, rules.seq)
    return dataclasses.replace(rules, embed=tuple(x for x in default if x in tokens) or None)


class DeviceRanges(NamedTuple):
    """Hold the numbers of each part's devices in a process; the same in every process."""

    policy: range
    ref: range
    engine: range

    def of_roles(self) -> list[tuple[str, range]]:
        """Return the devices of each model; a critic lies where the policy does."""
        return [("policy", self.policy), ("ref", self.ref), ("critic", self.policy)]


def device_ranges(config: TrainConfig, num_devices: int) -> DeviceRanges:
    """Give all devices to all parts, or first the policy's, then those of parts on their own.

    As in SkyRL, `policy_num_gpus_per_node` and `ref_num_gpus_per_node` count the devices of the
    policy and of a reference of its own; an engine of its own takes what is left.

    Args:
        num_devices: of a process.
    """
    placement, everything = config.trainer.placement, range(num_devices)
    apart = _engine_is_apart(config)
    if placement.colocate_policy_ref and not apart:
        return DeviceRanges(everything, everything, everything)
    policy = everything[: placement.policy_num_gpus_per_node]
    ref = policy
    if not placement.colocate_policy_ref:
        ref = everything[len(policy) : len(policy) + placement.ref_num_gpus_per_node]
    return DeviceRanges(policy, ref, everything[max(policy.stop, ref.stop) :] if apart else policy)


def check_placement(config: TrainConfig, num_devices: int) -> DeviceRanges:
    """Return the ranges, if there are devices for all and work for all devices.

    Args:
        num_devices: of a process.

    Raises:
        ValueError: names the field, its value and the fix.
    """
    placement, ranges = config.trainer.placement, device_ranges(config, num_devices)
    apart = _engine_is_apart(config)
    if placement.colocate_policy_ref and not apart:
        return ranges
    counts = {"policy": placement.policy_num_gpus_per_node}
    if not placement.colocate_policy_ref:
        counts["ref"] = placement.ref_num_gpus_per_node
    requested = " + ".join(f"{role}_num_gpus_per_node={n}" for role, n in counts.items())
    field = "colocate_all" if apart else "colocate_policy_ref"
    for role, number in counts.items():
        if number < 1:
            fail(f"{_PLACEMENT}.{role}_num_gpus_per_node", number, "must be at least 1")
    if sum(counts.values()) + apart > num_devices:
        what = "leaves the engine none" if apart else "is more"
        fix = f"{requested} of {num_devices} devices {what}; lower them, or set {field}=True"
        fail(f"{_PLACEMENT}.{field}", False, fix)
    if not apart and sum(counts.values()) < num_devices:
        idle = f"leaves some of {num_devices} devices idle; let them add up to {num_devices}"
        fail(f"{_PLACEMENT}.{field}", False, f"{requested} {idle}")
    return ranges


def check_nodes(config: TrainConfig, num_processes: int) -> None:
    """Refuse a job without the processes that the config asks for.

    On one host any number is right.

    Raises:
        ValueError: names the field, the value and the fix.
    """
    nodes, each = config.trainer.placement.policy_num_nodes, config.trainer.cluster
    wanted = nodes * each.processes_per_host
    if nodes > 1 and num_processes != wanted:
        fix = f"asks for {wanted} processes, and the job has {num_processes}; start it with "
        how = "python -m jaxrl.cluster.launch on as many hosts (docs/cluster.md), or set it to 1"
        fail(f"{_PLACEMENT}.policy_num_nodes", nodes, fix + how)


def check_processes(config: TrainConfig, num_devices: int, num_processes: int) -> None:
    """Refuse what a job of several processes cannot do.

    Raises:
        ValueError: names the field, its value and the fix.
    """
    if num_processes == 1:
        return
    if num_devices % num_processes:
        raise ValueError(
            f"{num_processes} processes with {num_devices} devices in all: give each as many"
        )
    asynchronous, hosts = (
        config.trainer.fully_async,
        engine_hosts(config.generator.inference_engine),
    )
    if not asynchronous.enabled or not in_process(config):
        return
    if hosts > 1 and runs_free(config):
        fix = (
            f"an engine over the devices of {hosts} processes samples while the trainer waits, and "
            "so one batch at a time; set 'lockstep', or "
            "generator.inference_engine.hosts_per_engine=1"
        )
        fail("trainer.fully_async.schedule", "free", fix)
    size, engines = config.trainer.train_batch_size, num_processes // hosts
    if size < engines:
        fix = f"leaves some of {engines} engines without a prompt of a batch; raise it"
        fail("trainer.train_batch_size", size, fix)


def _engine_is_apart(config: TrainConfig) -> bool:
    """Return whether the engine is in this process, on devices of its own.

    Servers have theirs in any case.
    """
    return in_process(config) and not config.trainer.placement.colocate_all


def fewest_devices(config: TrainConfig) -> int:
    """Return how many devices the meshes of the models need at least."""
    trainer = config.trainer
    meshes = (role.mesh for role in (trainer.policy, trainer.ref, trainer.critic))
    sizes = [dataclasses.astuple(mesh) for mesh in meshes if mesh is not None]
    return math.lcm(*(math.prod(size for size in mesh if size > 0) for mesh in sizes))


def batch_groups(config: TrainConfig, num_devices: int, role: str = "policy") -> int:
    """Count the groups of devices that hold different rows of a batch: data x fsdp by default.

    Args:
        role: "policy", "ref" or "critic".
    """
    mesh = getattr(config.trainer, role).mesh or config.trainer.policy.mesh
    sizes = mesh_sizes(num_devices, **dataclasses.asdict(mesh))
    rows = sharding_rules(config.trainer.sharding_rules).batch or ()
    return math.prod(size for axis, size in zip(AXES, sizes, strict=True) if axis in rows)


def check_mesh(config: TrainConfig, ranges: DeviceRanges, num_processes: int = 1) -> None:
    """Check that sizes fit the devices, SkyRL's fields agree, and rules can be placed.

    Raises:
        ValueError: with the field, its value and the fix.
    """
    trainer = config.trainer
    for name, devices in ranges.of_roles():
        role = getattr(trainer, name)
        if role.mesh is None:
            continue
        field, sizes = f"trainer.{name}.mesh", dataclasses.asdict(role.mesh)
        try:
            mesh_sizes(len(devices) * num_processes, **sizes)
        except ConfigError as error:
            changed = {axis: size for axis, size in sizes.items() if size != 1}
            fail(field, changed, error.remedy)
        for alias, axis, size in skyrl_sizes(role):
            if sizes[axis] != size:
                fix = (
                    f"trainer.{name}.{alias}={size} says otherwise; set one of them, or both alike"
                )
                fail(f"{field}.{axis}", sizes[axis], fix)
    meshes = [role.mesh for role in (trainer.policy, trainer.ref, trainer.critic) if role.mesh]
    if trainer.context_strategy != "auto" and all(mesh.context == 1 for mesh in meshes):
        fix = "has no effect with mesh.context=1; set it to 'auto'"
        fail("trainer.context_strategy", trainer.context_strategy, fix)
    if trainer.expert_exchange != "auto" and all(mesh.expert == 1 for mesh in meshes):
        fix = "has no effect with mesh.expert=1; set it to 'auto'"
        fail("trainer.expert_exchange", trainer.expert_exchange, fix)
    _check_rules(trainer.sharding_rules)


_OF_ROWS = ("batch", "embed")  # rules whose axes have other rows


def _check_rules(overrides: dict[str, Any]) -> None:
    """Check that rows and parameters are over the batch axes, a model's width over the others."""
    movable = ("batch", "embed", "vocab", "heads", "kv_heads", "mlp")
    for name, axes in overrides.items():
        check_choice(_RULES, name, movable)
        allowed = [None, "data", "fsdp", "tensor", *(["expert"] if name in _OF_ROWS else [])]
        for axis in axes if isinstance(axes, list | tuple) else [axes]:
            check_choice(f"{_RULES}[{name!r}]", axis, allowed)
    rules = dataclasses.asdict(sharding_rules(overrides))
    axes_of = {name: (x,) if isinstance(x, str) else x or () for name, x in rules.items()}
    batch = set(axes_of["batch"])
    tokens = batch | set(axes_of["seq"])
    if not set(axes_of["embed"]) <= tokens:
        fix = f"must be among those of tokens, {sorted(tokens)}: parameters are gathered over them"
        fail(f"{_RULES}['embed']", rules["embed"], fix)
    for name in ("vocab", "heads", "kv_heads", "mlp"):
        if set(axes_of[name]) & batch or len(axes_of[name]) > 1:
            fix = f"must be one axis that is not of batch, {sorted(batch)}, or None (whole)"
            fail(f"{_RULES}[{name!r}]", rules[name], fix)
