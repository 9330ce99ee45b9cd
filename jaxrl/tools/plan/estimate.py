"""Estimate what a program needs beside its arguments, from shapes: nothing is compiled.

Arguments and results are exact: they follow from shapes and shardings. Temporaries and collectives
are formulas here, see docs/plan.md for how far they are from the compiler's.
"""

import math

import jax

from jaxrl.models.kernels.head_log_probs import XLA_IDS, block_tokens
from jaxrl.models.transformer import TransformerConfig
from jaxrl.parallel.rules import batch_devices
from jaxrl.tools.plan.phases import SAMPLING, Part, Phase
from jaxrl.tools.plan.work import layer_params
from jaxrl.training.forward import CHUNK_LOGITS, CHUNK_TOKENS, CPU_CHUNK_TOKENS
from jaxrl.training.resident_memory import device_bytes

CAUSAL = 5 / 8  # of the scores are computed, see `attention.causal_attention`


def temporaries(phase: Phase, remat: str, flash: bool) -> float:
    """Estimate the bytes of a program's temporaries on one device.

    Args:
        remat: what layers keep; flash: scores are never written.
    """
    part, (rows, length) = phase.part, phase.shape
    model, size, tensor = part.model, part.dtype.itemsize, part.placement.mesh.shape["tensor"]
    leaves = [device_bytes(x) for x in jax.tree.leaves(phase.call.args[0])]
    if phase.kind in ("apply", "load"):
        return max(leaves)
    if phase.kind in SAMPLING:  # one program; its scores are those of a page of a few rows
        rows, (_, tiles, tile) = phase.call.args[2].live.size, phase.call.args[3].tokens.shape
        parts = batch_devices(part.placement.mesh, part.placement.rules)
        logits = 3 * rows / parts * model.vocab_size / tensor * 4
        return max(logits, sum(_intermediates(part, tiles // parts, tile).values()))
    within = _intermediates(part, rows, length)
    if not flash:
        scores = rows * model.num_heads / tensor * length**2 * CAUSAL
        within["scores"] = scores * (4 + size)
    weights = layer_params(model) / model.num_layers / tensor * size
    head = model.vocab_size * model.hidden_size / tensor * size
    one = 2 * weights + head + _logits(part, rows * length) + sum(within.values())
    one += 3 * within["input"]
    if phase.kind == "forward":
        return one
    gradients = sum(leaves) + 2 * weights * 4 / size + head * 4 / size
    return one + gradients + model.num_layers * _saved(within, remat) + sum(within.values())


def _intermediates(part: Part, rows: int, length: int) -> dict[str, float]:
    """Return the bytes of what a layer computes, on one device, without the scores."""
    model, tokens = part.model, rows * length * part.dtype.itemsize
    tensor = part.placement.mesh.shape["tensor"]
    heads = model.head_dim / tensor
    return {
        "input": tokens * model.hidden_size,
        "norms": 3 * tokens * model.hidden_size,
        "qkv": tokens * (model.num_heads + 2 * model.num_kv_heads) * heads,
        "attention": tokens * model.num_heads * heads,
        "mlp": 3 * tokens * model.intermediate_size / tensor,
        "scores": 0.0,
    }


def _logits(part: Part, tokens: int) -> float:
    """Return the bytes of what the head writes of its logits at a time, on one device."""
    if part.model.value_head is not None or part.head_kernel == "pallas":
        return 0.0
    ids = part.model.vocab_size / part.placement.mesh.shape["tensor"]
    if part.head_kernel == "tiles":
        return 3 * block_tokens("tiles", tokens, part.model.hidden_size) * min(XLA_IDS, ids) * 4
    chunk = CPU_CHUNK_TOKENS if part.placement.platform == "cpu" else CHUNK_TOKENS
    return 3 * min(chunk, CHUNK_LOGITS / ids, tokens) * ids * 4


def _saved(within: dict[str, float], remat: str) -> float:
    """Return the bytes of a layer that are saved for its backward pass."""
    if remat == "none":
        return sum(within.values())
    saved = {
        "dots": ("input", "qkv", "mlp"),
        "attention": ("input", "attention"),
        "full": ("input",),
        "offload": (),
    }
    return sum(within[name] for name in saved[remat])


def collectives(phase: Phase, remat: str) -> dict[str, float]:
    """Estimate the bytes that a device sends in one execution, by kind.

    They are the least of FSDP and Megatron.
    """
    part, (rows, length) = phase.part, phase.shape
    model, size, mesh = part.model, part.dtype.itemsize, part.placement.mesh
    tensor, fsdp, data = (mesh.shape[axis] for axis in ("tensor", "fsdp", "data"))
    sent: dict[str, float] = {}
    passes = {"forward": 1, "prefill": 1, "decode": phase.trips, "gradient": 2 + (remat != "none")}
    if phase.kind not in passes:
        return sent
    if tensor > 1:  # two sums of the activations in a layer
        activations = rows * length * model.hidden_size * size
        sums = 2 * model.num_layers * passes[phase.kind]
        sent["all-reduce"] = sums * activations * 2 * (tensor - 1) / tensor
    if phase.kind in SAMPLING:
        return sent
    elements = _elements(model) / tensor
    if fsdp > 1:
        gathers = 1 if phase.kind == "forward" else 2
        sent["all-gather"] = gathers * elements * size * (fsdp - 1) / fsdp
    if phase.kind == "gradient":
        trained = sum(device_bytes(x) for x in jax.tree.leaves(phase.call.args[0]))
        if fsdp > 1:
            sent["reduce-scatter"] = trained * (fsdp - 1)
        if data > 1:
            sent["all-reduce"] = sent.get("all-reduce", 0) + trained * 2 * (data - 1) / data
    return sent


def _elements(model: TransformerConfig) -> float:
    return layer_params(model) + math.prod((model.vocab_size, model.hidden_size))
