"""Log-probs and entropy of a vocabulary head, tile by tile: its logits are never in main memory.

    z = cap tanh(W y / cap) / temperature        log p(t) = z_t - log sum e^z

Forward, one pass over the tiles of W keeps a running maximum and the sums below it (Milakov and
Gimelshein, https://arxiv.org/abs/1805.02867); with the entropy's sum of (z - max) e^(z - max) and
the target's logit that is all that the losses need. Backward, each tile of logits is made again and
turned into its own gradient at once, which is rounded to the compute dtype before its two products;
these are summed up in float32. `pallas` does so as one kernel over a block of tokens: the tile of
W, that of its gradient and the tokens' are in fast memory. `tiles` is the same in plain XLA, which
writes a tile of logits, but none of the whole vocabulary.

Shape legend: N tokens, D model width, V vocabulary (of one device), n tokens of a block, v ids of
a tile. Logits are [v, n]: sums over the vocabulary then leave one number for each lane of a TPU.
W is [V, D] (an embedding) or [D, V] (a head of its own), and its gradient lies as it does: its
dim of the vocabulary is `vocab_dim`. A tile is turned, never the whole.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxrl.array_ops import FILTERED
from jaxrl.models.attention import softcap
from jaxrl.models.kernels.choice import REFERENCE, Facts, Implementation, Operation, unmet
from jaxrl.models.linear import einsum_float32
from jaxrl.types import Array

XLA_TOKENS, XLA_IDS = 4096, 8192  # of a block and of a tile: products far above the bandwidth
# Of a TPU: the tokens of a product, and bytes for those of a block and for the tiles of a matrix.
TPU_TOKENS, TPU_BLOCK, TPU_TILES = 512, 32 * 2**20, 16 * 2**20
CORES = 2  # of a v5p, each of half the tiles; one core alone does them one after the other
TPU_PARAMS = pltpu.CompilerParams(
    dimension_semantics=("parallel", "arbitrary"),
    vmem_limit_bytes=64 * 2**20,  # of v5p; v5e and v6e have 128
)
SMALL_VMEM = "TPU v2", "TPU v3", "TPU v4"
DIMS = "vd", "dv"  # of a matrix, by its dim of the vocabulary
LEFT_OUT = -2  # in the place of an id: what a tile holds there does not count; nobody's target


class Scoring(NamedTuple):
    """Say what becomes of the products: divided by the temperature, after the soft cap if any."""

    temperature: float
    cap: float | None


class Sums(NamedTuple):
    """Hold the sums over some ids of the vocabulary, for each token; float32, of one shape.

    Attributes:
        largest: logit m.
        total: sum of e^(z - m).
        weighted: sum of (z - m) e^(z - m).
        target: logit of the target, 0 if it is not among the ids.
    """

    largest: Array
    total: Array
    weighted: Array
    target: Array

    def over(self, axes: tuple[str, ...]) -> "Sums":
        """Return the sums over a vocabulary that is split over mesh axes, if any."""
        if not axes:
            return self
        largest = jax.lax.pmax(self.largest, axes)
        here = _below(self, largest)
        total, weighted, target = jax.lax.psum((here.total, here.weighted, here.target), axes)
        return Sums(largest, total, weighted, target)

    def log_probs(self) -> Array:
        """Return the log-prob of the targets."""
        return self.target - self.log_total()

    def entropy(self) -> Array:
        """Return the entropy in nats; two terms of one sign, so nothing cancels."""
        return jnp.log(self.total) - self.weighted / self.total

    def log_total(self) -> Array:
        """Return log sum e^z."""
        return self.largest + jnp.log(self.total)


class Slopes(NamedTuple):
    """Hold what the backward pass needs of each token; float32, of one shape.

    Attributes:
        log_total: log sum e^z over the whole vocabulary.
        entropy: of the distribution.
        for_log_prob, for_entropy: gradients of the objective; 0 for tokens that are not wanted.
    """

    log_total: Array
    entropy: Array
    for_log_prob: Array
    for_entropy: Array


def block_tokens(kernel: str, tokens: int, width: int) -> int:
    """Return the tokens of a block: those scored in one call, of `tokens` of a given width D."""
    if kernel == "tiles":
        return min(XLA_TOKENS, tokens)
    at_once = min(TPU_TOKENS, -(-tokens // 128) * 128)
    fitting = TPU_BLOCK // (6 * width)  # as bfloat16, and their gradient as float32
    blocks = max(min(fitting, 2048) // at_once, 1)
    return at_once * min(blocks, -(-tokens // at_once))


def sums(
    kernel: str,
    y: Array,
    w: Array,
    targets: Array,
    count: Array,
    scoring: Scoring,
    vocab_dim: int = 0,
    known: Array | None = None,
) -> Sums:
    """Return the sums over the ids of `w`, each [n].

    Args:
        kernel: "pallas", "tiles", or "interpret": "pallas" anywhere, slowly, for tests.
        y: [n, D] normed hidden states, as many as `block_tokens`, in the compute dtype as `w` is.
        w: [V, D], or [D, V] where `vocab_dim` is 1.
        targets: [n] int, numbered by the ids of w; -1 where it is not among them.
        count: [] int, tokens that are wanted, the first ones; the others' sums are any.
        known: [] int, ids of w that count, the first ones, none of them if it is below 1; None =
            all.
    """
    if kernel == "tiles":
        return _xla_sums(y, w, targets, scoring, vocab_dim, known)
    tiles, numbers = _Tiles.of(y, w, vocab_dim), _numbers(count, known)
    return _pallas_sums(y, w, targets, numbers, scoring, tiles, interpret=kernel == "interpret")


def gradients(
    kernel: str,
    y: Array,
    w: Array,
    targets: Array,
    count: Array,
    slopes: Slopes,
    for_w: Array,
    scoring: Scoring,
    vocab_dim: int = 0,
    known: Array | None = None,
) -> tuple[Array, Array]:
    """Return the gradient of the hidden states, and that of the matrix added to another.

    Args:
        y, w, targets, count, vocab_dim, known: as of `sums`.
        slopes: each [n], 0 and finite where not wanted.
        for_w: float32 of the shape of `w`, what its gradient is added to.

    Returns:
        [n, D] float32, over the ids of `w` alone; float32 of the shape of `w`.
    """
    if kernel == "tiles":
        return _xla_gradients(y, w, targets, slopes, for_w, scoring, vocab_dim, known)
    tiles, interpret = _Tiles.of(y, w, vocab_dim), kernel == "interpret"
    args = y, w, targets, _numbers(count, known), slopes, for_w, scoring, tiles
    return _pallas_gradients(*args, interpret=interpret)


def _numbers(count: Array, known: Array | None) -> Array:
    """Return what kernels read before they begin: [1], or [2] where not all ids count."""
    return jnp.stack([x.astype(jnp.int32) for x in (count, known) if x is not None])


def _logits(products: Array, scoring: Scoring) -> Array:
    return softcap(products, scoring.cap) / scoring.temperature


def _below(sums: Sums, largest: Array) -> Sums:
    """Return the sums below another, larger maximum."""
    shift = sums.largest - largest
    scale = jnp.exp(shift)
    weighted = scale * (sums.weighted + shift * sums.total)
    return Sums(largest, scale * sums.total, weighted, sums.target)


def _add(sums: Sums, z: Array, ids: Array, targets: Array) -> Sums:
    """Add logits z [v, n] of ids [v, 1] to the sums [1, n] of the tokens."""
    z = jnp.where(ids == LEFT_OUT, FILTERED, z)
    largest = jnp.maximum(sums.largest, z.max(0, keepdims=True))
    before = _below(sums, largest)
    below = z - largest
    e = jnp.exp(below)
    return Sums(
        largest,
        before.total + e.sum(0, keepdims=True),
        before.weighted + (below * e).sum(0, keepdims=True),
        before.target + jnp.where(ids == targets, z, 0).sum(0, keepdims=True),
    )


def _no_sums(shape: tuple[int, ...]) -> Sums:
    zeros = jnp.zeros(shape, jnp.float32)
    return Sums(zeros + FILTERED, zeros, zeros, zeros)


def _product_gradients(
    z: Array, ids: Array, targets: Array, slopes: Slopes, scoring: Scoring
) -> Array:
    """Return the gradient of the products W y, [v, n] float32.

    d log p(t) / dz = [v = t] - p and dH / dz = -p (log p + H), with p of each id v; then through
    the soft cap, whose slope is 1 - tanh^2.
    """
    log_p = z - slopes.log_total
    weight = slopes.for_log_prob + slopes.for_entropy * (log_p + slopes.entropy)
    g = jnp.where(ids == targets, slopes.for_log_prob, 0) - jnp.exp(log_p) * weight
    if scoring.cap is not None:
        g *= 1 - jnp.square(z * (scoring.temperature / scoring.cap))
    return jnp.where(ids == LEFT_OUT, 0, g / scoring.temperature)


def _xla_tiles(w: Array, vocab_dim: int) -> tuple[int, Array]:
    """Return the number of ids in a tile, and the first id that each of them is to add."""
    vocabulary = w.shape[vocab_dim]
    size = min(XLA_IDS, vocabulary)
    return size, jnp.arange(math.ceil(vocabulary / size)) * size


def _xla_logits(
    y: Array,
    w: Array,
    first: Array,
    size: int,
    scoring: Scoring,
    vocab_dim: int,
    known: Array | None,
) -> tuple[Array, Array, Array, Array]:
    """Return where a tile of w starts, the tile, its ids [v, 1] and logits.

    The last one starts earlier, where it fits, and ids that are in the one before are left out.
    """
    start = jnp.minimum(first, w.shape[vocab_dim] - size)
    tile = jax.lax.dynamic_slice_in_dim(w, start, size, vocab_dim)
    ids = start + jnp.arange(size)[:, None]
    z = _logits(einsum_float32(f"{DIMS[vocab_dim]},nd->vn", tile, y), scoring)
    ids = jnp.where(ids < first, LEFT_OUT, ids)
    return start, tile, ids if known is None else jnp.where(ids < known, ids, LEFT_OUT), z


def _xla_sums(
    y: Array, w: Array, targets: Array, scoring: Scoring, vocab_dim: int, known: Array | None
) -> Sums:
    size, tiles = _xla_tiles(w, vocab_dim)

    def body(sums: Sums, first: Array) -> tuple[Sums, None]:
        _, _, ids, z = _xla_logits(y, w, first, size, scoring, vocab_dim, known)
        return _add(sums, z, ids, targets), None

    found = jax.lax.scan(body, _no_sums((1, y.shape[0])), tiles)[0]
    return jax.tree.map(lambda x: x[0], found)


def _xla_gradients(
    y: Array,
    w: Array,
    targets: Array,
    slopes: Slopes,
    for_w: Array,
    scoring: Scoring,
    vocab_dim: int,
    known: Array | None,
) -> tuple[Array, Array]:
    size, tiles = _xla_tiles(w, vocab_dim)
    dims = DIMS[vocab_dim]

    def body(totals: tuple[Array, Array], first: Array) -> tuple[tuple[Array, Array], None]:
        for_y, for_w = totals
        start, tile, ids, z = _xla_logits(y, w, first, size, scoring, vocab_dim, known)
        g = _product_gradients(z, ids, targets, slopes, scoring).astype(y.dtype)
        for_y += einsum_float32(f"vn,{dims}->nd", g, tile)
        part = jax.lax.dynamic_slice_in_dim(for_w, start, size, vocab_dim)
        part += einsum_float32(f"vn,nd->{dims}", g, y)
        return (for_y, jax.lax.dynamic_update_slice_in_dim(for_w, part, start, vocab_dim)), None

    return jax.lax.scan(body, (jnp.zeros(y.shape, jnp.float32), for_w), tiles)[0]


def _pallas_sums(
    y: Array,
    w: Array,
    targets: Array,
    numbers: Array,
    scoring: Scoring,
    tiles: "_Tiles",
    *,
    interpret: bool,
) -> Sums:
    shape = (tiles.cores, *tiles.rows(targets).shape)
    found = pl.pallas_call(
        functools.partial(_sums_kernel, tiles=tiles, scoring=scoring),
        out_shape=[jax.ShapeDtypeStruct(shape, jnp.float32)] * 4,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(tiles.cores, tiles.each),
            in_specs=[tiles.whole(y), tiles.whole(targets), tiles.spec],
            out_specs=[tiles.part(targets)] * 4,
        ),
        compiler_params=TPU_PARAMS,
        cost_estimate=_cost(y, w, tiles, products=1),
        interpret=interpret,
        name="head_sums",
    )(numbers, tiles.rows(y), tiles.rows(targets), w)
    parts = Sums(*(x.reshape(tiles.cores, -1) for x in found))
    below = _below(parts, parts.largest.max(0))
    return Sums(below.largest, *(x.sum(0) for x in below[1:]))


def _pallas_gradients(
    y: Array,
    w: Array,
    targets: Array,
    numbers: Array,
    slopes: Slopes,
    for_w: Array,
    scoring: Scoring,
    tiles: "_Tiles",
    *,
    interpret: bool,
) -> tuple[Array, Array]:
    by_token = targets, *slopes
    for_y, for_w = pl.pallas_call(
        functools.partial(_gradients_kernel, tiles=tiles, scoring=scoring),
        out_shape=[
            jax.ShapeDtypeStruct((tiles.cores, *tiles.rows(y).shape), jnp.float32),
            jax.ShapeDtypeStruct(for_w.shape, for_w.dtype),
        ],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(tiles.cores, tiles.each),
            in_specs=[
                tiles.whole(y),
                *(tiles.whole(x) for x in by_token),
                tiles.spec,
                tiles.spec,
            ],
            out_specs=[tiles.part(y), tiles.spec],
        ),
        input_output_aliases={8: 1},  # counted from the prefetched numbers
        compiler_params=TPU_PARAMS,
        cost_estimate=_cost(y, w, tiles, products=3),
        interpret=interpret,
        name="head_gradients",
    )(numbers, *(tiles.rows(x) for x in (y, *by_token)), w, for_w)
    return for_y.sum(0).reshape(y.shape), for_w


class _Tiles(NamedTuple):
    """Say how a kernel goes through tokens and ids: a tile for each step of the grid.

    Attributes:
        vocabulary, width, vocab_dim: of the matrix, V, D and which of its dims is V.
        size: ids of a tile.
        cores: that have a tile.
        each: steps of a core.
        tokens: of one product.
    """

    vocabulary: int
    width: int
    vocab_dim: int
    size: int
    cores: int
    each: int
    tokens: int

    @classmethod
    def of(cls, y: Array, w: Array, vocab_dim: int) -> "_Tiles":
        """Return those of y [n, D] and a matrix."""
        vocabulary, width = w.shape[vocab_dim], w.shape[1 - vocab_dim]
        # w twice in bfloat16, its gradient coming and going twice in float32
        size = min(max(TPU_TILES // (20 * width) // 128 * 128, 128), 1024)
        tokens = TPU_TOKENS if len(y) % TPU_TOKENS == 0 else len(y)
        tiles = pl.cdiv(vocabulary, size)
        cores = min(CORES, tiles)
        return cls(vocabulary, width, vocab_dim, size, cores, pl.cdiv(tiles, cores), tokens)

    def rows(self, x: Array) -> Array:
        """Return x [n, ...] by products, [n / tokens, tokens, D] or [n / tokens, 1, tokens]."""
        return x.reshape(-1, *((self.tokens, self.width) if x.ndim == 2 else (1, self.tokens)))

    def whole(self, x: Array) -> pl.BlockSpec:
        """Return the block of an input that is all of it, in each step."""
        return pl.BlockSpec(self.rows(x).shape, lambda *_: (0, 0, 0))

    def part(self, x: Array) -> pl.BlockSpec:
        """Return the block of an output that each core has its own of."""
        shape = None, *self.rows(x).shape
        return pl.BlockSpec(shape, lambda core, *_: (core, 0, 0, 0), pipeline_mode=pl.Buffered(1))

    @property
    def spec(self) -> pl.BlockSpec:
        """Return the block of a matrix; of the last core's steps some may be too many."""
        last = pl.cdiv(self.vocabulary, self.size) - 1

        def place(core: Any, step: Any, _: Any) -> tuple[Any, Any]:
            tile = jnp.minimum(core * self.each + step, last)
            return (0, tile) if self.vocab_dim else (tile, 0)

        shape = (self.width, self.size) if self.vocab_dim else (self.size, self.width)
        return pl.BlockSpec(shape, place)

    def first(self) -> Array:
        """Return the first id of the tile of a step."""
        return (pl.program_id(0) * self.each + pl.program_id(1)) * self.size

    def read(self, w: Any, first: Array, numbers: Any) -> tuple[Array, Array]:
        """Return the tile of a step as [v, D], and its ids [v, 1].

        The last one may be more than is left of the matrix: beyond it lies anything, NaN too.
        """
        ids = first + jax.lax.broadcasted_iota(jnp.int32, (self.size, 1), 0)
        there = ids < self.vocabulary
        tile = w[...].T if self.vocab_dim else w[...]
        counts = there if numbers.shape == (1,) else there & (ids < numbers[1])
        return jnp.where(there, tile, 0), jnp.where(counts, ids, LEFT_OUT)

    def outer(self, g: Array, y: Array) -> Array:
        """Return the product of g [v, n] and y [n, D] as a tile of the matrix lies."""
        return _product(y, g, (0, 1)) if self.vocab_dim else _product(g, y, (1, 0))


def _cost(y: Array, w: Array, tiles: _Tiles, products: int) -> pl.CostEstimate:
    gradients = 4 * y.size + 8 * w.size if products > 1 else 0
    return pl.CostEstimate(
        flops=2 * products * len(y) * w.size,
        transcendentals=len(y) * tiles.vocabulary,
        bytes_accessed=y.nbytes + w.nbytes + gradients,
    )


def _product(x: Array, y: Array, contract: tuple[int, int]) -> Array:
    dims = (((contract[0],), (contract[1],)), ((), ()))
    return jax.lax.dot_general(x, y, dims, preferred_element_type=jnp.float32)


def _products(numbers: Any, tiles: _Tiles) -> Array:
    """Return how many of the products along the tokens have a wanted one."""
    return jax.lax.div(numbers[0] + tiles.tokens - 1, tiles.tokens)


def _sums_kernel(
    numbers: Any, y: Any, targets: Any, w: Any, *out: Any, tiles: _Tiles, scoring: Scoring
) -> None:
    first = tiles.first()

    @pl.when(pl.program_id(1) == 0)
    def begin() -> None:
        for ref, start in zip(out, _no_sums(targets.shape), strict=True):
            ref[...] = start

    @pl.when(first < tiles.vocabulary)
    def add() -> None:
        tile, ids = tiles.read(w, first, numbers)

        def product(i: Array, _: None) -> None:
            z = _logits(_product(tile, y[i], (1, 1)), scoring)
            found = _add(Sums(*(ref[i] for ref in out)), z, ids, targets[i])
            for ref, new in zip(out, found, strict=True):
                ref[i] = new

        jax.lax.fori_loop(0, _products(numbers, tiles), product, None)


def _gradients_kernel(
    numbers: Any,
    y: Any,
    targets: Any,
    log_total: Any,
    entropy: Any,
    for_log_prob: Any,
    for_entropy: Any,
    w: Any,
    before: Any,
    for_y: Any,
    for_w: Any,
    *,
    tiles: _Tiles,
    scoring: Scoring,
) -> None:
    first = tiles.first()

    @pl.when(pl.program_id(1) == 0)
    def begin() -> None:
        for_y[...] = jnp.zeros_like(for_y)

    @pl.when(first < tiles.vocabulary)
    def add() -> None:
        tile, ids = tiles.read(w, first, numbers)
        for_w[...] = before[...]

        def product(i: Array, _: None) -> None:
            z = _logits(_product(tile, y[i], (1, 1)), scoring)
            slopes = Slopes(log_total[i], entropy[i], for_log_prob[i], for_entropy[i])
            g = _product_gradients(z, ids, targets[i], slopes, scoring).astype(tile.dtype)
            for_w[...] += tiles.outer(g, y[i])
            for_y[i] += _product(g, tile, (0, 0))

        jax.lax.fori_loop(0, _products(numbers, tiles), product, None)


def _all_logits(
    y: Array,
    w: Array,
    targets: Array,
    count: Array,
    scoring: Scoring,
    vocab_dim: int = 0,
    known: Array | None = None,
) -> Sums:
    """Compute the sums from all logits at once; the reference, which autodiff goes through."""
    del count  # all of them
    z = _logits(einsum_float32(f"{DIMS[vocab_dim]},nd->vn", w, y), scoring)
    if known is not None:
        z = jnp.where(jnp.arange(len(z))[:, None] < known, z, FILTERED)
    largest = z.max(0)
    below = z - largest
    e = jnp.exp(below)
    target = jnp.take_along_axis(z, jnp.maximum(targets, 0)[None], axis=0)[0]
    target = jnp.where(targets < 0, 0, target)
    return Sums(largest, e.sum(0), (below * e).sum(0), target)


def _tiles_needs(facts: Facts) -> list[str]:
    without = "generator.sampling_params.keep_sampling_mask=False, and no distillation"
    return unmet([(not facts.masked, without)])


def _pallas_needs(facts: Facts) -> list[str]:
    width = facts.model.hidden_size if facts.model else 128
    return _tiles_needs(facts) + unmet(
        [
            (not facts.kind.startswith(SMALL_VMEM), f"a TPU v5e or later, not {facts.kind}"),
            (facts.dtype == jnp.bfloat16, "trainer.bf16=True"),
            (width % 128 == 0, f"a hidden_size that 128 divides, not {width}"),
        ]
    )


# What is named "xla" in a run is `jaxrl.training.forward.score_columns`: all logits of some tokens,
# over the ids that a token was drawn from if need be, and of a head that is somebody else's.
HEAD_LOG_PROBS = Operation(
    "head_log_probs",
    "log-probs and entropy of the vocabulary head, in training and scoring",
    {
        "pallas": Implementation(
            functools.partial(sums, "pallas"),
            _pallas_needs,
            "v5e or later, bf16, 128 divides hidden_size, no keep_sampling_mask",
        ),
        "tiles": Implementation(
            functools.partial(sums, "tiles"), _tiles_needs, "no keep_sampling_mask"
        ),
        REFERENCE: Implementation(_all_logits),
    },
    {
        "tpu": ("pallas", "tiles", REFERENCE),
        "gpu": ("tiles", REFERENCE),
        "cpu": (REFERENCE, "tiles"),
    },
)
