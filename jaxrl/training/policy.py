"""The weights of a run: what is trained, what that rests on, and the reference."""

import os
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl import config as cfg
from jaxrl.config.objective_requirements import needs_reference
from jaxrl.models import hf
from jaxrl.models.adapter import AdaptedModel
from jaxrl.models.export import save_pretrained
from jaxrl.models.linear import merge
from jaxrl.models.lora import LoraConfig, attach, lora_config
from jaxrl.models.peft_format import base_of_adapter, load_adapter, save_adapter
from jaxrl.models.transformer import (
    Params,
    TransformerConfig,
    abstract_params,
    describe,
    init_params,
    logical_axes,
)
from jaxrl.parallel import Placement, param_shardings
from jaxrl.parallel.checksums import checksums
from jaxrl.parallel.offload import host_shardings, on_device


class Policy:
    """Know where the parameters of policy and reference come from, and where the policy's go.

    With adapters (`trainer.policy.model.lora`) these are all that is trained, differentiated,
    checkpointed and exported; `base` is read once and never changes. The reference shares it where
    it is the initial policy: its forward is that of the base without adapters. A reference with
    adapters of its own (`trainer.ref.model.lora`) is read from a PEFT folder and its base.

    Args:
        trainer: the TrainerConfig.
        model, ref_model: architecture of policy and reference.
        placement, ref_placement: of their parameters.

    Raises:
        ValueError: adapters for a flax module, or for matrices that the model does not have; a
            folder of the reference without the adapters that the config says.
    """

    def __init__(
        self,
        trainer: cfg.TrainerConfig,
        model: TransformerConfig | AdaptedModel,
        placement: Placement,
        ref_model: TransformerConfig | AdaptedModel,
        ref_placement: Placement,
    ) -> None:
        self.trainer, self.model, self.ref_model = trainer, model, ref_model
        self.placement, self.ref_placement = placement, ref_placement
        self.lora = lora_config(trainer.policy.model.lora, model, "policy")
        self.trained = self.lora or model
        self.base: Params | None = None
        self.ref_adapters = reference_adapters(trainer.ref.model, ref_model)

    def describe(self) -> dict[str, Any]:
        """Return what a checkpoint of this policy must agree with; read the base, if any."""
        if self.lora is None:
            return describe(self.model)
        self.base = self._load("policy", self.placement)
        return describe(self.lora) | {"base": checksums(self.base)}

    def size(self) -> str:
        """Say how much is trained, in words."""
        if self.lora is None:
            return f"all {_parameters(self.model):,} parameters"
        return (
            f"{_parameters(self.lora):,} parameters, adapters of rank {self.lora.rank} for "
            f"{len(self.lora.modules)} matrices of a model of {_parameters(self.model):,}"
        )

    def initial(self) -> Params:
        """Return the trained parameters at the start of a run."""
        if self.lora is None:
            return on_device(self._load("policy", self.placement))
        return init_params(self.lora, self.trainer.seed, _shardings(self.placement, self.lora))

    def whole(self, trained: Params) -> Params:
        """Return all parameters of the policy, from those that are trained; nothing is copied."""
        if self.lora is None:
            return trained
        assert self.base is not None  # read by `describe`
        return attach(self.lora, self.base, trained)

    def reference(self, moved: Params | None = None) -> Params | None:
        """Return the reference's parameters, if a KL counts or the loss asks for its log-probs.

        Args:
            moved: of one that moves, `TrainState.ref_params`; None = that of the config.
        """
        if not needs_reference(self.trainer.algorithm):
            return None
        if moved is not None:
            return self.whole(moved)
        same = self._source("ref") == self._source("policy")
        if self.base is not None and same and self.ref_placement == self.placement:
            return self.base
        return self._load("ref", self.ref_placement)

    @property
    def moves_reference(self) -> bool:
        """Return whether the reference becomes a copy of the policy after every epoch."""
        algorithm = self.trainer.algorithm
        return self.trainer.update_ref_every_epoch and needs_reference(algorithm)

    def reference_like(self) -> Params | None:
        """Return shapes and shardings of `TrainState.ref_params`; None: the reference stays."""
        if not self.moves_reference:
            return None
        shardings = _shardings(self.ref_placement, self.trained)
        return jax.tree.map(
            lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
            abstract_params(self.trained),
            shardings,
        )

    def first_reference(self, trained: Params) -> Params | None:
        """Return `TrainState.ref_params` at the start of a run."""
        if not self.moves_reference:
            return None
        return self.reference() if self.lora is None else self.moved_reference(trained)

    def moved_reference(self, trained: Params) -> Params:
        """Copy the trained parameters to where those of the reference lie."""
        shardings = _shardings(self.ref_placement, self.trained)
        if self.trainer.ref.fsdp_config.cpu_offload:
            shardings = host_shardings(shardings, "trainer.ref.fsdp_config.cpu_offload")
        # what is put where it is already would be donated with the policy
        return jax.device_put(jax.tree.map(jnp.copy, on_device(trained)), shardings)

    def export(
        self,
        folder: str | os.PathLike[str],
        trained: Params,
        tokenizer: Any,
        generation_config: dict[str, Any] | None,
    ) -> None:
        """Write a Hugging Face folder; with adapters a PEFT folder that names the base."""
        if self.lora is not None:
            base = self.trainer.policy.model.path or ""  # validated
            save_adapter(folder, self.lora, trained, tokenizer, base=base, overwrite=True)
            return
        assert isinstance(self.model, TransformerConfig)  # checked at the start
        save_pretrained(
            folder,
            self.model,
            trained,
            tokenizer,
            generation_config=generation_config,
            overwrite=True,
        )

    def _source(self, name: str) -> tuple[Any, ...]:
        role = getattr(self.trainer, name)
        overrides = cfg.model_overrides(self.trainer, role)
        return role.model.path, role.model.random_init, overrides

    def _load(self, name: str, placement: Placement) -> Params:
        """Load the parameters from the folder of policy or ref, or draw them.

        They go into host memory where the config asks for that.
        """
        role = getattr(self.trainer, name)
        model = self.ref_model if name == "ref" else self.model
        shardings = _shardings(placement, model)
        if role.fsdp_config.cpu_offload:
            shardings = host_shardings(shardings, f"trainer.{name}.fsdp_config.cpu_offload")
        if isinstance(model, AdaptedModel):
            return init_params(model, self.trainer.seed, shardings)
        assert role.model.path is not None  # validated
        adapted, path = name == "ref" and self.ref_adapters, role.model.path
        params = hf.load_or_init(
            base_of_adapter(hf.local_folder(path)) if adapted else path,
            model,
            overrides=cfg.model_overrides(self.trainer, role),
            random_init=role.model.random_init,
            seed=self.trainer.seed,
            shardings=shardings,
        )
        if not adapted:
            return params
        lora, adapters = adapted
        adapters = jax.device_put(adapters, _shardings(placement, lora))
        whole = jax.jit(lambda w, x: merge(attach(lora, w, x)))(on_device(params), adapters)
        return jax.device_put(whole, shardings)


def _shardings(
    placement: Placement, model: TransformerConfig | AdaptedModel | LoraConfig
) -> Params:
    """Return a tree parallel to the parameters of the whole model, or of its adapters."""
    axes, shapes = logical_axes(model), abstract_params(model)
    return param_shardings(placement.mesh, axes, shapes, placement.rules)


def _parameters(model: TransformerConfig | AdaptedModel | LoraConfig) -> int:
    return sum(x.size for x in jax.tree.leaves(abstract_params(model)))


def reference_adapters(
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
