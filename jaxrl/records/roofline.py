"""Share of the roofline, by phase: the least seconds that a phase's work takes, over what it took.

Least is the larger of FLOPs and bytes over what the devices can do (Williams et al., 2009,
https://doi.org/10.1145/1498765.1498785). Nothing recomputed counts, no padding and no collectives,
but layers with a sliding window count as if they saw everything: their share can be too high.
"""

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl.models.adapter import AdaptedModel
from jaxrl.models.architecture import attention_flops, position_elements, state_flops
from jaxrl.models.transformer import TransformerConfig, abstract_params
from jaxrl.parallel.chips import chip_of
from jaxrl.records.flops import forward_flops
from jaxrl.types import TrainBatch


class Limits(NamedTuple):
    """Hold what all devices together can do: FLOP/s, and bytes/s of their memory."""

    flops: float
    bandwidth: float


def limits(devices: Sequence[Any]) -> Limits | None:
    """Return the limits of devices: their makers', or what this machine's processor reaches.

    None for a device that is not in the table of `chips.py`, and for processors of several hosts.
    """
    if chip := chip_of(devices[0]):
        return Limits(len(devices) * chip.flops, len(devices) * chip.bandwidth)
    if devices[0].platform != "cpu" or jax.process_count() > 1:
        return None
    return _processor()


@functools.cache
def _processor() -> Limits:
    """Measure this machine in float32, in some hundredths of a second; other work slows it.

    By numpy, as a program of JAX would count as one that the run compiled.
    """
    square, large = np.ones((512, 512), np.float32), np.ones((4096, 2048), np.float32)
    product = _least(lambda: square @ square)
    read = _least(lambda: large @ large[0])
    return Limits(2 * len(square) ** 3 / product, large.nbytes / read)


def _least(run: Callable[[], Any]) -> float:
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def least_seconds(
    batch: TrainBatch,
    model: TransformerConfig | AdaptedModel,
    limits: Limits,
    *,
    passes: int,
    scored: int,
    copies: int,
    element: int,
    shared: Sequence[int] | np.ndarray = (),
) -> dict[str, float]:
    """Return the least seconds of the phases of a step, without those that have nothing to do.

    Args:
        passes: forward passes that the updates cost, the backward counted in them.
        scored: forward passes that score the batch before the updates.
        copies: of the sampler's weights, each of which is read in every step of decoding; 0 = the
            sampler is not on these devices, or samples beside training.
        element: bytes of one of its weights.
        shared: see `speed_metrics`.
    """
    lengths, sampled = np.asarray(batch.lengths), np.asarray(batch.loss_mask).sum(1)
    one = forward_flops(model, lengths, scored=float(sampled.sum()))
    one -= forward_flops(model, shared, scored=0.0)
    found = {
        "fwd_logprobs_values_reward": scored * one / limits.flops,
        "policy_train": passes * one / limits.flops,
    }
    if copies:
        # a row's tokens come one after the other, so there are as many steps as its longest has
        weights, position = _sampler_elements(model)
        seen = float(np.sum(sampled * (lengths - (sampled + 1) / 2)))  # when one is drawn
        moved = element * (copies * float(sampled.max()) * weights + position * seen)
        flops = 2.0 * weights * float(sampled.sum())
        found["generate"] = max(moved / limits.bandwidth, flops / limits.flops)
    return {phase: seconds for phase, seconds in found.items() if seconds > 0}


def _sampler_elements(model: TransformerConfig | AdaptedModel) -> tuple[float, float]:
    """Return the weights that a step of decoding reads, and the numbers of a cached position."""
    if isinstance(model, AdaptedModel):
        return float(sum(x.size for x in jax.tree.leaves(abstract_params(model)))), 0.0
    # of one token alone: 2 for each weight, and its attention to itself
    alone = forward_flops(model, np.ones(1)) - attention_flops(model) - state_flops(model)
    return alone / 2, float(position_elements(model))


def shares(least: Mapping[str, float], seconds: Mapping[str, float]) -> dict[str, float]:
    """Return `roofline/<phase>`: least seconds over those of `timing/<phase>`."""
    return {
        f"roofline/{phase}": bound / max(seconds[f"timing/{phase}"], 1e-9)
        for phase, bound in least.items()
        if f"timing/{phase}" in seconds
    }
