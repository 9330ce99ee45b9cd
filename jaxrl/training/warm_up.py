"""Which shapes and programs of training a run will need, known before its first step.

Lengths vary from batch to batch; shapes only between the buckets of `data.packing.length_bucket`,
or between the fewer ones of `trainer.few_shapes`. Which of them can occur follows from the prompts
and the longest response.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np

from jaxrl.data.microbatches import Microbatching
from jaxrl.training.forward_pass import ForwardPass
from jaxrl.training.update import Updater


def model_programs(
    forward_passes: Iterable[ForwardPass], updaters: Iterable[Updater]
) -> list[tuple[Any, str]]:
    """Return the jitted functions that hold a model, each once, for `compilation.lowering`."""
    forwards = [
        (forward_pass, "forward") for forward_pass in {id(s): s for s in forward_passes}.values()
    ]
    gradients = [(u, name) for u in updaters for name in ("accumulate", "pull_back")]
    return [*forwards, *gradients]


def row_shapes(cut: Microbatching, widths: Sequence[int]) -> str:
    """Return all shapes of the model's rows, "rows x tokens"."""
    wide = (cut.width(width) for width in widths)
    shapes = [(n, cut.length(width)) for width in wide for n in cut.row_counts(width)]
    return ", ".join(f"{rows} x {length}" for rows, length in dict.fromkeys(shapes))


def resized(tree: Any, rows: int) -> Any:
    """Return host arrays with their rows repeated or cut to `rows`."""
    return jax.tree.map(lambda x: np.resize(x, (rows, *x.shape[1:])), tree)
