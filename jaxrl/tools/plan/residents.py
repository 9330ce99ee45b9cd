"""What stays in the devices' memory between the programs of a planned step."""

from jaxrl import config as cfg
from jaxrl.tools.plan.phases import SAMPLING, Phase
from jaxrl.tools.plan.run import Run
from jaxrl.training.resident_memory import Resident, device_bytes, of_training


def residents(run: Run, found: list[Phase]) -> list[Resident]:
    """Return what is on the devices of policy, reference, critic and engine.

    The engine's weights and cache are dropped when the rollouts of a step are there, unless
    sampling goes on while the trainer trains.
    """
    kinds = None if cfg.overlaps(run.config) else SAMPLING
    stay = list(of_training(run.policy, run.reference, run.updater, run.state, run.critic))
    for decode in (phase for phase in found if phase.kind == "decode"):
        weights, cache = (device_bytes(x) for x in decode.call.args[:2])
        stay.append(Resident("engine weights", weights, decode.part.devices, kinds))
        stay.append(Resident("KV cache", cache, decode.part.devices, kinds))
    return stay
