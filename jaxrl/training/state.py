"""The state of a run: where it starts, and what a step leaves in it beside the updates."""

from typing import Any

import jax
import numpy as np
import optax

from jaxrl.config.algorithm import KLCtrlConfig
from jaxrl.parallel import put, replicated
from jaxrl.training.critic import Critic
from jaxrl.training.optim import init_state
from jaxrl.training.policy import Policy
from jaxrl.training.rewards import next_kl_coef
from jaxrl.types import TrainState


def initial_state(
    policy: Policy,
    critic: Critic | None,
    optimizer: optax.GradientTransformation,
    like: TrainState,
    *,
    kl_coef: float,
) -> TrainState:
    """Return the state before the first step, from the model folders.

    Args:
        like: shapes and shardings of the state.
        kl_coef: where the KL controller starts.
    """
    shardings = jax.tree.map(lambda x: x.sharding, like.params)
    whole = replicated(policy.placement.mesh)
    state = init_state(optimizer, policy.initial(), shardings, whole, kl_coef=kl_coef)
    return state.replace(
        critic=critic and critic.initial(), ref_params=policy.first_reference(state.params)
    )


def finished_state(
    state: TrainState,
    policy: Policy,
    *,
    step: int,
    batches_drawn: int,
    steps_per_epoch: int,
    rows: int,
    metrics: dict[str, float],
    kl_ctrl: KLCtrlConfig,
) -> TrainState:
    """Return the state after the updates of a step: counts, the KL controller, a moving reference.

    An epoch ends with the step that draws the last of its batches.

    Args:
        batches_drawn: of the data, this step's among them.
        rows: trajectories of the step.
        metrics: of the step.
    """
    coef = next_kl_coef(float(state.kl_coef), metrics, kl_ctrl, rows)
    epoch_ended = int(state.batches_drawn) // steps_per_epoch < batches_drawn // steps_per_epoch
    if policy.moves_reference and epoch_ended:
        state = state.replace(ref_params=policy.moved_reference(state.params))
    numbers: dict[str, Any] = {
        "step": np.int32(step),
        "batches_drawn": np.int32(batches_drawn),
        "kl_coef": np.float32(coef),
    }
    return state.replace(**put(numbers, replicated(policy.placement.mesh)))
