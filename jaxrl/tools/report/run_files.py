"""Read what a run folder holds, as far as that can be read; notes tell the rest.

Nothing in the folder is written to. A run may go on meanwhile, or may have been killed.
"""

import difflib
import glob
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from jaxrl.records.batch_file import batch_path
from jaxrl.records.ledger import FILE, read_rollouts
from jaxrl.records.run_config import CONFIG, read_config
from jaxrl.tools.audit.lineage import open_run

METRICS, ROLLOUTS = "metrics.jsonl", "rollouts"
RUN_FOLDER = "<trainer.log_path>/<trainer.run_name>"
TRAINED = "trained"
# Trajectories that are in a rollout file: the filter of dynamic sampling keeps the others out.
_ENDED = """FROM live_ends e JOIN trajectories t ON t.id = e.trajectory_id
    JOIN groups g ON g.id = t.group_id WHERE e.reason IS NOT 'dynamic_sampling'"""
T = TypeVar("T")


@dataclass
class RunFiles:
    """Hold what is read of one run.

    Attributes:
        lines: of metrics.jsonl, by step, in order.
        settings: config.yaml; {} = not there or damaged.
        attempts: starts of the process, of the ledger, with the steps that each finished.
        ends: where trajectories ended, on the surviving lineage: reason -> number.
        dropped: reason of each trajectory of a rollout file that was not trained, by ledger id.
        stops: reasons why trajectories stopped.
        rollouts: step -> file of its trajectories.
        data_rows: source of the data -> its rows, read when one is asked for; see `prompt_rows`.
        has_ledger: `attempts`, `ends` and `dropped` are known.
        notes: what is missing or damaged, and what that means; for the reader of the page.
        step_notes: the same of files of single steps: what -> step -> reason. See `all_notes`.
    """

    folder: Path
    lines: dict[int, dict[str, float]] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    attempts: list[dict[str, Any]] = field(default_factory=list)
    ends: dict[str, int] = field(default_factory=dict)
    dropped: dict[int, str] = field(default_factory=dict)
    stops: list[str] = field(default_factory=lambda: ["abort", "env_error", "length", "stop"])
    rollouts: dict[int, Path] = field(default_factory=dict)
    data_rows: dict[int, list[str]] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    has_ledger: bool = False
    notes: list[str] = field(default_factory=list)
    step_notes: dict[str, dict[int, str]] = field(default_factory=dict)

    @property
    def trainer(self) -> dict[str, Any]:
        """Return the group `trainer` of the config; {} where it is not known."""
        return self.group("trainer")

    def group(self, *path: str) -> dict[str, Any]:
        """Return the group of the config at a path of names; {} where it is not known."""
        found: Any = self.settings
        for name in path:
            found = found.get(name) if isinstance(found, dict) else None
        return found if isinstance(found, dict) else {}

    @property
    def name(self) -> str:
        """Return the name of the run folder."""
        return self.folder.resolve().name

    @property
    def last_step(self) -> int:
        """Return the step of the last line; 0 before the first step."""
        return max(self.lines, default=0)

    @property
    def total_steps(self) -> int | None:
        """Return the number of steps that the run is to do; None where that is not known."""
        size, epochs = self.trainer.get("train_batch_size"), self.trainer.get("epochs")
        prompts, most = self.facts.get("num_prompts"), self.trainer.get("max_training_steps")
        if not (isinstance(size, int) and isinstance(epochs, int) and size and prompts):
            return None
        steps = epochs * (prompts // size)
        return min(steps, most) if isinstance(most, int) else steps

    def note_of(
        self, what: str, action: Callable[[], T], otherwise: T, *, step: int | None = None
    ) -> T:
        """Return the result of an action; where it fails, what failed becomes a note.

        A page of a damaged run is worth more than none, whatever is damaged: hence any error.

        Args:
            step: whose file it is about; of all steps together there is one note.
        """
        try:
            return action()
        except Exception as error:
            kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
            reason = f"{kind}{' '.join(str(error).split())}"
            if step is None:
                self.notes.append(f"{what}: {reason}")
            else:
                self.step_notes.setdefault(what, {})[step] = reason
            return otherwise

    def all_notes(self) -> list[str]:
        """Return `notes`, and one for each kind of file that some steps lack."""
        several = []
        for what, reasons in self.step_notes.items():
            first, *rest = reasons
            more = f" and of {len(rest)} more up to step {rest[-1]}" if rest else ""
            several.append(f"{what} of step {first}{more}: {reasons[first]}")
        return [*self.notes, *several]

    def dumped_batch(self, step: int) -> Path | None:
        """Return the file that `trainer.dump_data_batch` wrote of a step, or None.

        Paths of a config are relative to where the run was started; that is tried, then a folder of
        that name in the run folder.
        """
        exports = self.trainer.get("export_path")
        if not isinstance(exports, str):
            return None
        for folder in (Path(exports), self.folder / Path(exports).name):
            if (path := batch_path(folder, step)).is_file():
                return path
        return None


def is_run(folder: Path) -> bool:
    """Return whether a folder holds anything that a run writes."""
    return any((folder / name).exists() for name in (METRICS, FILE, ROLLOUTS))


def run_folders(words: Sequence[str | Path]) -> list[Path]:
    """Return the run folders that are named, each once: runs, folders of runs, or patterns.

    Raises:
        ValueError: one of the words names no run.
    """
    found: dict[Path, None] = {}
    for word in words:
        folder = Path(word)
        if not folder.exists() and set("*?[") & set(str(word)):
            folders = [Path(name) for name in sorted(glob.glob(str(word))) if is_run(Path(name))]
        elif folder.is_dir() and not is_run(folder):
            folders = [path for path in sorted(folder.iterdir()) if is_run(path)]
        else:
            folders = [folder]
        if not folders and not folder.is_dir():
            raise ValueError(f"{word} matches no run folder, {RUN_FOLDER}")
        found |= dict.fromkeys(folders or [folder])  # one that is none says so when it is read
    return list(found)


def read_runs(words: Sequence[str | Path]) -> list[RunFiles]:
    """Read the runs that are named, see `run_folders` and `read_run`."""
    return [read_run(folder) for folder in run_folders(words)]


def read_run(folder: str | Path) -> RunFiles:
    """Read everything of a run folder but the contents of its rollout files.

    Raises:
        ValueError: it is no folder, or holds nothing that a run writes.
    """
    run = RunFiles(Path(folder))
    if not run.folder.is_dir():
        above = run.folder.parent
        runs = {path.name: path for path in above.glob("*") if is_run(path)}
        near = difflib.get_close_matches(run.folder.name, runs, n=1)
        hint = f"did you mean {runs[near[0]]}?" if near else f"give a run folder, {RUN_FOLDER}"
        raise ValueError(f"{folder} is not a folder: {hint}")
    if not is_run(run.folder):
        raise ValueError(
            f"{folder} holds none of {METRICS}, {FILE}, {ROLLOUTS}/: give a run folder, "
            f"{RUN_FOLDER}, of a run that has begun, or a folder of those"
        )
    _read_config(run)
    _read_metrics(run)
    _read_ledger(run)
    if not run.rollouts:
        _find_rollouts(run)
    return run


def _read_config(run: RunFiles) -> None:
    path = run.folder / CONFIG
    if not path.is_file():
        run.notes.append(
            f"no {CONFIG}: config, objective and the tokenizer's place are not known; put that of "
            "the run back"
        )
        return
    run.settings = run.note_of("put that of the run back", lambda: read_config(run.folder), {})


def _read_metrics(run: RunFiles) -> None:
    """Read all whole lines of the metrics."""
    path = run.folder / METRICS
    if not path.is_file():
        run.notes.append(f"no {METRICS}: there are no curves")
        return
    bad: list[int] = []
    lines: dict[int, dict[str, float]] = {}
    texts = path.read_text(encoding="utf-8", errors="replace").splitlines()
    for number, text in enumerate(texts, 1):
        try:
            line = json.loads(text)
            step, numbers = int(line["step"]), _numbers(line)
            if not 0 <= step < 2**32:
                raise ValueError(f"step {step}")
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            bad.append(number)
            continue
        lines.setdefault(step, {}).update(numbers)
    run.lines = dict(sorted(lines.items()))
    if bad == [len(texts)]:
        run.notes.append(f"the last line of {METRICS} is not whole: the run goes on, or was killed")
    elif bad:
        some = ", ".join(map(str, bad[:5])) + (" ..." if len(bad) > 5 else "")
        run.notes.append(f"{METRICS}: {len(bad)} damaged lines are left out ({some})")
    if not run.lines:
        run.notes.append(f"{METRICS} has no whole line yet: there are no curves")


def _numbers(line: Mapping[str, Any]) -> dict[str, float]:
    return {k: float(v) for k, v in line.items() if k != "step" and isinstance(v, int | float)}


def _read_ledger(run: RunFiles) -> None:
    if not (run.folder / FILE).is_file():
        run.notes.append(
            f"no {FILE}: restarts, the machine, and where trajectories ended are not known"
        )
        return
    run.has_ledger = run.note_of(FILE, lambda: _read_tables(run), False)


def _read_tables(run: RunFiles) -> bool:
    with open_run(run.folder) as ledger:
        run.facts = ledger.facts
        done = dict(ledger.rows("SELECT attempt, COUNT(*) FROM steps GROUP BY attempt"))
        surviving = dict(ledger.rows("SELECT attempt, COUNT(*) FROM live_steps GROUP BY attempt"))
        query = "SELECT attempt, from_step, started, origin, machine FROM attempts ORDER BY attempt"
        run.attempts = [
            {
                "attempt": attempt,
                "from_step": from_step,
                "started": started,
                "origin": origin,
                "machine": json.loads(machine),
                "steps": done.get(attempt, 0),
                "taken_back": done.get(attempt, 0) - surviving.get(attempt, 0),
            }
            for attempt, from_step, started, origin, machine in ledger.rows(query)
        ]
        query = "SELECT COALESCE(reason, ?), COUNT(*) FROM live_ends GROUP BY 1 ORDER BY 2 DESC"
        run.ends = dict(ledger.rows(query, TRAINED))
        query = "SELECT trajectory_id, reason FROM live_ends WHERE reason IS NOT NULL"
        run.dropped = dict(ledger.rows(f"{query} AND reason != 'dynamic_sampling'"))  # in no file
        run.stops = [x for (x,) in ledger.rows(f"SELECT DISTINCT stop_reason {_ENDED} ORDER BY 1")]
        files = dict(ledger.rows("SELECT step, file FROM live_steps ORDER BY step"))
    run.rollouts = {step: run.folder / file for step, file in files.items() if file is not None}
    gone = [step for step, path in run.rollouts.items() if not path.is_file()]
    for step in gone:
        del run.rollouts[step]
    if gone:
        run.notes.append(f"the rollout files of {len(gone)} steps are gone, as that of {gone[0]}")
    if unrecorded := [step for step, file in files.items() if file is None]:
        run.notes.append(
            f"{len(unrecorded)} steps have no trajectories: they ran with "
            "trainer.ledger.record_rollouts=false"
        )
    return True


def prompts_of_steps(run: RunFiles) -> dict[int, list[str]]:
    """Return the prompts of each step whose trajectories are recorded, by their uids."""
    found: dict[int, list[str]] = {step: [] for step in run.rollouts}
    if not run.has_ledger:
        for step, path in run.rollouts.items():

            def uids(path: Path = path) -> list[str]:
                return read_rollouts(path, with_routes=False)[1]

            found[step] = list(dict.fromkeys(run.note_of("trajectories", uids, [], step=step)))
        return found
    with open_run(run.folder) as ledger:
        for step, uid in ledger.rows(
            f"SELECT DISTINCT e.step, g.uid {_ENDED} ORDER BY e.step, g.id"
        ):
            if step in found:
                found[step].append(uid)
    return found


def _find_rollouts(run: RunFiles) -> None:
    """Find rollout files by their names, where no ledger says which belong to the run."""
    for path in (run.folder / ROLLOUTS).glob("step_*.npz"):
        number = path.stem.removeprefix("step_")
        if number.isdecimal():
            run.rollouts[int(number)] = path
    run.rollouts = dict(sorted(run.rollouts.items()))
    if not run.rollouts:
        run.notes.append("no recorded trajectories, see trainer.ledger.record_rollouts")
