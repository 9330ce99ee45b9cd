"""Speed of a step: tokens/s, model FLOP/s, and the share of the devices' peak that it is (MFU).

Useful work alone counts: no recomputation, no padding. Chowdhery et al., 2022,
https://arxiv.org/abs/2204.02311 (appendix B).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxrl.models.adapter import AdaptedModel
from jaxrl.models.architecture import attention_flops, layer_params, state_flops
from jaxrl.models.transformer import TransformerConfig, abstract_params
from jaxrl.parallel.chips import chip_of
from jaxrl.types import TrainBatch


def peak_flops(device: Any) -> float | None:
    """Return the FLOP/s of a device at best.

    None for a kind that is not in the table of `chips.py`.
    """
    chip = chip_of(device)
    return chip.flops if chip else None


def forward_flops(
    model: TransformerConfig | AdaptedModel,
    lengths: Sequence[int] | np.ndarray,
    *,
    scored: float | None = None,
) -> float:
    """Return the FLOPs of one forward pass over rows of so many tokens [B].

    The logits are those of `scored` tokens; None = of every token. 2 for each parameter of a matrix
    product that a token uses; 4 x heads x head width for each pair of tokens of which one sees the
    other, in layers with attention; see `state_flops` of the others. Of a flax module 2 for each
    parameter and token alone.
    """
    tokens = float(np.sum(lengths))
    if isinstance(model, AdaptedModel):
        return 2.0 * tokens * sum(x.size for x in jax.tree.leaves(abstract_params(model)))
    products = layer_params(model) * tokens
    products += model.hidden_size * model.vocab_size * (tokens if scored is None else scored)
    pairs = float(np.sum(np.square(lengths, dtype=np.float64) + lengths) / 2)
    return 2.0 * products + attention_flops(model) * pairs + state_flops(model) * tokens


def speed_metrics(
    batch: TrainBatch,
    seconds: Mapping[str, float],
    model: TransformerConfig | AdaptedModel,
    devices: Sequence[Any],
    *,
    passes: int,
    sampled_beside: bool,
    shared: Sequence[int] | np.ndarray = (),
) -> dict[str, float]:
    """Return tokens/s of a step and of its sampling; FLOP/s of its update, its MFU where known.

    Args:
        seconds: of the phases of the step, `timing/<phase>`.
        devices: of training.
        passes: forward passes that its updates cost, the backward counted in them.
        sampled_beside: sampling goes on beside training; the time of its phase is then a wait.
        shared: tokens of each prefix that a trajectory has from another, and that is not computed.
    """
    lengths = np.asarray(batch.lengths)
    sampled = float(np.sum(batch.loss_mask)) / max(seconds["timing/generate"], 1e-9)
    flops = passes * (forward_flops(model, lengths) - forward_flops(model, shared))
    rate = flops / max(seconds["timing/policy_train"], 1e-9) / len(devices)
    tokens = float(lengths.sum()) / seconds["timing/step"]
    metrics = {
        "trainer/tokens_per_second_per_gpu": tokens / len(devices),
        "trainer/tflops_per_second_per_gpu": rate / 1e12,
    }
    if not sampled_beside:
        metrics["generate/tokens_per_second_per_gpu"] = sampled / len(devices)
    peak = peak_flops(devices[0])
    return metrics if peak is None else metrics | {"trainer/mfu": rate / peak}
