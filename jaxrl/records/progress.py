"""What shows how far a run is: seconds of its parts, the line of a step, the bar."""

import contextlib
import sys
import time
from collections.abc import Iterator, Mapping

import jax
from tqdm import tqdm

Metrics = dict[str, float]


def progress_bar(name: str, total: int, finished: int, *, shown: bool = True) -> tqdm:
    """Return a bar over steps, on stderr; in a notebook on stdout, where the messages are.

    A notebook shows every change from one stream to the other as a new block of output, and in each
    block another bar.

    Args:
        finished: steps of earlier starts of the run.
    """
    notebook = type(sys.stdout).__module__.startswith("ipykernel.")
    file = sys.stdout if notebook else sys.stderr
    return tqdm(total=total, initial=finished, desc=name, disable=not shown, file=file)


@contextlib.contextmanager
def timed(metrics: Metrics, name: str) -> Iterator[None]:
    """Add the seconds of a block to `timing/<name>`, and name it in a trace of the profiler."""
    started = time.perf_counter()
    with jax.profiler.TraceAnnotation(name):
        yield
    key = f"timing/{name}"
    metrics[key] = metrics.get(key, 0.0) + time.perf_counter() - started


def progress_line(metrics: Mapping[str, float]) -> dict[str, str]:
    """Return the numbers that people watch."""
    shown = {
        "reward": "reward/avg_raw_reward",
        "eval": "eval/all/avg_score",
        "loss": "policy/final_loss",
        "entropy": "policy/policy_entropy",
        "tokens": "generate/avg_num_tokens",
        "tok/s": "trainer/tokens_per_second_per_gpu",
    }
    return {label: f"{metrics[name]:.3g}" for label, name in shown.items() if name in metrics}
