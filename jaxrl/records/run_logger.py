"""The records of a run, and the loggers that it chose."""

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrl import activity
from jaxrl.files import replaced
from jaxrl.records.curve import Curve
from jaxrl.records.json_lines import JsonLines
from jaxrl.records.loggers import Logger, RunInfo, open_logger
from jaxrl.records.run_config import write_config
from jaxrl.redaction import redacted

REWARD_CURVES = (("reward/avg_raw_reward", "training"), ("eval/all/avg_score", "evaluation"))


class RunLogger:
    """Write `config.yaml`, a line per step to `metrics.jsonl`, and what the loggers want.

    A checkpoint must not be ahead of the lines before it: `flush` first, then commit.

    Args:
        folder: the run's folder; made if need be.
        loggers: names of `trainer.logger`.
        finished_steps: what a resumed run has behind it, see `JsonLines`.
        config: what the run was asked to do.
        project, run_name: for the loggers that have such.
        curves: metrics that `plot` draws over the steps, (name, label) each; ylabel: of them.
        read: is told of each line that a resumed run goes on from.

    Raises:
        FolderError: one of the first two cannot be written.
    """

    def __init__(
        self,
        folder: Path,
        loggers: Sequence[str],
        finished_steps: int,
        *,
        config: Mapping[str, Any] | None = None,
        project: str = "skyrl",
        run_name: str = "test_run",
        curves: Sequence[tuple[str, str]] = REWARD_CURVES,
        ylabel: str = "mean reward",
        read: Callable[[Mapping[str, float]], None] = lambda line: None,
    ) -> None:
        self.folder = folder
        plain = json.loads(json.dumps(config or {}))  # tuples are lists to YAML
        if config is not None:
            write_config(folder, plain)
        self._labels, self._ylabel = dict(curves), ylabel
        self._curves = {name: Curve() for name in self._labels}
        self._drawn = False  # all lines are in the picture

        def read_line(line: Mapping[str, float]) -> None:
            self._extend(int(line["step"]), line)
            read(line)

        self.lines = JsonLines(folder / "metrics.jsonl", finished_steps, read_line)
        run = RunInfo(folder, finished_steps, project, run_name, plain)
        self.loggers: dict[str, Logger] = {}
        for name in loggers:
            with self._left_out_if_it_fails(name):
                if (logger := open_logger(name, run)) is not None:
                    self.loggers[name] = logger

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Record the numbers of one step."""
        numbers = {name: float(value) for name, value in metrics.items()}
        self.lines.log(step, numbers)
        self._extend(step, numbers)
        self._each(lambda logger: logger.log(step, numbers))

    def flush(self) -> None:
        """Write everything logged so far to the disk."""
        self.lines.flush()
        self._each(lambda logger: logger.flush())

    def plot(self) -> Path:
        """Draw the curves to `curve.png`, unless nothing is new."""
        path = self.folder / "curve.png"
        if self._drawn and path.exists():
            return path
        from matplotlib.figure import Figure  # pyplot has state, and in a notebook a backend

        figure = Figure(figsize=(7, 4))
        axes = figure.subplots()
        for name, label in self._labels.items():
            if points := self._curves[name].points:
                axes.plot(
                    *zip(*points, strict=True), label=label, marker="o" if "eval" in name else ""
                )
        axes.set(xlabel="step", ylabel=self._ylabel, title=self.folder.name.replace("$", r"\$"))
        axes.grid(alpha=0.3)
        axes.legend()
        try:
            with replaced(path) as new:
                figure.savefig(new, dpi=120, format="png")  # a tight box is drawn twice
            self._drawn = True
        except Exception as error:  # a picture is no reason to end a run
            activity.warn(f"{path} could not be drawn ({type(error).__name__}: {error})")
        return path

    def close(self) -> None:
        """Close the records and every logger."""
        self.lines.close()
        self._each(lambda logger: logger.close())

    def _extend(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, curve in self._curves.items():
            if name in numbers:
                curve.add(step, numbers[name])
        self._drawn = False

    def _each(self, action: Callable[[Logger], None]) -> None:
        for name, logger in list(self.loggers.items()):
            with self._left_out_if_it_fails(name):
                action(logger)

    @contextlib.contextmanager
    def _left_out_if_it_fails(self, name: str) -> Iterator[None]:
        """Leave a logger out if it fails in the block, and say its error once.

        The run has better to do than to end for it.
        """
        try:
            yield
        except Exception as error:
            self.loggers.pop(name, None)
            reason = redacted(f"{type(error).__name__}: {error}")  # of a key that it did not take
            activity.warn(
                f"logger {name!r} failed and gets nothing more ({reason}). "
                f"The run goes on; {self.lines.path} has all numbers"
            )
