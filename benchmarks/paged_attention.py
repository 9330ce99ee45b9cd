"""A decoding step's attention on this CPU: to pages, and to contiguous rows that are read whole.

    python -m benchmarks.paged_attention

Claim: where the rows of a batch differ in length, as those of a rollout do, attention to pages
takes 0.3 to 0.85 of the time of plain products over whole rows, for the heads of SmolLM2-135M and
Qwen2.5-1.5B, since it reads of each row what that has. The quickstart's small heads take about as
long; rows that are all as long as the longest take from 0.7 to 3.5 times as long. Slots, of which a
quarter, a half or all was read, are gone: their figures are in LOG.md.

Pages lie at random. One layer, float32; medians of `--repeats` calls in turns, milliseconds, on two
cores that others use too. "skewed" lengths are lognormal, with a median of a fifth of the longest
and sigma 0.7.
"""

import argparse
import functools
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.models.kernels.paged_attention import Pages, layout_of, paged_attention
from jaxrl.models.transformer import TransformerConfig

SIZE = 64  # positions of a page
SHAPES = {  # heads, key/value heads, head width
    "SmolLM2-135M": (9, 3, 64),
    "quickstart": (8, 4, 32),
    "Qwen2.5-1.5B": (12, 2, 128),
}
CASES = ((64, 1024), (32, 192), (16, 1024), (64, 256))  # rows, positions of the longest


def measure(shape: str, rows: int, longest: int, skewed: bool, repeats: int) -> dict[str, Any]:
    """Milliseconds of both."""
    heads, kv_heads, width = SHAPES[shape]
    config = TransformerConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=32,
        num_layers=1,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=width,
    )
    rng = np.random.default_rng(0)
    lengths = np.full(rows, longest)
    if skewed:
        drawn = rng.lognormal(np.log(longest / 5), 0.7, rows)
        lengths = np.clip(drawn, 8, longest).astype(int)
    new = functools.partial(rng.standard_normal, dtype=np.float32)
    q = jnp.asarray(new((rows, 1, heads, width)))
    keys = jnp.asarray(new((rows, kv_heads, width, longest)))
    values = jnp.asarray(new((rows, kv_heads, longest, width)))
    of_row, at = longest // SIZE, jnp.arange(longest)
    table = jnp.asarray(rng.permutation(rows * of_row).reshape(rows, of_row))
    pages = Pages.empty(config, rows * of_row, SIZE, jnp.float32, layout=layout_of("cpu"))
    tokens = keys.transpose(0, 3, 1, 2), values.swapaxes(1, 2)
    flat = (x.reshape(-1, kv_heads, width) for x in tokens)
    pages = pages.write(table[:, at // SIZE].ravel(), jnp.tile(at % SIZE, rows), *flat)
    mask = (at < lengths[:, None])[:, None, None]

    @jax.jit
    def whole(q: jax.Array, keys: jax.Array, values: jax.Array) -> jax.Array:
        grouped = q.reshape(rows, kv_heads, -1, width) * width**-0.5
        scores = jnp.where(mask, jnp.einsum("bkgh,bkhs->bkgs", grouped, keys), -jnp.inf)
        return jnp.einsum("bkgs,bksh->bkgh", jax.nn.softmax(scores), values).reshape(q.shape)

    to_pages = jax.jit(functools.partial(paged_attention, config))
    runs = {
        "rows": functools.partial(whole, q, keys, values),
        "pages": functools.partial(to_pages, q, pages, table, jnp.asarray(lengths - 1)),
    }
    np.testing.assert_allclose(runs["rows"](), runs["pages"](), atol=1e-5)
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            started = time.perf_counter()
            jax.block_until_ready(run())
            seconds[name].append(time.perf_counter() - started)
    took = {name: 1e3 * statistics.median(found) for name, found in seconds.items()}
    return {
        "shape": shape,
        "rows": rows,
        "longest": longest,
        "mean": float(lengths.mean()),
        **{f"{name}_ms": value for name, value in took.items()},
        "rows / pages": took["rows"] / took["pages"],
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--smoke", action="store_true", help="one small case, once")
    parser.add_argument("--json", help="a file for the rows")
    given = parser.parse_args(argv)
    shapes, cases = (["quickstart"], [(2, 128)]) if given.smoke else (list(SHAPES), CASES)
    rows = []
    for shape in shapes:
        for case in cases:
            for skewed in (False, True):
                found = measure(shape, *case, skewed, 1 if given.smoke else given.repeats)
                rows.append(found)
                print(", ".join(f"{k} {v:.4g}" if k != "shape" else v for k, v in found.items()))
    if given.json:
        Path(given.json).write_text(json.dumps({"rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
