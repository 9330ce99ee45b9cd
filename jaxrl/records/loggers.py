"""Where the numbers of a run go, by the names of `trainer.logger`.

No logger can stop a run or hold it up: one that fails is named once and left out, and those that
talk to a server do so in a thread of their own.
"""

import importlib.util
import os
import queue
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from jaxrl import activity
from jaxrl.files import replace_text
from jaxrl.redaction import redacted

QUEUE_STEPS = 1000  # steps that wait for a server at most
CLOSE_SECONDS = 30.0  # that the end of a run waits for one
INIT_SECONDS = 60.0  # that W&B may take to open a run
STEP = "trainer/global_step"
AT_ONCE, VALUE_CHARACTERS = 100, 500  # MLflow: parameters of a call, and of a value; no more
PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb", "mlflow": "mlflow"}


@dataclass(frozen=True)
class RunInfo:
    """Hold what a logger may say about a run.

    Attributes:
        folder: of the run.
        finished_steps: that a resumed run has behind it; 0 = it starts afresh.
        config: nested, JSON.
    """

    folder: Path
    finished_steps: int
    project: str = "skyrl"
    run_name: str = "test_run"
    config: Mapping[str, Any] = field(default_factory=dict)

    def run_id(self, name: str) -> str | None:
        """Return the id under which a tracker knows the run that is resumed, or None."""
        path = self._id_file(name)
        return (
            path.read_text(encoding="utf-8").strip()
            if self.finished_steps and path.exists()
            else None
        )

    def keep_run_id(self, name: str, run_id: str) -> None:
        """Keep the id for the run that resumes this one."""
        replace_text(self._id_file(name), f"{run_id}\n")

    def _id_file(self, name: str) -> Path:
        return self.folder / f"{name}_run_id.txt"


class Logger(Protocol):
    """Take the numbers of each step, in order."""

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Take the numbers of a step."""

    def flush(self) -> None:
        """Write what waits: a checkpoint is about to be committed."""

    def close(self) -> None:
        """End the log: the run is over."""


def check_installed(names: Sequence[str]) -> None:
    """Refuse loggers whose package is missing.

    Raises:
        ValueError: says how to get it.
    """
    for name in names:
        package = PACKAGES.get(name)
        if package and importlib.util.find_spec(package) is None:
            raise ValueError(
                f"trainer.logger={name!r} needs the package {package}, which is not installed: "
                f"pip install 'jaxrl[{name}]', or choose another logger"
            )


def open_logger(name: str, run: RunInfo) -> Logger | None:
    """Return the logger of that name; None for those that write no files of their own."""
    if name == "tensorboard":
        return TensorBoard(run.folder / "tensorboard", run.finished_steps)
    if name == "wandb":
        return Background(lambda: WandbLogger(run))
    if name == "mlflow":
        return Background(lambda: MlflowLogger(run))
    return None


class Background:
    """Run a logger in a thread of its own: the run never waits for its server.

    Args:
        make: opens the logger, in the thread.
    """

    def __init__(self, make: Callable[[], Logger]) -> None:
        self.queue: queue.Queue[tuple[int, Mapping[str, float]] | None] = queue.Queue(QUEUE_STEPS)
        self.error: Exception | None = None
        self.thread = threading.Thread(target=self._work, args=(make,), daemon=True)
        self.thread.start()

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Hand over the numbers of a step.

        Raises:
            Exception: that of an earlier call in the thread; queue.Full: the server is too slow.
        """
        self._raise()
        self.queue.put_nowait((step, numbers))

    def flush(self) -> None:
        """Do nothing: a server has no part in the commit of a checkpoint."""

    def close(self) -> None:
        """Wait for what is under way, for `CLOSE_SECONDS` at most.

        Raises:
            TimeoutError: there is still something; the process does not wait for it.
        """
        if self.error is None:
            self.queue.put(None, timeout=CLOSE_SECONDS)
        self.thread.join(CLOSE_SECONDS)
        self._raise()
        if self.thread.is_alive():
            raise TimeoutError(f"its server did not take everything within {CLOSE_SECONDS:g} s")

    def _raise(self) -> None:
        if self.error is not None:
            raise self.error

    def _work(self, make: Callable[[], Logger]) -> None:
        try:
            logger = make()
            while (item := self.queue.get()) is not None:
                logger.log(*item)
            logger.close()
        except Exception as error:  # told by the next `log`
            self.error = error


class TensorBoard:
    """Write an event file that hides what earlier ones in `folder` hold after `finished_steps`.

    The events are written by the caller's thread: tensorboardX's `SummaryWriter` leaves them to
    another one, and its `flush` does not wait for it.
    """

    def __init__(self, folder: Path, finished_steps: int) -> None:
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog  # pyright: ignore

        folder.mkdir(parents=True, exist_ok=True)
        self.events = EventsWriter(str(folder / "events"))
        start = SessionLog(status=SessionLog.START)
        self.events.write_event(Event(step=finished_steps + 1, session_log=start))

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Write the numbers of a step."""
        from tensorboardX.proto.event_pb2 import Event  # pyright: ignore
        from tensorboardX.proto.summary_pb2 import Summary  # pyright: ignore

        values = [Summary.Value(tag=name, simple_value=x) for name, x in numbers.items()]
        event = Event(step=step, wall_time=time.time(), summary=Summary(value=values))
        self.events.write_event(event)

    def flush(self) -> None:
        """Write everything logged so far to the disk."""
        self.events.flush()

    def close(self) -> None:
        """Close the file."""
        self.events.close()


class WandbLogger:
    """Log to a W&B run of `trainer.project_name`, offline where the server cannot be had.

    `WANDB_MODE=offline` writes under `<run folder>/wandb` alone. A resumed run goes on
    under its id; W&B leaves out the steps that it has already.
    """

    def __init__(self, run: RunInfo) -> None:
        self.info, run_id = run, run.run_id("wandb") or uuid.uuid4().hex[:8]
        run.keep_run_id("wandb", run_id)
        try:
            self.run = self._init(run_id, mode=None)
        except Exception as error:  # no key, no server
            reason = redacted(f"{type(error).__name__}: {error}")
            activity.warn(
                f"W&B: {reason}. The run is recorded in {run.folder}/wandb: `wandb sync` that "
                "folder later"
            )
            self.run = self._init(run_id, mode="offline")

    def _init(self, run_id: str, mode: str | None) -> Any:
        import wandb  # pyright: ignore[reportMissingImports]

        if mode is None and os.environ.get("WANDB_MODE", "online") == "online":
            wandb.Api()  # raises without a key; `init` would ask for one at the terminal
        return wandb.init(
            project=self.info.project,
            name=self.info.run_name,
            config=dict(self.info.config),
            dir=self.info.folder,
            id=run_id,
            resume="allow",
            mode=mode,
            settings=wandb.Settings(init_timeout=INIT_SECONDS, finish_timeout=CLOSE_SECONDS),
        )

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Hand the numbers of a step to W&B's own process."""
        self.run.log(dict(numbers), step=step)

    def flush(self) -> None:
        """Do nothing: W&B's process writes the numbers."""

    def close(self) -> None:
        """Wait until the server has everything."""
        self.run.finish()


class MlflowLogger:
    """Log to a run of the experiment `trainer.project_name`.

    It is in the store of MLFLOW_TRACKING_URI, else in files under `<trainer.log_path>/mlruns`.

    A resumed run goes on under its id; the steps that MLflow has already are left out.
    """

    def __init__(self, run: RunInfo) -> None:
        # MLflow 3 asks for it, before its import
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        from mlflow import MlflowClient  # pyright: ignore[reportMissingImports]
        from mlflow.entities import Param  # pyright: ignore[reportMissingImports]

        store = os.environ.get("MLFLOW_TRACKING_URI", f"file:{run.folder.parent.resolve()}/mlruns")
        self.client, run_id, self.newest = MlflowClient(store), run.run_id("mlflow"), -1
        if run_id is not None:
            self.run_id = run_id
            history = self.client.get_metric_history(run_id, STEP)
            self.newest = max((point.step for point in history), default=-1)
            self.client.update_run(run_id, status="RUNNING")
            return
        experiment = self.client.get_experiment_by_name(run.project)
        if experiment is None:
            number = self.client.create_experiment(run.project)
        else:
            number = experiment.experiment_id
        self.run_id = self.client.create_run(number, run_name=run.run_name).info.run_id
        run.keep_run_id("mlflow", self.run_id)
        params = [Param(key, value) for key, value in _flat(run.config)]
        for start in range(0, len(params), AT_ONCE):
            self.client.log_batch(self.run_id, params=params[start : start + AT_ONCE])

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Send the numbers of a step."""
        if step <= self.newest:
            return
        from mlflow.entities import Metric  # pyright: ignore[reportMissingImports]

        now = time.time_ns() // 1_000_000
        metrics = [Metric(_allowed(name), x, now, step) for name, x in numbers.items()]
        self.client.log_batch(self.run_id, metrics=metrics)

    def flush(self) -> None:
        """Do nothing: no numbers wait."""

    def close(self) -> None:
        """Tell MLflow that the run is over."""
        self.client.set_terminated(self.run_id)


def _allowed(name: str) -> str:
    """Replace the characters of a name that MLflow does not take."""
    return re.sub(r"[^\w./: -]", "_", name)


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield _allowed(f"{prefix}{name}"), str(value)[:VALUE_CHARACTERS]
