"""Products of groups of rows with a matrix each: the experts of a mixture.

Rows lie sorted by group. Their gradient has two products more, dx with the transposed matrices and
dW [E, in, out] of each group's rows alone; both are made by the implementation itself. XLA's own
gradient of `jax.lax.ragged_dot` is never taken: compiled for TPUs, its dW multiplies all rows with
all groups, E times the work.

Shape legend: n rows, E groups.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxrl.models.kernels import tokamax_package
from jaxrl.models.kernels.choice import (
    HOPPER,
    REFERENCE,
    Facts,
    Implementation,
    Operation,
    unmet,
)
from jaxrl.types import Array

TILE, SMALLEST_TILE = 128, 8  # rows of a product of the reference
WIDE_TILE, AT_ONCE = 512, 2**26  # rows of a product of `batched_outer`, and numbers that it makes
TPU_ROWS, TPU_WIDTH = 512, 1024  # of the tiles of megablox; VMEM holds three of them twice
Product = Callable[[Array, Array, Array], Array]


def grouped_product(x: Array, w: Array, sizes: Array, kernel: str = REFERENCE) -> Array:
    """Multiply each group of rows with its matrix, in the dtype of x.

    Args:
        x: [n, in], sorted by group.
        w: [E, in, out]; its gradient is made in its own dtype.
        sizes: [E] int32, rows of each group; rows after them are of no group, and their result
            and gradient are 0.
        kernel: of `GROUPED_PRODUCT`.

    Returns:
        [n, out].
    """
    return GROUPED_PRODUCT.implementations[kernel].run(x, w, sizes)


def differentiable(rows: Callable[..., Array], outer: Product) -> Product:
    """Make the whole of its parts, each summed up in float32.

    Args:
        rows: x [n, in], w [E, in, out], sizes [E] -> [n, out] in the dtype of x; what it has for
            rows of no group is not read. With transposed=True w is [E, out, in].
        outer: x [n, in], y [n, out], sizes [E] -> [E, in, out] float32, the sum of x_i y_i^T over
            the rows of each group.
    """

    def only_grouped(x: Array, sizes: Array) -> Array:
        return jnp.where(jnp.arange(len(x))[:, None] < sizes.sum(), x, 0)

    @jax.custom_vjp
    def product(x: Array, w: Array, sizes: Array) -> Array:
        return only_grouped(rows(x, w.astype(x.dtype), sizes), sizes)

    def forward(x: Array, w: Array, sizes: Array) -> tuple[Array, tuple]:
        cast = w.astype(x.dtype)
        return only_grouped(rows(x, cast, sizes), sizes), (x, cast, sizes, jnp.zeros((), w.dtype))

    def backward(residuals: tuple, g: Array) -> tuple[Array, Array, None]:
        x, w, sizes, stored = residuals
        for_x = only_grouped(rows(g, w, sizes, transposed=True), sizes)
        return for_x, outer(x, g, sizes).astype(stored.dtype), None

    product.defvjp(forward, backward)
    return product


# ---------------------------------------------------------------- any platform


def tile_rows(x: Array, w: Array, sizes: Array, *, transposed: bool = False) -> Array:
    """Do `rows` in plain XLA: one product for each group in each tile of rows.

    What a row becomes depends on no other row, nor on its place, but on the number of rows.
    """
    tiles, width = _tiles(x, len(sizes)), w.shape[1 if transposed else 2]

    def add(out: Array, visit: tuple[Array, ...]) -> tuple[Array, None]:
        tile, group, mask = visit

        def product() -> Array:
            some = jnp.where(mask[:, None], tiles[tile], 0)
            matrix = w[group].T if transposed else w[group]
            return jnp.dot(some, matrix, preferred_element_type=jnp.float32)

        return out.at[tile].add(_unless_empty(mask, product)), None

    zeros = jnp.zeros((*tiles.shape[:2], width), jnp.float32)
    out = jax.lax.scan(add, zeros, _visits(sizes, tiles))[0]
    return out.reshape(-1, width)[: len(x)].astype(x.dtype)


def tile_outer(x: Array, y: Array, sizes: Array) -> Array:
    """Do `outer` in plain XLA."""
    x_tiles, y_tiles = _tiles(x, len(sizes)), _tiles(y, len(sizes))

    def add(out: Array, visit: tuple[Array, ...]) -> tuple[Array, None]:
        tile, group, mask = visit

        def product() -> Array:
            some = jnp.where(mask[:, None], x_tiles[tile], 0)
            return jnp.einsum("ni,no->io", some, y_tiles[tile], preferred_element_type=jnp.float32)

        return out.at[group].add(_unless_empty(mask, product)), None

    zeros = jnp.zeros((len(sizes), x.shape[1], y.shape[1]), jnp.float32)
    return jax.lax.scan(add, zeros, _visits(sizes, x_tiles))[0]


def _unless_empty(mask: Array, product: Callable[[], Array]) -> Array:
    """Return the product of a visit, 0 where it finds no row."""
    part = jax.eval_shape(product)
    return jax.lax.cond(mask.any(), product, lambda: jnp.zeros(part.shape, part.dtype))


def _tiles(x: Array, groups: int, most: int = TILE) -> Array:
    """Cut rows [n, width] into tiles [n / size, size, width], the last one padded.

    Tiles hold about as many rows as a group: in decoding a product of `TILE` rows is mostly of 0.
    """
    size = min(most, max(SMALLEST_TILE, 1 << (len(x) // groups).bit_length()))
    padded = jnp.pad(x, ((0, -len(x) % size), (0, 0)))
    return padded.reshape(-1, size, x.shape[1])


def _visits(sizes: Array, tiles: Array) -> tuple[Array, Array, Array]:
    """Return which tile meets which group, and in which of its rows [size] bool.

    Going through tiles and groups in order each step goes to the next of one of them, so there are
    tiles + E steps. Those that find no row of the group in the tile have an empty mask.
    """
    number, size = tiles.shape[:2]
    ends = jnp.cumsum(sizes)
    group_ends, tile_ends = ends, (jnp.arange(number) + 1) * size
    order = jnp.argsort(jnp.concatenate([group_ends, tile_ends]), stable=True)
    of_group = order < len(sizes)
    done_groups, done_tiles = (
        jnp.cumsum(which) - which for which in (of_group.astype(int), (~of_group).astype(int))
    )
    group, tile = jnp.minimum(done_groups, len(sizes) - 1), jnp.minimum(done_tiles, number - 1)
    place = tile[:, None] * size + jnp.arange(size)
    inside = (place >= (ends - sizes)[group][:, None]) & (place < ends[group][:, None])
    valid = (done_groups < len(sizes)) & (done_tiles < number)
    return tile, group, inside & valid[:, None]


# ---------------------------------------------------------------- TPU


def megablox_rows(
    x: Array, w: Array, sizes: Array, *, transposed: bool = False, interpret: bool = False
) -> Array:
    """Do `rows` by JAX's kernel for TPUs; `interpret` runs it anywhere, slowly, for tests."""
    from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm

    rows, tiling = _for_megablox(x, w.shape[1 if transposed else 2])
    settings = {"transpose_rhs": transposed, "interpret": interpret}
    return gmm(rows, w, sizes, x.dtype, tiling, **settings)[: len(x)]


def megablox_outer(x: Array, y: Array, sizes: Array, *, interpret: bool = False) -> Array:
    """Do `outer` by JAX's kernel for TPUs."""
    from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm

    x_rows, tiling = _for_megablox(x, y.shape[1])
    y_rows, _ = _for_megablox(y, x.shape[1])
    return tgmm(x_rows.T, y_rows, sizes, jnp.float32, tiling, interpret=interpret)


def _for_megablox(x: Array, width: int) -> tuple[Array, tuple[int, int, int]]:
    """Return rows in whole tiles, and the tiles' rows, inner and outer width."""
    size = min(TPU_ROWS, -(-len(x) // TILE) * TILE)
    tiling = size, min(TPU_WIDTH, x.shape[1]), min(TPU_WIDTH, width)
    return jnp.pad(x, ((0, -len(x) % size), (0, 0))), tiling


# ---------------------------------------------------------------- GPU


def tokamax_rows(x: Array, w: Array, sizes: Array, *, transposed: bool = False) -> Array:
    """Do `rows` by tokamax's kernel for Hopper."""
    from tokamax._src.ops.ragged_dot.pallas_mosaic_gpu import (  # pyright: ignore
        PallasMosaicGpuRaggedDot,
    )

    tokamax_package.prepare()
    matrices, settings = w.mT if transposed else w, {"preferred_element_type": x.dtype}
    return PallasMosaicGpuRaggedDot()(x, matrices, group_sizes=sizes, **settings)


def batched_outer(x: Array, y: Array, sizes: Array) -> Array:
    """Do `outer` in plain XLA, many visits at a time: a conditional makes a GPU wait for its host.

    In the place of tokamax's kernel, by whose 0.0.17 the gradient was off by 0.038 of its norm on
    an H100, where the value was off by 0.0017 (LOG.md).
    """
    x_tiles, y_tiles = (_tiles(z, len(sizes), WIDE_TILE) for z in (x, y))
    visits = _visits(sizes, x_tiles)
    some = min(max(AT_ONCE // (x.shape[1] * y.shape[1]), 1), len(visits[0]))
    more = -len(visits[0]) % some  # behind them none finds a row

    def add(out: Array, visit: tuple[Array, ...]) -> tuple[Array, None]:
        tile, group, mask = visit
        rows = jnp.where(mask[..., None], x_tiles[tile], 0)
        parts = jnp.einsum("vni,vno->vio", rows, y_tiles[tile], preferred_element_type=jnp.float32)
        return out.at[group].add(parts), None

    cut = [
        jnp.pad(z, ((0, more), *((0, 0),) * (z.ndim - 1))).reshape(-1, some, *z.shape[1:])
        for z in visits
    ]
    zeros = jnp.zeros((len(sizes), x.shape[1], y.shape[1]), jnp.float32)
    return jax.lax.scan(add, zeros, tuple(cut))[0]


def _tokamax_needs(facts: Facts) -> list[str]:
    hopper = facts.capability is None or HOPPER <= facts.capability < HOPPER + 1
    return tokamax_package.missing() + unmet(
        [
            (hopper, f"a Hopper GPU, not compute capability {facts.capability}"),
            (facts.dtype == jnp.bfloat16, "trainer.bf16=True"),
        ]
    )


GROUPED_PRODUCT = Operation(
    "grouped_product",
    "each group of rows times its own matrix, for mixtures of experts",
    {
        "megablox": Implementation(differentiable(megablox_rows, megablox_outer)),
        "tokamax": Implementation(
            differentiable(tokamax_rows, batched_outer), _tokamax_needs, "tokamax, Hopper, bf16"
        ),
        REFERENCE: Implementation(differentiable(tile_rows, tile_outer)),
    },
    {"tpu": ("megablox", REFERENCE), "gpu": ("tokamax", REFERENCE)},
)
