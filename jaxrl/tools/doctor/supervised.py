"""Examine a run of `jaxrl.sft`: its gradients, masks and checkpoints."""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np

from jaxrl import config as cfg, sft
from jaxrl.config.dataclass_config import flatten
from jaxrl.config.platform_defaults import settle
from jaxrl.models import hf
from jaxrl.records.checkpoint import recorded_settings
from jaxrl.tools.doctor.examined_run import ExaminedRun, Program
from jaxrl.tools.doctor.finding import bad_input
from jaxrl.tools.doctor.smaller_config import QUIET, ROWS, differences, written_elsewhere
from jaxrl.types import TrainBatch

TOKENS = 256  # of a conversation


class ExaminedSFT(ExaminedRun):
    """Hold a run of `jaxrl.sft`, made smaller; see `ExaminedRun`."""

    def __init__(self, config: Any, folder: Path, programs: Sequence[Program]) -> None:
        written = cfg.to_train_config(config)
        cfg.validate_sft(written, num_devices=len(jax.devices()))
        self.folder, self.programs, self.known, self.made = folder, programs, {}, {}
        resolved = cfg.resolve_sft(written)
        recorded = recorded_settings(resolved.trainer)
        self.full_config = settle(resolved, recorded=recorded).config
        changes = _smaller(self.full_config)
        before = cfg.with_settled(written, flatten(self.full_config))
        self.changes = differences(before, changes)
        self.small_config = cfg.apply_overrides(written_elsewhere(before, folder, QUIET), changes)

    @property
    def config(self) -> cfg.TrainConfig:
        """Return the config of the small run."""
        return self.trainer.config

    @property
    def tokenizer(self) -> Any:
        """Return the tokenizer of the small run."""
        return self.trainer.tokenizer

    def _build(self) -> Any:
        try:
            trainer = sft.build(self.small_config)
            trainer.state = trainer.restore_or_init()
        except (ValueError, OSError) as error:
            raise bad_input(self.full_config, error) from error
        path = trainer.config.trainer.policy.model.path or ""  # validated

        def commit(step: int) -> str:
            return trainer.checkpointer.save(step, trainer.state, trainer.meta)

        # what checks ask of a trainer, and one of jaxrl.sft does not have
        vars(trainer).update(
            eos_token_ids=sorted({trainer.tokenizer.eos_token_id, *hf.eos_token_ids(path)}),
            commit=commit,
            load_reference=lambda moved: None,
            batches_drawn=0,
        )
        return trainer

    def restart(self) -> None:
        """Restore the run after a check that failed in the middle: the state may be gone."""
        trainer = copy.copy(self.trainer)
        for step in trainer.checkpointer.files.steps():
            trainer.checkpointer.files.delete(step)
        self.trainer.state = trainer.restore_or_init()

    def close(self) -> None:
        """Stop the threads that write."""
        trainer = self.made.get("trainer")
        if isinstance(trainer, sft.SFTTrainer):
            trainer.checkpointer.close()

    def _complete(self) -> TrainBatch:
        return cast(sft.SFTTrainer, self.trainer).next_batch(1)

    def _first_minibatch(self) -> TrainBatch:
        return self.batch.replace(advantages=np.zeros(self.batch.tokens.shape, np.float32))

    def train(self) -> None:
        """Train one step."""
        trainer = self.trainer
        trainer.train_step(int(trainer.state.step) + 1)


def _smaller(config: cfg.TrainConfig) -> dict[str, Any]:
    """Return the changes that leave few conversations, cut to few tokens."""
    trainer, groups = config.trainer, cfg.batch_groups(config, len(jax.devices()))
    rows = min(trainer.train_batch_size, max(ROWS, 2 * groups))
    longest = config.sft.max_length
    return {
        "trainer.train_batch_size": rows,
        "trainer.micro_train_batch_size_per_gpu": min(
            trainer.micro_train_batch_size_per_gpu, max(rows // (2 * groups), 1)
        ),
        "sft.max_length": TOKENS if longest is None else min(longest, TOKENS),
        "sft.overlong": "truncate",
        "trainer.policy.optimizer_config.num_warmup_steps": 0,
    }
