"""The optimizer and the update that a config asks for."""

import dataclasses
import functools
import math
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxrl import config as cfg
from jaxrl.config.microbatching import forward_microbatching, update_microbatching
from jaxrl.config.needs import needs_reference
from jaxrl.forward import log_probs_and_entropy
from jaxrl.models import hf
from jaxrl.models.adapter import AdaptedModel
from jaxrl.models.attention import choose_kernel
from jaxrl.models.lora import LoraConfig
from jaxrl.models.transformer import TransformerConfig, abstract_params, logical_axes
from jaxrl.offload import host_shardings
from jaxrl.optim import abstract_state, make_apply, make_optimizer, make_schedule
from jaxrl.parallel import Placement, batch_sharding, make_mesh, param_shardings, replicated
from jaxrl.parallel.rules import batch_devices
from jaxrl.policy import Policy
from jaxrl.scorer import Scorer
from jaxrl.types import TrainState
from jaxrl.update import Updater

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


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


def place_model(
    trainer: cfg.TrainerConfig,
    model: TransformerConfig | AdaptedModel,
    mesh: jax.sharding.Mesh,
    role: str = "policy",
) -> Placement:
    """A mesh and the rules of the run, for a model that fits them.

    Args:
        role: "policy" or "ref", whose mesh it is.

    Raises:
        ValueError: the tensor axis does not divide the heads or the MLP width of the model, or the
            model is a flax module, which has no axes to split.
    """
    placement = Placement(mesh, cfg.sharding_rules(trainer.sharding_rules))
    parts = placement.size(placement.rules.embed)
    if isinstance(model, TransformerConfig) and model.hidden_size % parts:
        warnings.warn(
            f"trainer.{role}.mesh: {parts} devices do not divide the model's hidden_size="
            f"{model.hidden_size}, so each holds all of its weights; split over fewer with fsdp, "
            "and over the rest with data",
            stacklevel=2,
        )
    name = f"trainer.{role}.mesh.tensor"
    for axis, field in {"heads": "num_heads", "mlp": "intermediate_size"}.items():
        split = placement.size(getattr(placement.rules, axis))
        if split == 1:
            continue
        if isinstance(model, AdaptedModel):
            raise ValueError(f"{name}={split}: {model.name} is a flax module; set it to 1")
        if (whole := getattr(model, field)) % split:
            common = math.gcd(mesh.size, model.num_heads, model.intermediate_size)
            divisors = [n for n in range(1, common + 1) if common % n == 0]
            raise ValueError(
                f"{name}={split} does not divide the model's {field}={whole}; on {mesh.size} "
                f"devices set it to one of {divisors}"
            )
    return placement


def reference_model(
    trainer: cfg.TrainerConfig, model: TransformerConfig | AdaptedModel
) -> TransformerConfig | AdaptedModel:
    """The architecture of the reference: the policy's, or that of its own path (a teacher)."""
    path = trainer.ref.model.path
    if path == trainer.policy.model.path or isinstance(model, AdaptedModel):
        return model
    if path is None or not needs_reference(trainer.algorithm):
        return model
    return hf.load_config(path, cfg.model_overrides(trainer, trainer.ref))


def place_reference(
    trainer: cfg.TrainerConfig, model: TransformerConfig | AdaptedModel, policy: Placement
) -> Placement:
    """The policy's placement, or that of `trainer.ref.mesh` on the same devices.

    Args:
        model: architecture of the reference.
    """
    if trainer.ref.mesh is None:
        return policy
    mesh = make_mesh(devices=list(policy.mesh.devices.flat), **dataclasses.asdict(trainer.ref.mesh))
    return place_model(trainer, model, mesh, "ref")


def assemble_policy(
    config: cfg.TrainConfig, model: TransformerConfig | AdaptedModel, mesh: jax.sharding.Mesh
) -> tuple[Policy, Scorer, Scorer]:
    """The weights of a run, the policy's forward pass, and that of the reference.

    The two passes are one where architecture and placement are the same.
    """
    trainer = config.trainer
    placement, ref_model = place_model(trainer, model, mesh), reference_model(trainer, model)
    ref_placement = place_reference(trainer, ref_model, placement)
    policy = Policy(trainer, model, placement, ref_model, ref_placement)
    scorer = ref_scorer = make_scorer(config, model, placement)
    if ref_placement is not placement or ref_model != model:
        ref_scorer = make_scorer(config, ref_model, ref_placement)
    return policy, scorer, ref_scorer


def make_scorer(
    config: cfg.TrainConfig, model: TransformerConfig | AdaptedModel, placement: Placement
) -> Scorer:
    """Log-probs and entropy of a model, jitted for its mesh."""
    trainer = config.trainer
    assert trainer.algorithm.temperature is not None  # resolved
    mesh, rules = placement.mesh, placement.rules
    dtype = DTYPES["bfloat16" if trainer.bf16 else "float32"]
    kernel = "xla"  # a flax module brings its own attention
    if isinstance(model, TransformerConfig):
        platform = mesh.devices.flat[0].platform
        kernel = choose_kernel(model, trainer.flash_attn, platform, dtype)
    forward = functools.partial(
        log_probs_and_entropy,
        model,
        temperature=trainer.algorithm.temperature,
        dtype=dtype,
        remat=trainer.remat_policy if trainer.gradient_checkpointing else "none",
        kernel=kernel,
        placement=placement if mesh.size > 1 else None,
    )
    place = functools.partial(jax.device_put, device=batch_sharding(mesh, rules))
    return Scorer(forward, place, forward_microbatching(config, batch_devices(mesh, rules)))


def assemble_update(
    config: cfg.TrainConfig,
    scorer: Scorer,
    placement: Placement,
    total_steps: int,
    trained: TransformerConfig | AdaptedModel | LoraConfig,
) -> tuple[optax.GradientTransformation, TrainState, Updater]:
    """The optimizer, the abstract state with its shardings, and the jitted update.

    Args:
        scorer: the policy's forward pass.
        trained: whose parameters the state holds: the model, or its adapters.
    """
    trainer, mesh, rules = config.trainer, placement.mesh, placement.rules
    optimizer, schedule = assemble_optimizer(trainer, total_steps)
    shardings = param_shardings(mesh, logical_axes(trained), abstract_params(trained), rules)
    like = abstract_state(optimizer, trained, shardings, replicated(mesh))
    state_shardings = jax.tree.map(lambda x: x.sharding, like)
    updater = Updater(
        scorer,
        make_apply(optimizer, schedule),
        algorithm=trainer.algorithm,
        shardings=state_shardings,
        resting=_resting(trainer.policy, state_shardings),
        microbatching=update_microbatching(config, batch_devices(mesh, rules)),
        block_rows=trainer.micro_train_batch_size_per_gpu,
    )
    return optimizer, like, updater


def _resting(policy: cfg.PolicyConfig, shardings: TrainState) -> dict[str, Any]:
    """Shardings of what waits in host memory between updates, by field of the state."""
    fields = {}
    if policy.optimizer_config.offload_after_step:
        fields["opt_state"] = "trainer.policy.optimizer_config.offload_after_step"
    if policy.fsdp_config.cpu_offload:
        fields |= dict.fromkeys(("params", "opt_state"), "trainer.policy.fsdp_config.cpu_offload")
    return {name: host_shardings(getattr(shardings, name), field) for name, field in fields.items()}
