"""The HTTP server under load: requests, time to the first token, tokens per second.

    python -m benchmarks.serve --model=models/smollm2-135m-instruct [--json=FILE]
        [--vllm-url=http://127.0.0.1:8001 --vllm-model=NAME] [--largest]

Claim: at 32 streams on SmolLM2-135M (float32, CPU) `jaxrl.serve` gives about the tokens per second
of a vLLM CPU server that runs beside it (LOG.md); twice as many are the aim.

As many clients as there are streams ask one after the other for `--tokens` tokens each, with
prompts of `--prompt` random token ids, streamed. The servers are asked in turn, level by level; one
round before the first is not measured. Ours is a process of its own on the whole machine; what the
clients take of it is the same for both. Without --model ours has the quickstart's random weights.

--largest measures the last level once more while one client more sends, without pause, prompts that
fill the context and bodies of nearly the largest size: the others' median at most doubles.
"""

import argparse
import asyncio
import contextlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from benchmarks import roofline

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Target:
    """A server and its model."""

    name: str
    url: str
    model: str


@contextlib.contextmanager
def our_server(arguments: argparse.Namespace) -> Iterator[Target]:
    """`jaxrl.serve` in a process of its own."""
    length = arguments.prompt + arguments.tokens
    settings: dict[str, Any] = {
        "generator.inference_engine.http_endpoint_port": 0,
        "generator.inference_engine.served_model_name": "policy",
        "serve.max_model_len": length,
        "serve.max_num_seqs": max(arguments.streams),
        "serve.steps_per_dispatch": arguments.block,
    }
    if arguments.model:
        settings["trainer.policy.model.path"] = arguments.model
        settings["trainer.policy.model.random_init"] = False
    flags = [f"--config.{name}={value}" for name, value in settings.items()]
    command = [sys.executable, "-m", "jaxrl.serve", "--config=configs/quickstart.py", *flags]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = next((text for text in process.stdout if text.startswith("serving ")), "")
            if not line:
                raise RuntimeError(f"the server did not start: {' '.join(command)}")
            yield Target("jaxrl", line.split()[3].removesuffix("/v1;"), "policy")
        finally:
            process.terminate()


async def one_request(
    http: aiohttp.ClientSession, target: Target, prompt: list[int], tokens: int
) -> tuple[float, float]:
    """Seconds to the first token, and to the last."""
    body = {
        "model": target.model,
        "prompt": prompt,
        "max_tokens": tokens,
        "stream": True,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    started, first, got = time.perf_counter(), None, 0
    async with http.post(f"{target.url}/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            for choice in json.loads(line[6:])["choices"]:
                got += len(choice.get("token_ids") or ())
                if got and first is None:
                    first = time.perf_counter() - started
    if got != tokens or first is None:
        raise RuntimeError(f"{target.name} gave {got} tokens of {tokens}")
    return first, time.perf_counter() - started


async def send_largest(http: aiohttp.ClientSession, target: Target, length: int) -> None:
    """Send prompts that fill the context, and texts that nearly fill a body, without end."""
    while True:
        for prompt in ([3] * (length - 1), "a" * (4 * 1024**2 - 1024)):
            body = {"model": target.model, "prompt": prompt, "max_tokens": 1}
            async with http.post(f"{target.url}/v1/completions", json=body) as response:
                await response.read()


async def load(
    target: Target,
    prompts: Sequence[list[int]],
    streams: int,
    tokens: int,
    *,
    largest: int = 0,
) -> dict[str, Any]:
    """All prompts, by so many clients; `largest`: of a context that one more fills meanwhile."""
    waiting, times = list(prompts), []

    async def client(http: aiohttp.ClientSession) -> None:
        while waiting:
            times.append(await one_request(http, target, waiting.pop(), tokens))

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(
        connector=connector, timeout=aiohttp.ClientTimeout(None), read_bufsize=2**20
    ) as http:
        more = asyncio.create_task(send_largest(http, target, largest)) if largest else None
        started = time.perf_counter()
        await asyncio.gather(*(client(http) for _ in range(streams)))
        seconds = time.perf_counter() - started
        if more is not None:
            more.cancel()
    firsts = sorted(first for first, _ in times)
    return {
        "system": f"{target.name}, largest" if largest else target.name,
        "streams": streams,
        "requests_per_second": len(times) / seconds,
        "tokens_per_second": len(times) * tokens / seconds,
        "median": statistics.median(last for _, last in times),
        "first_token_median": statistics.median(firsts),
        "first_token_p95": firsts[int(0.95 * (len(firsts) - 1))],
    }


def measure(targets: Sequence[Target], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each level and server."""
    rng, rows = np.random.default_rng(0), []
    for streams in [max(arguments.streams), *arguments.streams]:
        number = max(streams, arguments.requests)
        prompts = rng.integers(3, 40, (number, arguments.prompt)).tolist()
        found = [asyncio.run(load(t, prompts, streams, arguments.tokens)) for t in targets]
        rows.append(found)
        if arguments.largest and streams == arguments.streams[-1] and len(rows) > 1:
            length = arguments.prompt + arguments.tokens
            for _ in range(2):  # the first compiles
                more = [
                    asyncio.run(load(t, prompts, streams, arguments.tokens, largest=length))
                    for t in targets
                ]
            rows.append(more)
    return [row for found in rows[1:] for row in found]  # the first round compiles


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure, and print the table."""
    with our_server(arguments) as ours:
        targets = [ours]
        if arguments.vllm_url:
            targets.append(Target("vllm", arguments.vllm_url, arguments.vllm_model))
        rows = measure(targets, arguments)
    print(f"{arguments.prompt} + {arguments.tokens} tokens, load {roofline.machine_load()}")
    print(
        f"{'system':<16}{'streams':>8}{'requests/s':>12}{'tokens/s':>10}{'median':>10}"
        f"{'first token, p95':>22}"
    )
    for row in rows:
        print(
            f"{row['system']:<16}{row['streams']:>8}{row['requests_per_second']:>12.2f}"
            f"{row['tokens_per_second']:>10.1f}{1e3 * row['median']:>7.0f} ms"
            f"{1e3 * row['first_token_median']:>10.0f} ms"
            f"{1e3 * row['first_token_p95']:>6.0f} ms"
        )
    return {"rows": rows, "prompt": arguments.prompt, "tokens": arguments.tokens}


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="folder of a model")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--requests", type=int, default=32, help="of a level, at least")
    parser.add_argument("--prompt", type=int, default=64, help="tokens")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer")
    parser.add_argument("--block", type=int, default=8, help="serve.steps_per_dispatch")
    parser.add_argument("--vllm-url", help="of a vLLM server with the same model")
    parser.add_argument("--vllm-model", default="model", help="its name there")
    parser.add_argument("--largest", action="store_true", help="one client sends largest prompts")
    parser.add_argument("--smoke", action="store_true", help="tiny, for the tests")
    parser.add_argument("--json", type=Path, help="write the numbers here")
    arguments = parser.parse_args(argv)
    if arguments.smoke:
        arguments.streams, arguments.requests = [1, 2], 2
        arguments.prompt, arguments.tokens = 4, 4
    report = run(arguments)
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
