"""How large a run the report carries: a made run, its page as a file and as a live page.

    python -m benchmarks.report RUN                    # 1,000 steps of 512 trajectories, 0.5 GB
    python -m benchmarks.report RUN --steps=10 --prompts=2

The run is written into the folder RUN, which must not exist, by the library's own writers: run.db,
metrics.jsonl, a rollout file per step of 64 prompts of 8 samples of about 200 tokens. A RUN that
exists is measured as it is. Printed: size of the static page, seconds and peak memory to write it;
seconds until the live page has its first parts.

Claim: the live page of the large run answers in less than 2 s on quiet cores; the static one is
10 MB at most.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import yaml

from jaxrl.data.recorded import to_arrays
from jaxrl.records.json_lines import JsonLines
from jaxrl.records.ledger import FILE, Ledger, rollouts_path, write_rollouts

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "configs/tiny_char_model"
SAMPLES, TOKENS, METRICS, DATA = 8, 200, 90, 4096


def make_run(folder: Path, steps: int, prompts: int) -> None:
    """Write a run of `steps` steps of `prompts` prompts of `SAMPLES` samples."""
    folder.mkdir(parents=True)
    trainer = {"ckpt_path": str(folder / "checkpoints"), "policy": {"model": {"path": str(MODEL)}}}
    trainer |= {"train_batch_size": prompts, "max_training_steps": steps}
    (folder / "config.yaml").write_text(yaml.safe_dump({"trainer": trainer}))
    rng, metrics = np.random.default_rng(0), JsonLines(folder / "metrics.jsonl", 0)
    uids = [f"0:{row}" for row in range(DATA)]
    ledger = Ledger(folder / FILE)
    facts = {"num_prompts": DATA, "train_batch_size": prompts, "samples": SAMPLES, "seed": 0}
    ledger.begin(0, None, first_ordinal=0, facts=facts, machine={"devices": 1}, uids=uids)
    for step in range(1, steps + 1):
        first = (step - 1) * prompts
        own = [uids[(first + k) % DATA] for k in range(prompts)]
        groups = ledger.add("groups", [(first + k, uid, step - 1) for k, uid in enumerate(own)])
        rows = prompts * SAMPLES
        sizes = rng.integers(TOKENS // 2, 3 * TOKENS // 2, rows)
        rewards = (rng.random(rows) < step / (2 * steps)).astype(float).tolist()
        stops = ["stop" if n < 1.4 * TOKENS else "length" for n in sizes]
        ids = ledger.add("trajectories", [
            (groups[i // SAMPLES], i % SAMPLES, rewards[i], int(sizes[i]), stops[i], step, step)
            for i in range(rows)
        ])  # fmt: skip
        ledger.add("ends", [(i, step, None) for i in ids])
        output = {
            "prompt_token_ids": [rng.integers(0, 36, 40).tolist()] * rows,
            "response_ids": [rng.integers(0, 36, n).tolist() for n in sizes],
            "rewards": rewards,
            "loss_masks": [[1] * n for n in sizes],
            "stop_reasons": stops,
            "rollout_logprobs": [(-rng.exponential(0.3, n)).tolist() for n in sizes],
            "policy_versions": [step - 1] * rows,
            "rollout_metrics": {},
            "ledger_ids": ids,
        }
        arrays = to_arrays(output)  # type: ignore[arg-type]
        path = rollouts_path(folder, step)
        of_rows = [uid for uid in own for _ in range(SAMPLES)]
        digest = write_rollouts(path, arrays, of_rows)
        ledger.add("steps", [(step, str(path.relative_to(folder)), digest, "{}")])
        line = {f"policy/made_{i}": float(rng.normal()) for i in range(METRICS)}
        line |= {"reward/avg_raw_reward": float(np.mean(rewards)), "timing/wall": 5.0}
        metrics.log(step, line | {"timing/generate": 3.0, "timing/policy_train": 2.0})
    ledger.close()
    metrics.close()


def measure_static(run: Path) -> dict[str, float]:
    """Write the page in a process of its own; return its size, seconds and peak memory."""
    began, command = time.perf_counter(), [sys.executable, "-m", "jaxrl.report", str(run)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "static page, MB": (run / "report.html").stat().st_size / 1e6,
        "static page, seconds to write": time.perf_counter() - began,
        "static page, CPU seconds": used.ru_utime + used.ru_stime,
        "static page, peak memory in MB": used.ru_maxrss / 1000,
    }


def measure_live(run: Path) -> dict[str, float]:
    """Serve the page; return seconds from the command to its parts, and of its first search."""
    began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "jaxrl.report", str(run), "--live", "--port=0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert server.stdout is not None
        address = next(word for word in server.stdout.readline().split() if "http" in word)
        found = {"live page, seconds to its address": time.perf_counter() - began}
        get(address)
        steps = json.loads(get(f"{address}part/manifest"))["runs"][0]["recorded"]
        found["live page, MB of its curves"] = len(get(f"{address}part/m0")) / 1e6
        found["live page, seconds to its curves"] = time.perf_counter() - began
        asked = time.perf_counter()
        found["live page, MB of a step"] = len(get(f"{address}part/t0-{steps[-1]}")) / 1e6
        found["live page, seconds for a step"] = time.perf_counter() - asked
    finally:
        server.terminate()
        server.wait()
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    found["live page, CPU seconds for all that"] = used.ru_utime - before.ru_utime
    return found


def get(address: str) -> bytes:
    """Return what an address of the live page answers."""
    with urllib.request.urlopen(address) as answer:
        return answer.read()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; see the head of this module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=Path)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--prompts", type=int, default=64)
    options = parser.parse_args(argv)
    if not options.run.exists():
        make_run(options.run, options.steps, options.prompts)
    for name, value in (measure_static(options.run) | measure_live(options.run)).items():
        print(f"{name}: {value:.3g}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
