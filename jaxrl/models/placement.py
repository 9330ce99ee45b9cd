"""Where the arrays of a model are: a mesh, and the rules that split them over its axes."""

import math
import warnings

import jax

from jaxrl.models.adapter import AdaptedModel
from jaxrl.models.lora import LoraConfig
from jaxrl.models.transformer import Params, TransformerConfig, abstract_params, logical_axes
from jaxrl.parallel import Placement, ShardingRules, param_shardings


def place_model(
    model: TransformerConfig | AdaptedModel,
    mesh: jax.sharding.Mesh,
    rules: ShardingRules,
    role: str = "policy",
) -> Placement:
    """Return the mesh and the rules of a run, for a model that fits them.

    Args:
        role: "policy", "ref" or "critic", whose mesh it is.

    Raises:
        ValueError: the tensor axis does not divide the heads or the MLP width of the model, or the
            model is a flax module, which has no axes to split.
    """
    placement = Placement(mesh, rules)
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


def model_shardings(
    model: TransformerConfig | AdaptedModel | LoraConfig, placement: Placement
) -> Params:
    """Return a tree of shardings, parallel to the parameters of a model or of its adapters."""
    axes, shapes = logical_axes(model), abstract_params(model)
    return param_shardings(placement.mesh, axes, shapes, placement.rules)


def placed_params(
    model: TransformerConfig | AdaptedModel | LoraConfig, placement: Placement
) -> Params:
    """Return the shapes of the parameters, with their shardings; nothing is allocated."""
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        abstract_params(model),
        model_shardings(model, placement),
    )
