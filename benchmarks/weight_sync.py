"""New weights for a sampler: seconds, GB/s and memory of each transport, against plain copies.

    JAX_PLATFORMS=cpu python -m benchmarks.weight_sync [--mib=500] [--groups 32 128 512]
        [--json=FILE]

Claim: beside what they hold anyway, the trainer's process and the sampler's need at most one group
and 250 MiB for weights that go from one to the other, whatever the size of the model.

The sampler is a process of its own on this machine. "transfer" is what a server does with each
group: pull it, compare its checksums, put it in place; by size of the groups. "folder" writes a
Hugging Face folder and reads it there, in the page cache. "device_put" gives the decode layout to
an engine on another device of the trainer's process, in groups; "at once" is one `jax.device_put`
before it. The bounds are a socket of the loopback device with nothing behind it, and a copy in
memory. Memory is the growth of the resident set at its peak, without the new weights themselves.
All in float32; a round before the measured ones compiles, of these the fastest and the largest
growth count.
"""

import argparse
import asyncio
import contextlib
import ctypes
import gc
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import roofline
from jaxrl.models.export import save_pretrained
from jaxrl.models.hf import load_params
from jaxrl.models.transformer import (
    Params,
    TransformerConfig,
    abstract_params,
    init_params,
    logical_axes,
)
from jaxrl.parallel import ShardingRules, make_mesh, param_shardings
from jaxrl.rollout.native.engine import NativeEngine
from jaxrl.rollout.weights.groups import GROUP_BYTES
from jaxrl.rollout.weights.incoming import Incoming, Notice
from jaxrl.rollout.weights.transfer import WeightTransfer

MIB = 2**20
LAYER, VOCABULARY = dict(hidden_size=1024, intermediate_size=4096), 24_000
SMALL, SMALL_VOCABULARY = dict(hidden_size=32, intermediate_size=64), 100


def model_of(mib: float, small: bool) -> TransformerConfig:
    """A model of about that size in float32."""
    sizes, vocabulary = (SMALL, SMALL_VOCABULARY) if small else (LAYER, VOCABULARY)
    width, inner = sizes["hidden_size"], sizes["intermediate_size"]
    layer = 4 * (4 * width**2 + 3 * width * inner) / MIB
    layers = max(1, round((mib - 4 * vocabulary * width / MIB) / layer))
    heads = dict(num_heads=width // 32, num_kv_heads=width // 32, head_dim=32)
    return TransformerConfig(vocab_size=vocabulary, num_layers=layers, **sizes, **heads)


def resident(name: str) -> float:
    """MiB of this process: VmRSS now, VmHWM at its peak."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(name))


def forget_peak() -> float:
    """Give back what is free, and let the peak begin anew; MiB now."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # Linux with glibc
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return resident("VmRSS")


def measured(work: Callable[[], Any]) -> tuple[float, float]:
    """Seconds, and MiB at the peak above those before and those of the result."""
    before, started = forget_peak(), time.perf_counter()
    result = jax.block_until_ready(work())
    seconds = time.perf_counter() - started
    held = sum(x.nbytes for x in jax.tree.leaves(result)) / MIB
    return seconds, resident("VmHWM") - before - held


# ---- the sampler's process


def sampler(model: TransformerConfig) -> None:
    """Does what the lines of its input say, and answers each with one."""
    mesh, like = make_mesh(devices=jax.devices()[:1]), abstract_params(model)
    shardings = param_shardings(mesh, logical_axes(model), like, ShardingRules())
    incoming, before, weights = Incoming(like, shardings, 600.0), 0.0, None
    for line in sys.stdin:
        asked, answer = json.loads(line), None
        if asked["do"] == "begin":
            weights = None
            before = forget_peak()
        elif asked["do"] == "receive":
            notice = Notice.read(asked["notice"])
            weights = incoming.receive(notice)
            answer = incoming.address if notice.onward else ""
        elif asked["do"] == "read":
            weights = load_params(asked["folder"], model, shardings=shardings)
        elif asked["do"] == "socket":
            answer = _listen(asked["bytes"])
        elif asked["do"] == "memory":
            held = sum(x.nbytes for x in jax.tree.leaves(weights)) / MIB
            answer = resident("VmHWM") - before - held
        jax.block_until_ready(weights)
        print(json.dumps(answer), flush=True)


def _listen(number: int) -> None:
    """Take so many bytes from whoever connects; the port goes before."""
    target = memoryview(bytearray(number))
    with socket.create_server(("127.0.0.1", 0)) as server:
        print(json.dumps(server.getsockname()[1]), flush=True)
        connection, _ = server.accept()
        with connection:
            got = 0
            while got < number:
                got += connection.recv_into(target[got:])


class Sampler:
    """The other process.

    Args:
        module: of a command that calls `sampler` where it is given --sampler.
        arguments: of that.
    """

    def __init__(self, module: str, arguments: Sequence[str]) -> None:
        command = [sys.executable, "-m", module, *arguments, "--sampler"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen(command, **pipes, text=True, cwd=Path(__file__).parents[1])

    def ask(self, what: str, **rest: Any) -> Any:
        """Have it do something, and wait until it has."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": what, **rest}) + "\n")
        self.process.stdin.flush()
        return self.answer()

    def answer(self) -> Any:
        """Its next line."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError("the sampler's process ended")
        return json.loads(line)


LOOP = asyncio.new_event_loop()  # one for all, as a run has


class Pulling:
    """A server as `WeightTransfer` sees it, which only pulls weights.

    Args:
        process: where it does.
    """

    def __init__(self, process: Sampler) -> None:
        self.process, self.version = process, None
        self.url = f"http://127.0.0.1:{process.process.pid}"  # nothing listens: it is a name

    async def receive(self, group: dict[str, Any], seconds: float) -> str:
        """Have it pull a group; where others pull it."""
        del seconds
        return await asyncio.to_thread(self.process.ask, "receive", notice=group)


def give_all(end: WeightTransfer, params: Params, version: int, servers: Sequence[Pulling]) -> None:
    """Bring a version to all servers."""
    offer = end.publish(params, version)

    async def give() -> None:
        await asyncio.gather(*(end.give(s, offer, version, "") for s in servers))  # type: ignore

    LOOP.run_until_complete(give())
    for server in servers:
        server.version = version


# ---- the transports


@contextlib.contextmanager
def transports(
    model: TransformerConfig, params: Params, other: Sampler, groups: Sequence[float]
) -> Iterator[dict[str, Callable[[], Any]]]:
    """Name -> what moves all weights once."""
    size = sum(x.nbytes for x in jax.tree.leaves(params))
    folder = Path(tempfile.mkdtemp())
    there = make_mesh(devices=jax.devices()[1:])

    def transfer(group: float) -> None:
        give_all(WeightTransfer(jnp.float32, int(group * MIB)), params, 1, [Pulling(other)])

    def through_files() -> None:
        save_pretrained(folder / "weights", model, params, overwrite=True)
        other.ask("read", folder=str(folder / "weights"))

    def in_process(group: float) -> Any:
        options = {"max_num_seqs": 1, "group_bytes": int(group * MIB)}
        engine = NativeEngine(model, there, **options)
        engine.programs.load(params)
        return engine.programs.params

    def at_once() -> Any:
        functions = NativeEngine(model, there, max_num_seqs=1).programs.functions
        return functions.decode_params(jax.device_put(params, functions.whole))

    def plain_socket() -> None:
        with socket.create_connection(("127.0.0.1", other.ask("socket", bytes=size))) as end:
            end.sendall(memoryview(host))
        other.answer()

    host = np.ones(size, np.uint8)
    yield {
        **{f"transfer, groups of {g:g} MiB": lambda g=g: transfer(g) for g in groups},
        "folder": through_files,
        **{f"device_put, groups of {g:g} MiB": lambda g=g: in_process(g) for g in groups},
        "device_put at once": at_once,
        "bound: socket": plain_socket,
        "bound: memory": host.copy,
    }
    shutil.rmtree(folder)


def measure(arguments: argparse.Namespace, own: Sequence[str]) -> dict[str, Any]:
    """A row for each transport."""
    model = model_of(arguments.mib, arguments.smoke)
    mesh = make_mesh(devices=jax.devices()[:1])
    shardings = param_shardings(mesh, logical_axes(model), abstract_params(model), ShardingRules())
    params = init_params(model, 0, shardings)
    size, other, rows = (
        sum(x.nbytes for x in jax.tree.leaves(params)),
        Sampler("benchmarks.weight_sync", own),
        [],
    )
    with transports(model, params, other, arguments.groups) as found:
        for name, move in found.items():
            found_so_far = []
            for _ in range(arguments.rounds + 1):
                other.ask("begin")
                seconds, trainer = measured(move)
                found_so_far.append((seconds, trainer, other.ask("memory")))
            times, trainers, samplers = zip(*found_so_far[1:], strict=True)
            row = {
                "transport": name,
                "seconds": min(times),
                "gb_per_second": size / min(times) / 1e9,
            }
            rows.append(row | {"trainer_mib": max(trainers), "sampler_mib": max(samplers)})
    other.process.terminate()
    return {"mib": size / MIB, "rows": rows, "default_group_mib": GROUP_BYTES / MIB}


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=float, default=500, help="size of the model")
    parser.add_argument("--groups", type=float, nargs="+", default=[32, 128, 512], help="MiB")
    parser.add_argument("--rounds", type=int, default=3, help="of which the fastest counts")
    parser.add_argument("--sampler", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--smoke", action="store_true", help="tiny, for the tests")
    parser.add_argument("--json", type=Path, help="write the numbers here")
    given = list(sys.argv[1:] if argv is None else argv)
    arguments = parser.parse_args(given)
    if arguments.smoke:
        arguments.mib, arguments.groups, arguments.rounds = 0.1, [0.02], 1
    if arguments.sampler:
        sampler(model_of(arguments.mib, arguments.smoke))
        return 0
    report = measure(arguments, given)
    print(f"{report['mib']:.0f} MiB in float32, load {roofline.machine_load()}")
    print(f"{'transport':<32}{'seconds':>9}{'GB/s':>7}{'trainer +MiB':>14}{'sampler +MiB':>14}")
    for row in report["rows"]:
        print(
            f"{row['transport']:<32}{row['seconds']:>9.2f}{row['gb_per_second']:>7.2f}"
            f"{row['trainer_mib']:>14.0f}{row['sampler_mib']:>14.0f}"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    if "host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", 2)  # the trainer's, and the sampler's
    sys.exit(main())
