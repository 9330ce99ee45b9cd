"""The update: its speed at the shapes of real models, that of the head alone, and its memory."""

import json
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl import config as cfg
from jaxrl.data.packing import empty_batch, length_bucket
from jaxrl.models.families import config_from_hf
from jaxrl.models.kernels.choice import facts_of
from jaxrl.models.kernels.head_log_probs import HEAD_LOG_PROBS
from jaxrl.models.transformer import init_params
from jaxrl.parallel import replicated
from jaxrl.parallel.chips import GIB
from jaxrl.records.flops import forward_flops
from jaxrl.tools.plan import topology
from jaxrl.tools.plan.costs import estimated
from jaxrl.tools.plan.plan import make_plan
from jaxrl.tools.plan.run import Run
from jaxrl.tools.plan.work import head_flops
from jaxrl.tools.prove.section import Machine, Result, Row, Task, shares_hold
from jaxrl.tools.prove.timing import median_seconds
from jaxrl.training.build import assemble_optimizer
from jaxrl.training.forward import Head, Targets, score
from jaxrl.training.optim import init_state
from jaxrl.types import TrainBatch

MICROBATCHES = 2  # of an update
MEAN = 0.4  # of the longest trajectory: what a sampler gives that may stop at every token
SCALE = 0.45  # of the exponential distribution, cut at the longest, that has this mean
PLAN_HOLDS = 1.2  # measured peak / planned peak, at most
PASSES = 3  # forward passes that an update is worth, the backward counted as two


class Case(NamedTuple):
    """Hold an update that can be run.

    Attributes:
        name: of the model.
        length, tokens: of a packed row, and of a microbatch on all devices.
        lengths: of the trajectories.
        peak: bytes of a device that it needs by `plan --estimate`.
    """

    name: str
    length: int
    tokens: int
    run: Run
    lengths: np.ndarray
    peak: float


def update(task: Task) -> Result:
    """Measure the MFU of packed updates, and of the vocabulary head alone."""
    rows: list[Row] = []
    updates: list[Row] = []
    wrong = ""
    for name, shape in task.work.shapes.items():
        for length in task.work.row_lengths:
            case = assemble(task, name, shape, length)
            try:
                row = _measured(task, case)
            except jax.errors.JaxRuntimeError as error:
                if "RESOURCE_EXHAUSTED" not in str(error):
                    raise
                note = f"no memory left, although the plan has {case.peak / GIB:.1f} GiB"
                row = {"model": name, "what": f"rows of {length}", "note": note}
                wrong = f"{name}, rows of {length}: {note}"
            updates.append(row)
            rows.append(row)
        rows.append(_head(task, name, shape))
    done = [row for row in rows if "mfu" in row]
    wrong = wrong or shares_hold(task.machine, [row["mfu"] for row in done])
    shares = ", ".join(f"{row['model']} {row['what']} {row['mfu']:.1%}" for row in done)
    figure = f"MFU {shares} (by {task.machine.source})"
    if not wrong and not any("mfu" in row for row in updates):
        least = updates[0]
        reason = f"no update fits: {least['model']}, {least['what']}, {least['note']}"
        return Result(None, figure, reason, rows)
    return Result(not wrong, figure, wrong, rows)


def memory(task: Task) -> Result:
    """Compare the peak of a device's memory in an update with the plan's."""
    fitting = None
    for name, shape in task.work.shapes.items():
        for length in task.work.row_lengths:
            case = assemble(task, name, shape, length)
            fitting = case if _refusal(task.machine, case) is None else fitting
    if fitting is None:
        return Result(None, reason="no update fits the memory of a device here")
    run, planned = fitting.run, fitting.peak
    rows: list[Row] = [{"what": "plan --estimate", "gib": planned / GIB}]
    if jax.devices()[0].memory_stats() is None:
        return Result(
            None,
            f"{planned / GIB:.3g} GiB planned",
            f"a {task.machine.device} does not say what its peak was",
            rows,
            ["peak of the device's memory"],
        )
    _seconds(fitting, repeats=1)
    peak = max(device.memory_stats()["peak_bytes_in_use"] for device in run.mesh.devices.flat)
    share = peak / planned
    rows += [{"what": "measured peak", "gib": peak / GIB}]
    reason = ""
    if share > PLAN_HOLDS:
        reason = f"the update takes {share:.2f} of what the plan says; more than {PLAN_HOLDS}"
    figure = (
        f"{peak / GIB:.3g} GiB measured, {planned / GIB:.3g} planned ({fitting.name}, rows of "
        f"{fitting.length})"
    )
    return Result(not reason, figure, reason, rows)


def assemble(task: Task, name: str, shape: Mapping[str, Any], length: int) -> Case:
    """Assemble an update from shapes, in the largest microbatches that fit.

    They are halves of `Work.tokens`; where none fits, they are the smallest that hold a row.
    """
    folder = task.folder / name
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shape), encoding="utf-8")
    tokens = max(task.work.tokens, length)
    while _refusal(task.machine, case := _assemble(task, folder, length, tokens)):
        if tokens // 2 < length:
            break
        tokens //= 2
    return case


def _assemble(task: Task, folder: Path, length: int, tokens: int) -> Case:
    """Assemble the trainer's own update: a GRPO run on all devices, of packed rows.

    Args:
        folder: of the model.
        tokens: of a microbatch on one device.
    """
    work, tokens = task.work, tokens * task.machine.number
    lengths = skewed_lengths(2 * round(MICROBATCHES * tokens / (MEAN * length) / 2), length)
    config = cfg.TrainConfig.from_cli_overrides(
        {
            "trainer.policy.model.path": str(folder),
            "trainer.policy.model.random_init": True,
            "trainer.algorithm.use_kl_loss": False,
            "trainer.train_batch_size": len(lengths) // 2,
            "trainer.policy_mini_batch_size": len(lengths) // 2,
            "generator.n_samples_per_prompt": 2,
            "generator.inference_engine.max_num_seqs": max(work.slots),
            "trainer.max_prompt_length": length // 2,
            "generator.sampling_params.max_generate_length": length - length // 2,
            "trainer.use_sample_packing": True,
            "trainer.packed_length": length,
            "trainer.max_tokens_per_microbatch": tokens,
        }
    )
    plan = make_plan(config, topology.machine(), estimated)
    peak = max(x.peak for x in plan.lines if x.phase.kind in ("gradient", "apply"))
    return Case(folder.name, length, tokens, Run(plan.config, plan.machine), lengths, peak)


def skewed_lengths(number: int, longest: int) -> np.ndarray:
    """Return quantiles of an exponential distribution that is cut at `longest`, shuffled."""
    at = (np.arange(number) + 0.5) / number
    lengths = np.minimum(-SCALE * longest * np.log1p(-at), longest).astype(np.int32)
    return np.random.default_rng(0).permutation(np.maximum(lengths, 2))


def random_batch(lengths: np.ndarray, width: int, vocabulary: int) -> TrainBatch:
    """Make trajectories of random tokens, all but the first sampled; advantages of both signs."""
    rng, column = np.random.default_rng(0), np.arange(width)
    real = column < lengths[:, None]
    mask = (real & (column > 0)).astype(np.float32)
    tokens = rng.integers(3, vocabulary, real.shape, dtype=np.int32)
    return empty_batch(len(lengths), width, 0).replace(
        tokens=np.where(real, tokens, 0),
        lengths=lengths,
        response_mask=mask,
        loss_mask=mask,
        old_log_probs=np.full(real.shape, -np.log(vocabulary), np.float32) * mask,
        advantages=rng.choice([-1, 1], (len(lengths), 1)).astype(np.float32) * mask,
        index=np.arange(len(lengths), dtype=np.int32),
    )


def _refusal(machine: Machine, case: Case) -> str | None:
    """Return why an update is not tried, or None."""
    if machine.memory is None or case.peak <= machine.memory:
        return None
    return (
        f"needs {case.peak / GIB:.1f} GiB of a device by the plan, it has "
        f"{machine.memory / GIB:.1f}"
    )


def _measured(task: Task, case: Case) -> Row:
    """Return the row of an update."""
    machine, tokens = task.machine, int(case.lengths.sum())
    row: Row = {"model": case.name, "what": f"rows of {case.length}", "plan_gib": case.peak / GIB}
    if (refusal := _refusal(machine, case)) is not None:
        return row | {"note": refusal}
    seconds, packed = _seconds(case, task.work.repeats)
    flops = PASSES * forward_flops(case.run.model, case.lengths) / machine.number
    return row | {
        "microbatch": case.tokens,
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "tflops_per_second_per_device": flops / seconds / 1e12,
        "mfu": flops / seconds / machine.flops,
        "tokens_in_rows": packed,
    }


def _seconds(case: Case, repeats: int) -> tuple[float, float]:
    """Run updates; return the seconds of one, and the share of rows that are real tokens."""
    run = case.run
    shardings = jax.tree.map(lambda x: x.sharding, run.state)
    params = init_params(run.model, 0, shardings.params)
    optimizer, _ = assemble_optimizer(run.config.trainer, 1)
    state = init_state(optimizer, params, shardings.params, replicated(run.mesh))
    del params
    batch = random_batch(case.lengths, length_bucket(case.length), run.model.vocab_size)
    weights, _ = run.updater.weights(batch)
    times = []
    for _ in range(2 + repeats):  # the second runs with the layouts that the first compiled for
        started = time.perf_counter()
        state, _, _ = run.updater.update(state, batch, weights, jax.random.key(0))
        jax.block_until_ready(state)
        times.append(time.perf_counter() - started)
    return statistics.median(times[2:]), run.updater.cut_metrics([batch])[
        "trainer/packing_efficiency"
    ]


def _head(task: Task, name: str, shape: Mapping[str, Any]) -> Row:
    """Return the row of the head's log-probs, entropy and gradients on one device."""
    model, machine = config_from_hf(dict(shape)), task.machine
    dtype, tokens = jnp.dtype(machine.dtype), task.work.tokens
    params = init_params(model, 0)
    params = {key: value for key, value in params.items() if key != "layers"}
    hidden = jax.random.normal(jax.random.key(0), (1, tokens, model.hidden_size), dtype)
    targets = jax.random.randint(jax.random.key(1), (1, tokens), 3, model.vocab_size)
    wanted = jnp.ones((1, tokens), bool)
    kernel = HEAD_LOG_PROBS.choose(facts_of(jax.devices()[0], dtype, model)).name
    head = Head(model, 1.0, dtype, True, kernel=kernel)

    def loss(params: Any, hidden: Any) -> Any:
        log_probs, entropy = score(head, params, hidden, Targets(targets, None), wanted, None)
        return log_probs.sum() + entropy.sum()

    seconds = median_seconds(jax.jit(jax.grad(loss, (0, 1))), task.work.repeats, params, hidden)
    flops = PASSES * head_flops(model, tokens)
    return {
        "model": name,
        "what": f"head alone, {kernel}",
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "tflops_per_second_per_device": flops / seconds / 1e12,
        "mfu": flops / seconds / machine.flops,
    }
