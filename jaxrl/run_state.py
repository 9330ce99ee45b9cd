"""The state of a run: where it starts, and what a step leaves in it beside the updates."""

from typing import TYPE_CHECKING

import jax
import numpy as np

from jaxrl.checkpoint import resume
from jaxrl.optim import init_state
from jaxrl.parallel import put, replicated
from jaxrl.rewards import next_kl_coef
from jaxrl.types import TrainState

if TYPE_CHECKING:
    from jaxrl.trainer import Trainer


def restore_or_init(trainer: "Trainer") -> TrainState:
    """The state of the checkpoint that the config points to, else that of the model folders.

    Each part of it is where it rests between updates.

    Raises:
        CheckpointError, FileNotFoundError: see `checkpoint.resume`.
    """
    settings, policy, critic = trainer.config.trainer, trainer.policy, trainer.critic
    of_critic = {"critic": critic.describe()} if critic else {}
    trainer.checkpoint_meta["model"] = policy.describe() | of_critic
    given = trainer.checkpointer, settings.resume_mode, settings.resume_path
    state = resume(*given, trainer.like, trainer.checkpoint_meta)
    if state is not None:
        print(f"resuming after step {int(state.step)}")
        if int(state.step) >= trainer.total_steps:
            print(
                f"nothing to do: {settings.ckpt_path} holds step {int(state.step)} of "
                f"{trainer.total_steps}. Raise trainer.epochs, or choose another "
                "trainer.run_name to start again"
            )
        if state.ref_params is not None:
            state = state.replace(ref_params=policy.moved_reference(state.ref_params))
    else:
        shardings = jax.tree.map(lambda x: x.sharding, trainer.like.params)
        whole, coef = replicated(trainer.mesh), settings.algorithm.kl_loss_coef
        state = init_state(trainer.optimizer, policy.initial(), shardings, whole, kl_coef=coef)
        state = state.replace(
            critic=critic and critic.initial(), ref_params=policy.first_reference(state.params)
        )
    if critic:
        state = state.replace(critic=critic.updater.rest(state.critic))
    return trainer.updater.rest(state)


def finished_state(trainer: "Trainer", step: int, rows: int) -> TrainState:
    """The state after the updates of a step: counts, the KL controller, a moving reference.

    An epoch ends with the step that draws the last of its batches.

    Args:
        rows: trajectories of the step.
    """
    state, control = trainer.state, trainer.config.trainer.algorithm.kl_ctrl
    coef = next_kl_coef(float(state.kl_coef), trainer.metrics, control, rows)
    before, now = (
        int(drawn) // trainer.steps_per_epoch
        for drawn in (state.batches_drawn, trainer.batches_drawn)
    )
    if trainer.policy.moves_reference and now > before:
        state = state.replace(ref_params=trainer.policy.moved_reference(state.params))
    numbers = {
        "step": np.int32(step),
        "batches_drawn": np.int32(trainer.batches_drawn),
        "kl_coef": np.float32(coef),
    }
    return state.replace(**put(numbers, trainer.like.step.sharding))
