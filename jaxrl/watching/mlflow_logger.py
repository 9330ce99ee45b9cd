"""MLflow: what MLFLOW_TRACKING_URI names, or files under `<trainer.log_path>/mlruns`."""

import os
import re
import time
from collections.abc import Iterator, Mapping
from typing import Any

os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # MLflow 3 asks for it; before its import
from mlflow import MlflowClient  # noqa: E402  # pyright: ignore[reportMissingImports]
from mlflow.entities import Metric, Param  # noqa: E402  # pyright: ignore[reportMissingImports]

from jaxrl.watching.loggers import RunInfo  # noqa: E402

STEP = "trainer/global_step"
AT_ONCE, VALUE_CHARACTERS = 100, 500  # parameters of a call, and of a value; servers take no more


class MlflowLogger:
    """A run of the experiment `trainer.project_name`.

    A resumed run goes on under its id; the steps that MLflow has already are left out.
    """

    def __init__(self, run: RunInfo) -> None:
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
        now = time.time_ns() // 1_000_000
        metrics = [Metric(_allowed(name), x, now, step) for name, x in numbers.items()]
        self.client.log_batch(self.run_id, metrics=metrics)

    def flush(self) -> None:
        """Nothing waits."""

    def close(self) -> None:
        """The run is over."""
        self.client.set_terminated(self.run_id)


def _allowed(name: str) -> str:
    """MLflow takes no other characters in a name."""
    return re.sub(r"[^\w./: -]", "_", name)


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield _allowed(f"{prefix}{name}"), str(value)[:VALUE_CHARACTERS]
