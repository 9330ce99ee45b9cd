"""Any flax module as the policy: NNX or linen, (tokens, positions, segment_ids) -> logits.

All three are [B, T] int, segment 0 is padding, rows are right padded; logits are [B, T, V]. The
module must be causal. With `trainer.use_sample_packing` a row holds several segments, each with
positions from 0: the module must then take its positions from the argument and let no token attend
to another segment; `check_packing` refuses one that does not.

An `AdaptedModel` takes the place of `TransformerConfig` in the functions that `transformer.py`
dispatches; only `NativeEngine`, which needs a key/value cache, cannot use it:
`rollout.native.recompute.RecomputeEngine` samples instead.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxrl.models import transformer
from jaxrl.models.exact import Tiles
from jaxrl.models.remat import recompute
from jaxrl.models.transformer import Params
from jaxrl.parallel.processes import put
from jaxrl.parallel.rules import Placement

EXAMPLE = np.zeros((1, 8), np.int32)  # tokens, positions and segment ids to initialise with


@dataclass(frozen=True, eq=False)
class AdaptedModel:
    """Describe a model as functions of its parameters.

    Attributes:
        name: kept in checkpoints; a run resumes only with the same name and shapes.
        call: (params, tokens, positions, segment_ids) -> logits [B, T, V].
        init: seed -> params, a pytree of arrays.
        axes: tree of logical axis names parallel to the params, see `parallel/rules.py`; None
            shards the largest dim of each.
    """

    name: str
    call: Callable[[Params, jax.Array, jax.Array, jax.Array], jax.Array]
    init: Callable[[int], Params]
    axes: Params | None = None


def adapt_linen(module: nn.Module, axes: Params | None = None) -> AdaptedModel:
    """Adapt a linen module whose only variables are parameters.

    Raises:
        ValueError: on the first use of its parameters, if it has other collections.
    """

    def init(seed: int) -> Params:
        variables = module.init(jax.random.key(seed), EXAMPLE, EXAMPLE, EXAMPLE)
        _refuse_state(type(module).__name__, sorted(set(variables) - {"params"}))
        return nn.meta.unbox(variables["params"])

    def call(params: Params, *inputs: jax.Array) -> jax.Array:
        return module.apply({"params": params}, *inputs)  # pyright: ignore[reportReturnType]

    return AdaptedModel(type(module).__name__, call, init, axes)


def adapt_nnx(make: Callable[[nnx.Rngs], nnx.Module], axes: Params | None = None) -> AdaptedModel:
    """Adapt an NNX module whose only state is parameters: a dict by path, "layers/0/kernel".

    Args:
        make: random streams -> module, for example `lambda rngs: MyModel(width=64, rngs=rngs)`.

    Raises:
        ValueError: it has other state: batch statistics, or random streams of its own (dropout).
    """
    module = nnx.eval_shape(lambda: make(nnx.Rngs(0)))
    name = type(module).__name__
    graph, state, other = nnx.split(module, nnx.Param, ...)
    _refuse_state(name, ["/".join(map(str, path)) for path, _ in nnx.to_flat_state(other)])
    paths = ["/".join(map(str, path)) for path, _ in nnx.to_flat_state(state)]
    treedef = jax.tree.structure(state)

    def init(seed: int) -> Params:
        params = nnx.state(make(nnx.Rngs(seed)), nnx.Param)
        return dict(zip(paths, jax.tree.leaves(params), strict=True))

    def call(params: Params, *inputs: jax.Array) -> jax.Array:
        return nnx.merge(graph, treedef.unflatten([params[path] for path in paths]))(*inputs)

    return AdaptedModel(name, call, init, axes)


def check_packing(model: AdaptedModel, params: Params) -> None:
    """Refuse a module for which it matters what else is in a row.

    Five tokens and three, in one row and in two, must have the same logits. The parameters are
    shifted for that, so that a head that starts at zero hides nothing.

    Raises:
        ValueError: a segment's logits depend on the other one, or on its place in the row.
    """
    tokens = np.array(
        [[1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 5, 0, 0, 0], [6, 7, 8, 0, 0, 0, 0, 0]]
    )
    segment_ids = np.array([[1] * 5 + [2] * 3, [1] * 5 + [0] * 3, [1] * 3 + [0] * 5])
    positions = np.array([[*range(5), *range(3)], [*range(8)], [*range(8)]])

    @jax.jit
    def logits(params: Params) -> jax.Array:
        shifted = jax.tree.map(
            lambda x: x + 0.1 * jnp.sin(jnp.arange(x.size)).reshape(x.shape), params
        )
        return model.call(shifted, *map(jnp.asarray, (tokens, positions, segment_ids)))

    together, first, second = jax.device_get(logits(params))
    difference = np.abs(together - np.concatenate([first[:5], second[:3]])).max()
    if not difference <= 1e-3 * np.abs(together).max():
        raise ValueError(
            f"trainer.use_sample_packing=True: the logits of {model.name} for several segments in "
            f"a row differ by {difference:.2g} from those of each alone; let no token attend to "
            "another segment and take positions from the argument, or set it to False"
        )


def _refuse_state(name: str, other: list[str]) -> None:
    if other:
        raise ValueError(
            f"{name} has state that is not a parameter: {', '.join(other)}; jaxrl trains pure "
            "functions of parameters, take it out (batch statistics, caches, dropout)"
        )


@transformer.abstract_params.register
def abstract_params_of_adapted(model: AdaptedModel) -> Params:
    """Return the shapes of the module's parameters; nothing is allocated."""
    return jax.eval_shape(lambda: _float32(model.init(0)))


@transformer.logical_axes.register
def logical_axes_of_adapted(model: AdaptedModel) -> Params:
    """Return the module's own axes, or names that split the largest dim of each parameter."""

    def largest(x: jax.ShapeDtypeStruct) -> tuple[str | None, ...]:
        widest = max(range(x.ndim), key=lambda d: x.shape[d], default=None)
        return tuple("embed" if d == widest else None for d in range(x.ndim))

    return model.axes or jax.tree.map(largest, transformer.abstract_params(model))


@transformer.init_params.register
def init_params_of_adapted(
    model: AdaptedModel, seed: int, shardings: Params | None = None
) -> Params:
    """Let the module draw its parameters, and place them."""
    return put(_float32(model.init(seed)), shardings)


@transformer.describe.register
def describe_adapted(model: AdaptedModel) -> dict[str, Any]:
    """Return the module's name and the shapes of its parameters, which checkpoints keep."""
    shapes = jax.tree_util.tree_leaves_with_path(transformer.abstract_params(model))
    return {"adapted": model.name} | {
        jax.tree_util.keystr(path): list(x.shape) for path, x in shapes
    }


@transformer.forward.register
def forward_of_adapted(
    model: AdaptedModel,
    params: Params,
    tokens: jax.Array,
    positions: jax.Array,
    segment_ids: jax.Array,
    *,
    dtype: jnp.dtype = jnp.float32,
    remat: str = "none",
    kernel: str = "xla",
    experts_kernel: str = "xla",
    rule_kernel: str = "xla",
    exchange: str = "auto",
    context: str = "auto",
    placement: Placement | None = None,
    tiles: Tiles | None = None,
    ends: jax.Array | None = None,
    tree_kernel: str = "xla",
) -> jax.Array:
    """Run the module; what it returns are logits already."""
    assert tiles is None  # `make_forward_pass` refuses the exact mode
    assert ends is None  # and prefix trees
    # the module's own attention; left to the partitioner
    del kernel, experts_kernel, rule_kernel, exchange, context, placement, tiles, ends, tree_kernel
    call = recompute(model.call, remat)
    return call(_cast(params, dtype), tokens, positions, segment_ids)


@transformer.head_axes.register
def head_axes_of_adapted(model: AdaptedModel) -> Params:
    """Return nothing: `unembed_adapted` reads no parameters."""
    return {}


@transformer.unembed.register
def unembed_adapted(
    model: AdaptedModel, params: Params, hidden: jax.Array, first: jax.Array | int = 0
) -> jax.Array:
    """Return the logits that the module's forward ended with, in float32."""
    del first  # it is never split
    return hidden.astype(jnp.float32)


def _cast(params: Params, dtype: jnp.dtype) -> Params:
    return jax.tree.map(lambda x: x.astype(dtype), params)


_float32 = functools.partial(_cast, dtype=jnp.float32)
