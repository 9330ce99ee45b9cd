"""Sampling: decode steps against the bandwidth of the memory, and new weights for the engine."""

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.models.architecture import position_elements, state_elements
from jaxrl.models.families import config_from_hf
from jaxrl.models.transformer import (
    Params,
    TransformerConfig,
    abstract_params,
    init_params,
    logical_axes,
)
from jaxrl.parallel import ShardingRules, make_mesh, param_shardings
from jaxrl.parallel.chips import GIB
from jaxrl.rollout.native.engine import NativeEngine
from jaxrl.rollout.native.programs import shape_of
from jaxrl.rollout.protocol import Request, Sampling
from jaxrl.tools.plan.work import decode_step_bytes, head_flops, layers_flops
from jaxrl.tools.prove.section import Machine, Result, Row, Task, shares_hold

GROUP = 8  # samples of a prompt


def decode(task: Task) -> Result:
    """Measure decode steps of the engine at several numbers of slots."""
    machine, work, rows = task.machine, task.work, []
    cached = machine.platform == "cpu"
    missing = ["the bound: so small a model lies in the caches of a CPU"] if cached else []
    for name, shape in work.shapes.items():
        model, params = _model(shape), None
        for slots in work.slots:
            if note := _too_large(task, model, slots):
                rows.append({"model": name, "slots": slots, "note": note})
                continue
            params = _params(model, make_mesh()) if params is None else params
            rows.append({"model": name, "slots": slots} | _decode(task, model, params, slots))
    done = [row for row in rows if "step_ms" in row]
    if not done:
        return Result(None, reason=rows[0]["note"], rows=rows)
    figure = ", ".join(
        f"{row['model']} x {row['slots']} slots: {row['tokens_per_second']:,.0f} tokens/s"
        + ("" if cached else f", {row['share_of_bound']:.0%} of the bound")
        for row in done
    )
    if cached:
        return Result(True, figure, rows=rows, missing=missing)
    wrong = shares_hold(machine, [row["share_of_bound"] for row in done])
    return Result(not wrong, f"{figure} (by {machine.source})", wrong, rows)


def sync(task: Task) -> Result:
    """Measure how long an engine takes to get new weights from the trainer's parameters."""
    rows, missing = [], []
    for name, shape in task.work.shapes.items():
        model = _model(shape)
        if note := _too_large(task, model, 1):
            rows.append({"model": name, "note": note})
            continue
        everywhere = make_mesh()
        params = _params(model, everywhere)
        rows.append({"model": name, "to": "the same devices"} | _sync(task, model, params))
        if (half := task.machine.number // 2) < 1:
            missing = ["sync to other devices: there is one device"]
            continue
        params = _params(model, make_mesh(devices=jax.devices()[:half]))
        there = jax.devices()[half : 2 * half]
        rows.append({"model": name, "to": "other devices"} | _sync(task, model, params, there))
    done = [row for row in rows if "seconds" in row]
    if not done:
        return Result(None, reason=rows[0]["note"], rows=rows)
    figure = ", ".join(
        f"{row['model']} to {row['to']}: {row['seconds']:.3g} s, {row['gb_per_second']:.3g} GB/s"
        for row in done
    )
    return Result(True, figure, rows=rows, missing=missing)


def _model(shape: Mapping[str, Any]) -> TransformerConfig:
    return config_from_hf(dict(shape))


def _params(model: TransformerConfig, mesh: jax.sharding.Mesh) -> Params:
    """Draw parameters as a trainer holds them: float32, over all devices of the mesh."""
    like = abstract_params(model)
    shardings = param_shardings(mesh, logical_axes(model), like, ShardingRules())
    return init_params(model, 0, shardings)


def _too_large(task: Task, model: TransformerConfig, slots: int) -> str:
    """Return why a model is not tried; "" = the weights, twice, and the cache have room.

    The trainer's parameters are spread over the devices; each has the engine's weights whole.
    """
    machine, size = task.machine, jnp.dtype(task.machine.dtype).itemsize
    weights = sum(math.prod(x.shape) for x in jax.tree.leaves(abstract_params(model)))
    page = shape_of(machine.platform).page
    pages = -(-(task.work.prompt + task.work.new_tokens) // page)
    positions = pages * page * slots / machine.number
    cache = position_elements(model) * positions * size
    cache += 4 * state_elements(model) * slots / machine.number
    needed = 4 * weights / machine.number + size * weights + cache
    if machine.memory is None or needed < 0.8 * machine.memory:
        return ""
    return (
        f"weights and cache need {needed / GIB:.1f} GiB of a device, it has "
        f"{machine.memory / GIB:.1f}"
    )


def _decode(task: Task, model: TransformerConfig, params: Params, slots: int) -> Row:
    """Return the figures of `slots` rows that are decoded together.

    Prompts are of random tokens, others in each call: the engine would find those of the last one.
    """
    work, machine, dtype = task.work, task.machine, jnp.dtype(task.machine.dtype)
    engine = NativeEngine(model, make_mesh(), dtype=dtype, max_num_seqs=slots)
    engine.update_weights(params, 0)
    rng, groups = np.random.default_rng(0), -(-slots // GROUP)
    keys = [tuple((i, j) for j in range(min(GROUP, slots))) for i in range(groups)]

    def seconds(new_tokens: int) -> float:
        sampling = Sampling(max_tokens=new_tokens, temperature=1.0)
        prompts = rng.integers(3, model.vocab_size, (groups, work.prompt))
        requests = [
            Request(tuple(prompt), rows, sampling)
            for prompt, rows in zip(prompts.tolist(), keys, strict=True)
        ]
        started = time.perf_counter()
        engine.generate(requests)
        return time.perf_counter() - started

    times = [(seconds(1), seconds(work.new_tokens)) for _ in range(2 + work.repeats)][2:]
    first, whole = (statistics.median(column) for column in zip(*times, strict=True))
    step = (whole - first) / (work.new_tokens - 1)
    row: Row = {
        "tokens_per_second": slots * work.new_tokens / whole,
        "prefill_ms": 1e3 * first,
        "step_ms": 1e3 * step,
    }
    if machine.platform == "cpu":
        return row
    bound = _bound(machine, model, slots, work.prompt + work.new_tokens / 2, dtype.itemsize)
    return row | {"bound_ms": 1e3 * bound, "share_of_bound": bound / step}


def _bound(
    machine: Machine, model: TransformerConfig, slots: int, context: float, size: int
) -> float:
    """Return the least seconds of a step: its bytes or its FLOPs over the rates of a device."""
    rows = slots / machine.number
    token = layers_flops(model, int(context) - 1, int(context)) + head_flops(model, 1)
    moved = decode_step_bytes(model, rows, context, size)  # pyright: ignore[reportArgumentType]
    return max(moved / machine.bandwidth, rows * token / machine.flops)


def _sync(
    task: Task, model: TransformerConfig, params: Params, devices: Sequence[Any] | None = None
) -> Row:
    """Return the figures of giving an engine the parameters, again and again."""
    dtype = jnp.dtype(task.machine.dtype)
    engine = NativeEngine(model, make_mesh(devices=devices), dtype=dtype, max_num_seqs=1)
    times = []
    for version in range(1 + task.work.repeats):
        started = time.perf_counter()
        engine.update_weights(params, version)
        jax.block_until_ready(engine.programs.params)
        times.append(time.perf_counter() - started)
    size, seconds = sum(x.nbytes for x in jax.tree.leaves(params)), statistics.median(times[1:])
    return {
        "gb_of_parameters": size / 1e9,
        "seconds": seconds,
        "gb_per_second": size / seconds / 1e9,
        "first_seconds": times[0],
    }
