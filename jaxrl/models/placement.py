"""Where the arrays of a model are: a mesh, and the rules that split them over its axes."""

import math
import warnings

import jax

from jaxrl.models.adapter import AdaptedModel
from jaxrl.models.architecture import DENSE, keeps_states, layers_with
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
            expert axis the experts; the context axis splits rows of a model that keeps states or
            has attention sinks; or the model is a flax module, which has no axes to split.
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
    apart = placement.size(placement.rules.seq)
    if apart > 1 and isinstance(model, TransformerConfig) and keeps_states(model):
        raise ValueError(
            f"trainer.{role}.mesh.context={apart}: the model has layers whose state goes from "
            "token to token, so its rows are not spread over devices; set it to 1"
        )
    if apart > 1 and isinstance(model, TransformerConfig) and model.attention_sinks:
        raise ValueError(
            f"trainer.{role}.mesh.context={apart}: the model's heads have scores that go to no key "
            "(attention sinks), so its rows are not spread over devices; set it to 1"
        )
    by_rule = _sizes_to_split(model)
    for rule, sizes in by_rule.items():
        split = placement.size(getattr(placement.rules, rule))
        if split == 1:
            continue
        field = f"trainer.{role}.mesh.{'expert' if rule == 'experts' else 'tensor'}={split}"
        if isinstance(model, AdaptedModel):
            raise ValueError(f"{field}: {model.name} is a flax module; set it to 1")
        if not sizes:
            raise ValueError(f"{field}: the model has no experts; set it to 1")
        for name, whole in sizes.items():
            if whole % split:
                alike = [r for r in by_rule if (r == "experts") == (rule == "experts")]
                common = math.gcd(mesh.size, *(n for r in alike for n in by_rule[r].values()))
                divisors = [n for n in range(1, common + 1) if common % n == 0]
                raise ValueError(
                    f"{field} does not divide the model's {name}={whole}; on {mesh.size} devices "
                    f"set it to one of {divisors}"
                )
    return placement


def _sizes_to_split(model: TransformerConfig | AdaptedModel) -> dict[str, dict[str, int]]:
    """Return, by rule, the numbers of a model that its mesh axis must divide."""
    if isinstance(model, AdaptedModel):
        return {"heads": {}, "experts": {}}
    experts, widths = model.experts, {}
    if layers_with(model, DENSE):
        widths["intermediate_size"] = model.intermediate_size
    if experts is not None:
        widths["experts.width"] = experts.width
    if experts is not None and experts.shared_width is not None:
        widths["experts.shared_width"] = experts.shared_width
    heads = {"num_heads": model.num_heads}
    if (net := model.delta_net) is not None:
        heads["linear_num_key_heads"] = net.key_heads
        heads["linear_num_value_heads"] = net.value_heads
    return {
        "heads": heads,
        "mlp": widths,
        "experts": {} if experts is None else {"experts.count": experts.count},
    }


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
