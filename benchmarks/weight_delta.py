"""What an update changes of bfloat16 weights, and what sending only that costs the trainer.

    JAX_PLATFORMS=cpu python -m benchmarks.weight_delta [--model=models/smollm2-135m-instruct]
        [--lrs 1e-6 1e-5] [--steps=4] [--mib=100] [--group=16] [--share=0.02]
        [--receivers 1 2 4 8] [--json=FILE]

Claim: after a step of RL most bfloat16 weights are as they were, and a server that has the version
before is sent less than half of the bytes.

Shares: `configs/arithmetic_smollm2_grpo.py` with each learning rate, warm-up left out, on the model
in the folder (`examples/smollm2_to_hf.py` writes it); after each step the weights as bfloat16 are
compared with those of the step before. Pause: the seconds from a new version to the last server
that has it, whole and as changes of a share of the weights, drawn at random, against a socket of
the loopback device with as many bytes and nothing behind it. The servers are processes of this
machine that take the weights as `jaxrl.serve` does, in a tree; float32; the fastest round counts.
The socket has as many bytes as all of them receive together, one after the other.

Folder: the bytes that a version takes on a disk, and the seconds to write and to read it: as a
Hugging Face folder, whole in the sampler's bfloat16, and as changes of the same share. The files
are in the page cache; the fastest round counts.
"""

import argparse
import contextlib
import io
import json
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from benchmarks import roofline
from benchmarks.weight_sync import MIB, Pulling, Sampler, give_all, model_of, sampler
from jaxrl import config as cfg
from jaxrl.models.export import save_pretrained
from jaxrl.models.hf import load_params
from jaxrl.models.linear import merge
from jaxrl.models.placement import model_shardings
from jaxrl.models.transformer import Params, abstract_params, init_params
from jaxrl.parallel import make_mesh
from jaxrl.parallel.rules import Placement
from jaxrl.records.callbacks import TrainingCallback
from jaxrl.rollout.weights.changes import changes
from jaxrl.rollout.weights.transfer import WeightTransfer
from jaxrl.rollout.weights.version_folder import VersionFolder
from jaxrl.rollout.weights.version_reader import VersionReader
from jaxrl.train import BasePPOExp

CONFIGS = Path(__file__).parents[1] / "configs"


class Shares(TrainingCallback):
    """Note what share of the weights has other bits as bfloat16 than a step ago."""

    def __init__(self) -> None:
        self.before: list[np.ndarray] = []
        self.shares: list[float] = []
        self.sent: list[float] = []

    def note(self, params: Params) -> None:
        """Compare parameters with those of the last call."""
        now = [np.asarray(x.astype(jnp.bfloat16)) for x in jax.tree.leaves(merge(params))]
        if self.before:
            made = [changes(*pair) for pair in zip(self.before, now, strict=True)]
            whole = sum(x.nbytes for x in now)
            self.shares.append(sum(c.places.size for c in made) / sum(x.size for x in now))
            self.sent.append(sum(c.nbytes for c in made) / whole)
        self.before = now

    def on_step_start(self, trainer: Any, *_: Any) -> None:
        if not self.before:
            self.note(trainer.state.params)

    def on_step_end(self, trainer: Any, *_: Any) -> None:
        self.note(trainer.state.params)


def train(arguments: argparse.Namespace, lr: float) -> dict[str, Any]:
    """Train some steps; the share that each changed."""
    noted = Shares()

    class Experiment(BasePPOExp):
        def get_callbacks(self) -> list[TrainingCallback]:
            return [noted]

    name = "quickstart.py" if arguments.smoke else "arithmetic_smollm2_grpo.py"
    with tempfile.TemporaryDirectory() as folder:
        changed = {
            "trainer.policy.optimizer_config.lr": lr,
            "trainer.policy.optimizer_config.num_warmup_steps": 0,
            "trainer.max_training_steps": arguments.steps,
            "trainer.eval_before_train": False,
            **dict.fromkeys(("eval_interval", "ckpt_interval", "hf_save_interval"), -1),
            "trainer.log_path": folder,
            "trainer.ckpt_path": f"{folder}/checkpoints",
            "trainer.export_path": f"{folder}/exports",
        }
        changed = {k if "." in k else f"trainer.{k}": v for k, v in changed.items()}
        if not arguments.smoke:
            changed["trainer.policy.model.path"] = str(arguments.model)
        config = cfg.apply_overrides(cfg.load_config_file(str(CONFIGS / name)), changed)
        with contextlib.redirect_stdout(io.StringIO()):
            Experiment(config).run()
    return {"lr": lr, "shares": noted.shares, "sent": noted.sent}


def moved(params: Params, share: float, seed: int) -> Params:
    """Other parameters, of which about that share of the elements has other bits."""
    rng = np.random.default_rng(seed)

    def some(x: jax.Array) -> jax.Array:
        return jnp.where(rng.random(x.shape, np.float32) < share, x * 1.25 + 1.0, x)

    return jax.tree.map(some, params)


def pause(arguments: argparse.Namespace, own: Sequence[str], delta: bool) -> list[dict[str, Any]]:
    """The seconds in which so many servers get a version."""
    model = model_of(arguments.mib, arguments.smoke)
    placement = Placement(make_mesh(devices=jax.devices()[:1]))
    first = init_params(model, 0, model_shardings(model, placement))
    versions = [first, moved(first, arguments.share, 1)]
    size, rows = sum(x.nbytes for x in jax.tree.leaves(first)), []
    for number in arguments.receivers:
        servers, times = [Sampler("benchmarks.weight_delta", own) for _ in range(number)], []
        end = WeightTransfer(jnp.float32, int(arguments.group * MIB), delta=delta)
        pulling = [Pulling(server) for server in servers]
        for version in range(1, arguments.rounds + 3):  # the first is whole, the second compiles
            started = time.perf_counter()
            give_all(end, versions[version % 2], version, pulling)
            times.append(time.perf_counter() - started)
        moved_bytes = end.sent_bytes * number if delta else number * size
        bare = min(_socket(servers, moved_bytes) for _ in range(arguments.rounds))
        for server in servers:
            server.process.terminate()
        row = {"receivers": number, "delta": delta, "seconds": min(times[2:]), "socket": bare}
        rows.append(row | {"sent_mib": end.sent_bytes / MIB, "whole_mib": number * size / MIB})
    return rows


def _socket(servers: Sequence[Sampler], total: int) -> float:
    """The seconds in which as many bytes go through a socket to one after the other."""
    share = total // len(servers)
    host, started = np.ones(share, np.uint8), time.perf_counter()
    for server in servers:
        with socket.create_connection(("127.0.0.1", server.ask("socket", bytes=share))) as end:
            end.sendall(memoryview(host))
        server.answer()
    return time.perf_counter() - started


def through_folder(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The bytes and seconds of a version in a folder, by the way in which it is written."""
    model = model_of(arguments.mib, arguments.smoke)
    shardings = model_shardings(model, Placement(make_mesh(devices=jax.devices()[:1])))
    first = init_params(model, 0, shardings)
    params = [first, moved(first, arguments.share, 1)]
    rows = []
    for way in ("Hugging Face folder", "whole", "changes"):
        with tempfile.TemporaryDirectory() as name:
            root, times = epath.Path(name), []
            group = int(arguments.group * MIB)
            end = VersionFolder(root, jnp.bfloat16, group, delta=way == "changes")
            reader = VersionReader(abstract_params(model), shardings)
            for version in range(arguments.rounds + 3):  # the first is whole, the second compiles
                began = time.perf_counter()
                if way == "Hugging Face folder":
                    folder = Path(name, f"version-{version}")
                    save_pretrained(folder, model, params[version % 2])
                    written = time.perf_counter()
                    read = load_params(folder, model, shardings=shardings)
                else:
                    folder = Path(end.publish(params[version % 2], version)).parent
                    written = time.perf_counter()
                    read = reader.read(epath.Path(folder))
                jax.block_until_ready(read)
                times.append((written - began, time.perf_counter() - written))
            size = sum(file.stat().st_size for file in folder.iterdir())
        writes, reads = zip(*times[2:], strict=True)
        row = {"way": way, "mib": size / MIB}
        rows.append(row | {"write_seconds": min(writes), "read_seconds": min(reads)})
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """The command; 1 where the claim is false."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=Path("models/smollm2-135m-instruct"))
    parser.add_argument("--lrs", type=float, nargs="*", default=[1e-6, 1e-5])
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--mib", type=float, default=100, help="size of the model that is sent")
    parser.add_argument("--group", type=float, default=16, help="MiB that are moved at a time")
    parser.add_argument("--share", type=float, default=0.02, help="of its weights that change")
    parser.add_argument("--receivers", type=int, nargs="*", default=[1, 2, 4, 8])
    parser.add_argument("--rounds", type=int, default=3, help="of which the fastest counts")
    parser.add_argument("--sampler", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--smoke", action="store_true", help="tiny, for the tests")
    parser.add_argument("--json", type=Path, help="write the numbers here")
    given = list(sys.argv[1:] if argv is None else argv)
    arguments = parser.parse_args(given)
    if arguments.smoke:
        arguments.mib, arguments.receivers, arguments.rounds = 0.1, [2], 1
        arguments.lrs, arguments.steps = [1e-6], 2
    if arguments.sampler:
        sampler(model_of(arguments.mib, arguments.smoke))
        return 0
    print(f"load {roofline.machine_load()}")
    runs = [train(arguments, lr) for lr in arguments.lrs]
    for run in runs:
        shares = ", ".join(f"{share:.2%}" for share in run["shares"])
        print(f"lr {run['lr']:g}: changed by each step {shares}", flush=True)
        print(f"    sent, of the whole: {statistics.fmean(run['sent']):.1%}")
    rows = [row for delta in (False, True) for row in pause(arguments, given, delta)]
    for row in rows:
        name = f"{arguments.share:.0%} changed" if row["delta"] else "whole"
        print(
            f"{row['receivers']} receivers, {name}: {row['seconds']:.2f} s, the trainer sends "
            f"{row['sent_mib']:.1f} MiB, they get {row['whole_mib']:.0f}; a socket "
            f"{row['socket']:.3f} s"
        )
    folders = through_folder(arguments)
    for row in folders:
        print(
            f"folder, {row['way']}: {row['mib']:.1f} MiB, written in {row['write_seconds']:.2f} s, "
            f"read in {row['read_seconds']:.2f} s"
        )
    if arguments.json:
        report = {"runs": runs, "pause": rows, "folder": folders}
        arguments.json.write_text(json.dumps(report, indent=1))
    return int(any(share >= 0.5 for run in runs for share in run["sent"]))


if __name__ == "__main__":
    sys.exit(main())
