"""The reference of a run: its folder's model, the base of the policy's adapters, or a moving copy.

With adapters the policy's base is shared where the reference is the initial policy: its forward is
that of the base without adapters. A reference with adapters of its own (`trainer.ref.model.lora`)
is read from a PEFT folder and its base.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl import config as cfg
from jaxrl.config.objective_requirements import needs_reference
from jaxrl.models import hf
from jaxrl.models.adapter import AdaptedModel
from jaxrl.models.architecture import with_known_ids
from jaxrl.models.linear import merge
from jaxrl.models.lora import LoraConfig, attach
from jaxrl.models.peft_format import base_of_adapter, load_adapter
from jaxrl.models.placement import model_shardings, placed_params
from jaxrl.models.transformer import Params, TransformerConfig
from jaxrl.parallel import Placement
from jaxrl.parallel.offload import on_device
from jaxrl.training.weights import Weights


class Reference:
    """Know where the parameters of the reference are, and whether they move.

    Args:
        policy: may share its base.
        model: architecture of the reference, see `reference_model`.
        placement: of its parameters.

    Raises:
        ValueError: a folder of the reference without the adapters that the config says.
    """

    def __init__(
        self, policy: Weights, model: TransformerConfig | AdaptedModel, placement: Placement
    ) -> None:
        trainer = policy.trainer
        self.policy, self.weights = policy, Weights(trainer, "ref", model, placement)
        self.adapters = adapters_in_folder(trainer.ref.model, model)
        # becomes a copy of the policy after every epoch
        self.moves = trainer.update_ref_every_epoch and needs_reference(trainer.algorithm)

    @property
    def is_base_of_policy(self) -> bool:
        """Return whether the reference, before it moves, is what the policy's adapters rest on."""
        policy, ref = self.policy, self.weights
        same = _source(policy) == _source(ref) and policy.placement == ref.placement
        return policy.lora is not None and same

    def params(self, moved: Params | None = None) -> Params:
        """Return all parameters of the reference.

        Args:
            moved: of one that moves, `TrainState.ref_params`; None = that of the config.
        """
        if moved is not None:
            return self.policy.whole(moved)
        if self.is_base_of_policy:
            return self.policy.base
        if self.adapters is None:
            return self.weights.load()
        lora, adapters = self.adapters
        folder = hf.local_folder(self.weights.settings.model.path or "")  # validated
        base = self.weights.load(base_of_adapter(folder))
        adapters = jax.device_put(adapters, model_shardings(lora, self.weights.placement))
        whole = jax.jit(lambda w, x: merge(attach(lora, w, x)))(on_device(base), adapters)
        return jax.device_put(whole, self.weights.storage_shardings(self.weights.model))

    def abstract_moved(self) -> Params | None:
        """Return shapes and shardings of `TrainState.ref_params`; None: the reference stays."""
        if not self.moves:
            return None
        return placed_params(self.policy.trained, self.weights.placement)

    def first_moved(self, trained: Params) -> Params | None:
        """Return `TrainState.ref_params` at the start of a run, from the policy's parameters."""
        if not self.moves:
            return None
        return self.params() if self.policy.lora is None else self.moved(trained)

    def moved(self, trained: Params) -> Params:
        """Copy the trained parameters to where those of the reference lie."""
        shardings = self.weights.storage_shardings(self.policy.trained)
        # what is put where it is already would be donated with the policy
        return jax.device_put(jax.tree.map(jnp.copy, on_device(trained)), shardings)


def reference_model(
    trainer: cfg.TrainerConfig, model: TransformerConfig | AdaptedModel
) -> TransformerConfig | AdaptedModel:
    """Return the reference's architecture: the policy's, or that of its own path (a teacher).

    Raises:
        ValueError: the policy's weights are to become those of a reference of another architecture.
    """
    ref = trainer.ref.model
    if ref.path in (None, trainer.policy.model.path) or isinstance(model, AdaptedModel):
        return model
    if ref.lora.rank or not needs_reference(trainer.algorithm):  # adapters of the policy's model
        return model
    found = hf.load_config(ref.path, cfg.model_overrides(trainer, trainer.ref))
    found = dataclasses.replace(found, initializer_range=model.initializer_range)  # not of weights
    found = with_known_ids(found, model.known_ids)  # their tokenizers give tokens the same ids
    if trainer.update_ref_every_epoch and found != model:
        raise ValueError(
            f"trainer.update_ref_every_epoch=True: trainer.ref.model.path={ref.path!r} is of "
            "another architecture than the policy; set it to False"
        )
    return found


def adapters_in_folder(
    settings: cfg.ModelConfig, model: TransformerConfig | AdaptedModel
) -> tuple[LoraConfig, Params] | None:
    """Read a reference's adapters in `settings.path`; None: rank 0, the folder is a whole model.

    Raises:
        ValueError: the model is a flax module; the folder has no adapters, or of another rank.
    """
    field = "trainer.ref.model"
    if settings.lora.rank == 0:
        return None
    if isinstance(model, AdaptedModel):
        fix = f"{model.name} is a flax module; set it to 0"
        raise ValueError(f"{field}.lora.rank={settings.lora.rank}: {fix}")
    try:
        lora, adapters = load_adapter(hf.local_folder(settings.path or ""), model)
    except FileNotFoundError as error:
        fix = f"set a PEFT folder, or {field}.lora.rank=0"
        raise ValueError(f"{field}.path={settings.path!r}: {error}; {fix}") from error
    if lora.rank != settings.lora.rank:
        fix = f"the adapters in {settings.path} have rank {lora.rank}; set that"
        raise ValueError(f"{field}.lora.rank={settings.lora.rank}: {fix}")
    return lora, adapters


def _source(weights: Weights) -> tuple[Any, ...]:
    """Return what decides which numbers `Weights.load` gives."""
    settings = weights.settings
    overrides = cfg.model_overrides(weights.trainer, settings)
    return settings.model.path, settings.model.random_init, overrides
