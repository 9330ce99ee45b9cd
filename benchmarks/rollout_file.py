"""Bytes and seconds of a step's rollout file, compressed and not.

    python -m benchmarks.rollout_file [--tokens=1000000] [--json=FILE]

Claim: the ledger's thread compresses the rollouts of a million tokens in about half a second of CPU
time, to less than half their size; the training thread copies them in a tenth of a second.
"""

import argparse
import io
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl.data.recorded import to_arrays
from jaxrl.types import GeneratorOutput

VOCABULARY, SAMPLES = 150_000, 16


def synthetic(tokens: int, rows: int) -> GeneratorOutput:
    """Log-normal lengths, token ids with Zipf's weights, six in ten log-probs near 0."""
    rng = np.random.default_rng(0)
    weights = 1 / (np.arange(VOCABULARY) + 10.0)
    up_to, ids = np.cumsum(weights / weights.sum()), rng.permutation(VOCABULARY)
    lengths = np.clip(rng.lognormal(6.7, 0.6, rows), 16, 4096)
    lengths = (lengths * tokens / lengths.sum()).astype(int) + 1

    def drawn(n: int) -> list[int]:
        return ids[np.minimum(np.searchsorted(up_to, rng.random(n)), VOCABULARY - 1)].tolist()

    def log_probs(n: int) -> list[float]:
        scale = np.where(rng.random(n) < 0.6, 1e-3, 1.0)
        return (-rng.exponential(scale)).astype(np.float32).tolist()

    prompts = [drawn(int(rng.integers(60, 300))) for _ in range(rows // SAMPLES)]
    return GeneratorOutput(
        prompt_token_ids=[prompt for prompt in prompts for _ in range(SAMPLES)],
        response_ids=[drawn(n) for n in lengths],
        rewards=rng.integers(0, 2, rows).astype(float).tolist(),
        loss_masks=[[1] * n for n in lengths],
        stop_reasons=["stop"] * rows,
        rollout_logprobs=[log_probs(n) for n in lengths],
        policy_versions=[7] * rows,
        rollout_metrics={},
        token_versions=[[7] * n for n in lengths],
        ledger_ids=list(range(rows)),
    )


def cpu_seconds(work: Callable[[], Any]) -> float:
    """Of all threads of this process."""
    started = time.process_time()
    work()
    return time.process_time() - started


def main(argv: Sequence[str] | None = None) -> int:
    """Print and write the sizes and seconds."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--smoke", action="store_true", help="10,000 tokens")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(argv)
    output = synthetic(10_000 if given.smoke else given.tokens, rows=1024)
    arrays = to_arrays(output)
    report: dict[str, Any] = {
        "tokens": sum(map(len, output["response_ids"])),
        "copy": {"cpu_seconds": cpu_seconds(lambda: to_arrays(output))},
    }
    for write in (np.savez, np.savez_compressed):
        file = io.BytesIO()
        seconds = cpu_seconds(lambda write=write, file=file: write(file, **arrays))
        report[write.__name__] = {"cpu_seconds": seconds, "bytes": len(file.getvalue())}
    print(json.dumps(report, indent=2))
    if given.json:
        given.json.write_text(json.dumps(report))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
