"""The exact mode: the numbers of a token depend on what its row holds up to it, and on no shape.

XLA chooses how it adds up a product by the shapes of the call, and what it fuses by what stands
around it. So everything that is computed for tokens goes through one function of one shape, a tile,
wherever it is called from: prefill, decode, scoring, training. Three constructions hold that:

    tiles      `over_tiles` runs a function on as many tokens at a time, padded. It stands in a
               branch that XLA cannot know to be taken: a computation of its own, into which nothing
               from outside is fused, and whose inputs are arrays, rounded to what they are.
    blocks     attention goes through keys page by page, in their order, from tiles of queries
               (`kernels.paged_attention.by_tiles`). A page of which a query sees nothing changes no
               bit of its sums: x * 1 + 0.
    parts      what is split over devices is split into as many *logical* parts on any mesh; their
               sums are gathered and added up in the order of the parts.

What is left to trust, and tested (tests/models/test_exact.py): a row of a product depends neither
on its place in the tile nor on the other rows.

Shape legend: B rows, T tokens, n tokens of a tile, D model width, V vocabulary, S parts.
"""

import dataclasses
import functools
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import PartitionSpec

from jaxrl.models.architecture import TransformerConfig, keeps_states
from jaxrl.models.linear import Weight, einsum_float32, project
from jaxrl.parallel.rules import Placement, gather_parameter
from jaxrl.types import Array

Run = Callable[..., Any]  # of weights, arrays with a gradient, others; arrays are [1, n, ...]


@dataclass(frozen=True)
class Tiles:
    """Hold the sizes that every call has: what numbers depend on.

    Attributes:
        tokens: of a tile of products, norms and the head.
        queries: neighbouring positions of a row that attend together; it divides a page, and the
            engine's tile of a prompt, or is a multiple of it.
        rows: such groups of queries that are computed at once.
        page: keys of a block, those of the engine's pages.
        parts: logical parts of heads, MLP width and vocabulary; the size of every mesh's tensor
            axis divides it. A dim that it does not divide is whole.
        full: gradients, too, are those of rows one by one, added up in a tree.
        platform: of the devices. On CPUs weights stand in tiles in float32, with the values of the
            compute dtype: a CPU multiplies nothing narrower, and would widen them for every tile.
        shared: device axis over which the parts are spread, here; None = all are here.
    """

    tokens: int = 64
    queries: int = 4
    rows: int = 32
    page: int = 64
    parts: int = 1
    full: bool = False
    platform: str = "cpu"
    shared: str | None = None

    def split(self, x: Array, w: Array, width: int) -> Array:
        """Multiply x [B, T, D] by w [D, out, ...] of which `width` is the whole `out`: `project`.

        Each part of the outputs is a product of its own. So is each part of the gradient of x,
        which is their sum, in order.
        """
        if not self.is_split(width):
            return self._product(x, w)
        here = self.here(width)
        cut = jnp.moveaxis(w.reshape(w.shape[0], here, -1, *w.shape[2:]), 1, 0)
        spread = self.spread(x, here)
        parts = each(lambda both: self._product(*both), (spread, cut))
        return jnp.moveaxis(parts, 0, 2).reshape(*x.shape[:2], *w.shape[1:])

    def join(self, x: Array, w: Array, width: int, contract: int = 1) -> Array:
        """Multiply x [B, T, in, ...] by w [in, ..., D], of which `width` is the whole `in`.

        The parts of the sum are added up in their order, wherever they are.
        """
        if not self.is_split(width):
            return self._product(x, w, contract)
        here = self.here(width)
        of_x = jnp.moveaxis(x.reshape(*x.shape[:2], here, -1), 2, 0)
        of_w = w.reshape(here, -1, w.shape[-1])

        def part(both: tuple[Array, Array]) -> Array:
            return einsum_float32("bti,io->bto", both[0], both[1].astype(x.dtype))

        return self.in_order(each(part, (of_x, of_w))).astype(x.dtype)

    def by_part(self, run: Callable[..., Array], x: Array, width: int, *weights: Array) -> Array:
        """Return `run(x, *weights)` of x [B, T, heads, ...], each part of the heads by itself."""
        if not self.is_split(width):
            return run(x, *weights)
        here = self.here(width)
        cut = jnp.moveaxis(x.reshape(*x.shape[:2], here, -1, *x.shape[3:]), 2, 0)
        spread = (self.spread(w, here) for w in weights)
        parts = each(lambda given: run(*given), (cut, *spread))
        return jnp.moveaxis(parts, 0, 2).reshape(*x.shape[:2], -1, *parts.shape[4:])

    def in_order(self, parts: Array) -> Array:
        """Add up the parts [S here, ...] of all devices in their order."""

        @jax.custom_vjp
        def add_up(parts: Array) -> Array:
            return self._sum(parts)

        def back(here: int, g: Array) -> tuple[Array]:
            return (jnp.broadcast_to(g, (here, *g.shape)),)

        add_up.defvjp(lambda parts: (add_up(parts), len(parts)), back)
        return add_up(parts)

    def only(self, x: Array) -> Array:
        """Add up what one device has and the others have 0 of."""
        if self.shared is None:
            return x
        axis = self.shared

        @jax.custom_vjp
        def add_up(x: Array) -> Array:
            return jax.lax.psum(x, axis)

        add_up.defvjp(lambda x: (add_up(x), None), lambda _, g: (g,))
        return add_up(x)

    def is_split(self, width: int) -> bool:
        """Return whether a dim has parts."""
        return self.parts > 1 and width % self.parts == 0

    def here(self, width: int) -> int:
        """Return how many parts of a dim this device has."""
        if not self.is_split(width):
            return 1
        return self.parts // (1 if self.shared is None else jax.lax.axis_size(self.shared))

    def spread(self, x: Array, here: int) -> Array:
        """Return x once for each part that is here, [S here, ...]."""

        @jax.custom_vjp
        def spread(x: Array) -> Array:
            return jnp.broadcast_to(x, (here, *x.shape))

        def back(_: None, g: Array) -> tuple[Array]:
            return (self._sum(g.astype(jnp.float32)).astype(g.dtype),)

        spread.defvjp(lambda x: (spread(x), None), back)
        return spread(x)

    def _sum(self, parts: Array) -> Array:
        if self.shared is not None:
            parts = jax.lax.all_gather(parts, self.shared, tiled=True)
        return functools.reduce(jnp.add, [parts[i] for i in range(self.parts)])

    def _product(self, x: Array, w: Weight, contract: int = 1) -> Array:
        if self.platform != "cpu" or x.dtype == jnp.float32:
            return project(x, w, contract)
        return project(x.astype(jnp.float32), w, contract).astype(x.dtype)


def choose_tiles(
    exact: str, platform: str, *, tokens: int | None, parts: int, rows: int | None = None
) -> Tiles | None:
    """Return the tiles of a run; None where it is not exact.

    A tile reads all weights once: it should hold as many tokens as make their products worth it,
    and not many more than decode together, which would be padding.

    Args:
        exact: `trainer.exact`.
        tokens: `trainer.exact_tile`.
        parts: see `Tiles`.
        rows: most that decode together; None = many.
    """
    if exact == "off":
        return None
    most = CPU_TOKENS if platform == "cpu" else TOKENS
    together = most if rows is None else 1 << (rows - 1).bit_length()
    size = tokens or min(max(together, LEAST_TOKENS), most)
    sizes: dict[str, Any] = {"tokens": size, "rows": max(size // 2, 1)}
    if platform != "cpu":
        sizes |= {"queries": 8, "page": 128, "platform": platform}
    return Tiles(parts=parts, full=exact == "full", **sizes)


def check_exact(model: TransformerConfig, parts: int, platform: str) -> None:
    """Refuse what lets the exact mode compute some numbers in other ways.

    Raises:
        ValueError: the model has such layers, or the tensor axes split it unevenly; or on GPUs XLA
            may choose how to multiply by the time that it takes, in each program by itself.
    """
    field = "trainer.exact"
    if platform == "gpu" and GPU_FLAG not in os.environ.get("XLA_FLAGS", ""):
        raise ValueError(
            f"{field}: XLA tunes products on GPUs for each program by itself; set "
            f"XLA_FLAGS={GPU_FLAG} before the start"
        )
    if keeps_states(model) or model.latent is not None:
        raise ValueError(f"{field}: layers with a state, or latents, have no exact mode; set 'off'")
    if parts == 1:
        return
    if model.experts is not None or model.qk_norm == "whole" or model.output_gate:
        raise ValueError(
            f"{field}: experts, norms over all heads and gates of queries are not split into equal "
            "parts; set trainer.policy.mesh.tensor and tensor_parallel_size to 1, or 'off'"
        )
    sizes = {"num_heads": model.num_heads, "num_kv_heads": model.num_kv_heads}
    sizes |= {"intermediate_size": model.intermediate_size, "vocab_size": model.vocab_size}
    for name, size in sizes.items():
        if size % parts and math.gcd(size, parts) > 1:
            raise ValueError(
                f"{field}: {name}={size} is split over some of {parts} devices and not over all; "
                "give trainer.policy.mesh.tensor and tensor_parallel_size the same size"
            )


class Given(NamedTuple):
    """Hold what a tile is computed from.

    Attributes:
        moved: arrays [B, T, ...] with a gradient.
        fixed: arrays [B, T, ...] without.
        real: [B, T] bool; a tile of which nothing is real is left out, and 0.
    """

    moved: Any
    fixed: Any
    real: Array


def by_tokens(
    run: Run,
    tiles: Tiles,
    weights: Any,
    given: Given,
    *,
    dtype: Any,
    placement: Placement | None,
    specs: Any,
    moved: Any,
    outputs: Any,
) -> Any:
    """Return `run(tiles, weights, moved, fixed)` of all tokens, a tile at a time.

    In the backward pass a tile is computed again, and the gradient of the weights is added up in
    their own dtype: tile after tile, of many more tokens, as no promise is about their bits; or, of
    `tiles.full`, for each row alone, and then in a tree over the rows, whichever devices have them.

    Args:
        run: of tokens one by one; it takes and returns arrays [1, n, ...], and closes over no
            arrays. What is alike on all devices of the tensor axis has a gradient that is.
        weights: cast to `dtype`, but those that are float32 in the sampler (named in `WIDE`).
        specs: how weights lie on the mesh.
        moved, outputs: of what is given and made the whole width of dim 2, if that may be split,
            or 0.
    """
    alone = placement is None or placement.mesh.size == 1
    axis = None if placement is None else tensor_axis(placement)
    here = dataclasses.replace(tiles, shared=axis)
    rows = () if placement is None or alone else placement.batch_axes

    def lies(width: int) -> PartitionSpec:
        if axis is None or placement is None or not width or width % placement.size(axis):
            return PartitionSpec(rows)
        return PartitionSpec(rows, None, axis)

    def on_devices(function: Callable[..., Any], given: tuple, made: Any) -> Callable[..., Any]:
        if alone:
            return function
        return jax.shard_map(
            function,
            mesh=placement.mesh,  # type: ignore[union-attr]
            in_specs=given,
            out_specs=made,
            check_vma=False,  # the sum of gathered parts is the same on all devices of its axis
        )

    of_moved, of_outputs = (jax.tree.map(lies, x) for x in (moved, outputs))
    whole = specs, of_moved, PartitionSpec(rows), PartitionSpec(rows)

    @jax.custom_vjp
    def compute(*given: Any) -> Any:
        return on_devices(functools.partial(_forward, run, here, dtype), whole, of_outputs)(*given)

    def backward(given: tuple, cotangents: Any) -> tuple:
        floats = _Floats.of(cotangents)
        pull = functools.partial(_backward, run, here, dtype, rows)
        lie = _Floats.of(_by_leaf(of_outputs, cotangents), like=cotangents)
        made = specs, of_moved
        for_weights, for_moved = on_devices(pull, (*whole, lie), made)(*given, floats)
        return for_weights, for_moved, *jax.tree.map(_no_gradient, given[2:])

    compute.defvjp(lambda *given: (compute(*given), given), backward)
    return compute(weights, *given)


def exact_look_up(
    tiles: Tiles,
    table: Array,
    tokens: Array,
    real: Array,
    *,
    dtype: Any,
    placement: Placement | None,
    names: tuple[str, str],
) -> Array:
    """Look up rows of a table [V, D] for tokens [B, T] -> [B, T, D], with a gradient of tiles."""
    width = len(table)

    def run(tiles: Tiles, weights: Any, moved: tuple, fixed: tuple) -> Array:
        (tokens,), rows = fixed, weights["table"]
        if not tiles.is_split(width):
            return rows[tokens].astype(dtype)
        first = 0 if tiles.shared is None else jax.lax.axis_index(tiles.shared) * len(rows)
        here = (tokens >= first) & (tokens < first + len(rows))
        found = jnp.where(here[..., None], rows[jnp.where(here, tokens - first, 0)], 0)
        return tiles.only(found.astype(dtype))

    whole = {"table": gather_parameter(table, names, placement, dtype)}
    specs = None
    if placement is not None:
        specs = {"table": placement.whole_over_batch(table.shape, names)}
    return by_tokens(
        run,
        tiles,
        whole,
        Given((), (tokens,), real),
        dtype=dtype,
        placement=placement,
        specs=specs,
        moved=(),
        outputs=0,
    )


def tensor_axis(placement: Placement) -> str | None:
    """Return the mesh axis of logical parts, if it has more than one device."""
    axis = placement.rules.heads
    assert axis is None or isinstance(axis, str)
    return axis if placement.size(axis) > 1 else None


TOKENS, CPU_TOKENS, LEAST_TOKENS = 256, 64, 16  # of a tile, see docs/exact.md
BACKWARD_TOKENS = 1024  # where gradients are not exact; with a head of 150,000 0.6 GB of logits
GPU_FLAG = "--xla_gpu_deterministic_ops=true"
WIDE = ("final_norm",)  # weights that the sampler keeps in float32


def _forward(
    run: Run, tiles: Tiles, dtype: Any, weights: Any, moved: Any, fixed: Any, real: Array
) -> Any:
    """Run a function of tokens on a tile of them at a time, on one device."""
    tiles = dataclasses.replace(tiles, full=False)  # that is of gradients
    run = functools.partial(run, tiles)
    cast = _cast(weights, dtype, tiles.platform == "cpu")

    def one(tile: tuple[Any, Any, Array]) -> Any:
        *arrays, some_real = tile
        out = alone(functools.partial(run, cast), *arrays, when=some_real.any())
        return jax.tree.map(_bits, out)

    given = jax.tree.map(lambda x: _tiled(x, tiles), (moved, fixed, real))
    first = jax.tree.map(lambda x: x[0], given[:2])
    out = jax.lax.map(one, given)
    like = jax.eval_shape(run, cast, *first)
    return jax.tree.map(lambda x, y: _whole(x, real.shape, tiles, y.dtype), out, like)


def _backward(
    run: Run,
    tiles: Tiles,
    dtype: Any,
    axes: tuple[str, ...],
    weights: Any,
    moved: Any,
    fixed: Any,
    real: Array,
    cotangents: "_Floats",
) -> tuple[Any, Any]:
    """Return the gradients of weights, over all devices of some axes, and of what is moved."""
    if not tiles.full:
        total = math.prod(real.shape)
        tiles = dataclasses.replace(tiles, tokens=-(-total // -(-total // BACKWARD_TOKENS)))
    run = functools.partial(run, tiles)
    # in their own dtype, so that gradients are; with the values that the tile has
    cast = jax.tree.map(lambda w, x: x.astype(w.dtype), weights, _cast(weights, dtype, False))

    def pull(total: Any, moved: Any, fixed: Any, cotangents: _Floats) -> tuple[Any, Any]:
        out, pull_back = jax.vjp(lambda w, x: run(w, x, fixed), cast, moved)
        for_weights, for_moved = pull_back(cotangents.whole(out))
        return jax.tree.map(jnp.add, total, for_weights), for_moved

    def one(total: Any, tile: tuple) -> tuple[Any, Any]:
        some_moved, some_fixed, some_real, some = tile

        def nothing() -> tuple[Any, Any]:
            return total, jax.tree.map(jnp.zeros_like, some_moved)

        total, for_moved = jax.lax.cond(
            jax.lax.optimization_barrier(some_real.any()),
            lambda: alone(pull, total, some_moved, some_fixed, some),
            nothing,
        )
        return total, jax.tree.map(_bits, for_moved)

    given = jax.tree.map(lambda x: _tiled(x, tiles), (moved, fixed, real, cotangents))
    zeros = jax.tree.map(jnp.zeros_like, weights)
    if tiles.full:
        by_row = jax.tree.map(lambda x: x.reshape(len(real), -1, *x.shape[1:]), given)
        of_rows, for_moved = jax.lax.map(lambda row: jax.lax.scan(one, zeros, row), by_row)
        for_moved = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), for_moved)
        for_weights = jax.tree.map(lambda x: over_devices(in_pairs(x), axes), of_rows)
    else:
        for_weights, for_moved = jax.lax.scan(one, zeros, given)
        for_weights = jax.lax.psum(for_weights, axes) if axes else for_weights
    return for_weights, jax.tree.map(
        lambda x, y: _whole(x, real.shape, tiles, y.dtype), for_moved, moved
    )


def in_pairs(x: Array) -> Array:
    """Add up x [n, ...] over its first dim: neighbours, then neighbouring sums."""
    while len(x) > 1:
        x = jnp.pad(x, ((0, len(x) % 2), *((0, 0),) * (x.ndim - 1)))
        x = x[0::2] + x[1::2]
    return x[0]


def over_devices(x: Array, axes: tuple[str, ...]) -> Array:
    """Add up what devices have, in the tree of `in_pairs`, in a `shard_map` over these axes.

    Each adds up a part, as a reduction would have it, but in this order.
    """
    if not axes:
        return x
    number = jax.lax.axis_size(axes)
    flat = x.reshape(-1)
    parts = jnp.pad(flat, (0, -flat.size % number)).reshape(number, -1)
    mine = in_pairs(jax.lax.all_to_all(parts, axes, 0, 0))
    return jax.lax.all_gather(mine, axes, tiled=True)[: flat.size].reshape(x.shape)


def each(run: Callable[[Any], Any], parts: Any) -> Any:
    """Run a function of one part on each of them [S, ...], however many there are here."""
    return jax.lax.map(lambda part: alone(run, part), parts)


def alone(run: Callable[..., Any], *given: Any, when: Array | bool = True) -> Any:
    """Return `run(*given)`, or zeros, computed in the same way wherever that is called.

    It is a branch that XLA cannot know to be taken, so that nothing from outside is fused into it;
    what goes in and comes out is flat, so that no array has another layout than elsewhere. What it
    closes over is fixed in neither.

    Args:
        when: [] bool; False gives zeros.
    """
    leaves, treedef = jax.tree.flatten(given)
    made = jax.eval_shape(run, *given)
    outputs, made_as = jax.tree.flatten(made)

    def inside(*flat: Array) -> list[Array]:
        whole = [x.reshape(leaf.shape) for x, leaf in zip(flat, leaves, strict=True)]
        return [x.reshape(-1) for x in jax.tree.leaves(run(*treedef.unflatten(whole)))]

    def never(*flat: Array) -> list[Array]:
        del flat
        return [jnp.zeros(x.size, x.dtype) for x in outputs]

    flat = [x.reshape(-1) for x in leaves]
    found = jax.lax.cond(jax.lax.optimization_barrier(jnp.asarray(when)), inside, never, *flat)
    shaped = [x.reshape(like.shape) for x, like in zip(found, outputs, strict=True)]
    return made_as.unflatten(shaped)


def _cast(weights: Any, dtype: Any, widened: bool) -> Any:
    """Return weights as the sampler has them; widened: in float32."""

    def narrow(path: Sequence[Any], w: Array) -> Array:
        if any(getattr(key, "key", None) in WIDE for key in path):
            return w.astype(jnp.float32)
        # behind a barrier, or XLA joins a cast to the next one, and takes back the rounding
        cast = jax.lax.optimization_barrier(w.astype(dtype))
        return jax.lax.optimization_barrier(cast.astype(jnp.float32)) if widened else cast

    return jax.tree_util.tree_map_with_path(narrow, weights)


def _tiled(x: Array, tiles: Tiles) -> Array:
    """Cut x [B, T, ...] into [number, 1, n, ...]; what fills the last one up is 0.

    Of `tiles.full` each row begins with a tile.
    """
    flat = x if tiles.full else x.reshape(1, -1, *x.shape[2:])
    room = (0, 0), (0, -flat.shape[1] % tiles.tokens), *((0, 0),) * (flat.ndim - 2)
    return jnp.pad(flat, room).reshape(-1, 1, tiles.tokens, *x.shape[2:])


def _whole(x: Array, shape: tuple[int, ...], tiles: Tiles, dtype: Any) -> Array:
    """Undo `_tiled`, of the `_bits` of tiles."""
    rows, length = shape if tiles.full else (1, math.prod(shape))
    by_row = x.reshape(rows, -1, *x.shape[3:])[:, :length]
    return _bits(by_row.reshape(*shape, *x.shape[3:]), dtype)


def _bits(x: Array, dtype: Any = jnp.uint16) -> Array:
    """Return bfloat16 as whole numbers, and back.

    XLA for CPUs writes a tile of bfloat16 into an array by widening all of that, for every tile.
    """
    if jnp.bfloat16 not in (x.dtype, dtype):
        return x
    return jax.lax.bitcast_convert_type(x, dtype)


class _Floats(struct.PyTreeNode):
    """Hold the cotangents of what has some: not those of whole numbers."""

    leaves: list[Array]

    @classmethod
    def of(cls, tree: Any, like: Any = None) -> "_Floats":
        """Take them out of a tree, or what stands where they do in another one."""
        likes = jax.tree.leaves(tree if like is None else like)
        pairs = zip(jax.tree.leaves(tree), likes, strict=True)
        return cls([x for x, y in pairs if y.dtype != jax.dtypes.float0])

    def whole(self, outputs: Any) -> Any:
        """Return cotangents of all outputs."""
        left = iter(self.leaves)
        return jax.tree.map(lambda x: next(left) if _is_float(x) else _no_gradient(x), outputs)


def _by_leaf(prefix: Any, tree: Any) -> Any:
    """Return a tree of what a prefix of it says of each leaf."""
    is_spec = lambda x: isinstance(x, PartitionSpec)  # noqa: E731
    return jax.tree.map(
        lambda spec, part: jax.tree.map(lambda _: spec, part), prefix, tree, is_leaf=is_spec
    )


def _no_gradient(x: Array) -> Any:
    return jnp.zeros_like(x) if _is_float(x) else np.zeros(x.shape, jax.dtypes.float0)


def _is_float(x: Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)
