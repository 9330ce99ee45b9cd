"""Seconds and temporaries of value and gradient of policy losses, beside eager torch.

    python -m benchmarks.losses [--json=FILE] [--rows=512] [--length=4096]

Claim: but for clip_cov and kl_cov, which sort all tokens, every loss of systems/torch_losses.py
takes less time jitted than the same formula in eager torch on the same machine, and holds at most 6
temporary [B, T] arrays beyond its inputs and its gradient.

The objective is sum_bt w_bt loss_bt with the weights of token_mean, differentiated by log_probs.
Both systems get the same arrays and the same number of threads, and run in turns, the least of
`--repeats` times counts. Temporaries are the compiler's own figure (`memory_analysis`). The
gradients are compared before anything is timed; clip_cov draws its tokens differently and is not.
"""

import argparse
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from benchmarks.roofline import machine_load
from benchmarks.systems import torch_losses
from jaxrl.config import AlgorithmConfig
from jaxrl.losses import LOSSES
from jaxrl.losses.reduction import reduction_weights
from jaxrl.registry import accepted_keywords

Arrays = dict[str, np.ndarray]
DRAWS = {"clip_cov"}  # its random tokens are others than torch's


def make_arrays(rows: int, length: int) -> Arrays:
    """Log-probs near those of two older policies, advantages per row, a ragged mask."""
    rng = np.random.default_rng(0)
    log_probs = -rng.gamma(1.0, 1.0, (rows, length))
    arrays = {
        "log_probs": log_probs,
        "old_log_probs": log_probs + 0.1 * rng.standard_normal((rows, length)),
        "rollout_log_probs": log_probs + 0.1 * rng.standard_normal((rows, length)),
        "advantages": np.repeat(rng.standard_normal((rows, 1)), length, axis=1),
        "loss_mask": np.arange(length) < rng.integers(length // 2, length + 1, (rows, 1)),
    }
    return {name: np.asarray(array, np.float32) for name, array in arrays.items()}


def ours(name: str, config: AlgorithmConfig) -> Callable[..., Any]:
    """Value and gradient of the objective by log_probs, to be jitted."""
    func = LOSSES[name]

    def objective(
        log_probs: jax.Array, weights: jax.Array, key: jax.Array, inputs: dict[str, jax.Array]
    ) -> jax.Array:
        offered = {name: inputs[name] for name in ("loss_mask", "rollout_log_probs")}
        loss, _ = func(
            log_probs,
            inputs["old_log_probs"],
            inputs["advantages"],
            config,
            **accepted_keywords(func, {**offered, "key": key}),
        )
        return jnp.sum(loss * weights)

    return jax.value_and_grad(objective)


def theirs(name: str, config: AlgorithmConfig, arrays: Arrays, weights: np.ndarray) -> Callable:
    """The same in eager torch, as a function of nothing."""
    tensors = {key: torch.from_numpy(array) for key, array in arrays.items()}
    log_probs, weight = tensors["log_probs"].requires_grad_(), torch.from_numpy(weights)
    order = ("old_log_probs", "rollout_log_probs", "advantages", "loss_mask")
    inputs = [tensors[key] for key in order]

    def step() -> tuple[float, np.ndarray]:
        log_probs.grad = None
        objective = (torch_losses.LOSSES[name](log_probs, *inputs, config) * weight).sum()
        objective.backward()
        assert log_probs.grad is not None
        return objective.item(), log_probs.grad.numpy()

    return step


def measure(name: str, arrays: Arrays, repeats: int) -> dict[str, Any]:
    """One row of the table.

    Raises:
        AssertionError: the two systems do not compute the same gradient.
    """
    config = AlgorithmConfig()
    weights = np.array(reduction_weights(arrays["loss_mask"], "token_mean"))
    inputs = {k: jnp.asarray(v) for k, v in arrays.items() if k != "log_probs"}
    given = (jnp.asarray(arrays["log_probs"]), jnp.asarray(weights), jax.random.key(0), inputs)
    compiled = jax.jit(ours(name, config)).lower(*given).compile()
    torch_step = theirs(name, config, arrays, weights)

    def jax_step() -> Any:
        return jax.block_until_ready(compiled(*given))

    (value, gradient), (torch_value, torch_gradient) = jax_step(), torch_step()
    if name not in DRAWS:
        np.testing.assert_allclose(value, torch_value, rtol=1e-3, err_msg=name)
        scale = np.abs(torch_gradient).max()
        np.testing.assert_allclose(gradient, torch_gradient, atol=1e-4 * scale, err_msg=name)
    seconds = [(_seconds(jax_step), _seconds(torch_step)) for _ in range(repeats)]
    best, torch_best = (min(column) for column in zip(*seconds, strict=True))
    temporaries = compiled.memory_analysis().temp_size_in_bytes / arrays["log_probs"].nbytes
    return {
        "loss": name,
        "seconds": best,
        "torch_seconds": torch_best,
        "torch_over_ours": torch_best / best,
        "temporaries": temporaries,
    }


def _seconds(step: Callable[[], Any]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as text, milliseconds and ratios."""
    lines = [
        f"{'loss':<20}{'ours ms':>10}{'torch ms':>10}{'torch/ours':>12}{'[B, T] temporaries':>20}"
    ]
    for row in rows:
        lines.append(
            f"{row['loss']:<20}{1e3 * row['seconds']:>10.2f}{1e3 * row['torch_seconds']:>10.2f}"
            f"{row['torch_over_ours']:>12.2f}{row['temporaries']:>20.2f}"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=5)
    names = list(torch_losses.LOSSES)
    parser.add_argument("--losses", nargs="*", default=names, choices=names)
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--smoke", action="store_true", help="a tiny shape")
    arguments = parser.parse_args(argv)
    shape = (8, 32) if arguments.smoke else (arguments.rows, arguments.length)
    torch.set_num_threads(len(os.sched_getaffinity(0)))  # as many as XLA takes
    load = machine_load()
    arrays = make_arrays(*shape)
    rows = [measure(name, arrays, arguments.repeats) for name in arguments.losses]
    backend = jax.devices()[0].device_kind
    print(f"[{shape[0]}, {shape[1]}] float32 on {backend}, torch {torch.__version__} on the CPU")
    print(table(rows))
    print(f"load averages before: {load}")
    if arguments.json:
        report = {"shape": shape, "backend": backend, "load": load, "rows": rows}
        arguments.json.write_text(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
