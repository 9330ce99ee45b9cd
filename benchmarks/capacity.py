"""How many rows run at once in the memory of 32 rows of 4,096 tokens, in slots and in pages; and
what a synchronous step with its tail takes then, on a device whose clock is simulated.

    python -m benchmarks.capacity

Claim: where responses have lognormal lengths with a median of a fifth of the longest, pages hold
more than three times as many rows as slots that are as long as the longest row, and lose nothing;
a step of as many samples takes less than half the time.

The engine is the real one, with its pages, but its device does nothing: a block ends at once, with
the tokens that each sample has left. Groups of 8 samples share a prompt of 512 tokens. "at once" is
the mean of the rows in a block, of those blocks that begin while samples wait; "suspended" how
often a sample made room for others. Slots hold 32 rows, whatever their length.

The clock: a step of decoding takes as long as a TPU v5p needs to read 15.2 GB of weights and 57,344
bytes for each position of the rows that are live (7B in bfloat16, 2,765 GB/s); a chunk of 512
prompt tokens as long as its 7.8 TFLOP at half of 459 TFLOP/s. With slots the host needs 3 ms
between two blocks of 32 steps, while the device waits, and a prompt is prefilled before the rows
decode; with pages blocks have 8 steps, and the device waits for nobody. What is taken to the host
and back, at 30 GB/s, the device waits for.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.engine_host import model
from jaxrl.models.transformer import init_params
from jaxrl.parallel import make_mesh
from jaxrl.rollout.native import engine as native
from jaxrl.rollout.native.decode import Block, Prompts, Rows
from jaxrl.rollout.protocol import Request, Sampling

SLOTS, LONGEST, PROMPT, GROUP, STOP = 32, 4096, 512, 8, 9
BANDWIDTH, LINK = 2765e9, 30e9  # bytes a second of the device's memory, and to the host's
WEIGHTS, POSITION = 15.2e9, 57_344  # bytes
CHUNK = 512 * 2 * 7.6e9 / (0.5 * 459e12)  # seconds
HOST, BEFORE = 3e-3, 32  # seconds between two blocks with slots, and their steps


class Device:
    """Stand in for the device of an engine: rows draw what they have left, and end."""

    def __init__(self, engine: native.NativeEngine, lengths: np.ndarray) -> None:
        self.engine, self.lengths = engine, lengths
        self.at_once: list[int] = []
        self.seconds = 0.0
        programs: Any = engine.programs
        programs.decode, programs.fetch = self.decode, lambda block: block
        engine.table._save = lambda part, pages: self.carry(pages)
        engine.table._restore = lambda part, pages, held: self.carry(pages)

    def carry(self, pages: Sequence[int]) -> int:
        """Take pages to the host, or back."""
        self.seconds += len(pages) * self.engine.programs.shape.page * POSITION / LINK
        return len(pages)

    def decode(self, rows: Rows, prompts: Prompts | None, *_: Any) -> tuple[Rows, Block]:
        steps = self.engine.programs.steps
        left = self.lengths[rows.keys[:, 1]] - rows.count
        count = np.where(rows.live, np.minimum(left, steps - rows.start), 0)
        if prompts is not None:
            self.seconds += int(prompts.chunks) * CHUNK * 128 / 512  # of a CPU's tokens
        for step in range(int(count.max(initial=0))):
            live = count > step
            self.seconds += step_seconds((rows.position + step + 1)[live].sum())
        if self.engine._queue:
            self.at_once.append(int(rows.live.sum()))
        tokens = np.full((len(left), steps), 7, np.int32)
        ends = rows.live & (count == left)
        tokens[ends, count[ends] - 1] = STOP
        nothing = np.zeros((len(left), steps, 0))
        log_probs = np.full(tokens.shape, -1.0, np.float32)
        return rows, Block(
            tokens=tokens,
            log_probs=log_probs,
            count=count,
            steps=np.zeros_like(count),
            stopped=ends,
            top_ids=nothing,
            top_log_probs=nothing,
            raw_log_probs=nothing,
            sampling_mask_ids=nothing,
        )


def step_seconds(positions: float) -> float:
    """Return how long a step of decoding takes that reads so many positions."""
    return (WEIGHTS + float(positions) * POSITION) / BANDWIDTH


def in_slots(lengths: np.ndarray) -> float:
    """Return the seconds that 32 slots need for samples that come one after the other."""
    seconds, waiting = 0.0, list(range(len(lengths)))[::-1]
    left, position = np.zeros(SLOTS, int), np.zeros(SLOTS, int)
    while waiting or left.any():
        for slot in np.flatnonzero(left == 0)[: len(waiting)]:
            sample = waiting.pop()
            left[slot], position[slot] = lengths[sample], PROMPT
            seconds += CHUNK * (sample % GROUP == 0)
        for _ in range(min(BEFORE, int(left.max()))):
            seconds += step_seconds(position[left > 0].sum())
            position += left > 0
            left -= left > 0
        seconds += HOST
    return seconds


def measure(samples: int, median: float, sigma: float) -> dict[str, float]:
    """What a run of so many samples took."""
    rng = np.random.default_rng(0)
    lengths = np.exp(rng.normal(np.log(median), sigma, samples)).astype(int)
    lengths = np.clip(lengths, 1, LONGEST - PROMPT)
    fits = native.pages_that_fit
    native.pages_that_fit = lambda *_, **__: SLOTS * LONGEST // 64
    try:
        engine = native.NativeEngine(
            model(),
            make_mesh(devices=jax.devices()[:1]),
            max_num_seqs=16 * SLOTS,
            max_model_len=LONGEST,
            shrink=False,
            steps_per_dispatch=8,
        )
    finally:
        native.pages_that_fit = fits
    engine.update_weights(init_params(model(), 0), 0)
    device = Device(engine, lengths)
    sampling = Sampling(LONGEST - PROMPT, stop_token_ids=(STOP,))
    requests = [
        Request(
            tuple(rng.integers(10, 128, PROMPT).tolist()),
            tuple((0, first + i) for i in range(GROUP)),
            sampling,
        )
        for first in range(0, samples, GROUP)
    ]
    drawn = [len(c.tokens) for group in engine.generate(requests) for c in group]
    assert drawn == lengths.tolist()  # nothing is lost, and nothing is drawn twice
    assert all(pool.available == engine.programs.pages for pool in engine.table.pools)
    return {
        "samples": samples,
        "mean": float(lengths.mean()) + PROMPT,
        "slots_at_once": SLOTS,
        "pages_at_once": float(np.mean(device.at_once)),
        "suspended": engine.suspended,
        "slots_seconds": in_slots(lengths),
        "pages_seconds": device.seconds,
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=10_000)
    parser.add_argument("--median", type=float, default=LONGEST / 5, help="tokens of a response")
    parser.add_argument("--sigma", type=float, default=0.7)
    parser.add_argument("--smoke", action="store_true", help="few samples")
    parser.add_argument("--json", help="a file for the figures")
    given = parser.parse_args(argv)
    found = measure(512 if given.smoke else given.samples, given.median, given.sigma)
    print(", ".join(f"{name} {value:,.1f}" for name, value in found.items()))
    if given.json:
        Path(given.json).write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
