"""What a machine can do, measured, and the least seconds of a decode step.

The work is counted by `jaxrl.tools.plan.work`, the rates are measured by `jaxrl.tools.plan.rates`.
"""

import os

from jaxrl.models.transformer import TransformerConfig
from jaxrl.tools.plan.rates import Rates, best_seconds, measure_rates
from jaxrl.tools.plan.work import (
    decode_step_bytes,
    head_flops,
    layer_params,
    layers_flops,
    step_flops,
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
