"""Kill jobs of several processes at random instants, while the servers that they sample on come and
go, and see whether anything was lost.

    python -m benchmarks.chaos_jobs --kills 40
    python -m benchmarks.chaos_jobs --kills 10 --terms 5 --after-commit --kinds engines-2,servers-1

Claim: after 40 kills of a launcher, of a process that leads an engine, of one that follows, or of a
server, `jaxrl.audit` passes, and metrics, parameters and ledger of every step are those of the job
that was not disturbed, bit for bit. So it is for synchronous jobs and for the schedule "lockstep",
with engines in the processes, and on `jaxrl.serve` servers that have as many slots each and do not
shrink their arrays (`generator.inference_engine.engine_init_kwargs`): a sample is drawn by the name
of its place, and blocks always run over all slots. "free" trains what is finished first, which
depends on the clock: there the audit passes.

A victim is killed (SIGKILL), or stands still (SIGSTOP): then the others notice it after
`stall_seconds`. A server is killed, asked to leave (SIGTERM), or stands still. Two servers are
there at first; one that went comes back before one of the next kills. "silence" is the longest time
from what befell a process until the launcher said that it starts the job again, or until all was
dead where the launcher itself was killed.

SIGTERM to the launcher or to one process ends all processes after the step that is being done. Then
the job starts again after that step, the latter by itself. --after-commit leaves out what falls
before the first checkpoint of a job.
"""

import argparse
import collections
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.chaos import ASYNCHRONOUS, Run, check, shared
from jaxrl.audit import audit, report
from jaxrl.cluster.guard import descendants
from jaxrl.files import check_file
from jaxrl.rollout.remote.server_process import free_port

STAY = 15.0  # seconds after the limit in which a job that stands still must be noticed
START_UP = 40.0  # seconds in which a kill at the start falls
PATIENCE = 900.0  # seconds until a job that does not get on is given up
SLOTS = 8  # of a server: all samples of a step
TIMED = "timing", "per_second", "roofline", "compile", "idle_sec", "qsize"  # metrics of the clock
SMALL = {
    "generator.n_samples_per_prompt": 2,
    "generator.sampling_params.max_generate_length": 3,
    "trainer.cluster.restart_backoff_seconds": 0.1,
    "trainer.cluster.max_restarts": 20,
}
LOCKSTEP = {**ASYNCHRONOUS, "trainer.fully_async.schedule": "lockstep"}
SPANNING = {
    "generator.inference_engine.hosts_per_engine": 2,
    "generator.inference_engine.tensor_parallel_size": 2,
}
# The number is that of the processes; where none of the names says "servers" they have engines.
KINDS: dict[str, dict[str, Any]] = {
    "engines-2": {},
    "servers-1": LOCKSTEP,
    "servers-2": LOCKSTEP,
    "lockstep-2": LOCKSTEP,
    "free-2": {**LOCKSTEP, "trainer.fully_async.schedule": "free"},
    "engines-4": SPANNING,
    "servers-4": {**LOCKSTEP, "generator.inference_engine.weight_delta": True},
}
LAUNCHER, LEADER, FOLLOWER, SERVER = "launcher", "leader", "follower", "server"
SIGNALS = {"killed": signal.SIGKILL, "frozen": signal.SIGSTOP, "left": signal.SIGTERM}


class Servers:
    """Hold `python -m jaxrl.serve` at two addresses; a server that went may come back."""

    def __init__(self, job: Run, number: int) -> None:
        self.job, self.ports = job, [free_port() for _ in range(number)]
        self.alive: dict[int, subprocess.Popen] = {}
        self.frozen: dict[int, subprocess.Popen] = {}

    @property
    def urls(self) -> list[str]:
        """Return the addresses, of those that are away too."""
        return [f"http://127.0.0.1:{port}" for port in self.ports]

    def come(self, rng: random.Random | None = None) -> None:
        """Start those that are away: all, or each with probability 1/2, and at least one."""
        away = [port for port in self.ports if port not in self.alive]
        if rng is not None:
            coming = [port for port in away if rng.random() < 0.5]
            away = coming or ([] if self.alive else away[:1])
        for port in away:
            self._end(self.frozen.pop(port, None))
            settings = {
                "generator.inference_engine.http_endpoint_port": port,
                "generator.inference_engine.engine_init_kwargs": "{'shrink': False}",
                "serve.max_num_seqs": SLOTS,
                "serve.receive_weights": True,
            }
            words = [f"--config.{name}={value}" for name, value in settings.items()]
            self.alive[port] = self.job.command(
                "jaxrl.serve", f"--config={self.job.folder / 'server.py'}", *words
            )

    def go(self, how: str, rng: random.Random) -> None:
        """Have one that is there be killed, leave, or stand still."""
        port = rng.choice(list(self.alive))
        process = self.alive.pop(port)
        if how == "frozen":
            self.frozen[port] = process
        os.killpg(process.pid, SIGNALS[how])

    def stop(self) -> None:
        """End all."""
        for process in [*self.alive.values(), *self.frozen.values()]:
            self._end(process)

    def _end(self, process: subprocess.Popen | None) -> None:
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


class Job(Run):
    """Run `python -m jaxrl.cluster.launch` with several processes of a device each.

    Args:
        limit: seconds of silence.
    """

    def __init__(self, folder: Path, kind: str, steps: int, cache: Path, limit: int) -> None:
        name, _, count = kind.partition("-")
        self.processes, self.servers = int(count), None
        changes = SMALL | {
            "trainer.hf_save_interval": steps,
            "trainer.cluster.stall_seconds": limit,
            "trainer.cluster.heartbeat_seconds": limit,
        }
        if name == "servers":
            super().__init__(folder, changes, steps, cache)
            self.recipe.rename(folder / "server.py")
            self.servers = Servers(self, 2)
            changes |= {
                "generator.inference_engine.run_engines_locally": False,
                "generator.inference_engine.remote_urls": self.servers.urls,
                "generator.inference_engine.weight_transport": "transfer",
            }
        super().__init__(folder, changes | KINDS[kind], steps, cache)
        self.hosts = KINDS[kind].get("generator.inference_engine.hosts_per_engine", 1)
        self.launcher: subprocess.Popen

    def start(self) -> subprocess.Popen:
        """Start the launcher, in a process group of its own."""
        flags = f"--xla_force_host_platform_device_count={self.processes}"
        words = [f"--local-processes={self.processes}", f"--config={self.recipe}"]
        self.launcher = self.command("jaxrl.cluster.launch", *words, flags=flags)
        return self.launcher

    def finish(self) -> None:
        """Run to the end, without another kill."""
        self.start()
        if self.servers:
            self.servers.come()
        try:
            self.wait()
        finally:
            self.stop()

    def wait(self) -> None:
        """Wait until the job has ended well."""
        try:
            status = self.launcher.wait(PATIENCE)
        except subprocess.TimeoutExpired as error:
            raise RuntimeError(f"the job hangs:\n{self.output()}") from error
        if status != 0:
            raise RuntimeError(f"the job ended with status {status}:\n{self.output()}")

    def stop(self) -> None:
        """End what is left of it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.launcher.pid, signal.SIGKILL)
        if self.servers:
            self.servers.stop()

    def pids(self) -> dict[int, int]:
        """Return the processes of the job that are alive, by number."""
        found = {}
        for pid in descendants(self.launcher.pid):
            with contextlib.suppress(OSError):
                command = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
                environment = Path(f"/proc/{pid}/environ").read_text().split("\0")
                index = [x.partition("=")[2] for x in environment if "JAXRL_PROCESS_ID=" in x]
                if index and command[1:3] == ["-m", "jaxrl.train"]:
                    found[int(index[0])] = pid
        return found

    def restarts(self) -> int:
        """Count how often the launcher said that it starts the job again."""
        return (self.folder / "output").read_text().count("in a row, ")

    def leads(self, index: int) -> bool:
        """Return whether a process leads: an engine over several, or, as the first, the job."""
        return index % self.hosts == 0 if self.hosts > 1 else index == 0


@dataclass
class Kill:
    """Hold what befell a job.

    Attributes:
        seconds: until it was noticed; 0 of a server, which costs the job nothing.
    """

    victim: str
    how: str
    aim: str
    seconds: float = 0.0


def strike(job: Job, rng: random.Random, *, after_commit: bool = False) -> Kill:
    """Wait for an instant, have something befall the job, and wait until it was noticed."""
    victims = [*victims_of(job), *([SERVER] if job.servers else [])]
    first = after_commit and not job.newest()
    victim, aim = rng.choice(victims), rng.choice(("step", "save", *(() if first else ("start",))))
    how = "killed"
    if victim != LAUNCHER and aim != "start" and rng.random() < 0.15:
        how = "frozen"  # nobody watches before all processes have joined: `start_seconds`
    if victim == SERVER and how == "killed" and rng.random() < 0.5:
        how = "left"
    _wait_for(job, aim, rng)
    if job.servers:
        job.servers.come(rng)
    if victim == SERVER:
        assert job.servers
        job.servers.go(how, rng)
        return Kill(victim, how, aim)
    before, pids = job.restarts(), {}
    while len(pids) < job.processes:
        pids = job.pids()
        _alive(job)
    alike = [i for i in pids if victim == LAUNCHER or job.leads(i) == (victim == LEADER)]
    chosen = rng.choice(alike)
    began = time.monotonic()
    os.kill(job.launcher.pid if victim == LAUNCHER else pids[chosen], SIGNALS[how])
    if victim == LAUNCHER:
        job.launcher.wait()
        while any(_runs(pid) for pid in pids.values()):
            _in_time(job, began)
    else:
        while job.restarts() == before:
            _in_time(job, began)
    seconds = time.monotonic() - began
    if victim == LAUNCHER:
        job.start()
    return Kill(victim, how, aim, seconds)


def victims_of(job: Job) -> list[str]:
    """Return what there is of a job beside servers."""
    return [LAUNCHER, LEADER, *([FOLLOWER] if job.processes > 1 else [])]


def end(job: Job, rng: random.Random) -> tuple[Kill, list[str]]:
    """Send SIGTERM in the midst of a step, start again; return to whom, and what is wrong then.

    The launcher starts the job again by itself unless the signal was its own.
    """
    victim = rng.choice(victims_of(job))
    if job.servers:
        job.servers.come(rng)
    _wait_for(job, "step", rng)
    began, pids, before = time.monotonic(), job.pids(), job.restarts()
    chosen = [i for i in pids if job.leads(i) == (victim == LEADER)]
    os.kill(job.launcher.pid if victim == LAUNCHER else pids[rng.choice(chosen)], signal.SIGTERM)
    if victim != LAUNCHER:
        while job.restarts() == before:
            _in_time(job, began)
    elif (status := job.launcher.wait(PATIENCE)) != 128 + signal.SIGTERM:
        raise RuntimeError(f"SIGTERM ended the job with {status}:\n{job.output()}")
    (*_, said) = re.findall(r"SIGTERM: ended after step (\d+)", job.output())
    ended = int(said), job.newest(), job.finished()  # as it says, as is saved, as is recorded
    if victim == LAUNCHER:
        job.start()
    wrong = [] if len({*ended}) == 1 else [f"after a SIGTERM the steps are {ended}"]
    return Kill(victim, "ended", "step", time.monotonic() - began), wrong


def _wait_for(job: Job, aim: str, rng: random.Random) -> None:
    """Wait for an instant of the attempt that begins, or of the one that goes on."""
    newest, left = job.newest(), job.half_written()
    if aim == "start":
        time.sleep(rng.uniform(0, START_UP))
        return
    began = time.monotonic()
    while job.newest() <= newest:
        _in_time(job, began, PATIENCE)
    if aim == "step":
        time.sleep(rng.uniform(0, 2.0))
        return
    while not job.half_written() - left:
        _in_time(job, began, PATIENCE, pause=0.0005)
    time.sleep(rng.uniform(0, 0.05))


def _alive(job: Job) -> None:
    if job.launcher.poll() is not None:
        raise RuntimeError(f"the job ended before it was killed:\n{job.output()}")


def _in_time(job: Job, began: float, limit: float = PATIENCE, pause: float = 0.02) -> None:
    if job.launcher.poll() not in (None, -signal.SIGKILL):
        raise RuntimeError(f"the job ended before its kill:\n{job.output()}")
    if time.monotonic() - began > limit:
        raise RuntimeError(f"nothing happens for {limit:g} s:\n{job.output()}")
    time.sleep(pause)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def differences(found: Run, wanted: Run) -> list[str]:
    """Name what differs between two runs: metrics, the ledger's rows, parameters."""
    said = []
    for name, of in (("metrics", _metrics), ("checksums", _checksums), ("ledger", _ends)):
        here, there = of(found), of(wanted)
        steps = sorted(step for step in {*here, *there} if here.get(step) != there.get(step))
        if steps:
            step = steps[0]
            one, other = (repr(x.get(step))[:500] for x in (here, there))
            said.append(f"{name} of {len(steps)} steps differ, first {step}: {one} / {other}")
    exported = f"exports/global_step_{wanted.steps}/policy/model.safetensors"
    if (found.folder / exported).read_bytes() != (wanted.folder / exported).read_bytes():
        said.append("the exported parameters differ")
    return said


def _metrics(run: Run) -> dict[int, Any]:
    lines = map(json.loads, (run.run_folder / "metrics.jsonl").read_text().splitlines())
    return {
        line["step"]: {k: x for k, x in line.items() if not any(name in k for name in TIMED)}
        for line in lines
    }


def _checksums(run: Run) -> dict[int, Any]:
    """Return those of batch and state of every step."""
    return dict(run.rows("SELECT step, checksums FROM steps WHERE superseded IS NULL"))


def _ends(run: Run) -> dict[int, Any]:
    """Return what was trained at every step."""
    found: dict[int, list[Any]] = {}
    for step, *row in run.rows(
        "SELECT e.step, e.reason, g.ordinal, g.uid, t.sample, t.reward, t.tokens, t.stop_reason, "
        "t.first_version, t.last_version FROM trajectories t JOIN groups g ON g.id = t.group_id "
        "JOIN ends e ON e.trajectory_id = t.id WHERE t.superseded IS NULL AND e.superseded IS NULL"
    ):
        found.setdefault(step, []).append(row)
    return {step: sorted(rows, key=repr) for step, rows in found.items()}


def torment(
    folder: Path,
    kind: str,
    kills: int,
    rng: random.Random,
    limit: int,
    terms: int = 0,
    *,
    after_commit: bool = False,
) -> dict[str, Any]:
    """Disturb a job of a kind, let it finish, compare it with one that was left alone.

    Args:
        kills, terms: what befalls it, and SIGTERMs, in any order.
        limit: see `Job`.
        after_commit: none of the former before there is a checkpoint.
    """
    steps, cache = 6 * (kills + terms) + 8, folder / "cache"
    whole = Job(folder / f"{kind}-whole", kind, steps, cache, limit)
    whole.finish()
    job = Job(folder / kind, kind, steps, cache, limit)
    job.start()
    if job.servers:
        job.servers.come()
    done, failures = list[Kill](), check(whole)
    try:
        signals = ["kill"] * kills + ["term"] * terms
        rng.shuffle(signals)
        for number, kind_of_signal in enumerate(signals, 1):
            now = list[str]()
            if kind_of_signal == "term":
                kill, now = end(job, rng)
            else:
                kill = strike(job, rng, after_commit=after_commit)
            done.append(kill)
            failures += (now := now + check(job))
            if kill.how != "ended" and kill.seconds > limit + STAY:
                now.append(f"{kind}: {kill} was noticed after {kill.seconds:.0f} s")
                failures += now[-1:]
            print(
                f"{kind}: kill {number}: {kill.victim} {kill.how}, aimed at {kill.aim}, after "
                f"checkpoint {job.newest()} of {steps}; noticed after {kill.seconds:.1f} s; "
                f"{'FAILED' if now else 'passed'}",
                flush=True,
            )
        job.wait()
    finally:
        job.stop()
    failures += check(job)
    print(report(audit(job.run_folder)))
    different = differences(job, whole)
    if not kind.startswith("free"):
        failures += different
    return {
        "kind": kind,
        "steps": steps,
        "victims": collections.Counter(f"{kill.victim} {kill.how}" for kill in done),
        "restarts": job.restarts() + sum(kill.victim == LAUNCHER for kill in done),
        "silence": max((kill.seconds for kill in done if kill.how != "ended"), default=0.0),
        "equal": not different,
        "failures": failures,
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return one line for each kind."""
    lines = [
        "| job | victims | attempts after the first | silence | bits | audit |",
        "|" + "---|" * 6,
    ]
    for row in rows:
        victims = ", ".join(f"{name} {n}" for name, n in sorted(row["victims"].items()))
        bits = "equal" if row["equal"] else "OTHER"
        verdict = "FAILED" if row["failures"] else "passed"
        silence = f"{row['silence']:.0f} s"
        cells = (row["kind"], victims, str(row["restarts"]), silence, bits, verdict)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


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
    parser.add_argument(
        "--limit", type=int, default=45, help="seconds of silence; more where imports take as long"
    )
    parser.add_argument("--folder", type=Path, help="keep the runs there; it must not exist")
    parser.add_argument("--json", type=Path, default=Path("chaos_jobs.json"), help="output file")
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
        rows = []
        each = zip(
            kinds,
            shared(arguments.kills, len(kinds)),
            shared(arguments.terms, len(kinds)),
            strict=True,
        )
        for kind, kills, terms in each:
            after_commit = arguments.after_commit
            rows.append(
                torment(folder, kind, kills, rng, arguments.limit, terms, after_commit=after_commit)
            )
            arguments.json.write_text(
                json.dumps({"benchmark": "chaos_jobs", "rows": rows}, indent=1)
            )
    print(table(rows))
    for row in rows:
        print(*row["failures"], sep="\n", end="")
    return int(any(row["failures"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
