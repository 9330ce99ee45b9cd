"""AdamW with warm-up and schedule, and the update that skips a gradient that is not finite."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxrl.config.model import SCHEDULERS
from jaxrl.models.transformer import abstract_params
from jaxrl.parallel.jit_once import Bound, jit_once, shapes_once
from jaxrl.training.moments import is_rows8, moment_sharding, scale_by_resting_adam
from jaxrl.types import CriticState, TrainState

State = TypeVar("State", TrainState, CriticState)


@functools.cache
def make_schedule(
    scheduler: str, *, lr: float, num_warmup_steps: int, total_steps: int
) -> optax.Schedule:
    """Make the learning rate by optimizer update, under the names of transformers' SchedulerType.

    constant ignores the warm-up; the others rise linearly from 0 over `num_warmup_steps`, then
    constant_with_warmup stays, linear and cosine fall to 0 at `total_steps`. It is the same for
    equal arguments: schedules are compared by identity, and jitted updates by their schedules.

    Raises:
        ValueError: unknown scheduler.
    """
    decay_steps = max(total_steps - num_warmup_steps, 1)
    after = {
        "constant": optax.constant_schedule(lr),
        "constant_with_warmup": optax.constant_schedule(lr),
        "linear": optax.linear_schedule(lr, 0.0, decay_steps),
        "cosine": optax.cosine_decay_schedule(lr, decay_steps),
    }
    if scheduler not in after:
        raise ValueError(f"scheduler={scheduler!r} is unknown; choose one of {list(SCHEDULERS)}")
    if scheduler == "constant" or num_warmup_steps == 0:
        return after[scheduler]
    warmup = optax.linear_schedule(0.0, lr, num_warmup_steps)
    return optax.join_schedules([warmup, after[scheduler]], [num_warmup_steps])


@functools.cache
def make_optimizer(
    schedule: optax.Schedule,
    *,
    adam_betas: tuple[float, float],
    weight_decay: float,
    max_grad_norm: float,
    state_dtype: str = "float32",
) -> optax.GradientTransformation:
    """Make the optimizer: clip by global norm, then AdamW.

    Its decay is decoupled, on every parameter. It is the same for equal arguments, as a schedule.

    Loshchilov & Hutter, https://arxiv.org/abs/1711.05101.

    Args:
        state_dtype: of the moments between updates, one of `STATE_DTYPES`.
    """
    b1, b2 = adam_betas
    adam = optax.scale_by_adam(b1, b2)
    if state_dtype != "float32":
        adam = scale_by_resting_adam(b1, b2, state_dtype)
    decay, rate = optax.add_decayed_weights(weight_decay), optax.scale_by_learning_rate(schedule)
    clip = optax.clip_by_global_norm(max_grad_norm)
    return optax.chain(clip, optax.chain(adam, decay, rate))


def new_state(
    optimizer: optax.GradientTransformation,
    params: Any,
    kl_coef: float = 0.0,
    algorithm_state: Any = None,
) -> TrainState:
    """Return the policy's state before the first step.

    Args:
        kl_coef: first coefficient of the KL in the reward.
        algorithm_state: first values of what authors keep, by name.
    """
    zero = jnp.zeros((), jnp.int32)
    return TrainState(
        params,
        optimizer.init(params),
        step=zero,
        skipped_updates=zero,
        kl_coef=jnp.float32(kl_coef),
        batches_drawn=zero,
        algorithm_state=jax.tree.map(jnp.asarray, algorithm_state),
    )


def new_critic_state(optimizer: optax.GradientTransformation, params: Any) -> CriticState:
    """Return the critic's state before the first step."""
    return CriticState(params, optimizer.init(params), skipped_updates=jnp.zeros((), jnp.int32))


def init_state(
    optimizer: optax.GradientTransformation,
    params: Any,
    shardings: Any,
    whole: Any,
    *,
    new: Callable[..., State] = new_state,
    **numbers: Any,
) -> State:
    """Make a fresh state around `params`, which are donated.

    Moments are placed like their parameters, counts whole.

    Args:
        new: whose state.
        numbers: of it.
    """
    make = Bound(_made, new, optimizer)
    numbers = jax.tree.map(lambda x: x if isinstance(x, jax.Array) else np.asarray(x), numbers)
    shapes = shapes_once(make, params, numbers)
    placement = _state_shardings(optimizer, shapes, shardings, whole)
    return jit_once(make, out_shardings=placement, donate_argnums=0)(params, numbers)


def _made(
    new: Callable[..., State],
    optimizer: optax.GradientTransformation,
    params: Any,
    numbers: dict[str, Any],
) -> State:
    return new(optimizer, params, **numbers)


def abstract_state(
    optimizer: optax.GradientTransformation,
    model: Any,
    shardings: Any,
    whole: Any,
    *,
    new: Callable[..., State] = new_state,
    **numbers: Any,
) -> State:
    """Return shapes, dtypes and shardings of a model's state; nothing is allocated.

    See `init_state`.
    """
    params = abstract_params(model)
    shapes = shapes_once(Bound(_made, new, optimizer), params, numbers)
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        shapes,
        _state_shardings(optimizer, shapes, shardings, whole),
    )


def make_apply(
    optimizer: optax.GradientTransformation, schedule: optax.Schedule, role: str = "policy"
) -> Callable[[State, optax.Updates], tuple[State, dict[str, jax.Array]]]:
    """Make the update `(state, gradients) -> (state, metrics)` of the policy, or of a "critic".

    A gradient with a NaN or inf changes nothing but `skipped_updates`: parameters, moments and the
    schedule stay where they were. `algorithm_state["lr_scale"]`, where there is one, multiplies the
    policy's learning rate. Equal arguments make equal updates, see `jit_once`.
    """

    return Bound(apply, optimizer, schedule, role)


def apply(
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule,
    role: str,
    state: State,
    grads: optax.Updates,
) -> tuple[State, dict[str, jax.Array]]:
    """Return the state after an update, and its metrics, see `make_apply`."""
    grad_norm = optax.tree.norm(grads)
    finite = jnp.isfinite(grad_norm)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    kept = state.algorithm_state if isinstance(state, TrainState) else None
    scale = (kept or {}).get("lr_scale")
    if scale is not None:  # AdamW's updates, decay included, are proportional to the rate
        updates = jax.tree.map(lambda x: x * scale.astype(x.dtype), updates)
    changed = (optax.apply_updates(state.params, updates), opt_state)
    params, opt_state = jax.tree.map(
        lambda new, old: jnp.where(finite, new, old), changed, (state.params, state.opt_state)
    )
    count = optax.tree_utils.tree_get(state.opt_state, "count", filtering=_is_schedule_count)
    new_state = state.replace(
        params=params,
        opt_state=opt_state,
        skipped_updates=state.skipped_updates + jnp.where(finite, 0, 1),
    )
    lr = jnp.asarray(schedule(count))
    return new_state, {
        "grad_norm": grad_norm,
        f"{role}_lr": lr if scale is None else lr * scale,
        "skipped_updates": jnp.where(finite, 0, 1),
    }


def _state_shardings(
    optimizer: optax.GradientTransformation, shapes: State, shardings: Any, whole: Any
) -> State:
    moments = optax.tree_utils.tree_map_params(
        optimizer,
        moment_sharding,
        shapes.opt_state,
        shardings,
        transform_non_params=lambda _: whole,
        is_leaf=is_rows8,
    )
    counts = jax.tree.map(lambda _: whole, shapes.replace(params=None, opt_state=None))
    return counts.replace(params=shardings, opt_state=moments)


def _is_schedule_count(path: tuple, _: object) -> bool:
    """Return whether a count of updates is the schedule's.

    Adam and the schedule both count updates; either number will do.
    """
    return any("ScaleBySchedule" in str(getattr(key, "tuple_name", "")) for key in path)
