"""CPU time of the native engine's own Python between two blocks of decoding, by number of slots.

    python -m benchmarks.engine_host --slots 128 512 1024

Claim: a turn of the engine's thread takes time linear in its slots: below 10 us each where it
decodes, below 130 where it fills or empties them all.

The device does nothing here: its programs return at once, a block with 8 tokens for each row, as an
accelerator's has. What is left is what an accelerator waits for: admission of samples, their pages,
chunks of prompts, the rows of a block, and what becomes of its tokens. `admit` is the turn in which
all slots are filled, with groups of 8 samples of prompts of 256 tokens, `turn` one that decodes,
`end` the one in which all samples end. CPU time of the thread, the least of `--repeats`: other
processes lengthen it.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxrl.models.transformer import TransformerConfig, init_params
from jaxrl.parallel import make_mesh
from jaxrl.rollout.native.decode import Block, Rows
from jaxrl.rollout.native.engine import NativeEngine
from jaxrl.rollout.protocol import Request, Sampling

GROUP, PROMPT, STEPS, BLOCKS = 8, 256, 8, 10


def model() -> TransformerConfig:
    """As small as possible: its weights are never used."""
    return TransformerConfig(
        vocab_size=128,
        hidden_size=8,
        intermediate_size=8,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=8,
    )


def idle_engine(slots: int) -> NativeEngine:
    """An engine whose device returns at once."""
    engine = NativeEngine(
        model(),
        make_mesh(devices=jax.devices()[:1]),
        max_num_seqs=slots,
        max_num_batched_tokens=slots * PROMPT,
        steps_per_dispatch=STEPS,
        shrink=False,
    )
    engine.update_weights(init_params(model(), 0), 0)
    programs: Any = engine.programs

    def decode(rows: Rows, *_: Any) -> tuple[Rows, Block]:
        drawn = np.full((len(rows.live), STEPS), 7, np.int32)
        nothing = np.zeros((len(drawn), STEPS, 0))
        full = np.full(len(drawn), STEPS)
        return rows, Block(
            tokens=drawn,
            log_probs=np.full(drawn.shape, -1.0, np.float32),
            count=full,
            steps=np.zeros_like(full),
            stopped=full < 0,
            top_ids=nothing,
            top_log_probs=nothing,
            raw_log_probs=nothing,
            sampling_mask_ids=nothing,
        )

    programs.decode, programs.fetch = decode, lambda block: block
    return engine


def measure(slots: int) -> dict[str, float]:
    """Milliseconds of a turn of each kind."""
    engine = idle_engine(slots)
    rng = np.random.default_rng(0)
    prompts = rng.integers(1, 128, (slots // GROUP, PROMPT)).tolist()
    sampling = Sampling(STEPS * BLOCKS)
    keys = [tuple((g, i) for i in range(GROUP)) for g in range(len(prompts))]
    engine.pause()
    futures = engine.submit(
        [Request(tuple(p), k, sampling) for p, k in zip(prompts, keys, strict=True)]
    )
    seconds = []
    for _ in range(BLOCKS):
        started = time.thread_time()
        engine._turn()
        seconds.append(time.thread_time() - started)
    engine.resume()
    assert all(len(f.result().tokens) == STEPS * BLOCKS for group in futures for f in group)
    admit, *turns, end = (1e3 * x for x in seconds)
    return {"slots": slots, "admit_ms": admit, "turn_ms": min(turns), "end_ms": end}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--slots", type=int, nargs="+", default=[128, 512, 1024])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--smoke", action="store_true", help="16 slots, once")
    parser.add_argument("--json", help="a file for the rows")
    given = parser.parse_args(argv)
    if given.smoke:
        given.slots, given.repeats = [16], 1
    measure(GROUP)  # imports, and what Python does once
    rows = []
    for slots in given.slots:
        found = [measure(slots) for _ in range(given.repeats)]
        rows.append({name: min(row[name] for row in found) for name in found[0]})
        print(", ".join(f"{name} {value:.1f}" for name, value in rows[-1].items()))
    if given.json:
        Path(given.json).write_text(json.dumps({"rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
