"""A supervised run as a subject: the checks of its gradients, masks and checkpoints."""

import copy
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxrl import config as cfg, sft
from jaxrl.config.dataclass_config import flatten
from jaxrl.config.platform_defaults import settle
from jaxrl.models import hf
from jaxrl.records.checkpoint import recorded_settings
from jaxrl.tools.doctor.compilations import Compilations
from jaxrl.tools.doctor.cut import QUIET, ROWS, elsewhere, get
from jaxrl.tools.doctor.finding import bad_input
from jaxrl.tools.doctor.subject import Subject
from jaxrl.types import TrainBatch

TOKENS = 256  # of a conversation
CHECKS = (  # the others are about rollouts
    *("versions", "devices", "build", "data.tokenizer", "batch", "mask.outside", "mask.padding"),
    *("gradients.microbatches", "gradients.packing", "gradients.order", "gradients.mesh"),
    *("checkpoint.state", "checkpoint.step"),
)


class SupervisedSubject(Subject):
    """Hold a run of `jaxrl.sft`, cut down; see `Subject`."""

    def __init__(self, config: Any, folder: Path, compilations: Compilations) -> None:
        given = cfg.to_train_config(config)
        cfg.validate_sft(given, num_devices=len(jax.devices()))
        self.folder, self.compilations = folder, compilations
        resolved = cfg.resolve_sft(given)
        recorded = recorded_settings(resolved.trainer)
        self.given, self.known, self.made = settle(resolved, recorded=recorded).config, {}, {}
        given = cfg.with_settled(given, flatten(self.given))
        changes = _smaller(self.given)
        self.cuts = {
            name: (was, now) for name, now in changes.items() if (was := get(given, name)) != now
        }
        self.small = cfg.apply_overrides(elsewhere(given, folder, QUIET), changes)

    @property
    def run(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Return the trainer, which has config and tokenizer where a `BasePPOExp` has them."""
        return self.trainer

    def _build(self) -> Any:
        try:
            trainer: Any = sft.build(self.small)
            trainer.state = trainer.restore_or_init()
        except (ValueError, OSError) as error:
            raise bad_input(self.given, error) from error
        path = trainer.config.trainer.policy.model.path or ""  # validated

        def commit(step: int) -> str:
            return trainer.checkpointer.save(step, trainer.state, trainer.meta)

        # what checks ask of a trainer, and a supervised one has not
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
        for step in trainer.checkpointer.manager.all_steps():
            trainer.checkpointer.manager.delete(step)
        self.trainer.state = trainer.restore_or_init()

    def close(self) -> None:
        """Stop the threads that write."""
        trainer = self.made.get("trainer")
        if isinstance(trainer, sft.SFTTrainer):
            trainer.checkpointer.close()

    def _complete(self) -> TrainBatch:
        trainer: Any = self.trainer  # an SFTTrainer
        return trainer.next_batch(1)

    def _cut(self) -> TrainBatch:
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
