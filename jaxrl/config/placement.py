"""Which devices of the process train, score with the reference, and sample."""

from typing import TYPE_CHECKING, NamedTuple

from jaxrl.config.errors import fail
from jaxrl.config.rollouts import in_process

if TYPE_CHECKING:
    from jaxrl.config.train_config import TrainConfig

_PLACEMENT = "trainer.placement"


class DeviceShares(NamedTuple):
    """Numbers of the devices of each part, in the order of `jax.devices()`."""

    policy: range
    ref: range
    engine: range

    def of_roles(self) -> list[tuple[str, range]]:
        """The devices of each model; a critic lies where the policy does."""
        return [("policy", self.policy), ("ref", self.ref), ("critic", self.policy)]


def device_shares(config: "TrainConfig", num_devices: int) -> DeviceShares:
    """All devices for all parts, or first the policy's, then those of parts on their own.

    As in SkyRL, `policy_num_gpus_per_node` and `ref_num_gpus_per_node` count the devices of the
    policy and of a reference of its own; an engine of its own takes what is left.
    """
    placement, whole = config.trainer.placement, range(num_devices)
    apart = _engine_is_apart(config)
    if placement.colocate_policy_ref and not apart:
        return DeviceShares(whole, whole, whole)
    policy = whole[: placement.policy_num_gpus_per_node]
    ref = policy
    if not placement.colocate_policy_ref:
        ref = whole[len(policy) : len(policy) + placement.ref_num_gpus_per_node]
    return DeviceShares(policy, ref, whole[max(policy.stop, ref.stop) :] if apart else policy)


def check_placement(config: "TrainConfig", num_devices: int) -> DeviceShares:
    """The shares, if there are devices for all and work for all devices.

    Raises:
        ValueError: names the field, its value and the fix.
    """
    placement, shares = config.trainer.placement, device_shares(config, num_devices)
    apart = _engine_is_apart(config)
    if placement.colocate_policy_ref and not apart:
        return shares
    counts = {"policy": placement.policy_num_gpus_per_node}
    if not placement.colocate_policy_ref:
        counts["ref"] = placement.ref_num_gpus_per_node
    said = " + ".join(f"{role}_num_gpus_per_node={n}" for role, n in counts.items())
    field = "colocate_all" if apart else "colocate_policy_ref"
    for role, number in counts.items():
        if number < 1:
            fail(f"{_PLACEMENT}.{role}_num_gpus_per_node", number, "must be at least 1")
    if sum(counts.values()) + apart > num_devices:
        what = "leaves the engine none" if apart else "is more"
        fix = f"{said} of {num_devices} devices {what}; lower them, or set {field}=True"
        fail(f"{_PLACEMENT}.{field}", False, fix)
    if not apart and sum(counts.values()) < num_devices:
        fix = f"{said} leaves some of {num_devices} devices idle; let them add up to {num_devices}"
        fail(f"{_PLACEMENT}.{field}", False, fix)
    return shares


def check_nodes(config: "TrainConfig", num_processes: int) -> None:
    """Does the job have the processes that the config asks for? One host: any number is right.

    Raises:
        ValueError: names the field, the value and the fix.
    """
    nodes, each = config.trainer.placement.policy_num_nodes, config.trainer.cluster
    wanted = nodes * each.processes_per_host
    if nodes > 1 and num_processes != wanted:
        fix = f"asks for {wanted} processes, and the job has {num_processes}; start it with "
        how = "python -m jaxrl.cluster.launch on as many hosts (docs/cluster.md), or set it to 1"
        fail(f"{_PLACEMENT}.policy_num_nodes", nodes, fix + how)


def _engine_is_apart(config: "TrainConfig") -> bool:
    """An engine in this process, on devices of its own; servers have theirs in any case."""
    return in_process(config) and not config.trainer.placement.colocate_all
