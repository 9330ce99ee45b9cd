"""The same training run with rollouts from each backend.

    python -m benchmarks.backends [--backends in_process http jetstream grpc vllm]
        [--vllm-python=/opt/vllm/bin/python] [--steps=240] [--plot=FILE.png] [--json=FILE]

Claim: configs/quickstart.py reaches the same reward whether its tokens come from the engine in the
process (`in_process`), from `jaxrl.serve` over HTTP (`http`), from an engine of JetStream's
protocol in the process (`jetstream`), from `jaxrl.serve` over JetStream's gRPC (`grpc`), or from a
vLLM server (`vllm`).

The model's heads are 32 wide instead of 16, which vLLM's CPU build cannot run. One seed, no
evaluation. "reward" is the mean of the sampled answers over the last 20 steps; "difference" is the
largest |sampler - trainer| of a token's log-prob over all steps, for gRPC, which has no log-probs,
the largest `policy/rollout_surprise_z` (a run ends above 8). Servers are processes beside the
trainer, on the same cores.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxrl import config as cfg
from jaxrl.records.json_lines import read_lines
from jaxrl.train import BasePPOExp

QUICKSTART = "configs/quickstart.py"
CONTROL = "JAXRL_BENCHMARK_CONTROL"  # address of the server that `reload` tells
ENGINE = "generator.inference_engine"
HEADS = {"head_dim": 32}
DIFFERENCES = ("policy/rollout_train_logprobs_abs_diff_max", "policy/rollout_surprise_z")


def reload(folder: str, version: int) -> None:
    """Tell the gRPC server's HTTP side about new weights (`engine_init_kwargs["control"]`)."""
    body = json.dumps({"path": folder, "version": version}).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{os.environ[CONTROL]}/update_weights", body, headers)
    urllib.request.urlopen(request, timeout=60).close()


@contextlib.contextmanager
def server(folder: Path) -> Iterator[tuple[str, str]]:
    """`jaxrl.serve` in a process of its own: its HTTP and its gRPC address."""
    settings = {
        "trainer.policy.model_config_kwargs": HEADS,
        f"{ENGINE}.http_endpoint_port": 0,
        f"{ENGINE}.served_model_name": "policy",
        "serve.grpc_port": 0,
        "serve.weights_root": folder,
        "serve.max_num_seqs": 512,
        "serve.max_samples": 4096,
    }
    flags = [f"--config.{name}={value}" for name, value in settings.items()]
    command = [sys.executable, "-m", "jaxrl.serve", f"--config={QUICKSTART}", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            lines = []
            for line in process.stdout:
                lines.append(line)
                if line.startswith("serving policy at "):
                    break
            else:
                raise RuntimeError(f"the server did not start: {' '.join(command)}")
            port = next(line.split()[-1] for line in lines if "JetStream's clients" in line)
            yield lines[-1].split()[3].removesuffix("/v1;"), f"127.0.0.1:{port}"
        finally:
            process.terminate()


def settings_of(backend: str, http: str, grpc: str, vllm_python: str | None) -> dict[str, Any]:
    """Fields of the engine that make a backend."""
    remote = {"run_engines_locally": False}
    control = {"control": "benchmarks.backends:reload", "sampling": {"temperature": 1.0}}
    engine: dict[str, dict[str, Any]] = {
        "in_process": {},
        "http": remote | {"backend": "native", "remote_urls": [http]},
        "jetstream": {"backend": "jetstream"},
        "grpc": remote
        | {"backend": "jetstream", "remote_urls": [grpc], "engine_init_kwargs": control},
        "vllm": {"backend": "vllm", "vllm_python": vllm_python},
    }
    settings = {f"{ENGINE}.{name}": value for name, value in engine[backend].items()}
    if backend == "grpc":
        settings["generator.sampling_params.logprobs"] = None
    return settings


def learn(backend: str, folder: Path, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The metrics of each step of a run."""
    settings = {
        "trainer.run_name": backend,
        "trainer.policy.model_config_kwargs": HEADS,
        "trainer.log_path": str(folder),
        "trainer.ckpt_path": str(folder / backend / "checkpoints"),
        "trainer.export_path": str(folder / backend / "exports"),
        "trainer.max_training_steps": arguments.steps,
        "trainer.eval_interval": -1,
        "trainer.ckpt_interval": -1,
        "trainer.hf_save_interval": -1,
        "trainer.print_example_interval": -1,
        "trainer.logger": "console",
        f"{ENGINE}.weights_folder": str(folder / "weights"),
    }
    if arguments.smoke:
        settings |= {"trainer.train_batch_size": 2, "trainer.policy_mini_batch_size": 1}
    needs_server = backend in ("http", "grpc")
    (folder / "weights").mkdir(exist_ok=True)
    with server(folder) if needs_server else contextlib.nullcontext(("", "")) as (http, grpc):
        os.environ[CONTROL] = http
        settings |= settings_of(backend, http, grpc, arguments.vllm_python)
        run = BasePPOExp(cfg.apply_overrides(cfg.load_config_file(QUICKSTART), settings))
        trainer = run.build()
        try:
            run.train(trainer)
        finally:
            getattr(trainer.engine, "close", lambda: None)()
    return [line for line in read_lines(folder / backend / "metrics.jsonl") if line["step"] > 0]


def summary(backend: str, lines: Sequence[dict[str, Any]], seconds: float) -> dict[str, Any]:
    """A row of the table."""
    (name,) = {name for name in DIFFERENCES if name in lines[-1]}
    return {
        "backend": backend,
        "reward": statistics.mean(line["reward/avg_raw_reward"] for line in lines[-20:]),
        "measure": name,
        "difference": max(line[name] for line in lines),
        "generate_seconds": statistics.median(line["timing/generate"] for line in lines),
        "sync_seconds": statistics.median(line["timing/sync_weights"] for line in lines),
        "seconds": seconds,
        "rewards": [line["reward/avg_raw_reward"] for line in lines],
    }


def plot(rows: Sequence[dict[str, Any]], path: str) -> None:
    """Mean rewards over steps, averaged over ten."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    for row in rows:
        rewards = row["rewards"]
        means = [statistics.mean(rewards[max(0, i - 9) : i + 1]) for i in range(len(rewards))]
        axes.plot(range(1, len(means) + 1), means, label=row["backend"])
    axes.set(xlabel="step", ylabel="mean reward, ten steps", title="quickstart by backend")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")
    plt.close(figure)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Train once with each backend; print the table."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for backend in arguments.backends:
            started = time.perf_counter()
            lines = learn(backend, Path(folder), arguments)
            rows.append(summary(backend, lines, time.perf_counter() - started))
    print(f"{'backend':12} reward  generate  sync     run  largest difference")
    for row in rows:
        print(
            f"{row['backend']:12} {row['reward']:6.3f}  {row['generate_seconds']:6.2f} s "
            f"{row['sync_seconds']:5.2f} s {row['seconds']:5.0f} s  {row['difference']:.1e} "
            f"({row['measure'].split('/')[1]})"
        )
    if arguments.plot:
        plot(rows, arguments.plot)
    return {"rows": rows}


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    everything = ["in_process", "http", "jetstream", "grpc", "vllm"]
    parser.add_argument("--backends", nargs="+", choices=everything, default=everything[:-1])
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--vllm-python", help="interpreter of the environment that has vLLM")
    parser.add_argument("--plot", help="draw the curves here")
    parser.add_argument("--smoke", action="store_true", help="tiny, for the tests")
    parser.add_argument("--json", type=Path, help="write the numbers here")
    arguments = parser.parse_args(argv)
    if arguments.smoke:
        arguments.steps = 2
    report = run(arguments)
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
