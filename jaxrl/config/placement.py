"""Which devices of the process train, score with the reference, and sample."""

from typing import TYPE_CHECKING, NamedTuple

from jaxrl.config.errors import fail
from jaxrl.config.rollouts import in_process

if TYPE_CHECKING:
    from jaxrl.config.train_config import TrainConfig

_PLACEMENT = "trainer.placement"


class DeviceShares(NamedTuple):
    """Numbers of the devices of each part among those of a process; the same in every process."""

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

    Args:
        num_devices: of a process.
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

    Args:
        num_devices: of a process.

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


def check_processes(config: "TrainConfig", num_devices: int, num_processes: int) -> None:
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
    if config.trainer.fully_async.enabled and in_process(config):
        fix = (
            f"the engine samples in each of {num_processes} processes, which take their parts of a "
            "batch together; sample on servers (generator.inference_engine.backend='vllm' or "
            "remote_urls), or set it to False"
        )
        fail("trainer.fully_async.enabled", True, fix)


def _engine_is_apart(config: "TrainConfig") -> bool:
    """An engine in this process, on devices of its own; servers have theirs in any case."""
    return in_process(config) and not config.trainer.placement.colocate_all
