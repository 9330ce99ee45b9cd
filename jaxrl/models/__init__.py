"""Language models: the transformer, its Hugging Face families, loading and export."""

from jaxrl.models.adapter import AdaptedModel, adapt_linen, adapt_nnx
from jaxrl.models.export import save_pretrained
from jaxrl.models.families import config_from_hf, config_to_hf
from jaxrl.models.hf import load_config, load_or_init, load_params
from jaxrl.models.rope import RopeScaling
from jaxrl.models.transformer import (
    Params,
    ParamSpec,
    TransformerConfig,
    abstract_params,
    forward,
    init_params,
    logical_axes,
    param_specs,
    unembed,
)
from jaxrl.models.weights import params_to_hf

__all__ = [
    "AdaptedModel",
    "ParamSpec",
    "Params",
    "RopeScaling",
    "TransformerConfig",
    "abstract_params",
    "adapt_linen",
    "adapt_nnx",
    "config_from_hf",
    "config_to_hf",
    "forward",
    "init_params",
    "load_config",
    "load_or_init",
    "load_params",
    "logical_axes",
    "param_specs",
    "params_to_hf",
    "save_pretrained",
    "unembed",
]
