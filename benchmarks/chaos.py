"""Kill training runs at random instants, again and again, and see whether anything was lost.

    python -m benchmarks.chaos --kills 40 --kinds sync,turns,lockstep,free
    python -m benchmarks.chaos --kills 30 --terms 15 --after-commit --kinds sync,carried,lora,sft

Claim: 40 SIGKILLs at random instants, some in the middle of writing a checkpoint or the ledger, of
synchronous, lockstep and free-running runs: after every one `jaxrl.audit` passes, and all kinds but
"free" end with the parameters and optimizer state of the run that was not disturbed, bit for bit.
After a SIGTERM the newest checkpoint is that of the step which was being done: nothing is lost.

"turns" is synchronous, with conversations of up to three turns, an environment that answers after
random times, and fewer slots and pages than conversations, so that some make room for others;
"guesses" is that, with an engine that guesses tokens. "carried" has a judge that takes its time,
answers that go on in the next step, and guesses from what each prompt was answered before. "lora"
trains adapters, and a critic. "sft" is `jaxrl.sft`, which has no ledger and so no audit.

Each run is `python -m jaxrl.train` on the task of the quickstart, in a process of its own, with a
checkpoint every second step; asynchronous ones have an environment that takes its time, so that
prompts are in flight at any instant. A kill is aimed at the start-up, at an instant of training, at
a checkpoint that is being written, or at one of the next writes to the log of the ledger: strace,
where it is installed, kills between the pages of a transaction. What was hit is read from what is
left. The seed fixes what is aimed at; the instant is the machine's. --after-commit leaves out what
falls before the first checkpoint of a run: there is nothing yet to resume from.
"""

import argparse
import asyncio
import collections
import contextlib
import json
import os
import random
import re
import shutil
import signal
import sqlite3
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxrl import config as cfg
from jaxrl.audit import audit, report
from jaxrl.envs import StepOutput
from jaxrl.envs.toys import guess_number, sort_digits
from jaxrl.files import check_file
from jaxrl.records.checkpoint import PREFIX, Checkpointer
from jaxrl.records.ledger import FILE
from jaxrl.tools.audit.lineage import NothingToAudit

ROOT = Path(__file__).parent.parent
ASYNCHRONOUS = {
    "trainer.fully_async.enabled": True,
    "trainer.fully_async.max_staleness_steps": 2,
    "trainer.fully_async.num_parallel_generation_workers": 12,
    "trainer.algorithm.old_log_probs": "rollout",
    "data.train_data": ["benchmarks.chaos:slowly_judged"],
}
KINDS: dict[str, dict[str, Any]] = {
    "sync": {},
    "turns": {
        "data.train_data": ["benchmarks.chaos:slowly_answered"],
        "environment.env_class": "guess_number",
        "generator.max_turns": 3,
        "generator.max_input_length": 39,  # 13 of the prompt; a guess of 2, its end, "a number?>"
        "generator.sampling_params.max_generate_length": 2,
        "generator.inference_engine.max_num_seqs": 6,
        "trainer.algorithm.max_seq_len": 41,
        "trainer.algorithm.advantage_estimator": "grpo",
    },
    "lockstep": {**ASYNCHRONOUS, "trainer.fully_async.schedule": "lockstep"},
    "free": {**ASYNCHRONOUS, "trainer.fully_async.schedule": "free"},
}
KINDS["guesses"] = KINDS["turns"] | {"generator.inference_engine.speculative_tokens": 3}
KINDS["carried"] = {
    "data.train_data": ["benchmarks.chaos:slowly_judged(size=12)"],  # a prompt comes again soon
    "trainer.algorithm.old_log_probs": "rollout",
    "generator.longest_first": True,
    "generator.sampling_params.max_generate_length": 8,
    "generator.partial_rollouts.max_tokens_per_step": 3,
    "generator.partial_rollouts.extra_prompts": 3,
    "generator.inference_engine.speculative_tokens": 3,
    "generator.inference_engine.speculative_history": 32,
}
KINDS["lora"] = {
    "trainer.policy.model.lora.rank": 4,
    "trainer.policy.model.lora.alpha": 8,
    "trainer.critic.model.path": str(ROOT / "configs" / "tiny_char_model"),
    "trainer.critic.model.random_init": True,
    "trainer.critic_mini_batch_size": 4,
    "trainer.algorithm.advantage_estimator": "gae",
}
SFT = "sft"
KINDS[SFT] = {"data.train_data": ["jaxrl.envs.toys.addition:prompts(size=64, split='train')"]}
INTERVALS = ("eval", "hf_save")
AIMS = ("start", "step", "save", "ledger")
START_UP = 12.0  # seconds in which a kill at the start falls


class SlowJudge(sort_digits.SortDigitsEnv):
    """Takes its time, a long tail of it: prompts are finished out of their order."""

    async def step(
        self, action: str, tokens: list[str] | None = None, stopped: bool = True
    ) -> StepOutput:
        await asyncio.sleep(random.expovariate(1 / 0.05))
        return super().step(action, tokens, stopped)


class SlowGuess(guess_number.GuessNumberEnv):
    """Answers after a random time: turns meet others in the engine in every run."""

    def step(self, action: str) -> StepOutput:
        time.sleep(random.Random().random() * 0.03)
        return super().step(action)


def slowly_answered() -> Iterator[dict[str, Any]]:
    """Numbers to guess, with `SlowGuess`."""
    for row in guess_number.prompts(size=64, seed=0):
        yield {**row, "env_class": "benchmarks.chaos:SlowGuess"}


def slowly_judged(size: int = 64) -> Iterator[dict[str, Any]]:
    """The prompts, with `SlowJudge`."""
    for row in sort_digits.prompts(size=size, seed=0):
        yield {**row, "env_class": "benchmarks.chaos:SlowJudge"}


class Run:
    """`python -m jaxrl.train` on one device, in a folder of its own.

    Args:
        changes: of the config.
        cache: of compiled programs.
        supervised: it is `jaxrl.sft`, on another recipe.
    """

    def __init__(
        self,
        folder: Path,
        changes: dict[str, Any],
        steps: int,
        cache: Path,
        *,
        supervised: bool = False,
    ) -> None:
        self.folder, self.steps, self.cache = folder, steps, cache
        self.supervised, self._starts, self._begun = supervised, 0, 0
        self.checkpoints, self.run_folder = folder / "checkpoints", folder / "quickstart"
        recipe = "sft_addition.py" if supervised else "quickstart.py"
        sampled = {
            "data.train_data": ["jaxrl.envs.toys.sort_digits:prompts(size=64, seed=0)"],
            "trainer.policy_mini_batch_size": 4,
            "generator.n_samples_per_prompt": 4,
            "trainer.print_example_interval": -1,
        }
        config = cfg.apply_overrides(
            cfg.load_config_file(str(ROOT / "configs" / recipe)),
            {
                **({} if supervised else sampled),
                "data.val_data": [],
                "trainer.run_name": "quickstart",
                "trainer.max_training_steps": steps,
                "trainer.epochs": steps,
                "trainer.train_batch_size": 4,
                "trainer.micro_train_batch_size_per_gpu": 4,
                "trainer.micro_forward_batch_size_per_gpu": 4,
                "trainer.policy.optimizer_config.scheduler": "constant",
                "trainer.ckpt_interval": 2,
                "trainer.logger": [],
                **dict.fromkeys((f"trainer.{x}_interval" for x in INTERVALS), -1),
                "trainer.log_path": str(folder),
                "trainer.ckpt_path": str(self.checkpoints),
                "trainer.export_path": str(folder / "exports"),
                **changes,
            },
        )
        folder.mkdir(parents=True, exist_ok=True)
        self.recipe = folder / "recipe.py"
        values = cfg.get_config_as_dict(config)
        self.recipe.write_text(f"def get_config():\n    return {values!r}\n")

    def start(self) -> subprocess.Popen:
        """In a process group of its own, which is killed whole."""
        self._starts, self._begun = self._starts + 1, self.finished()
        module = "jaxrl.sft" if self.supervised else "jaxrl.train"
        return self.command(module, f"--config={self.recipe}")

    def command(self, module: str, *words: str, flags: str = "") -> subprocess.Popen:
        """Start a module; what it prints goes to `output`."""
        environment = {
            "XLA_FLAGS": flags,
            "JAX_COMPILATION_CACHE_DIR": str(self.cache),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        with (self.folder / "output").open("a") as output:
            return subprocess.Popen(
                [sys.executable, "-m", module, *words],
                cwd=ROOT,
                env=os.environ | environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def finish(self) -> None:
        """To the end, without another kill."""
        if self.start().wait() != 0:
            raise RuntimeError(f"the run failed:\n{self.output()}")

    def output(self) -> str:
        """The end of what it printed."""
        return (self.folder / "output").read_text()[-3000:]

    def newest(self) -> int:
        """Step of the newest checkpoint, 0 without one."""
        names = [p.name.removeprefix(f"{PREFIX}_") for p in self.checkpoints.glob(f"{PREFIX}_*")]
        return max((int(name) for name in names if name.isdigit()), default=0)

    def finished(self) -> int:
        """The last step that is recorded."""
        lines = self.run_folder / "metrics.jsonl"
        whole = lines.read_bytes().split(b"\n")[:-1] if lines.exists() else []
        return json.loads(whole[-1])["step"] if whole else 0

    def half_written(self) -> set[tuple[str, int]]:
        """Checkpoints that are being written, or were when a process died."""
        found = self.checkpoints.glob("*orbax-checkpoint-tmp*")
        with contextlib.suppress(FileNotFoundError):  # it is whole by now
            return {(path.name, path.stat().st_ino) for path in found}
        return set()

    def log_changed(self) -> int:
        """When the log of the ledger last changed, in ns."""
        try:
            return os.stat(self.run_folder / f"{FILE}-wal").st_mtime_ns
        except FileNotFoundError:
            return 0

    def state(self) -> dict[str, Any]:
        """The arrays of the last checkpoint."""
        files = Checkpointer(str(self.checkpoints), read_only=True).files
        return jax.device_get(files.restore(self.steps, "state"))

    def attempts(self) -> int:
        """How often it has begun; of one without a ledger, to do steps."""
        if self.supervised:
            return self._starts - (not self.sampling())
        return len(self.rows("SELECT attempt FROM attempts"))

    def handed_out(self) -> int:
        """How many prompts were; without a ledger, how many steps are done."""
        if self.supervised:
            return self.finished()
        return next((x for (x,) in self.rows("SELECT COUNT(*) FROM groups")), 0)

    def sampling(self) -> bool:
        """Whether the last attempt has handed out prompts; without a ledger, done a step."""
        if self.supervised:
            return self.finished() != self._begun
        mine = "SELECT 1 FROM groups WHERE attempt = (SELECT MAX(attempt) FROM attempts) LIMIT 1"
        return bool(self.rows(mine))

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        """Of the ledger as it lies there; none if it has not begun."""
        path = self.run_folder / FILE
        if not path.exists():
            return []
        with contextlib.closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as db:
            try:
                return db.execute(query).fetchall()
            except sqlite3.OperationalError:  # no table yet
                return []


def kill_once(run: Run, aim: str, rng: random.Random, least: int) -> str:
    """Start, wait for what is aimed at, kill; says what was hit.

    Args:
        least: step of a checkpoint that must be there.
    """
    before = run.attempts(), run.half_written(), run.log_changed()
    attempts, left, _ = before
    target = max(run.newest() + rng.choice([0, 2]), least)
    process = run.start()
    if aim == "start":
        time.sleep(rng.uniform(0, START_UP))
    else:
        _until(run, process, lambda: run.attempts() > attempts and run.sampling(), 0.05)
        _until(run, process, lambda: run.newest() >= target, 0.002)
    if aim == "step":
        time.sleep(rng.uniform(0, 0.6))
    elif aim == "save":
        _until(run, process, lambda: bool(run.half_written() - left), 0.0005)
        time.sleep(rng.uniform(0, 0.03))
    elif aim == "ledger":
        _kill_at_write(run, process, rng.randrange(1, 40))
    by_strace = process.poll() == -signal.SIGKILL
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    if process.wait() != -signal.SIGKILL:
        raise RuntimeError(f"the run ended before it was killed:\n{run.output()}")
    return "writing the ledger" if by_strace else hit(run, *before)


def end_once(run: Run, rng: random.Random, least: int) -> tuple[str, list[str]]:
    """Start, send SIGTERM in the midst of a step; say what went on, and what is wrong then."""
    attempts, target = run.attempts(), max(run.newest() + rng.choice([0, 2]), least)
    process = run.start()
    _until(run, process, lambda: run.attempts() > attempts and run.sampling(), 0.05)
    _until(run, process, lambda: run.newest() >= target, 0.002)
    time.sleep(rng.uniform(0, 0.6))
    handed_out = run.handed_out()
    _until(run, process, lambda: run.handed_out() > handed_out, 0.002)
    went_on = doing(run)
    os.kill(process.pid, signal.SIGTERM)
    if process.wait() != 128 + signal.SIGTERM:
        raise RuntimeError(f"SIGTERM ended the run with {process.returncode}:\n{run.output()}")
    (*_, said) = re.findall(r"SIGTERM: ended after step (\d+)", run.output())
    ended = int(said), run.newest(), run.finished()  # as it says, as is saved, as is recorded
    return went_on, [] if len({*ended}) == 1 else [f"after a SIGTERM the steps are {ended}"]


def _until(run: Run, process: subprocess.Popen, happens: Callable[[], bool], pause: float) -> None:
    deadline = time.monotonic() + 300
    while not happens():
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the run ended, or hangs, before its kill:\n{run.output()}")
        time.sleep(pause)


def _kill_at_write(run: Run, process: subprocess.Popen, number: int) -> None:
    """Kill at a write to the ledger's log; without strace, when the log has changed so often."""
    log = run.run_folder / f"{FILE}-wal"
    if shutil.which("strace"):
        what = f"inject=pwrite64:signal=SIGKILL:when={number}"
        command = ["strace", "-f", "-qqq", "-o", os.devnull, "-P", str(log), "-e", what]
        subprocess.run([*command, "-p", str(process.pid)], check=False, stderr=subprocess.DEVNULL)
        return
    for _ in range(number // 4):
        before = run.log_changed()
        _until(run, process, lambda before=before: run.log_changed() != before, 0)


def hit(run: Run, attempts: int, left: set[tuple[str, int]], log_changed: int) -> str:
    """What the process was doing when it died, as its files tell.

    Args:
        attempts, left, log_changed: the attempts, half-written checkpoints and time of the log
            before it was started.
    """
    if run.log_changed() != log_changed and torn(run.run_folder / f"{FILE}-wal"):
        return "writing the ledger"
    if run.half_written() - left:
        return "writing a checkpoint"
    if run.attempts() == attempts:
        return "starting"
    return doing(run)


def doing(run: Run) -> str:
    """What the run does, as its ledger tells."""
    if run.supervised:
        return "training"
    last = run.rows(
        "SELECT 'sampling' AS name, MAX(id) AS at FROM groups UNION "
        "SELECT 'training', MAX(id) FROM trajectories UNION "
        "SELECT 'recording a step', MAX(id) FROM ends UNION "
        "SELECT 'between steps', MAX(id) FROM steps ORDER BY at DESC LIMIT 1"
    )
    return last[0][0] if run.sampling() else "compiling"


def torn(log: Path) -> bool:
    """Whether SQLite's log ends in pages of a transaction that was not committed."""
    data = log.read_bytes() if log.exists() else b""
    if len(data) < 32:
        return False
    page, salts, at, committed = struct.unpack(">I", data[8:12])[0], data[16:24], 32, True
    while at + 24 <= len(data) and data[at + 8 : at + 16] == salts:
        if at + 24 + page > len(data):
            return True
        committed = data[at + 4 : at + 8] != bytes(4)
        at += 24 + page
    return not committed


def check(run: Run) -> list[str]:
    """What the audit has to say against the run."""
    if run.supervised:
        return []
    try:
        results = audit(run.run_folder)
    except NothingToAudit as error:
        begun = run.newest() > 0 or run.rows("SELECT * FROM attempts")
        return [str(error)] if begun else []
    return [report(results)] if any(result.failures for result in results) else []


def torment(
    folder: Path, kind: str, kills: int, rng: random.Random, terms: int = 0, least: int = 0
) -> dict[str, Any]:
    """Disturb a run of a kind, let it finish, compare it with one that was left alone.

    Args:
        kills, terms: SIGKILLs and SIGTERMs, in any order.
        least: see `kill_once`.
    """
    supervised = kind == SFT
    steps = (24 if supervised else 8) * (kills + terms) + 16  # those of "sft" are short
    killed, whole = (
        Run(folder / name, KINDS[kind], steps, folder / "cache", supervised=supervised)
        for name in (kind, f"{kind}-whole")
    )
    whole.finish()  # fills the cache of compiled programs
    hits, ended, failures = collections.Counter[str](), collections.Counter[str](), check(whole)
    signals = ["kill"] * kills + ["term"] * terms
    rng.shuffle(signals)
    for number, kind_of_signal in enumerate(signals, 1):
        if kind_of_signal == "kill":
            aims = [aim for aim in AIMS if not (supervised and aim == "ledger")]
            aim = rng.choice([aim for aim in aims if killed.newest() >= least or aim != "start"])
            found, now = kill_once(killed, aim, rng, least), []
            hits[found] += 1
        else:
            aim = "step"
            found, now = end_once(killed, rng, least)
            ended[found] += 1
        failures += (now := now + check(killed))
        verdict = "FAILED" if now else "passed"
        print(
            f"{kind}: {kind_of_signal} {number}, aimed at {aim}, hit {found}, after checkpoint "
            f"{killed.newest()} of {steps}; audit {verdict}",
            flush=True,
        )
    killed.finish()
    failures += check(killed)
    if not supervised:
        print(report(audit(killed.run_folder)))
    same = equal(killed.state(), whole.state())
    if kind != "free" and not same:
        failures.append(f"{kind}: the last state is not that of the undisturbed run")
    return {
        "kind": kind,
        "kills": kills,
        "steps": steps,
        "hits": dict(hits),
        "terms": dict(ended),
        "equal": same,
        "failures": failures,
    }


def equal(a: Any, b: Any) -> bool:
    """Same structure, same bits."""
    if jax.tree.structure(a) != jax.tree.structure(b):
        return False
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.array_equal(x, y, equal_nan=True) for x, y in pairs)


def shared(number: int, parts: int) -> list[int]:
    """A number as so many whole ones, none above another by more than 1."""
    return [number // parts + (i < number % parts) for i in range(parts)]


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, write the JSON; 1 if something was lost."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=40, help="over all kinds, default: 40")
    parser.add_argument("--terms", type=int, default=0, help="SIGTERMs as well, default: 0")
    parser.add_argument("--after-commit", action="store_true", help="once there is a checkpoint")
    parser.add_argument("--kinds", default=",".join(KINDS), help=f"default: {','.join(KINDS)}")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="keep the runs there; it must not exist")
    parser.add_argument("--json", type=Path, default=Path("chaos.json"), help="output file")
    arguments = parser.parse_args(argv)
    kinds, rng = arguments.kinds.split(","), random.Random(arguments.seed)
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        parser.error(
            f"--kinds: there is no {', '.join(map(repr, unknown))}; take of {','.join(KINDS)}"
        )
    if arguments.folder and arguments.folder.exists():
        parser.error(f"--folder={arguments.folder} exists; name a new one, or move it away")
    try:
        check_file("--json", arguments.json)
    except ValueError as error:
        parser.error(str(error))
    with contextlib.ExitStack() as stack:
        given = arguments.folder
        folder = given or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        kills, terms = (shared(n, len(kinds)) for n in (arguments.kills, arguments.terms))
        least = 2 if arguments.after_commit else 0
        rows = [
            torment(folder, kind, kills[i], rng, terms[i], least) for i, kind in enumerate(kinds)
        ]
    for row in rows:
        hits, ended = (
            ", ".join(f"{name} {n}" for name, n in sorted(row[of].items()))
            for of in ("hits", "terms")
        )
        equality = "equal" if row["equal"] else "other"
        ends = f", {sum(row['terms'].values())} SIGTERMs ({ended})" if ended else ""
        print(f"{row['kind']:9}{row['kills']} kills ({hits}){ends}; last state {equality}")
        print(*row["failures"], sep="\n", end="")
    arguments.json.write_text(json.dumps({"benchmark": "chaos", "rows": rows}, indent=1))
    return int(any(row["failures"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
