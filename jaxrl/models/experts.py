"""Mixture of experts: an MLP of which each token uses the few that its router chooses.

Shazeer et al., 2017, https://arxiv.org/abs/1701.06538. No token is dropped: assignments lie sorted
by expert, and each expert multiplies its own (Gale et al., 2022, https://arxiv.org/abs/2211.15841).
The way there and back are gathers, in the backward pass as well, so that every sum has one order.

Shape legend: B rows, T tokens, n = B T, D model width, E experts, k experts of a token, F width of
an expert, S width of the shared expert.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxrl.models.architecture import Experts
from jaxrl.models.expert_exchange import ALL_TO_ALL, GATHER, Exchange, exchange_of, over_devices
from jaxrl.models.kernels.choice import REFERENCE
from jaxrl.models.kernels.grouped_product import grouped_product
from jaxrl.models.linear import (
    LoraWeight,
    QuantisedWeight,
    SampledWeight,
    kept_narrow,
    project,
    rounded,
)
from jaxrl.parallel.rules import Placement, constrain
from jaxrl.types import MOST_SEGMENTS, Array

EXPERT = "expert"  # the mesh axis over which experts are spread
SCORES: dict[str, Callable[[Array], Array]] = {
    "softmax": functools.partial(jax.nn.softmax, axis=-1),
    "sigmoid": jax.nn.sigmoid,
}


class Routes(NamedTuple):
    """Hold the experts of each token: ids [n, k] int32 and their weights [n, k] float32."""

    ids: Array
    weights: Array


class Routing(NamedTuple):
    """Hold what a router did: ids [B, T, k], weights [B, T, k], float32 logits [B, T, E].

    `SCORES` makes the scores of the logits. `differs` [B, T] float32 is the share of the ids that
    were replayed and that the router would not have chosen.
    """

    ids: Array
    weights: Array
    logits: Array
    differs: Array


def route(
    experts: Experts, logits: Array, bias: Array | None = None, replay: Array | None = None
) -> tuple[Routes, Array]:
    """Choose the k experts of each token and weigh them by their scores.

    As transformers does for Mixtral, OLMoE, Qwen2-MoE and Qwen3-MoE (softmax) and for DeepSeek-V3
    (sigmoid, https://arxiv.org/abs/2412.19437, section 2.1.2).

    Args:
        logits: [n, E] float32.
        bias: [E], with `experts.bias`; it has no gradient.
        replay: [n, k] ids that are taken in place of the choice, such as those of the sampler (Ma
            et al., 2025, https://arxiv.org/abs/2510.11370); the weights remain functions of the
            logits. A row whose first id is E or more is not known, and chooses for itself.

    Returns:
        The routes, and the scores [n, E] float32.
    """
    scores = SCORES[experts.scoring](logits)
    ids = _choose(experts, jax.lax.stop_gradient(scores), bias)
    if replay is not None:
        given = jnp.asarray(replay, jnp.int32)
        ids = jnp.where(given[:, :1] < experts.count, given, ids)
    weights = _at(scores, ids)
    if experts.normalise:
        weights = weights / (weights.sum(axis=-1, keepdims=True) + 1e-20)
    return Routes(ids, weights * experts.scaling), scores


def _choose(experts: Experts, scores: Array, bias: Array | None) -> Array:
    """Return the ids [n, k] of the best scores [n, E], in the best groups of experts alone.

    A group is as good as its two best together.
    """
    if bias is not None:
        scores = scores + jax.lax.stop_gradient(bias)
    if experts.groups > 1:
        grouped = scores.reshape(len(scores), experts.groups, -1)
        of_group = jax.lax.top_k(grouped, 2)[0].sum(axis=-1)
        best = jax.lax.top_k(of_group, experts.groups_per_token)[1]
        open_groups = (best[:, None] == jnp.arange(experts.groups)[:, None]).any(axis=-1)
        scores = jnp.where(open_groups[..., None], grouped, -jnp.inf).reshape(scores.shape)
    return jax.lax.top_k(scores, experts.per_token)[1]


@jax.checkpoint  # keeps no mask [n, k, E]
def _at(scores: Array, ids: Array) -> Array:
    """Return the scores [n, k] of ids; the gradient is a sum over k, not a scatter."""
    here = ids[..., None] == jnp.arange(scores.shape[1])
    return jnp.where(here, scores[:, None], 0).sum(axis=-1)


class RouterTerms(NamedTuple):
    """Hold what is known of the router of a layer by token, [B, T] float32 each.

    The first two add up to its losses; the third is that of `Routing`.
    """

    balance: Array
    z: Array
    differs: Array


def router_terms(experts: Experts, routing: Routing, segment_ids: Array) -> RouterTerms:
    """Return what is known of a layer's router; sums over a trajectory are its losses.

    Of a trajectory of n tokens, with the chosen ids and scores s of token t, that add up to 1:

        balance = sum_i f_i P_i,  f_i = E / (k n) sum_t 1[i chosen],  P_i = 1 / n sum_t s_ti
        z = 1 / n sum_t logsumexp(logits_t)^2

    Balance is 1 where all experts have the same load, and E / k where k have all. Each trajectory
    has its own, so no cut into microbatches changes the gradient, which is of P alone. DeepSeek-V3,
    https://arxiv.org/abs/2412.19437, equations 17 to 20; ST-MoE, https://arxiv.org/abs/2202.08906,
    equation 5.

    Args:
        segment_ids: [B, T] of the trajectory of each token, wherever in the row; 0 = padding, whose
            terms are 0.
    """
    chosen = (routing.ids[..., None] == jnp.arange(experts.count)).sum(axis=2)  # [B, T, E]
    inside = segment_ids[..., None] == jnp.arange(1, MOST_SEGMENTS + 1)  # [B, T, S]
    counts = jnp.einsum("bts,bte->bse", inside.astype(jnp.int32), chosen)
    mine = jnp.maximum(segment_ids - 1, 0)[..., None]
    counts = jnp.take_along_axis(counts, mine, axis=1)
    n = jnp.take_along_axis(inside.sum(axis=1), mine[..., 0], axis=1)
    n = jnp.maximum(n, 1).astype(jnp.float32)
    f = counts * (experts.count / (experts.per_token * n))[..., None]
    scores = SCORES[experts.scoring](routing.logits)
    scores = scores / scores.sum(axis=-1, keepdims=True)
    real = (segment_ids > 0) / n
    z = jnp.square(jax.nn.logsumexp(routing.logits, axis=-1))
    return RouterTerms(real * (f * scores).sum(axis=-1), real * z, routing.differs)


class Load(NamedTuple):
    """Hold what the experts of a layer had to do, float32.

    Attributes:
        tokens: [E] that were sent to each.
        weight: [E] the sum of the weights that they had there.
        sent: [] ids of all tokens, k of each.
    """

    tokens: Array
    weight: Array
    sent: Array


def load_of(experts: Experts, routing: Routing, real: Array) -> Load:
    """Return the load of the tokens that are `real` [B, T] bool."""
    here = routing.ids[..., None] == jnp.arange(experts.count)
    here &= real[..., None, None]
    weight = jnp.where(here, routing.weights[..., None], 0).sum(axis=(0, 1, 2))
    sent = experts.per_token * real.sum(dtype=jnp.float32)
    return Load(here.sum(axis=(0, 1, 2), dtype=jnp.float32), weight, sent)


def expert_mlp(
    experts: Experts,
    activation: Callable[[Array], Array],
    weights: Mapping[str, SampledWeight],
    y: Array,
    *,
    placement: Placement | None = None,
    kernel: str = REFERENCE,
    exchange: str = GATHER,
    replay: Array | None = None,
    real: Array | None = None,
) -> tuple[Array, Routing]:
    """Compute the sum of each token's experts by their weights, and of the shared expert.

    An expert is down(gated(gate y, up y)). Over a mesh with an axis `expert` each of its
    devices has E / its size of the experts: it gets the tokens of the others, computes what its
    experts make of them, and sends back sums.

    Args:
        weights: of one layer, whole over the batch axes: router [D, E], router_bias and
            router_offset [E], experts_gate_bias and experts_up_bias [E, F], experts_down_bias
            [E, D], experts_gate and experts_up [E, D, F], experts_down [E, F, D], shared_gate and
            shared_up [D, S], shared_down [S, D], shared_router [D, 1]. Those without bias in their
            names, but routers, may have adapters or be in 8 bits.
        y: [B, T, D].
        placement: where rows, experts and their width are spread.
        kernel: of `GROUPED_PRODUCT`.
        exchange: how tokens travel, see `exchange_of`.
        replay: [B, T, k], see `route`.
        real: [B, T] bool of tokens that are no padding, which is alike and would go all to the same
            experts: `all_to_all` leaves it where it is, and the sum of its experts out. None: all.

    Returns:
        [B, T, D] in the dtype of y, and what the router did.
    """
    routed = {k: w for k, w in weights.items() if k.startswith(("router", "experts_"))}
    # float32 outside and the dtype of y within, so that gradients meet in float32
    given = (routed, y.astype(jnp.float32), replay, real)
    run = functools.partial(_routed, experts, activation, kernel, y.dtype)
    if placement is None:
        parts, routing = run(None, None, *given)
    else:
        parts, routing = _over_mesh(experts, run, placement, exchange, y.dtype, *given)
    out = parts.sum(axis=0)
    if experts.shared_width is not None:
        out = out + _shared(activation, weights, y, placement)
    return out.astype(y.dtype), routing


def _over_mesh(
    experts: Experts,
    run: Callable[..., tuple[Array, Routing]],
    placement: Placement,
    named: str,
    dtype: Any,
    weights: dict[str, SampledWeight],
    y: Array,
    replay: Array | None,
    real: Array | None,
) -> tuple[Array, Routing]:
    """Run `_routed` on every device of a mesh, with its rows, its experts and its part of F."""
    shards = placement.mesh.shape.get(EXPERT, 1)
    expert = EXPERT if shards > 1 and experts.count % shards == 0 else None
    (width,) = placement.spec((experts.width,), ("mlp",))
    rows, seq = placement.spec(y.shape[:2], ("batch", "seq"))
    exchange = None
    if expert is not None and rows is not None and expert in placement.batch_axes:
        tokens = y.shape[0] * y.shape[1] // placement.size(rows) // placement.size(seq)
        size = jnp.dtype(dtype).itemsize
        exchange = exchange_of(experts, y.shape[2], tokens, shards, size, named)
    # Parts are added outside: the gradient of that sum is no sum, as it would be of a psum.
    parts = tuple(jax.tree.leaves((None if exchange else expert, width)))
    dims = {
        "experts_gate": (None, width),
        "experts_up": (None, width),
        "experts_down": (width, None),
        "experts_gate_bias": (width,),
        "experts_up_bias": (width,),
        "experts_down_bias": (None,),
    }
    if "experts_down_bias" in weights:  # of every part of the width; their sum has it once
        bias: Any = weights["experts_down_bias"]
        weights = weights | {"experts_down_bias": bias / placement.size(width)}
    specs = {name: _spec(w, expert, *dims.get(name, ())) for name, w in weights.items()}
    return jax.shard_map(
        functools.partial(run, expert, exchange),
        mesh=placement.mesh,
        in_specs=(specs, *(PartitionSpec(rows, seq),) * 3),
        out_specs=(PartitionSpec(parts, rows, seq), PartitionSpec(rows, seq)),
        check_vma=False,  # a kernel does not say over which axes its output varies
    )(weights, y, replay, real)


def _spec(w: SampledWeight, expert: str | None, *dims: str | None) -> Any:
    """Return by which mesh axes a weight of experts [E, in, out] is split; one without dims is not.

    Each device has the adapters of its experts, whole but for the dim that is split.
    """
    if not dims:
        return PartitionSpec()
    if isinstance(w, QuantisedWeight):
        return w.replace(values=PartitionSpec(expert, *dims), scale=PartitionSpec(expert, dims[1]))
    if not isinstance(w, LoraWeight):
        return PartitionSpec(expert, *dims)
    rows, columns = dims
    return w.replace(
        w=PartitionSpec(expert, rows, columns),
        a=PartitionSpec(expert, rows, None),
        b=PartitionSpec(expert, None, columns),
        scale=PartitionSpec(expert),
    )


def _routed(
    experts: Experts,
    activation: Callable[[Array], Array],
    kernel: str,
    dtype: Any,
    expert: str | None,
    exchange: Exchange | None,
    weights: dict[str, SampledWeight],
    y: Array,
    replay: Array | None,
    real: Array | None,
) -> tuple[Array, Routing]:
    """Compute the part [1, B, T, D] float32 that this device's experts have in the sum.

    Args:
        dtype: in which experts compute.
        expert: the axis over which experts are spread; None = all are here.
        exchange: how tokens travel along it; None = rows are not spread over it.
        y: [B, T, D] float32, of values that `dtype` has.
    """
    tokens = y.reshape(-1, y.shape[-1])
    router = weights["router"]
    assert not isinstance(router, LoraWeight | QuantisedWeight)
    logits = tokens @ rounded(router, dtype)
    if "router_offset" in weights:
        offset: Any = weights["router_offset"]
        logits = logits + rounded(offset, dtype)
    replay = None if replay is None else replay.reshape(len(tokens), -1)
    own, _ = route(experts, logits, weights.get("router_bias"))
    routes, differs = own, jnp.zeros(y.shape[:2], jnp.float32)
    if replay is not None:
        routes, _ = route(experts, logits, weights.get("router_bias"), replay)
        agrees = (routes.ids[..., None] == own.ids[:, None]).any(axis=-1)
        differs = 1 - agrees.mean(axis=-1).reshape(y.shape[:2])
    routing = Routing(*(x.reshape(*y.shape[:2], -1) for x in (*routes, logits)), differs=differs)

    def mix(weights: dict[str, SampledWeight], tokens: Array, ids: Array, by_id: Array) -> Array:
        first = 0 if expert is None else jax.lax.axis_index(expert) * _experts_in(weights)
        act, routes = functools.partial(gated, experts, activation), Routes(ids - first, by_id)
        return _mixture(act, kernel, dtype, weights, tokens, routes)

    held = {name: w for name, w in weights.items() if name.startswith("experts_")}
    if exchange is None:
        out = mix(held, tokens, *routes)
    else:
        assert expert is not None
        if exchange.way == ALL_TO_ALL and real is not None:
            travel = jnp.where(real.reshape(-1, 1), routes.ids, experts.count)
            routes = routes._replace(ids=travel)
        out = over_devices(exchange, mix, expert, dtype, held, tokens, routes)
    return out.reshape(1, *y.shape), routing


def gated(experts: Experts, activation: Callable[[Array], Array], gate: Array, up: Array) -> Array:
    """Return what an expert makes of gate and up: activation(gate) * up.

    With `swiglu_limit` it is gate sigmoid(alpha gate) (up + 1), of a gate that is clamped from
    above, and up from both sides (gpt-oss, https://arxiv.org/abs/2508.10925).
    """
    if (limit := experts.swiglu_limit) is None:
        return activation(gate) * up
    gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return gate * jax.nn.sigmoid(experts.swiglu_alpha * gate) * (up + 1)


def _mixture(
    activation: Callable[[Array, Array], Array],
    kernel: str,
    dtype: Any,
    weights: dict[str, SampledWeight],
    tokens: Array,
    routes: Routes,
) -> Array:
    """Compute the sum [n, D] float32 of what experts make of tokens [n, D].

    Ids outside of the experts in `weights` are of other devices: their assignments lie behind all
    groups, where a product is 0.
    """
    here = _experts_in(weights)
    ids = routes.ids.reshape(-1)
    ids = jnp.where((ids >= 0) & (ids < here), ids, here)
    order = jnp.argsort(ids, stable=True)
    inverse = jnp.argsort(order)
    ends = jnp.searchsorted(ids[order], jnp.arange(here), side="right")
    sizes = jnp.diff(ends, prepend=0).astype(jnp.int32)

    def product(x: Array, w: SampledWeight) -> Array:
        if isinstance(w, QuantisedWeight):
            x, values = kept_narrow(x, w.values)
            out = grouped_product(x, values, sizes, kernel).astype(jnp.float32)
            # rows of no group are 0, whatever their scale
            return (out * w.scale[jnp.minimum(ids[order], here - 1)]).astype(x.dtype)
        if not isinstance(w, LoraWeight):
            return grouped_product(x, w, sizes, kernel)
        # kernels have tiles of 128, and most ranks are smaller
        low = kernel if w.a.shape[-1] % 128 == 0 else REFERENCE
        low_rank = grouped_product(x, w.a, sizes, low)
        scaled = w.b * w.scale[:, None, None]
        return product(x, w.w) + grouped_product(low_rank, scaled, sizes, low)

    @jax.checkpoint  # keeps no second and wider copy of the rows
    def total(rows: Array, by_token: Array) -> Array:
        back = jnp.reshape(_take(rows, inverse, order, dtype), (*by_token.shape, -1))
        return (by_token[..., None] * back.astype(jnp.float32)).sum(axis=1)

    rows = _take(tokens, order, inverse, dtype)

    def matrix(x: Array, name: str) -> Array:
        out = product(x, weights[name])
        if f"{name}_bias" not in weights:
            return out
        # a product, so that its gradient is a sum of one order
        of_expert = (ids[order][:, None] == jnp.arange(here)).astype(dtype)
        bias: Any = weights[f"{name}_bias"]
        return out + of_expert @ bias.astype(dtype)

    hidden = activation(matrix(rows, "experts_gate"), matrix(rows, "experts_up"))
    return total(matrix(hidden, "experts_down"), routes.weights)


def _experts_in(weights: Mapping[str, SampledWeight]) -> int:
    """Return how many experts have their weights here."""
    return len(jax.tree.leaves(weights["experts_gate"])[0])  # of all its arrays


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _take(x: Array, order: Array, inverse: Array, dtype: Any) -> Array:
    """Return, for a permutation of k n places, rows order // k of x [n, D], in `dtype`.

    Its gradient is gathered by the inverse and summed over k in float32.
    """
    return x.astype(dtype)[order // (len(order) // len(x))]


def _take_forward(x: Array, order: Array, inverse: Array, dtype: Any) -> tuple[Array, tuple]:
    return _take(x, order, inverse, dtype), (inverse, x[:, :0])  # of x its shape and dtype


def _take_backward(dtype: Any, residuals: tuple, g: Array) -> tuple[Array, None, None]:
    inverse, x = residuals
    by_row = g[inverse].reshape(len(x), -1, g.shape[1])
    return by_row.astype(jnp.float32).sum(axis=1).astype(x.dtype), None, None


_take.defvjp(_take_forward, _take_backward)


def _shared(
    activation: Callable[[Array], Array],
    weights: Mapping[str, SampledWeight],
    y: Array,
    placement: Placement | None,
) -> Array:
    """Compute what the shared expert makes of y [B, T, D], in float32."""
    hidden = activation(project(y, weights["shared_gate"])) * project(y, weights["shared_up"])
    hidden = constrain(hidden, ("batch", None, "mlp"), placement)
    out = project(hidden, weights["shared_down"]).astype(jnp.float32)
    if "shared_router" in weights:
        out = out * jax.nn.sigmoid(project(y, weights["shared_router"]).astype(jnp.float32))
    return out
