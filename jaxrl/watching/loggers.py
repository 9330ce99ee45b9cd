"""Where the numbers of a run go, by the names of `trainer.logger`.

No logger can stop a run or hold it up: one that fails is named once and left out, and those that
talk to a server do so in a thread of their own.
"""

import importlib.util
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

QUEUE_STEPS = 1000  # steps that wait for a server at most
CLOSE_SECONDS = 30.0  # that the end of a run waits for one
PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb", "mlflow": "mlflow"}


@dataclass(frozen=True)
class RunInfo:
    """What a logger may say about a run.

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
        """Under which a tracker knows the run that is resumed."""
        path = self._id_file(name)
        return path.read_text().strip() if self.finished_steps and path.exists() else None

    def keep_run_id(self, name: str, run_id: str) -> None:
        """For the run that resumes this one."""
        self._id_file(name).write_text(run_id + "\n")

    def _id_file(self, name: str) -> Path:
        return self.folder / f"{name}_run_id.txt"


class Logger(Protocol):
    """Takes the numbers of each step, in order."""

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """The numbers of a step."""

    def flush(self) -> None:
        """A checkpoint is about to be committed."""

    def close(self) -> None:
        """The run is over."""


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
    """The logger of that name; None for those that write no files of their own."""
    if name == "tensorboard":
        from jaxrl.watching.tensorboard import TensorBoard

        return TensorBoard(run.folder / "tensorboard", run.finished_steps)
    if name == "wandb":
        from jaxrl.watching.wandb_logger import WandbLogger

        return Background(lambda: WandbLogger(run))
    if name == "mlflow":
        from jaxrl.watching.mlflow_logger import MlflowLogger

        return Background(lambda: MlflowLogger(run))
    return None


class Background:
    """A logger in a thread of its own: the run never waits for its server.

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
        """A server has no part in the commit of a checkpoint."""

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
