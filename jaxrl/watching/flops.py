"""Speed of a step: tokens/s, model FLOP/s, and the share of the devices' peak that it is (MFU).

Useful work alone counts: no recomputation, no padding. Chowdhery et al., 2022,
https://arxiv.org/abs/2204.02311 (appendix B).
"""

from typing import Any

import jax
import numpy as np

from jaxrl.chips import chip_of
from jaxrl.config.rollouts import overlaps
from jaxrl.models.adapter import AdaptedModel
from jaxrl.models.transformer import TransformerConfig, abstract_params
from jaxrl.types import TrainBatch


def peak_flops(device: Any) -> float | None:
    """FLOP/s of a device at best; None for a kind that is not in the table of `chips.py`."""
    chip = chip_of(device)
    return chip.flops if chip else None


def forward_flops(model: TransformerConfig | AdaptedModel, lengths: np.ndarray) -> float:
    """FLOPs of one forward pass over rows of so many tokens [B], logits of every token.

    2 for each parameter of a matrix product and token; 4 x heads x head width for each pair of
    tokens of which one sees the other. Of a flax module 2 for each parameter and token alone.
    """
    tokens = float(np.sum(lengths))
    if isinstance(model, AdaptedModel):
        return 2.0 * tokens * sum(x.size for x in jax.tree.leaves(abstract_params(model)))
    heads = model.num_heads * model.head_dim
    attention = model.hidden_size * 2 * (heads + model.num_kv_heads * model.head_dim)
    layer = attention + 3 * model.hidden_size * model.intermediate_size
    products = model.num_layers * layer + model.hidden_size * model.vocab_size
    pairs = float(np.sum(np.square(lengths, dtype=np.float64) + lengths) / 2)
    return 2.0 * products * tokens + 4.0 * model.num_layers * heads * pairs


def speed_metrics(trainer: Any, batch: TrainBatch) -> dict[str, float]:
    """Tokens/s of a step and of its sampling; FLOP/s of its update, and its MFU where known.

    Args:
        trainer: after the step; its metrics have the seconds of the phases.
    """
    settings, seconds = trainer.config.trainer, trainer.metrics
    devices, lengths = list(trainer.mesh.devices.flat), np.asarray(batch.lengths)
    sampled = float(np.sum(batch.loss_mask)) / max(seconds["timing/generate"], 1e-9)
    # with frozen weights the backward pass has no gradients of them to make
    passes = (2 if settings.policy.model.lora.rank else 3) * settings.update_epochs_per_batch
    flops = passes * forward_flops(trainer.model, lengths)
    rate = flops / max(seconds["timing/policy_train"], 1e-9) / len(devices)
    tokens = float(lengths.sum()) / seconds["timing/step"]
    metrics = {
        "trainer/tokens_per_second_per_gpu": tokens / len(devices),
        "trainer/tflops_per_second_per_gpu": rate / 1e12,
    }
    if not overlaps(trainer.config):  # else the phase is the wait for what was sampled beside it
        metrics["generate/tokens_per_second_per_gpu"] = sampled / len(devices)
    peak = peak_flops(devices[0])
    return metrics if peak is None else metrics | {"trainer/mfu": rate / peak}
