"""The native engine's device side: weights in the decode layout, the cache, compiled programs.

Programs have few shapes, listed by `sizes`, `PrefillShapes` and `prefill_rows`: what a block or a
chunk computes follows from them, and with `shrink=False` from no other sample: neighbours then
do not change a sample's bits.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxrl import activity
from jaxrl.data.packing import buckets_between, length_bucket, round_up
from jaxrl.models.kernels import decode_kernels
from jaxrl.models.kernels.choice import REFERENCE, facts_of
from jaxrl.models.kernels.decode_attention import decode_kernel
from jaxrl.models.transformer import (
    FUSED,
    Params,
    TransformerConfig,
    abstract_params,
    logical_axes,
    shards_of,
)
from jaxrl.parallel import ShardingRules
from jaxrl.parallel.compilation import Call, compile_together
from jaxrl.parallel.devices import device_memory
from jaxrl.parallel.rules import Placement, batch_devices
from jaxrl.rollout.native import decode as device, kv_cache
from jaxrl.rollout.weights.groups import (
    GROUP_BYTES,
    STACKED,
    layer_ranges,
    named,
    take,
    take_layers,
    whole_pieces,
)
from jaxrl.types import Array

GIB = 2**30
LEAST_LENGTH = 64  # positions; fewer are not worth shapes of their own
FRACTIONS = (4, 2, 1)  # a block runs over a quarter, a half or all of the slots, or of their length
# Tokens of a prefill call with several prompts, and of the longest chunk, by platform: a call with
# too few does not fill the device, one with too many computes padding and makes decoding wait.
PREFILL_TOKENS = {"cpu": (64, 256)}
DEFAULT_PREFILL_TOKENS = (1024, 1024)
# Decode steps of a block, by platform. Where a block begins before the one before is fetched, the
# device waits for the host only if that needs longer than a block takes: about 6 ms for 1,024 slots
# (LOG.md), where 8 steps of a 1.5B model take 24 ms on an H100 and 64 on a TPU v5e (estimates). A
# row that ends leaves its slot empty for one and a half blocks on average, 12 steps of 8. A CPU
# fetches each block before the next: for N steps of t each, h of the host and rows of L tokens
# h / (N t) + N / (2 L) is lost, which is flat around its least.
DISPATCH_STEPS = {"cpu": 32}
DEFAULT_DISPATCH_STEPS = 8
# Where programs take minutes to compile chunks have few lengths: the first of a prompt, later ones;
# and later ones see a quarter of a slot or all of it.
FIRST_CHUNKS, LATER_CHUNKS, LATER_FRACTIONS = (128, 256, 512, 1024), (256, 1024), (4, 1)


@dataclass(frozen=True)
class PrefillShapes:
    """Describe the chunks in which prompts are prefilled: their tokens, and the positions they see.

    Args:
        platform: of the devices.
        length: positions of a slot.
    """

    platform: str
    length: int

    @property
    def tokens(self) -> tuple[int, int]:
        """Return the tokens of a call with several prompts, and of the longest chunk."""
        return PREFILL_TOKENS.get(self.platform, DEFAULT_PREFILL_TOKENS)

    @property
    def few(self) -> bool:
        """Return whether there are few shapes, because each takes long to compile."""
        return self.platform not in PREFILL_TOKENS

    def width(self, missing: int, fresh: bool) -> int:
        """Return the tokens of the chunk that prefills the next of `missing` tokens.

        Args:
            fresh: the first of them is that of the prompt.
        """
        width = length_bucket(min(missing, self.tokens[1]))
        if self.few:
            few = FIRST_CHUNKS if fresh else LATER_CHUNKS
            width = next((n for n in few if n >= missing), few[-1])
        return min(width, self.length)

    def lengths(self) -> list[int]:
        """Return the numbers of positions that a chunk in the middle of a prompt can see."""
        return fractions_of(self.length, LATER_FRACTIONS if self.few else FRACTIONS)

    def all(self, prompts: Sequence[int], rests: bool) -> list[tuple[int, int | None]]:
        """Return chunk lengths, and the positions that they see; None = their own, of first chunks.

        Args:
            prompts: their lengths.
            rests: chunks may follow a prefix that is in the cache.
        """
        longest = max(prompts)
        widths = {self.width(max(n - 1, 1), True) for n in prompts}
        shapes: list[tuple[int, int | None]] = [(width, None) for width in widths]
        if longest - 1 > self.tokens[1] or rests:
            widths = {self.width(n, False) for n in buckets_between(1, longest)}
            shapes += itertools.product(widths, self.lengths())
        return sorted(shapes, key=lambda shape: (shape[1] is not None, shape))


def fractions_of(length: int, divisors: Sequence[int]) -> list[int]:
    """Return parts of the positions of a slot, ascending; the last is all of them."""
    parts = (round_up(length // divisor, 8) for divisor in divisors)
    return sorted({min(max(part, LEAST_LENGTH), length) for part in parts})


def kernel_of(
    config: TransformerConfig, mesh: Mesh, dtype: jnp.dtype, named: str | None = None
) -> str:
    """Return the name of what decoding attends by on the devices of a mesh."""
    return decode_kernel(facts_of(mesh.devices.flat[0], dtype, config), named)


def has_kernel(
    config: TransformerConfig, mesh: Mesh, dtype: jnp.dtype, named: str | None = None
) -> bool:
    """Return whether decoding attends by a kernel, whose caches have whole blocks of positions."""
    return kernel_of(config, mesh, dtype, named) != REFERENCE


def allocated_length(length: int, kernel: bool) -> int:
    """Return the positions of a slot with room for rows of `length` tokens; see `has_kernel`."""
    length = max(length_bucket(length), LEAST_LENGTH)
    return round_up(length, decode_kernels.POSITIONS) if kernel else length


def slots_that_fit(
    config: TransformerConfig,
    mesh: Mesh,
    dtype: jnp.dtype,
    *,
    max_model_len: int,
    utilization: float,
    memory: float | None = None,
    resident: float = 0,
    kernel: str | None = None,
) -> int:
    """Return how many slots fit, beside the decode weights, into a share of the free memory.

    Args:
        max_model_len: most tokens of a row.
        utilization: share of what is free.
        memory: bytes of a device; None = as it says itself.
        resident: bytes of a device that are not free.

    Raises:
        ValueError: not even one on each device.
    """
    length = allocated_length(max_model_len, has_kernel(config, mesh, dtype, kernel))
    tensor, groups = mesh.shape["tensor"], batch_devices(mesh, ShardingRules())
    size = jnp.dtype(dtype).itemsize
    elements = sum(math.prod(x.shape) for x in jax.tree.leaves(abstract_params(config)))
    weights = elements * size / tensor
    position = config.num_layers * config.num_kv_heads * size / tensor
    row = 2 * position * config.head_dim * length
    if mesh.devices.flat[0].platform == "tpu" and config.head_dim % kv_cache.TPU_LANES:
        # keys lie transposed, and are padded for the kernel while a block is decoded
        row += position * round_up(config.head_dim, kv_cache.TPU_LANES) * length
    whole = device_memory(mesh.devices.flat[0]) if memory is None else memory
    budget = utilization * (whole - resident)
    each = int((budget - weights) // row)
    if each < 1:
        raise ValueError(
            f"generator.inference_engine.gpu_memory_utilization={utilization}: {budget / GIB:.2f} "
            f"GiB per device, of {whole / GIB:.2f} with {resident / GIB:.2f} of the trainer's, "
            f"hold {weights / GIB:.2f} GiB of weights but not one row of {length} tokens "
            f"({row / GIB:.2f} GiB); raise it or tensor_parallel_size, offload the optimizer, or "
            "shorten prompts or responses"
        )
    return each * groups


class Programs:
    """Run prefill, decode and copies over one cache of `slots` slots.

    Args:
        mesh: slots are spread over its batch axes, heads and MLP over "tensor".
        steps: of a block; None = those of the platform, `DISPATCH_STEPS`.
        platform: whose shapes the programs have; None = that of the devices, which in a plan may
            stand in for others.
        ahead: a block may begin before the one before is fetched, so that the device does not wait
            for the host; None = but on CPUs, where both have the same cores.
        shrink: blocks may run over fewer rows than slots; None = on one CPU device. On accelerators
            a block takes as long, and between devices slots would move. False: nor do they see
            fewer positions than there are, so that no neighbour changes a bit.
        group_bytes: most bytes that are on their way from other devices at a time.
    """

    def __init__(
        self,
        config: TransformerConfig,
        mesh: Mesh,
        slots: int,
        *,
        dtype: jnp.dtype,
        steps: int | None,
        shrink: bool | None,
        ahead: bool | None = None,
        group_bytes: int = GROUP_BYTES,
        kernel: str | None = None,
        platform: str | None = None,
    ) -> None:
        # weights are whole but for the tensor axis: a step of decoding would gather them every time
        rules = ShardingRules(embed=None)
        placement = Placement(mesh, rules)
        platform = platform or placement.platform
        alone = platform == "cpu" and mesh.size == 1
        if steps is None:
            steps = DISPATCH_STEPS.get(platform, DEFAULT_DISPATCH_STEPS)
        self.config, self.steps, self.length = config, steps, 0
        self.placement, self.platform, self.dtype = placement, platform, jnp.dtype(dtype)
        self.group_bytes = group_bytes
        self.row_multiple = batch_devices(mesh, rules)
        self.slots = round_up(slots, self.row_multiple)
        self.chunk_tokens, self.longest_chunk = PrefillShapes(platform, 0).tokens
        self.params: Params | None = None
        # a kernel reads what is filled, whatever it is shown
        self._kernel = has_kernel(config, mesh, dtype, kernel)
        self.ahead = platform != "cpu" if ahead is None else ahead
        fewer = (alone if shrink is None else shrink) and not self.ahead  # rows stay where they are
        self._row_fractions = FRACTIONS if fewer else (1,)
        self._sees_all = self._kernel or shrink is False
        self._by_row = placement.sharding((self.slots,), ("batch",))
        self._cache: kv_cache.Cache | None = None
        self.functions = compiled(config, placement, self.slots, self.dtype, kernel)

    def load(self, params: Params) -> None:
        """Take over a copy of the trainer's parameters, from whatever devices they are on."""
        self.params = None  # two decode copies never live together
        self.params = self.functions.load(params, self.group_bytes)

    def drop(self, *, weights: bool) -> None:
        """Free the cache, and the weights. Its length stays: programs are compiled for it."""
        self._cache = None
        if weights:
            self.params = None

    def reserve(self, length: int) -> None:
        """Make room for rows of `length` tokens in every slot; what is in them stays."""
        length = self.cache_length(length)
        if self._cache is None:
            self._cache = self.functions.empty(length=length)
        elif length > self.length:
            self._cache = self.functions.lengthen(self._cache, length)
        self.length = length

    def cache_length(self, length: int) -> int:
        """Return the positions of a slot with room for `length` tokens, at least those of now."""
        return max(allocated_length(length, self._kernel), self.length)

    def sizes(self) -> list[int]:
        """Return the numbers of rows that a block can have."""
        return sorted({-(-self.slots // divisor) for divisor in self._row_fractions})

    def decode_lengths(self) -> list[int]:
        """Return the numbers of positions that a block can see."""
        return [self.length] if self._sees_all else fractions_of(self.length, FRACTIONS)

    @property
    def prefills(self) -> PrefillShapes:
        """Return the shapes of prefill calls."""
        return PrefillShapes(self.platform, self.length)

    def chunk(self, missing: int, start: int) -> tuple[int, int | None]:
        """Return the tokens of the chunk that prefills the next of `missing`, and what it sees.

        That is a number of positions of its slot; None = the chunk alone, which starts at 0.
        """
        width = self.prefills.width(missing, start == 0)
        end = start + min(missing, width)
        return width, _at_least(end, self.prefills.lengths()) if start else None

    def prefill_rows(self, width: int) -> int:
        """Return the number of chunks of `width` tokens in one call."""
        return round_up(max(self.chunk_tokens // width, 1), self.row_multiple)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy slots: (from, to), in order; at most one pair for each slot."""
        padded = np.resize(np.array([*pairs, (0, 0)], np.int32), (self.slots + 1, 2))
        self._cache = self.functions.copy(self._cache, *padded.T, len(pairs))

    def prefill(
        self, width: int, seen: int | None, chunks: Sequence[tuple[int, int, np.ndarray]]
    ) -> None:
        """Prefill at most `prefill_rows(width)` chunks: slot, first position, tokens.

        Args:
            width, seen: `chunk` of each.
        """
        rows = self.prefill_rows(width)
        tokens = np.zeros((rows, width), np.int32)
        slots, starts = np.full(rows, self.slots, np.int32), np.zeros(rows, np.int32)
        for row, (slot, start, new) in enumerate(chunks):
            tokens[row, : len(new)], slots[row], starts[row] = new, slot, start
        self._run_prefill(tokens, slots, starts, seen)

    def _run_prefill(self, tokens: Array, slots: Array, starts: Array, length: int | None) -> None:
        self._cache = self._prefill_call(tokens, slots, starts, length).run()

    def _prefill_call(self, tokens: Array, slots: Array, starts: Array, length: int | None) -> Call:
        tokens, slots, starts = jax.device_put((tokens, slots, starts), self._by_row)
        arguments = self.params, self._cache, tokens, slots, starts
        return Call(self.functions.prefill, arguments, {"length": length})

    def decode(
        self,
        rows: device.Rows,
        reach: int,
        before: device.Rows | None = None,
        begins: Array | None = None,
    ) -> tuple[device.Rows, device.Block]:
        """Begin a block; return its rows as it leaves them, and what it draws, on the device.

        Args:
            rows: as many as one of `sizes` says, as the host knows them.
            reach: tokens of the longest after the block.
            before: the rows of a block that is not fetched; those which do not begin go on there.
            begins: [B] bool.
        """
        rows = jax.device_put(rows, self._by_row)
        if before is not None:
            has_history = None not in (rows.history, before.history)
            names = [name for name in device.PROGRESS if name != "history" or has_history]
            given, left = ({name: getattr(x, name) for name in names} for x in (rows, before))
            begins = jax.device_put(begins, self._by_row)
            rows = rows.replace(**self.functions.go_on(given, left, begins))
        self._cache, after, block = self.functions.decode(
            self.params,
            self._cache,
            rows,
            steps=self.steps,
            length=_at_least(reach, self.decode_lengths()),
            every_slot=len(rows.slots) == self.slots,
        )
        for x in jax.tree.leaves(block):
            x.copy_to_host_async()
        return after, block

    def fetch(self, block: device.Block) -> device.Block:
        """Wait for a block, and return it on the host."""
        return jax.device_get(block)

    def warm_up(self, prompts: Sequence[int], rests: bool, padding: Any) -> None:
        """Compile everything for prompts of these lengths; nothing is drawn.

        Args:
            rests: also for what follows a prefix that is in the cache.
            padding: number of rows -> `Rows` of nothing but padding, for each program that differs.
        """
        calls = []
        for width, length in self.prefills.all(prompts, rests):
            rows = self.prefill_rows(width)
            nothing = np.zeros((rows, width), np.int32)
            slots, starts = np.full(rows, self.slots, np.int32), np.zeros(rows, np.int32)
            calls.append((nothing, slots, starts, length))
        if self.prefills.few:
            compile_together(self._prefill_call(*call).lower() for call in calls)
        blocks = [
            (blank, length)
            for size in self.sizes()
            for blank in padding(size)
            for length in self.decode_lengths()
        ]
        with activity.doing("sampler", len(calls) + len(blocks)) as programs:
            for call in calls:
                rows, width = call[0].shape
                programs.next(f"prefill {rows} x {width}")
                self._run_prefill(*call)
            for blank, length in blocks:
                programs.next(f"decode {len(blank.slots)} x {length}")
                after, block = self.decode(blank, length)
                if self.ahead:
                    _, block = self.decode(blank, length, after, blank.slots >= 0)
                self.fetch(block)
        self.copy([])

    def calls(
        self, params: Params, longest: int, prompt: int, rests: bool, rows: device.Rows
    ) -> dict[str, Call]:
        """Return the largest programs of "load", "prefill", "copy" and "decode", of shapes.

        Args:
            params: shapes and shardings of the trainer's.
            longest: tokens of a row.
            prompt: tokens of the longest prompt.
            rests: see `warm_up`.
            rows: padding for all slots.
        """
        functions, self.length = self.functions, self.cache_length(longest)
        params = functions.abstract_input(params)
        weights = functions.decode_params.eval_shape(params)
        cache = functions.empty.eval_shape(length=self.length)
        width, seen = self.prefills.all([prompt], rests)[-1]

        def shapes(tree: Any) -> Any:
            return jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._by_row), tree
            )

        several = np.zeros(self.prefill_rows(width), np.int32)
        chunks = shapes((np.zeros((len(several), width), np.int32), several, several))
        every = {"steps": self.steps, "length": self.decode_lengths()[-1], "every_slot": True}
        return {
            "load": Call(functions.decode_params, (params,), {}),
            "prefill": Call(functions.prefill, (weights, cache, *chunks), {"length": seen}),
            "copy": Call(functions.copy, (cache, *np.zeros((2, self.slots + 1), np.int32), 0), {}),
            "decode": Call(functions.decode, (weights, cache, shapes(rows)), every),
        }

    def describe(self) -> str:
        """Describe the shapes of all programs."""
        return (
            f"blocks of {self.sizes()} rows x {self.steps} tokens that see {self.decode_lengths()} "
            f"positions; prefill in chunks of at most {self.longest_chunk} tokens"
        )


def _at_least(length: int, sizes: Sequence[int]) -> int:
    return min(size for size in sizes if size >= length)


class Compiled(NamedTuple):
    """Hold functions of `decode.py` and `kv_cache.py` for one architecture, placement, slots."""

    whole: Any  # sharding
    dtype: jnp.dtype
    decode_params: Any
    rest: Any  # shardings of what is not stacked
    decode_layers: Any  # by their number
    decode_rest: Any
    empty: Any
    lengthen: Any
    copy: Any
    prefill: Any
    go_on: Any
    decode: Any

    def load(self, params: Params, group_bytes: int = GROUP_BYTES) -> Params:
        """Return the decode layout of the trainer's parameters, from whatever devices they are on.

        From other devices they come in groups of layers, cast before: beside what is there for good
        there is one group at a time, or one layer where that is larger.
        """
        if not self._elsewhere(params):
            return self.decode_params(params)
        stacked, layers, dtype = params[STACKED], [], self.dtype

        def near(part: Any, sharding: Any) -> Any:
            return jax.block_until_ready(jax.device_put(part, sharding))

        for first, count in layer_ranges(whole_pieces(named(stacked), dtype), group_bytes):
            # nothing keeps a name for what is on its way: the next group begins when it is gone
            layers += jax.block_until_ready(
                self.decode_layers(count)(
                    near(take_layers(stacked, first, count=count, dtype=dtype), self.whole)
                )
            )
        rest = {name: x for name, x in params.items() if name != STACKED}
        moved = {
            piece.name: near(take(rest, (piece,))[0], self.rest[piece.name])
            for piece in whole_pieces(rest, dtype)
        }
        return {**self.decode_rest(moved), STACKED: tuple(layers)}

    def abstract_input(self, params: Params) -> Params:
        """Return shapes of the trainer's parameters, as if `decode_params` got them at once."""
        if not self._elsewhere(params):
            return params
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, self.dtype, sharding=self.whole), params
        )

    def _elsewhere(self, params: Params) -> bool:
        return jax.tree.leaves(params)[0].sharding.device_set != self.whole.device_set


@functools.lru_cache(maxsize=8)  # an engine made anew finds what was compiled for the last one
def compiled(
    config: TransformerConfig,
    placement: Placement,
    slots: int,
    dtype: jnp.dtype,
    kernel: str | None = None,
) -> Compiled:
    """Return the functions of `decode.py`, jitted with the shardings of their results.

    Args:
        kernel: of decoding, see `decode_attention`.
    """
    bind, jit = functools.partial, jax.jit
    name = kernel_of(config, placement.mesh, dtype, kernel)
    shards, whole = shards_of(placement), placement.sharding((), ())
    split = shards > 1
    spread = placement if placement.mesh.size > 1 else None
    empty = bind(kv_cache.empty_cache, config, slots, dtype=dtype, platform=placement.platform)
    layer = jax.eval_shape(bind(empty, length=8))[0]
    names, by_row = ("batch", "kv_heads", None, None), placement.sharding((slots,), ("batch",))
    cache = (layer.each(lambda x, _: placement.sharding(x.shape, names)),) * config.num_layers
    weights = _weight_shardings(config, placement)
    rest = {name: one if split else whole for name, one in weights.items() if name != STACKED}

    @functools.cache
    def decode_layers(count: int) -> Any:
        run = bind(device.decode_layers, count=count, dtype=dtype, shards=shards)
        return jit(run, out_shardings=weights[STACKED][:count] if split else whole)

    return Compiled(
        whole=whole,
        dtype=dtype,
        decode_params=jit(
            bind(device.decode_params, config, dtype=dtype, shards=shards),
            out_shardings=weights if split else whole,
        ),
        rest=rest,
        decode_layers=decode_layers,
        decode_rest=jit(
            bind(device.decode_rest, dtype=dtype), donate_argnums=0, out_shardings=rest
        ),
        empty=jit(empty, static_argnames="length", out_shardings=cache),
        lengthen=jit(kv_cache.lengthen, static_argnums=1, out_shardings=cache),
        copy=jit(
            bind(kv_cache.copy_slots, placement=spread), donate_argnums=0, out_shardings=cache
        ),
        prefill=jit(
            bind(device.prefill, config, placement=spread),
            static_argnames="length",
            donate_argnums=1,
            out_shardings=cache,
        ),
        go_on=jit(device.go_on, out_shardings=by_row),
        decode=jit(
            bind(device.decode, config, placement=spread, kernel=name),
            static_argnames=("steps", "length", "every_slot"),
            donate_argnums=1,
            out_shardings=(cache, by_row, by_row),
        ),
    )


def _weight_shardings(config: TransformerConfig, placement: Placement) -> Params:
    """Return the shardings of the decode layout."""
    shapes = jax.eval_shape(
        functools.partial(
            device.decode_params, config, dtype=jnp.float32, shards=shards_of(placement)
        ),
        abstract_params(config),
    )
    axes = logical_axes(config)
    head = axes.get("unembed", axes["embed"][::-1])
    layer = {name: names[1:] for name, names in axes["layers"].items()}
    layer |= {name: layer[parts[0]] for name, (parts, _) in FUSED.items() if parts[0] in layer}
    layers = tuple({name: layer[name] for name in one} for one in shapes["layers"])
    decode_axes = {**axes, "layers": layers, "unembed": head}
    return jax.tree.map(lambda x, names: placement.sharding(x.shape, names), shapes, decode_axes)
