"""The weights of one model of a run: what is trained, what that rests on, where they come from."""

import os
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl import config as cfg
from jaxrl.models import hf
from jaxrl.models.adapter import AdaptedModel
from jaxrl.models.export import exported_configs, save_pretrained
from jaxrl.models.linear import merge
from jaxrl.models.lora import TRAINED_WHOLE, LoraConfig, attach, lora_config
from jaxrl.models.peft_format import check_adapter, save_adapter
from jaxrl.models.placement import model_shardings
from jaxrl.models.transformer import (
    Params,
    TransformerConfig,
    abstract_params,
    describe,
    init_params,
)
from jaxrl.parallel import Placement
from jaxrl.parallel.checksums import checksums
from jaxrl.parallel.offload import host_shardings, on_device


class Weights:
    """Know where the parameters of policy, reference or critic come from, and where they go.

    With adapters (`trainer.<role>.model.lora`) these, and a critic's head, are all that is trained,
    differentiated and checkpointed; `base`, on which they rest, never changes.

    Args:
        trainer: the TrainerConfig.
        role: "policy", "ref" or "critic".
        model: its architecture.
        placement: of its parameters.

    Attributes:
        lora: the adapters; None: all parameters are trained, or it is a reference.
        trained: whose parameters a state holds: the adapters, or the model.

    Raises:
        ValueError: adapters for a flax module, or for matrices that the model does not have.
    """

    def __init__(
        self,
        trainer: cfg.TrainerConfig,
        role: str,
        model: TransformerConfig | AdaptedModel,
        placement: Placement,
    ) -> None:
        self.trainer, self.role, self.model, self.placement = trainer, role, model, placement
        self.settings = getattr(trainer, role)
        # a reference's are in its folder, and are merged when they are read
        self.lora = None if role == "ref" else lora_config(self.settings.model.lora, model, role)
        self.trained = self.lora or model
        self._base: Params | None = None

    # ---------------------------------------------------------------- the whole model

    def load(self, path: str | os.PathLike[str] | None = None) -> Params:
        """Load all parameters of the model from the folder of the config, or draw them.

        They go into host memory where the config asks for that.

        Args:
            path: of another folder.
        """
        shardings = self.storage_shardings(self.model)
        if isinstance(self.model, AdaptedModel):
            return init_params(self.model, self.trainer.seed, shardings)
        return hf.load_or_init(
            path or self.settings.model.path or "",  # validated
            self.model,
            overrides=cfg.model_overrides(self.trainer, self.settings),
            random_init=self.settings.model.random_init,
            seed=self.trainer.seed,
            shardings=shardings,
        )

    def load_base(self) -> None:
        """Load what the adapters rest on; without adapters there is nothing to load."""
        if self.lora is not None:
            self._base = self.load()

    @property
    def base(self) -> Params:
        """Return the parameters that the adapters rest on, which `load_base` has loaded."""
        if self._base is None:
            raise RuntimeError(
                f"the base of the {self.role}'s adapters is not here: call load_base"
            )
        return self._base

    def whole(self, trained: Params) -> Params:
        """Return all parameters of the model, from those that are trained; nothing is copied."""
        return trained if self.lora is None else attach(self.lora, self.base, trained)

    # ---------------------------------------------------------------- what is trained

    def describe(self) -> dict[str, Any]:
        """Return what a checkpoint must agree with: the architecture; adapters and their base."""
        if self.lora is None:
            return describe(self.model)
        return describe(self.lora) | {"base": checksums(self.base)}

    def size(self) -> str:
        """Say how much is trained, in words."""
        count, whole = (
            sum(x.size for x in jax.tree.leaves(abstract_params(model)))
            for model in (self.trained, self.model)
        )
        if self.lora is None:
            return f"all {whole:,} parameters"
        head = "the head and " if self.role == "critic" else ""
        return (
            f"{count:,} parameters, {head}adapters of rank {self.lora.rank} for "
            f"{len(self.lora.modules)} matrices of a model of {whole:,}"
        )

    def initial(self) -> Params:
        """Return the trained parameters at the start of a run."""
        if self.lora is None:
            return on_device(self.load())
        params = init_params(
            self.lora, self.trainer.seed, model_shardings(self.lora, self.placement)
        )
        if TRAINED_WHOLE in params:
            head = jnp.copy(on_device(self.base[TRAINED_WHOLE]))  # the state is donated
            params |= {TRAINED_WHOLE: head}
        return params

    @property
    def _exports_adapters(self) -> bool:
        """Return whether an export is of the adapters alone.

        A critic's are merged: its head, `<value_head_prefix>.weight`, is trained whole, and PEFT's
        format has no place for it.
        """
        merged = self.role == "critic" or self.settings.model.lora.merge_exports
        return self.lora is not None and not merged

    def check_export(self) -> None:
        """Refuse what no export could be made of, now and not when the first is due.

        These are adapters that PEFT would not read as they were trained, and models of no family.

        Raises:
            ValueError: names what to set.
        """
        if self._exports_adapters:
            assert self.lora is not None
            check_adapter(self.lora)
        elif isinstance(self.model, TransformerConfig):
            exported_configs(self.model, None)

    def export(self, folder: str | os.PathLike[str], trained: Params, tokenizer: Any) -> None:
        """Write a Hugging Face folder, or a PEFT folder of the adapters that names the base."""
        if self._exports_adapters:
            assert self.lora is not None
            base = self.settings.model.path or ""  # validated
            save_adapter(folder, self.lora, trained, tokenizer, base=base, overwrite=True)
            return
        assert isinstance(self.model, TransformerConfig)  # checked at the start
        save_pretrained(
            folder,
            self.model,
            trained if self.lora is None else merge(on_device(self.whole(trained))),
            tokenizer,
            dtype=self.trainer.export_dtype,
            overwrite=True,
        )

    def storage_shardings(self, model: TransformerConfig | AdaptedModel | LoraConfig) -> Params:
        """Return where parameters are between programs: in host memory, if that is asked for."""
        shardings = model_shardings(model, self.placement)
        if self.settings.fsdp_config.cpu_offload:
            field = f"trainer.{self.role}.fsdp_config.cpu_offload"
            return host_shardings(shardings, field)
        return shardings
