"""Read the surviving lineage of a run: its ledger without the rows that crashes took back.

`run.db` is only read, in one transaction: a run may go on meanwhile, or may have been killed and
have left rows in the log beside the database (`run.db-wal`).
"""

import contextlib
import itertools
import json
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from etils import epath

from jaxrl.data.order import DataOrder, data_order
from jaxrl.files import DamagedFile, as_path
from jaxrl.records.checkpoint_folders import checkpoint_steps
from jaxrl.records.ledger.database import FILE, FORMATS
from jaxrl.records.run_config import CONFIG, read_config
from jaxrl.records.sealed_tables import damage, is_sealed
from jaxrl.types import Prompt

TABLES = ("groups", "trajectories", "ends", "steps")
# What comes of a field or a row that no run writes.
_NOT_AS_WRITTEN = (
    ArithmeticError,
    AttributeError,
    LookupError,
    TypeError,
    UnicodeDecodeError,
    json.JSONDecodeError,
)


REMEDY = (
    "Put a copy in its place; or move it away: the run then goes on with a new one, which knows "
    "nothing earlier"
)


class NothingToAudit(ValueError):
    """Say that a folder has no ledger that can be read."""


@dataclass(frozen=True)
class AuditedRun:
    """Hold a run folder and one snapshot of its ledger.

    The views live_groups, live_trajectories, live_ends and live_steps are the surviving lineage.

    Attributes:
        facts: seed, train_batch_size, num_prompts, samples, ... as the run wrote them.
        settings: its config.yaml.
        attempt, from_step, first_ordinal, origin: of the attempt that the lineage begins with; 0
            and "" where the whole history is known.
        last_step: finished steps.
        checkpoints: steps of those that were there before the snapshot, which has their rows.
    """

    folder: Path
    db: sqlite3.Connection
    run_id: str
    facts: dict[str, Any]
    settings: dict[str, Any]
    attempt: int
    from_step: int
    first_ordinal: int
    origin: str
    last_step: int
    checkpoints: list[int]

    def rows(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        """Return the result of a query."""
        return self.db.execute(query, values).fetchall()

    def pairs(self, query: str) -> np.ndarray:
        """Return the result of a query as integers [rows, 2]."""
        return np.array(self.rows(query), np.int64).reshape(-1, 2)

    @cached_property
    def damage(self) -> str:
        """Return what of the ledger is not as the run wrote it, in words; "" = nothing."""
        return damage(self.db)

    @property
    def is_sealed(self) -> bool:
        """Return whether its rows have checksums; those of earlier versions have none."""
        return is_sealed(self.db)

    @property
    def trainer(self) -> dict[str, Any]:
        """Return the group `trainer` of the config."""
        return self.settings["trainer"]

    @property
    def checkpoint_folder(self) -> epath.Path:
        """Return `trainer.ckpt_path` as a path."""
        return as_path("trainer.ckpt_path", self.trainer["ckpt_path"])

    @property
    def schedule(self) -> str:
        """Return "sync", or of an asynchronous run "lockstep" or "free"."""
        settings = self.trainer.get("fully_async") or {}
        return settings.get("schedule", "free") if settings.get("enabled") else "sync"

    @property
    def shares(self) -> list[range]:
        """Return the places in a batch whose prompts each engine of the run samples in order."""
        ends = self.facts.get("shares", [self.facts["train_batch_size"]])
        return [range(begin, end) for begin, end in itertools.pairwise([0, *ends])]

    @cached_property
    def data(self) -> list[str]:
        """Return the uids of the training prompts, in the order of the data."""
        return [uid for (uid,) in self.rows("SELECT uid FROM data ORDER BY row")]

    @cached_property
    def order(self) -> DataOrder:
        """Return the order in which the run visits the prompts."""
        settings = self.settings.get("data", {})  # older runs have neither
        weights, total = settings.get("train_data_weights") or (), self.facts["num_prompts"]
        sources = [Prompt(uid, [], (), "").source for uid in self.data] if weights else [0] * total
        return data_order(
            sources,
            self.facts["train_batch_size"],
            self.facts["seed"],
            weights=weights,
            shuffle=settings.get("shuffle", True),
        )

    def uids(self, ordinals: np.ndarray) -> list[str]:
        """Return the prompts that the order of the data has at these places, over all epochs.

        "?" for one that is not among those that the ledger lists.
        """
        batches, places = np.divmod(ordinals, self.order.batch_size)
        rows_of = {batch: self.order.batch(batch) for batch in np.unique(batches).tolist()}
        rows = [rows_of[b][p] for b, p in zip(batches.tolist(), places.tolist(), strict=True)]
        return [self.data[row] if row < len(self.data) else "?" for row in rows]


@contextlib.contextmanager
def open_run(folder: Path) -> Iterator[AuditedRun]:
    """Open the run in a folder while the block runs.

    Raises:
        NothingToAudit: there is no ledger that can be read; the message says what to do.
    """
    path = folder / FILE
    if not path.is_file():
        raise NothingToAudit(
            f"{folder} holds no {FILE}: give the run folder, <trainer.log_path>/<trainer.run_name>"
        )
    if not (folder / CONFIG).is_file():
        raise NothingToAudit(f"{folder} holds no {CONFIG} beside {FILE}: put that of the run back")
    settings = _settings(folder)
    saved = checkpoint_steps(as_path("trainer.ckpt_path", settings["trainer"]["ckpt_path"]))
    try:
        with _connected(path) as db:
            yield _read(folder, db, settings, saved)
    except (sqlite3.Error, *_NOT_AS_WRITTEN) as error:
        raise NothingToAudit(
            f"{path} cannot be read ({type(error).__name__}: {error}): it is damaged, or no "
            f"ledger. {REMEDY}"
        ) from error


def _settings(folder: Path) -> dict[str, Any]:
    """Return the config that a run wrote."""
    try:
        settings = read_config(folder)
        if not isinstance(settings["trainer"]["ckpt_path"], str):
            raise TypeError("trainer.ckpt_path is no text")
    except DamagedFile as error:
        raise NothingToAudit(f"{error}: put that of the run back") from error
    except _NOT_AS_WRITTEN as error:
        raise NothingToAudit(
            f"{folder / CONFIG} is not the config of a run ({type(error).__name__}: {error}): put "
            "that of the run back"
        ) from error
    return settings


@contextlib.contextmanager
def _connected(path: Path) -> Iterator[sqlite3.Connection]:
    """Open the ledger for reading, in a way that leaves every file as it is."""
    log, shared = (path.with_name(f"{path.name}-{end}") for end in ("wal", "shm"))
    with contextlib.ExitStack() as stack:
        if shared.exists():  # a run has it open, or was killed
            how = "mode=ro&readonly_shm=1"
        elif log.exists():  # without the index of its log, which SQLite would make beside it
            copies = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="jaxrl_ledger_")))
            for file in (path, log):
                shutil.copyfile(file, copies / file.name)
            path, how = copies / path.name, "mode=ro"
        else:
            how = "immutable=1"
        uri = f"{path.absolute().as_uri()}?{how}"
        db = sqlite3.connect(uri, uri=True, isolation_level=None)
        yield stack.enter_context(contextlib.closing(db))


def _read(
    folder: Path, db: sqlite3.Connection, settings: dict[str, Any], saved: list[int]
) -> AuditedRun:
    db.execute("BEGIN")
    tables = {name for (name,) in db.execute("SELECT name FROM sqlite_master")}
    if not tables or ("attempts" in tables and not db.execute("SELECT 1 FROM attempts").fetchone()):
        if found := damage(db):
            raise sqlite3.DatabaseError(found)
        raise NothingToAudit(f"{folder / FILE} is empty: the run has not begun yet, let it start")
    for name in TABLES:
        db.execute(f"CREATE TEMP VIEW live_{name} AS SELECT * FROM {name} WHERE superseded IS NULL")
    found = db.execute("SELECT run_id, format, facts FROM runs").fetchone()
    if found is None or found[1] not in FORMATS:
        raise NothingToAudit(
            f"{folder / FILE} has format {found and found[1]}, this jaxrl reads {FORMATS[-1]}: "
            "audit it with the version that wrote it"
        )
    start = db.execute(
        "SELECT attempt, from_step, first_ordinal, origin FROM attempts "
        "WHERE origin != '' ORDER BY attempt DESC LIMIT 1"
    ).fetchone()
    # an attempt from step 0 took all before it back, foreign history too
    fresh = db.execute("SELECT MAX(attempt) FROM attempts WHERE from_step = 0").fetchone()[0] or 1
    if start is None or start[0] < fresh:
        start = fresh, 0, 0, ""
    attempt, from_step, first_ordinal, origin = start
    run_id, _, facts = found
    (last,) = db.execute("SELECT MAX(step) FROM live_steps").fetchone()
    return AuditedRun(
        folder=folder,
        db=db,
        run_id=run_id,
        facts=json.loads(facts),
        settings=settings,
        attempt=attempt,
        from_step=from_step,
        first_ordinal=first_ordinal,
        origin=origin,
        last_step=from_step if last is None else last,
        checkpoints=saved,
    )
