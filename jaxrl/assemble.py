"""The weights, the optimizer and the update that a config asks for."""

import functools

import jax
import jax.numpy as jnp
import optax

from jaxrl import config as cfg
from jaxrl.config.microbatching import update_microbatching
from jaxrl.forward import log_probs_and_entropy
from jaxrl.models import hf
from jaxrl.models.adapter import AdaptedModel
from jaxrl.models.attention import choose_kernel
from jaxrl.models.transformer import (
    Params,
    TransformerConfig,
    abstract_params,
    init_params,
    logical_axes,
)
from jaxrl.offload import host_shardings
from jaxrl.optim import abstract_state, make_apply, make_optimizer, make_schedule
from jaxrl.parallel import Placement, batch_sharding, param_shardings, replicated
from jaxrl.parallel.rules import batch_devices
from jaxrl.types import TrainState
from jaxrl.update import Apply, Updater

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


def load_weights(
    trainer: cfg.TrainerConfig,
    role: cfg.PolicyConfig | cfg.RefConfig,
    model: TransformerConfig | AdaptedModel,
    shardings: Params,
) -> Params:
    """Parameters of the policy or the reference: from its folder, or random."""
    if isinstance(model, AdaptedModel):
        return init_params(model, trainer.seed, shardings)
    assert role.model.path is not None  # validated
    return hf.load_or_init(
        role.model.path,
        model,
        overrides=cfg.model_overrides(trainer, role),
        random_init=role.model.random_init,
        seed=trainer.seed,
        shardings=shardings,
    )


def load_reference(
    trainer: cfg.TrainerConfig, model: TransformerConfig | AdaptedModel, shardings: Params
) -> Params:
    """Parameters of the reference, in host memory with `cpu_offload`."""
    if trainer.ref.fsdp_config.cpu_offload:
        shardings = host_shardings(shardings, "trainer.ref.fsdp_config.cpu_offload")
    return load_weights(trainer, trainer.ref, model, shardings)


def assemble_optimizer(
    trainer: cfg.TrainerConfig, total_steps: int
) -> tuple[optax.GradientTransformation, optax.Schedule]:
    """The policy's optimizer and its learning rate by update; `total_steps` are training steps."""
    settings = trainer.policy.optimizer_config
    minibatches = trainer.train_batch_size // trainer.policy_mini_batch_size
    schedule = make_schedule(
        settings.scheduler,
        lr=settings.lr,
        num_warmup_steps=settings.num_warmup_steps,
        total_steps=total_steps * minibatches * trainer.update_epochs_per_batch,
    )
    optimizer = make_optimizer(
        schedule,
        adam_betas=(settings.adam_betas[0], settings.adam_betas[1]),
        weight_decay=settings.weight_decay,
        max_grad_norm=settings.max_grad_norm,
    )
    return optimizer, schedule


def assemble_update(
    config: cfg.TrainConfig,
    model: TransformerConfig | AdaptedModel,
    mesh: jax.sharding.Mesh,
    total_steps: int,
) -> tuple[optax.GradientTransformation, TrainState, Updater]:
    """The optimizer, the abstract state with its shardings, and the jitted update."""
    placement = place_model(config.trainer, model, mesh)
    optimizer, schedule = assemble_optimizer(config.trainer, total_steps)
    axes, shapes = logical_axes(model), abstract_params(model)
    shardings = param_shardings(mesh, axes, shapes, placement.rules)
    like = abstract_state(optimizer, model, shardings, replicated(mesh))
    apply = make_apply(optimizer, schedule)
    return optimizer, like, _updater(config, model, placement, like, apply)


def place_model(
    trainer: cfg.TrainerConfig, model: TransformerConfig | AdaptedModel, mesh: jax.sharding.Mesh
) -> Placement:
    """A mesh and the rules of the run, for a model that fits them.

    Raises:
        ValueError: the tensor axis does not divide the heads or the MLP width of the model, or the
            model is a flax module, which has no axes to split.
    """
    placement = Placement(mesh, cfg.sharding_rules(trainer.sharding_rules))
    sizes = {"heads": "num_heads", "mlp": "intermediate_size"}
    for axis, field in sizes.items():
        split = placement.size(getattr(placement.rules, axis))
        if split > 1 and isinstance(model, AdaptedModel):
            raise ValueError(f"mesh.tensor={split}: {model.name} is a flax module; set it to 1")
        if split > 1 and (whole := getattr(model, field)) % split:
            divisors = [n for n in range(1, mesh.size + 1) if whole % n == 0]
            raise ValueError(
                f"trainer.policy.mesh.tensor={split} does not divide the model's {field}={whole}; "
                f"set it to one of {divisors}"
            )
    return placement


def _kernel(
    trainer: cfg.TrainerConfig,
    model: TransformerConfig | AdaptedModel,
    mesh: jax.sharding.Mesh,
    dtype: jnp.dtype,
) -> str:
    """The attention kernel; a flax module brings its own attention."""
    if isinstance(model, AdaptedModel):
        return "xla"
    return choose_kernel(model, trainer.flash_attn, mesh.devices.flat[0].platform, dtype)


def _updater(
    config: cfg.TrainConfig,
    model: TransformerConfig | AdaptedModel,
    placement: Placement,
    like: TrainState,
    apply: Apply,
) -> Updater:
    """Forward, objective and apply, jitted for this mesh."""
    trainer = config.trainer
    assert trainer.algorithm.temperature is not None  # resolved
    mesh, rules = placement.mesh, placement.rules
    devices = batch_devices(mesh, rules)
    dtype = DTYPES["bfloat16" if trainer.bf16 else "float32"]
    forward = functools.partial(
        log_probs_and_entropy,
        model,
        temperature=trainer.algorithm.temperature,
        dtype=dtype,
        remat=trainer.remat_policy if trainer.gradient_checkpointing else "none",
        kernel=_kernel(trainer, model, mesh, dtype),
        placement=placement if mesh.size > 1 else None,
    )
    shardings = jax.tree.map(lambda x: x.sharding, like)
    field = "trainer.policy.optimizer_config.offload_after_step"
    offload = trainer.policy.optimizer_config.offload_after_step
    return Updater(
        forward,
        apply,
        algorithm=trainer.algorithm,
        shardings=shardings,
        resting=host_shardings(shardings.opt_state, field) if offload else None,
        microbatching=update_microbatching(config, devices),
        block_rows=trainer.micro_train_batch_size_per_gpu,
        place=functools.partial(jax.device_put, device=batch_sharding(mesh, rules)),
    )
