"""What a machine can do, measured, and the least seconds of a decode step.

The work is counted by `jaxrl.tools.plan.work`, the rates are measured by `jaxrl.tools.plan.costs`.
"""

import os
from collections.abc import Sequence

from jaxrl.models.architecture import TransformerConfig, layer_params
from jaxrl.tools.plan.costs import Rates, best_seconds, measure_rates
from jaxrl.tools.plan.work import (
    decode_step_bytes,
    head_flops,
    layers_flops,
)

__all__ = [
    "Rates",
    "best_seconds",
    "decode_step_bound",
    "decode_step_bytes",
    "head_flops",
    "layer_params",
    "layers_flops",
    "machine_load",
    "measure_rates",
    "step_flops",
]


def machine_load() -> list[float]:
    """Load averages over 1, 5 and 15 minutes; timings mean little above the number of cores."""
    return [round(x, 2) for x in os.getloadavg()]


def decode_step_bound(
    model: TransformerConfig, rates: Rates, batch: int, context: float, bytes_per_element: int
) -> float:
    """Least seconds of one decode step: the larger of its bytes and its FLOPs over the rates."""
    bytes_bound = decode_step_bytes(model, batch, context, bytes_per_element) / rates.bandwidth
    token = layers_flops(model, int(context) - 1, int(context)) + head_flops(model, 1)
    return max(bytes_bound, batch * token / rates.matmul_flops)


def step_flops(
    model: TransformerConfig, prompts: int, prompt_length: int, lengths: Sequence[int]
) -> dict[str, int]:
    """Return the FLOPs of the phases of one GRPO step.

    Args:
        lengths: response tokens of each sample. The prompts are prefilled once each; logits are
            counted where a response token is predicted; the update is three forwards.
    """
    head = head_flops(model, sum(lengths))
    prefill = prompts * layers_flops(model, 0, prompt_length)
    decode = sum(layers_flops(model, prompt_length, prompt_length + n) for n in lengths)
    forward = sum(layers_flops(model, 0, prompt_length + n) for n in lengths) + head
    phases = {
        "generation": prefill + decode + head,
        "reference": forward,
        "old": forward,
        "update": 3 * forward,
    }
    return phases | {"total": sum(phases.values())}
