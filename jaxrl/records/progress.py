"""The parts of a step: their seconds, and that they go on."""

import contextlib
import time
from collections.abc import Iterator

import jax

from jaxrl import activity

Metrics = dict[str, float]
# What goes on in a phase, in words; others say it themselves, or are short.
DOING = {
    "load_checkpoints": "loading",
    "init_weight_sync_state": "weights to the sampler",
    "fwd_logprobs_values_reward": "log-probs",
    "critic_train": "updating the critic",
    "policy_train": "updating the policy",
    "sync_weights": "weights to the sampler",
    "dump_data_batch": "writing the batch",
    "callbacks": "callbacks",
}


@contextlib.contextmanager
def timed(metrics: Metrics, name: str) -> Iterator[None]:
    """Add the seconds of a block to `timing/<name>`, and tell displays and the profiler of it."""
    started = time.perf_counter()
    goes_on = activity.doing(DOING[name]) if name in DOING else contextlib.nullcontext()
    with activity.phase(name), goes_on, jax.profiler.TraceAnnotation(name):
        yield
    key = f"timing/{name}"
    metrics[key] = metrics.get(key, 0.0) + time.perf_counter() - started
