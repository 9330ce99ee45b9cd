"""LoRA: which matrices get an adapter, and the adapters as parameters of their own.

    y = x W + (alpha / r) dropout(x) A B        A [in, r], B [r, out], of each expert its own

Hu et al., 2021, https://arxiv.org/abs/2106.09685 (section 4.1). W stays as it is. Adapters are a
tree beside the model, {"wq": {"a": [L, D, r], "b": [L, r, H, h]}, ...}: they alone have gradients
and optimizer state, and they alone are saved. `attach` puts them into the parameters for a forward,
`linear.merge` adds them up for a sampler. The base is never donated, so the reference can share it:
it is the base without adapters. A critic's head is new: it is trained whole, beside the adapters.
Shape legend: `transformer.py`; r is the rank.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.models import transformer
from jaxrl.models.adapter import AdaptedModel
from jaxrl.models.linear import LoraWeight, is_adapted
from jaxrl.models.transformer import Params, ParamSpec, TransformerConfig
from jaxrl.models.weights import HFWeight, is_weight, tensor_names, weight_map
from jaxrl.parallel.processes import put
from jaxrl.types import Array, ModelRows

INIT_METHODS = ("kaiming", "gaussian")
ALL_LINEAR = "all-linear"
NOT_IN_ALL_LINEAR = ("embed_tokens", "lm_head")
TRAINED_WHOLE = "value_head"
# Single parameters in transformers, which PEFT does not choose either.
NOT_LINEAR = ("router", "experts_gate_bias", "experts_up_bias", "experts_down_bias")
OF_EXPERT, EXPERTS = ".experts.", "experts"  # in the name of a matrix, and in patterns that mean it
Patterns = str | Sequence[str]


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """Describe the adapters of a model.

    It takes the model's place in `init_params`, `abstract_params`, `logical_axes`.

    Example: `LoraConfig(model, modules=select_modules(model, ["q_proj", "v_proj"]), rank=8)`.

    Attributes:
        model: the base.
        modules: full Hugging Face names of the matrices with an adapter, see `select_modules`.
        rank: r.
        alpha: the adapter's part is multiplied by alpha / r.
        dropout: probability that an element of the adapter's input is dropped.
        init_method: A is uniform in +-1 / sqrt(in) ("kaiming") or normal with deviation 1 / r
            ("gaussian"), B is 0, as in PEFT. Those of an embedding: A is 0, B normal(0, 1).

    Raises:
        ValueError: a number is out of range, or dropout is asked for in the vocabulary head.
    """

    model: TransformerConfig
    modules: tuple[str, ...]
    rank: int
    alpha: float = 16
    dropout: float = 0.0
    init_method: str = "kaiming"

    def __post_init__(self) -> None:
        if self.rank < 1 or self.alpha <= 0 or not 0 <= self.dropout < 1:
            raise ValueError(
                f"lora: rank={self.rank} must be at least 1, alpha={self.alpha} positive and "
                f"dropout={self.dropout} in [0, 1)"
            )
        if self.init_method not in INIT_METHODS:
            raise ValueError(
                f"lora.init_method={self.init_method!r} is unknown; choose one of "
                f"{list(INIT_METHODS)}"
            )
        if self.dropout and any(OF_EXPERT in name for name in self.modules):
            raise ValueError(
                f"lora.dropout={self.dropout} is not available for experts; set it to 0.0, or name "
                "no experts in target_modules"
            )
        if self.dropout and "lm_head" in self.modules:
            raise ValueError(
                f"lora.dropout={self.dropout} is not available for lm_head; set it to 0.0, or add "
                "lm_head to exclude_modules"
            )


# ---------------------------------------------------------------- which matrices


def matrices(config: TransformerConfig) -> dict[str, list[str]]:
    """Return the full names of each leaf's matrices in the order of its stack, by leaf.

    {"wq": ["model.layers.0.self_attn.q_proj", ...], ...}; tied embeddings are left out: an adapter
    in the table would change the head as well. So is a critic's head. Leaves that lie in one tensor
    have its name: "qkv_proj" of a Phi-3 means an adapter each of wq, wk and wv.
    """
    return {
        name: [part.removesuffix(".weight") for part in tensor_names(weight)]
        for name, weight in weights_by_name(config).items()
        if len(weight.dims) == 2
        and name.rpartition("/")[2] not in NOT_LINEAR
        and name != TRAINED_WHOLE
        and not (config.tie_embeddings and name == "embed")
    }


def select_modules(
    config: TransformerConfig, target_modules: Patterns, exclude_modules: Patterns | None = None
) -> tuple[str, ...]:
    """Return the full names of the matrices that the patterns choose.

    A pattern is a name ("q_proj", "mlp.up_proj"), the end of a full name, or a regular expression
    for the whole of one ("model.layers.[01]..*"). "all-linear": all but embed_tokens and lm_head,
    as in PEFT. Experts are chosen by patterns that name "experts" alone (".*experts.*"): to PEFT,
    which sees a single parameter, "gate_proj" is not theirs.

    Args:
        target_modules, exclude_modules: a pattern or a list of them.

    Raises:
        ValueError: a pattern is no regular expression or matches nothing, or nothing is left.
    """
    names = [name for leaf in matrices(config).values() for name in leaf]
    chosen = _matching(config, names, "target_modules", target_modules)
    excluded = _matching(config, names, "exclude_modules", exclude_modules or [])
    # a name comes more than once where several leaves lie in one tensor
    left = tuple(dict.fromkeys(name for name in names if name in chosen - excluded))
    if not left:
        raise ValueError(
            f"lora.exclude_modules={exclude_modules!r} leaves nothing of "
            f"lora.target_modules={target_modules!r}; exclude less"
        )
    return left


def _matching(
    config: TransformerConfig, names: list[str], field: str, patterns: Patterns
) -> set[str]:
    found = set()
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        try:
            matched = {name for name in names if _matches(name, pattern)}
        except re.error as error:
            raise ValueError(
                f"lora.{field}: {pattern!r} is not a regular expression: {error}"
            ) from error
        if not matched:
            ends = sorted({name.rpartition(".")[2] for name in names})
            tied = "; embed_tokens and lm_head are one matrix here, which takes no adapter"
            raise ValueError(
                f"lora.{field}: {pattern!r} matches no matrix; there are {', '.join(ends)}, or in "
                f"full {names[0]!r}{tied if config.tie_embeddings else ''}"
            )
        found |= matched
    return found


def _matches(name: str, pattern: str) -> bool:
    if OF_EXPERT in name and EXPERTS not in pattern:
        return False
    if pattern.lower() == ALL_LINEAR:
        return name.rpartition(".")[2] not in NOT_IN_ALL_LINEAR
    return f".{name}".endswith(f".{pattern}") or re.fullmatch(pattern, name) is not None


# ---------------------------------------------------------------- the adapters


def adapter_specs(lora: LoraConfig) -> Params:
    """Return the shapes and logical axes of the adapters.

    The inputs of a matrix lead, so A takes them and B the rest. A matrix that has
    adapters only in some layers has them in all, those without use times 0. A critic's head is
    there as it is.
    """
    specs = _by_name(transformer.param_specs(lora.model), transformer.is_spec)
    weights = weights_by_name(lora.model)
    pairs = {
        name: _pair(lora, name, specs[name], weights[name])
        for name, modules in matrices(lora.model).items()
        if set(modules) & set(lora.modules)
    }
    return pairs | {name: spec for name, spec in specs.items() if name == TRAINED_WHOLE}


def _pair(lora: LoraConfig, name: str, spec: ParamSpec, weight: HFWeight) -> dict[str, ParamSpec]:
    stack = len(weight.stack)
    split = stack + len(next(group for group in weight.dims if 0 in group))
    return {
        "a": ParamSpec(
            shape=(*spec.shape[:split], lora.rank),
            axes=(*spec.axes[:split], "lora_rank"),
            init="zeros" if name == "embed" else lora.init_method,
        ),
        "b": ParamSpec(
            shape=(*spec.shape[:stack], lora.rank, *spec.shape[split:]),
            axes=(*spec.axes[:stack], "lora_rank", *spec.axes[split:]),
            init="normal" if name == "embed" else "zeros",
        ),
    }


def weights_by_name(config: TransformerConfig) -> dict[str, HFWeight]:
    """Return the Hugging Face layout of each leaf of the model, by the name adapters know it by."""
    return _by_name(weight_map(config), is_weight)


def _by_name(tree: Params, is_leaf: Callable[[Any], bool]) -> dict[str, Any]:
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf)
    return {_name(path): leaf for path, leaf in leaves}


def _name(path: tuple) -> str:
    """Return the name by which adapters know a leaf: its path without "layers"."""
    return "/".join(part.key for part in path if part.key != "layers")


@transformer.abstract_params.register
def abstract_params_of_lora(lora: LoraConfig) -> Params:
    """Return the shapes and dtypes of the adapters; nothing is allocated."""
    return _map_specs(lambda s: jax.ShapeDtypeStruct(s.shape, jnp.float32), adapter_specs(lora))


@transformer.logical_axes.register
def logical_axes_of_lora(lora: LoraConfig) -> Params:
    """Return a tree of logical axis names, parallel to the adapters."""
    return _map_specs(lambda spec: spec.axes, adapter_specs(lora))


@transformer.describe.register
def describe_lora(lora: LoraConfig) -> dict[str, Any]:
    """Return the base's architecture and the adapters' settings, which checkpoints keep."""
    adapters = {f.name: getattr(lora, f.name) for f in dataclasses.fields(lora)}
    return transformer.describe(adapters.pop("model")) | {"lora": adapters}


@transformer.init_params.register
def init_params_of_lora(lora: LoraConfig, seed: int, shardings: Params | None = None) -> Params:
    """Draw adapters on the host; leaf i draws from (seed, i, 1), the base from (seed, i)."""
    specs, treedef = jax.tree.flatten(adapter_specs(lora), is_leaf=transformer.is_spec)
    places = jax.tree.leaves(shardings) if shardings is not None else [None] * len(specs)
    leaves = [
        put(_draw(spec, np.random.default_rng((seed, leaf, 1))), place)
        for leaf, (spec, place) in enumerate(zip(specs, places, strict=True))
    ]
    return treedef.unflatten(leaves)


def _draw(spec: ParamSpec, rng: np.random.Generator) -> np.ndarray:
    if spec.init == "zeros":
        return np.zeros(spec.shape, np.float32)
    if spec.init == "kaiming":
        stack = sum(axis in ("layers", "experts") for axis in spec.axes)
        bound = math.prod(spec.shape[stack:-1]) ** -0.5
        return np.float32(bound) * (2 * rng.random(spec.shape, np.float32) - 1)
    deviation = 1 / spec.shape[-1] if spec.init == "gaussian" else 1.0
    return np.float32(deviation) * rng.standard_normal(spec.shape, np.float32)


def _map_specs(change: Callable[[ParamSpec], Any], specs: Params) -> Params:
    return jax.tree.map(change, specs, is_leaf=transformer.is_spec)


# ---------------------------------------------------------------- base and adapters together


def attach(lora: LoraConfig, base: Params, adapters: Params) -> Params:
    """Return the base with a `LoraWeight` for every matrix with an adapter; nothing is copied.

    Args:
        adapters: shapes of `adapter_specs`; a critic's head among them takes that of the base's.
    """
    chosen, names = set(lora.modules), matrices(lora.model)
    weights = weights_by_name(lora.model)

    def paired(path: tuple, w: Array) -> Any:
        name = _name(path)
        if name not in adapters or name == TRAINED_WHOLE:
            return adapters.get(name, w)
        used = np.array([module in chosen for module in names[name]], np.float32)
        scale = (used * np.float32(lora.alpha / lora.rank)).reshape(weights[name].stack)
        pair = adapters[name]
        return LoraWeight(w, pair["a"], pair["b"], scale, dropout=lora.dropout)

    return jax.tree_util.tree_map_with_path(paired, base)


def trained(params: Any) -> Any:
    """Return what the optimizer changes: the adapters where there are any, else all parameters.

    A critic's head goes with its adapters.
    """
    if not _adapted(params):
        return params
    leaves = _by_name(params, is_adapted)
    adapters = {name: {"a": w.a, "b": w.b} for name, w in leaves.items() if is_adapted(w)}
    return adapters | {name: w for name, w in leaves.items() if name == TRAINED_WHOLE}


def with_trained(params: Any, new: Any) -> Any:
    """Return `params` with `new` in the place of `trained(params)`."""
    if not _adapted(params):
        return new
    return jax.tree_util.tree_map_with_path(
        lambda path, w: w.replace(**new[_name(path)]) if is_adapted(w) else new.get(_name(path), w),
        params,
        is_leaf=is_adapted,
    )


def _adapted(params: Any) -> bool:
    return any(map(is_adapted, jax.tree.leaves(params, is_leaf=is_adapted)))


# ---------------------------------------------------------------- dropout


def with_token_keys(
    params: Any, rows: ModelRows, row_ids: np.ndarray, key: Array | None
) -> ModelRows:
    """Give each token of host rows a PRNG key, if `params` have adapters that drop elements.

    It is named by (key, id of the token's row in the batch, position), so that what is dropped does
    not depend on microbatches, packing or devices.

    Args:
        row_ids: [B] int.
        key: of the update; None: nothing is dropped.
    """
    leaves = jax.tree.leaves(params, is_leaf=is_adapted)
    if key is None or not any(is_adapted(w) and w.dropout for w in leaves):
        return rows
    ids = np.zeros(rows.tokens.size + 1, np.int32)  # the last for tokens that stand nowhere
    source = rows.source
    if source is None:
        source = np.arange(rows.tokens.size).reshape(rows.tokens.shape)
    ids[np.minimum(source, rows.tokens.size)] = np.asarray(row_ids)[:, None]
    return rows.replace(keys=_token_keys(key, ids[:-1].reshape(rows.tokens.shape), rows.positions))


@jax.jit
def _token_keys(key: Array, row_ids: Array, positions: Array) -> Array:
    """Return keys [R, L] of row ids and positions, [R, L] int each."""

    def token_key(row: Array, position: Array) -> Array:
        return jax.random.fold_in(jax.random.fold_in(key, row), position)

    return jax.vmap(jax.vmap(token_key))(row_ids, positions)


def with_dropout(params: Any, keys: Array | None) -> Any:
    """Let the adapters of `params` drop elements of inputs, independently by matrix and layer.

    Args:
        keys: [R, L], one for each token; None: nothing is dropped.
    """
    if keys is None:
        return params
    leaves, treedef = jax.tree.flatten(params, is_leaf=is_adapted)

    def drawing(number: int, w: Any) -> Any:
        if not is_adapted(w) or not w.dropout:
            return w
        layers = np.arange(w.scale.size)
        by_layer = jax.vmap(lambda layer: _fold(_fold(keys, number), layer))(layers)
        return w.replace(keys=by_layer.reshape(*w.scale.shape, *keys.shape))

    return treedef.unflatten([drawing(number, w) for number, w in enumerate(leaves)])


def _fold(keys: Array, number: int | Array) -> Array:
    return jax.vmap(jax.vmap(lambda key: jax.random.fold_in(key, number)))(keys)


def lora_config(
    settings: Any, model: TransformerConfig | AdaptedModel, role: str
) -> LoraConfig | None:
    """Return the adapters that a config asks for; None: rank 0, all weights are trained.

    Args:
        settings: rank, alpha, dropout, init_method, target_modules and exclude_modules.
        role: "policy" or "critic", whose they are.

    Raises:
        ValueError: the model is a flax module, or a pattern matches none of its matrices.
    """
    if settings.rank == 0:
        return None
    if isinstance(model, AdaptedModel):
        raise ValueError(
            f"trainer.{role}.model.lora.rank={settings.rank}: {model.name} is a flax module, whose "
            "products jaxrl cannot see; set rank to 0, or put adapters into the module"
        )
    return LoraConfig(
        model,
        select_modules(model, settings.target_modules, settings.exclude_modules),
        rank=settings.rank,
        alpha=settings.alpha,
        dropout=settings.dropout,
        init_method=settings.init_method,
    )
