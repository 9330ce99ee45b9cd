"""Estimate what a program needs beside its arguments, from shapes: nothing is compiled.

Arguments and results are exact: they follow from shapes and shardings. Temporaries and collectives
are formulas here, see docs/plan.md for how far they are from the compiler's.
"""

import math

import jax

from jaxrl.models.architecture import (
    EXPERTS,
    TransformerConfig,
    layer_flags,
    layer_params,
    layers_with,
)
from jaxrl.models.delta_rule import CHUNK
from jaxrl.models.expert_exchange import GATHER, Exchange, exchange_of
from jaxrl.models.kernels.choice import REFERENCE
from jaxrl.models.kernels.context_attention import keys_received
from jaxrl.models.kernels.head_log_probs import XLA_IDS, block_tokens
from jaxrl.parallel.rules import batch_devices
from jaxrl.tools.plan.phases import SAMPLING, Part, Phase
from jaxrl.training.forward import CHUNK_LOGITS, CHUNK_TOKENS, CPU_CHUNK_TOKENS
from jaxrl.training.resident_memory import device_bytes

CAUSAL = 5 / 8  # of the scores are computed, see `attention.causal_attention`


def temporaries(phase: Phase, remat: str, flash: bool, exchange: str = GATHER) -> float:
    """Estimate the bytes of a program's temporaries on one device.

    Args:
        remat: what layers keep; flash: scores are never written; exchange: of `exchange_of`.
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
        return max(logits, sum(_intermediates(part, tiles // parts, tile, GATHER).values()))
    within = _intermediates(part, rows, length, exchange)
    if not flash:
        scores = rows * model.num_heads / tensor * length**2 * CAUSAL
        within["scores"] = scores * (4 + size)
    weights = _layers_of(part) / model.num_layers * size
    head = model.vocab_size * model.hidden_size / tensor * size
    one = 2 * weights + head + _logits(part, rows * length) + sum(within.values())
    one += 3 * within["input"]
    if phase.kind == "forward":
        return one
    gradients = sum(leaves) + 2 * weights * 4 / size + head * 4 / size
    return one + gradients + model.num_layers * _saved(within, remat) + sum(within.values())


def _intermediates(part: Part, rows: int, length: int, exchange: str) -> dict[str, float]:
    """Return the bytes of what a layer computes, on one device, without the scores."""
    model, tokens = part.model, rows * length * part.dtype.itemsize
    tensor = part.placement.mesh.shape["tensor"]
    heads = model.head_dim / tensor
    mlp = (2 + model.gated_mlp) * model.intermediate_size / tensor
    if (e := model.experts) is not None:  # of the tokens that come from all devices
        routed = e.per_token * (3 * e.width / tensor + 2 * model.hidden_size)
        found = _exchange(part, rows * length, exchange)
        mlp = found.devices * found.places / (rows * length) * routed
        mlp += 3 * (e.shared_width or 0) / tensor
    qkv = (model.num_heads * (1 + model.output_gate) + 2 * model.num_kv_heads) * heads
    if (net := model.delta_net) is not None:
        values = net.value_heads * net.value_dim
        qkv = max(qkv, (net.channels + values) / tensor)
    return {
        "rule": rows * length * _rule(part) / tensor,
        "input": tokens * model.hidden_size,
        "norms": 3 * tokens * model.hidden_size,
        "qkv": tokens * qkv,
        "attention": tokens * model.num_heads * heads,
        "mlp": tokens * mlp,
        "scores": 0.0,
    }


def _rule(part: Part) -> float:
    """Return the bytes that the delta rule has of a token, in float32."""
    net = part.model.delta_net
    if net is None:
        return 0.0
    if part.rule_kernel == REFERENCE:
        # in chunks: decays, products with them and their inverse; keys and queries by value head
        of_head = 5 * CHUNK + 4 * net.key_dim + 3 * net.value_dim
    else:  # what the kernel reads and writes, as it wants it
        of_head = 2 * net.key_dim * net.key_heads / net.value_heads + 2 * net.value_dim
    of_head += net.key_dim * net.value_dim / CHUNK  # a state for each chunk
    return net.value_heads * of_head * 4


def _exchange(part: Part, tokens: int, named: str) -> Exchange:
    """Return how the tokens of a device come to experts."""
    model, devices = part.model, part.placement.mesh.shape["expert"]
    assert model.experts is not None
    size = part.dtype.itemsize
    return exchange_of(model.experts, model.hidden_size, tokens, devices, size, named)


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


def collectives(phase: Phase, remat: str, exchange: str = GATHER) -> dict[str, float]:
    """Estimate the bytes that a device sends in one execution, by kind.

    They are the least of FSDP and Megatron, and what `expert_mlp` sends.

    Args:
        exchange: of `exchange_of`.
    """
    part, (rows, length) = phase.part, phase.shape
    model, size, mesh = part.model, part.dtype.itemsize, part.placement.mesh
    tensor, data, expert, context = (mesh.shape[x] for x in ("tensor", "data", "expert", "context"))
    fsdp = mesh.shape["fsdp"] * context  # the devices of a row share parameters like those of rows
    sent: dict[str, float] = {}
    passes = {"forward": 1, "prefill": 1, "decode": phase.trips, "gradient": 2 + (remat != "none")}
    if phase.kind not in passes:
        return sent
    if tensor > 1:  # two sums of the activations in a layer
        activations = rows * length * model.hidden_size * size
        sums = 2 * model.num_layers * passes[phase.kind]
        sent["all-reduce"] = sums * activations * 2 * (tensor - 1) / tensor
    if expert > 1 and (e := model.experts) is not None:
        layers = layers_with(model, EXPERTS)
        named = GATHER if phase.kind in SAMPLING else exchange
        way, width = _exchange(part, rows * length, named), model.hidden_size
        there, back = way.there(width, e.per_token, size), way.back(width)
        once = there + back
        if phase.kind == "gradient":  # what was sent back is not needed again
            once += (remat != "none") * there + way.gradient(width, e.per_token)
        sent["experts"] = layers * once * (phase.trips if phase.kind == "decode" else 1)
    if phase.kind in SAMPLING:
        return sent
    if context > 1:  # keys and values in each layer; their gradient back
        key = 2 * model.num_kv_heads * model.head_dim / tensor * size
        times = passes[phase.kind] + (phase.kind == "gradient")
        windows = [model.sliding_window if slides else None for slides in layer_flags(model).slides]
        keys = sum(keys_received(length * context, context, window) for window in windows)
        sent["keys"] = times * rows * key * keys
    head = math.prod((model.vocab_size, model.hidden_size)) / tensor
    shared, alone = layer_params(model, 0) / tensor + head, _expert_params(model) / tensor / expert
    gathers = 1 if phase.kind == "forward" else 2
    together = shared * (fsdp * expert - 1) / (fsdp * expert) + alone * (fsdp - 1) / fsdp
    if together:
        sent["all-gather"] = gathers * together * size
    if phase.kind == "gradient":
        leaves = jax.tree_util.tree_leaves_with_path(phase.call.args[0])
        size_of = {jax.tree_util.keystr(path): device_bytes(x) for path, x in leaves}
        trained = sum(size_of.values())
        apart = sum(size for name, size in size_of.items() if "['experts_" in name)
        if fsdp * expert > 1:
            sent["reduce-scatter"] = (trained - apart) * (fsdp * expert - 1) + apart * (fsdp - 1)
        if data > 1:
            sent["all-reduce"] = sent.get("all-reduce", 0) + trained * 2 * (data - 1) / data
    return sent


def _layers_of(part: Part) -> float:
    """Return the parameters of all layers that a device computes with."""
    shape = part.placement.mesh.shape
    apart = _expert_params(part.model) / shape["expert"]
    return (layer_params(part.model, 0) + apart) / shape["tensor"]


def _expert_params(model: TransformerConfig) -> float:
    return layer_params(model, math.inf) - layer_params(model, 0)
