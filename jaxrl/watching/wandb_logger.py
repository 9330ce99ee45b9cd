"""Weights & Biases. `WANDB_MODE=offline` writes under `<run folder>/wandb` alone."""

import os
import uuid
from collections.abc import Mapping

import wandb  # pyright: ignore[reportMissingImports]
from tqdm import tqdm

from jaxrl.watching.loggers import CLOSE_SECONDS, RunInfo

INIT_SECONDS = 60.0


class WandbLogger:
    """A W&B run of `trainer.project_name`, offline where the server cannot be had.

    A resumed run goes on under its id; W&B leaves out the steps that it has already.
    """

    def __init__(self, run: RunInfo) -> None:
        self.info, run_id = run, run.run_id("wandb") or uuid.uuid4().hex[:8]
        run.keep_run_id("wandb", run_id)
        try:
            self.run = self._init(run_id, mode=None)
        except Exception as error:  # no key, no server
            tqdm.write(
                f"W&B: {type(error).__name__}: {error}. The run is recorded in {run.folder}/wandb: "
                "`wandb sync` that folder later"
            )
            self.run = self._init(run_id, mode="offline")

    def _init(self, run_id: str, mode: str | None) -> "wandb.Run":
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
        """W&B's process writes them."""

    def close(self) -> None:
        """Wait until the server has everything."""
        self.run.finish()
