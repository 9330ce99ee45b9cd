"""The native engine's device side: weights in the decode layout, the cache, compiled programs.

There is one program for each number of rows in `sizes`, and each set of `Features`: it serves
prompts and rows of all lengths. With `shrink=False` there is one size, and then no sample changes a
bit of another.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxrl import activity
from jaxrl.data.packing import length_bucket, round_up
from jaxrl.models.architecture import by_kind, keeps_states, layer_stacks, routes_shape
from jaxrl.models.exact import Tiles
from jaxrl.models.kernels.choice import facts_of
from jaxrl.models.kernels.delta_rule import DELTA_RULE
from jaxrl.models.kernels.grouped_product import GROUPED_PRODUCT
from jaxrl.models.kernels.paged_attention import layout_of, paged_kernel
from jaxrl.models.linear import QuantisedWeight
from jaxrl.models.lora import LoraConfig
from jaxrl.models.transformer import (
    FUSED,
    Params,
    TransformerConfig,
    abstract_params,
    logical_axes,
    shards_of,
)
from jaxrl.parallel import ShardingRules, hosts_of, put
from jaxrl.parallel.compilation import Call
from jaxrl.parallel.devices import device_memory
from jaxrl.parallel.jit_once import Bound, shapes_once
from jaxrl.parallel.rules import Placement, batch_devices
from jaxrl.rollout.native import decode as device, kv_cache
from jaxrl.rollout.weights.groups import (
    GROUP_BYTES,
    STACKED,
    layer_ranges,
    named,
    take,
    take_layers,
    to_engine,
    whole_pieces,
)
from jaxrl.types import Array

GIB = 2**30
# weights are whole but for the tensor axis: a step of decoding would gather them every time
RULES = ShardingRules(embed=None)
# A group of samples needs two states beside those of its rows, at the end of its prompt and at the
# last border of a page before it; they are forgotten when there is no room.
ROWS_PER_BORDER = 4
FRACTIONS = (4, 2, 1)  # a block may run over a quarter, a half or all of the rows
# Decode steps of a block, by platform. Where a block begins before the one before is fetched, the
# device waits for the host only if that needs longer than a block takes: about 6 ms for 1,024 slots
# (LOG.md), where 8 steps of a 1.5B model take 64 ms on a TPU v5e (estimate). A row that ends leaves
# its slot empty for one and a half blocks on average, 12 steps of 8. A CPU fetches each block
# before the next: for N steps of t each, h of the host and rows of L tokens h / (N t) + N / (2 L)
# is lost, which is flat around its least. On GPUs XLA drives a loop from the thread that calls it,
# so that the host's work comes between blocks there, too: h = 5.5 ms on an H100, t = 1.4 ms for 64
# rows of a 0.5B model (LOG.md), and h / (N t) + 3 N / (2 L) is least at N = 36 for rows of 500, at
# 14 for a 7B model.
DISPATCH_STEPS = {"cpu": 32, "gpu": 16}
DEFAULT_DISPATCH_STEPS = 8


class Shape(NamedTuple):
    """Hold the sizes that a platform wants.

    Attributes:
        page: positions of a page. Small ones waste less of a row's last one, large ones are read in
            fewer pieces.
        tile: neighbouring tokens of a prompt that are prefilled together; it divides a page.
        tiles: of a chunk, on each part of the batch. A chunk with too few tokens does not fill the
            device, one with too many makes decoding wait.
    """

    page: int = 128
    tile: int = 128
    tiles: int = 4


SHAPES = {"cpu": Shape(64, 16, 8)}  # by platform; the default for others


def shape_of(platform: str) -> Shape:
    """Return the sizes of a platform."""
    return SHAPES.get(platform, Shape())


def pages_that_fit(
    config: TransformerConfig,
    mesh: Mesh,
    dtype: jnp.dtype,
    *,
    max_model_len: int,
    utilization: float,
    memory: float | None = None,
    resident: float = 0,
    platform: str | None = None,
    keep_routes: bool = False,
    slots: int = 0,
    quantization: str | None = None,
    kv_cache_dtype: str = "auto",
) -> int:
    """Return how many pages fit, beside the decode weights, into a share of a device's free memory.

    The states of a model that keeps some come first.

    Args:
        max_model_len: most tokens of a row.
        utilization: share of what is free.
        memory: bytes of a device; None = as it says itself.
        resident: bytes of a device that are not free.
        platform, keep_routes, slots, quantization, kv_cache_dtype: see `Programs`.

    Raises:
        ValueError: not even those of one row.
    """
    device = mesh.devices.flat[0]
    size = shape_of(platform or device.platform).page
    weights = weight_bytes(config, mesh, dtype, quantization)
    kept = {"keep_routes": keep_routes, "kv_cache_dtype": kv_cache_dtype}
    empty = Bound(_empty, config, device, dtype, **kept)
    parts = batch_devices(mesh, RULES)

    def of_device(pages: int, states: int) -> int:
        cache = shapes_once(Bound(empty, pages=pages, size=size, states=states))
        return _on_a_device(cache, kv_cache.cache_shardings(cache, Placement(mesh, RULES)))

    page_bytes = of_device(parts, 0)  # one in each
    weights += of_device(0, parts * states_of(config, round_up(slots, parts) // parts))
    whole = device_memory(device) if memory is None else memory
    budget = utilization * (whole - resident)
    fitting, row = int((budget - weights) // page_bytes), -(-max_model_len // size)
    if fitting < row:
        raise ValueError(
            f"generator.inference_engine.gpu_memory_utilization={utilization}: {budget / GIB:.2f} "
            f"GiB per device, of {whole / GIB:.2f} with {resident / GIB:.2f} of the trainer's, "
            f"hold {weights / GIB:.2f} GiB of weights but not one row of {max_model_len} tokens "
            f"({row * page_bytes / GIB:.2f} GiB); raise it or tensor_parallel_size, offload the "
            "optimizer, or shorten prompts or responses"
        )
    return fitting


def weight_bytes(
    config: TransformerConfig, mesh: Mesh, dtype: jnp.dtype, quantization: str | None = None
) -> int:
    """Return the bytes of a device that hold its part of the decode weights."""
    placement = Placement(mesh, RULES)
    return _on_a_device(*_decode_weights(config, placement, dtype, quantization=quantization))


def _on_a_device(shapes: Any, shardings: Any) -> int:
    parts = jax.tree.map(
        lambda x, sharding: math.prod(sharding.shard_shape(x.shape)) * x.dtype.itemsize,
        shapes,
        shardings,
    )
    return sum(jax.tree.leaves(parts))


def states_of(config: TransformerConfig, rows: int) -> int:
    """Return how many states a part of the batch has, of a model that keeps some.

    One for each of its rows, and one for every `ROWS_PER_BORDER` of them that others begin from.
    """
    return rows + max(2, -(-rows // ROWS_PER_BORDER)) if keeps_states(config) else 0


def kernel_of(
    config: TransformerConfig,
    mesh: Mesh,
    dtype: jnp.dtype,
    named: str | None = None,
    kv_cache_dtype: str = "auto",
) -> str:
    """Return the name of what the engine attends by on the devices of a mesh."""
    facts = facts_of(mesh.devices.flat[0], dtype, config)
    pages = kv_cache.page_dtype(kv_cache_dtype, facts.dtype)
    return paged_kernel(facts._replace(pages=pages), named)


def experts_kernel_of(
    config: TransformerConfig, mesh: Mesh, dtype: jnp.dtype, named: str | None = None
) -> str:
    """Return the name of what the engine multiplies experts by, of `GROUPED_PRODUCT`."""
    return GROUPED_PRODUCT.choose(facts_of(mesh.devices.flat[0], dtype, config), named).name


def rule_kernel_of(
    config: TransformerConfig, mesh: Mesh, dtype: jnp.dtype, named: str | None = None
) -> str:
    """Return the name of what the engine prefills linear attention by, of `DELTA_RULE`."""
    return DELTA_RULE.choose(facts_of(mesh.devices.flat[0], dtype, config), named).name


def _empty(
    config: TransformerConfig,
    device: Any,
    dtype: Any,
    *,
    pages: int,
    size: int,
    keep_routes: bool,
    states: int = 0,
    apart: bool = True,
    kv_cache_dtype: str = "auto",
) -> kv_cache.Cache:
    """Make a cache of pages of `size` positions as a device's platform has it."""
    return kv_cache.empty_cache(
        config,
        pages,
        size,
        dtype,
        layout=layout_of(device.platform, config),
        keep_routes=keep_routes,
        states=states,
        apart=apart,
        kv_cache_dtype=kv_cache_dtype,
    )


class Prefill:
    """Collect what a block prefills, tile by tile, and which pages it copies, on the host.

    Args:
        parts: of the batch.
        chunks: at most.
        columns: of a table.
        steps: of the block.
        copies: in each part, at most.
        states: of each part; 0 = the model keeps none.
        places: of adapters; 0 = there are none.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        parts: int,
        chunks: int,
        columns: int,
        steps: int,
        copies: int = 1,
        states: int = 0,
        places: int = 0,
    ) -> None:
        self._parts, self._tile, self._steps = parts, shape.tile, steps
        chunk = (chunks, parts * shape.tiles)
        self._per_chunk, self._most = shape.tiles, chunks * shape.tiles
        self._tokens = np.zeros((*chunk, self._tile), np.int32)
        self._table = np.zeros((*chunk, columns), np.int32)
        self._first = np.full(chunk, -1, np.int32)
        self._count = np.zeros(chunk, np.int32)
        self._adapter, self._has_places = np.zeros(chunk, np.int32), places > 0
        self._tiles = [0] * parts
        self._copies: list[list[tuple[int, int, int]]] = [[] for _ in range(parts)]
        self._most_copies = copies
        self._states: device.Places | None = None
        self._state_copies: list[list[tuple[int, int, int]]] = [[] for _ in range(parts)]
        if states:
            self._states = device.Places(*(np.full(chunk, states, np.int32) for _ in range(3)))

    @property
    def chunks(self) -> int:
        """Return how many there are."""
        return -(-max(self._tiles) // self._per_chunk)

    @property
    def used(self) -> bool:
        """Return whether there is anything to do."""
        return any(self._tiles) or any(self._copies) or any(self._state_copies)

    @property
    def sources(self) -> list[tuple[int, int]]:
        """Return (part, page) of all pages that are copied."""
        return [(p, source) for p, copies in enumerate(self._copies) for _, source, _ in copies]

    def room(self, part: int) -> int:
        """Return how many tokens of one row find room yet."""
        return (self._most - self._tiles[part]) * self._tile

    def add(
        self,
        part: int,
        table: np.ndarray,
        start: int,
        tokens: np.ndarray,
        state: int | None = None,
        begin: int | None = None,
        borders: Mapping[int, int] = MappingProxyType({}),
        adapter: int = 0,
    ) -> int:
        """Add neighbouring tokens of a row, from position `start` on; return their last chunk.

        Args:
            table: [C] where the row's pages are.
            state: where the row's state is, of a model that keeps some.
            begin: where the state is that the tokens go on from; None = it is the row's.
            borders: positions up to which the state is kept once more, and where.
            adapter: place of the row's.
        """
        chunk = 0
        for at in range(0, len(tokens), self._tile):
            chunk, tile = divmod(self._tiles[part], self._per_chunk)
            place = chunk, part * self._per_chunk + tile
            new = tokens[at : at + self._tile]
            self._tokens[place][: len(new)], self._table[place] = new, table
            self._first[place], self._count[place] = start + at, len(new)
            self._adapter[place] = adapter
            if self._states is not None:
                assert state is not None
                goes_on = state if at or begin is None else begin
                self._states.begin[place], self._states.end[place] = goes_on, state
                if (kept := borders.get(start + at + len(new))) is not None:
                    assert self._states.copy is not None
                    self._states.copy[place] = kept
            self._tiles[part] += 1
        return chunk

    def copy(self, part: int, source: int, target: int, chunk: int) -> None:
        """Copy a page, after a chunk."""
        self._copies[part].append((chunk, source, target))

    def copy_state(self, part: int, source: int, target: int, chunk: int) -> None:
        """Copy a state, after a chunk."""
        self._state_copies[part].append((chunk, source, target))

    def arrays(self, pace: int) -> device.Prompts:
        """Return what the device takes.

        Args:
            pace: chunks of a step.
        """
        copies, copied = self._due(self._copies, pace)
        states: dict[str, Any] = {}
        if self._states is not None:
            of_states, until = self._due(self._state_copies, pace)
            states = {"state_copies": of_states, "state_copied": until, "states": self._states}
        return device.Prompts(
            tokens=self._tokens,
            table=self._table,
            first=self._first,
            count=self._count,
            chunks=np.int32(self.chunks),
            pace=np.int32(pace),
            copies=copies,
            copied=copied,
            adapter=self._adapter if self._has_places else None,
            **states,
        )

    def _due(
        self, copies: list[list[tuple[int, int, int]]], pace: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return pairs [G n, 2], and those that are due up to each step [G, N + 1]."""
        pairs = np.zeros((self._parts, self._most_copies, 2), np.int32)
        until = np.zeros((self._parts, self._steps + 1), np.int32)
        for part, of_part in enumerate(copies):
            in_order = sorted(of_part, key=lambda copy: copy[0])
            for i, (chunk, source, target) in enumerate(in_order):
                pairs[part, i] = source, target
                until[part, chunk // pace + 1 :] = i + 1
        return pairs.reshape(-1, 2), until


class Programs:
    """Run blocks over one cache of pages, for at most `slots` rows.

    Args:
        mesh: rows and their pages are spread over its batch axes, heads and MLP over "tensor".
        slots: most rows.
        pages: most of a part of the batch; None = those that all its rows may need.
        batched_tokens: of prompts in a block, at most.
        steps: of a block; None = those of the platform, `DISPATCH_STEPS`.
        platform: whose pages, tiles and steps a block has; None = that of the devices, which in a
            plan may stand in for others.
        ahead: a block may begin before the one before is fetched, so that the device does not wait
            for the host; None = but on CPUs, where both have the same cores.
        shrink: blocks may run over fewer rows than slots; None = on one CPU device. On accelerators
            a block takes as long. With True the last bits depend on how many rows are live.
        group_bytes: most bytes that are on their way from other devices at a time.
        kernel, experts_kernel, rule_kernel: of `PAGED_ATTENTION`, `GROUPED_PRODUCT` and
            `DELTA_RULE`; None = the fastest that can.
        keep_routes: keep the experts of each position, for `read_routes`.
        tiles: of the exact mode; None = the shapes of a call decide the last bits.
        drafts: tokens that a step guesses of each row.
        quantization: 8 bits of the layers' matrices, "int8" or "fp8"; None = they are of `dtype`.
        kv_cache_dtype: of keys and values in pages, "fp8"; "auto" = `dtype`.
        lora, places: adapters that rows may have beside the base, and how many are held; 0 = none.
            The first place is of rows that have none.

    Attributes:
        length: tokens of the longest row that finds room.
        columns: of a table; the last one is beyond every row, for tiles that reach over its end.
        pages: of each part.
        states: of each part, see `states_of`; 0 = the model keeps none.
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
        pages: int | None = None,
        batched_tokens: int = 8192,
        ahead: bool | None = None,
        group_bytes: int = GROUP_BYTES,
        kernel: str | None = None,
        experts_kernel: str | None = None,
        rule_kernel: str | None = None,
        platform: str | None = None,
        keep_routes: bool = False,
        tiles: Tiles | None = None,
        drafts: int = 0,
        quantization: str | None = None,
        kv_cache_dtype: str = "auto",
        lora: LoraConfig | None = None,
        places: int = 0,
    ) -> None:
        placement = Placement(mesh, RULES)
        platform = platform or placement.platform
        alone = platform == "cpu" and mesh.size == 1
        if steps is None:
            steps = DISPATCH_STEPS.get(platform, DEFAULT_DISPATCH_STEPS)
        self.config, self.steps, self.length, self.pages = config, steps, 0, 0
        self.reach = steps * (1 + drafts)  # most tokens that a block draws of a row
        self.placement, self.platform, self.dtype = placement, platform, jnp.dtype(dtype)
        self.shape = shape_of(platform)
        if tiles is not None and tiles.page != self.shape.page:
            raise ValueError(
                f"tiles.page={tiles.page}: the trainer goes through keys as the engine does, "
                f"in pages of {self.shape.page}; give tiles of its platform (choose_tiles)"
            )
        if tiles is not None and (quantization, kv_cache_dtype) != (None, "auto"):
            raise ValueError(
                f"quantization={quantization!r}, kv_cache_dtype={kv_cache_dtype!r}: the exact mode "
                "has the trainer's own weights, keys and values; set None and 'auto', or no tiles"
            )
        if places and (mesh.size > 1 or tiles is not None or quantization is not None):
            raise ValueError(
                f"places={places}: adapters of rows are for an engine on one device, neither exact "
                "nor quantised; give it one, and more engines for more devices"
            )
        self.lora, self.places = lora, places
        self._adapters: list[tuple[Array, Array]] | None = None  # in the places, without weights
        self.group_bytes, self._most_pages = group_bytes, pages
        self.parts = batch_devices(mesh, RULES)
        self.slots = round_up(slots, self.parts)
        self.states = states_of(config, self.slots // self.parts)
        chunk = self.parts * self.shape.tiles * self.shape.tile
        self.chunks = max(batched_tokens // chunk, 1)
        self.params: Params | None = None
        self.ahead = platform != "cpu" if ahead is None else ahead
        fewer = (alone if shrink is None else shrink) and not self.ahead  # rows stay where they are
        self._row_fractions = FRACTIONS if fewer and self.parts == 1 else (1,)
        self._by_row = placement.sharding((self.slots,), ("batch",))
        self._to_devices = put if hosts_of(mesh) > 1 else jax.device_put
        self._cache: kv_cache.Cache | None = None
        self._nothing: device.Prompts | None = None
        self.functions = compiled(
            config,
            placement,
            self.dtype,
            kernel,
            experts_kernel,
            rule_kernel,
            page=self.shape.page,
            keep_routes=keep_routes,
            tiles=tiles,
            quantization=quantization,
            kv_cache_dtype=kv_cache_dtype,
            fused=not places,
        )

    def load(self, params: Params) -> None:
        """Take over a copy of the trainer's parameters, from whatever devices they are on.

        Adapters stay in their places.
        """
        self._let_go()  # two decode copies never live together
        self.params = self.functions.load(params, self.group_bytes)
        if self.places and self.lora is not None:
            known = self.config, self.params, self.lora
            held = self._adapters or device.empty_places(*known, self.places)
            self.params = device.with_places(*known, held)

    def _let_go(self) -> None:
        """Free the weights; adapters, which are small, are kept for those that come next."""
        if self.params is not None and self.places and self.lora is not None:
            self._adapters = device.in_places(self.config, self.params, self.lora)
        self.params = None

    def put_adapter(self, place: int, adapters: Params, scale: float) -> None:
        """Put an adapter to a place."""
        assert self.params is not None
        given = adapters, np.float32(scale), np.int32(place)
        self.params = self.functions.put_adapter(self.params, *given)

    def drop(self, *, weights: bool) -> None:
        """Free the cache, and the weights. Its length stays: programs are compiled for it."""
        self._cache = None
        if weights:
            self._let_go()

    @property
    def columns(self) -> int:
        """Return the columns of a table."""
        return -(-self.length // self.shape.page) + 1

    def has_room(self, length: int) -> bool:
        """Return whether there is room for rows of `length` tokens."""
        return length <= self.length and self._cache is not None

    def reserve(self, length: int) -> None:
        """Make room for rows of `length` tokens; what is there stays."""
        if not self.has_room(length):
            self.length, before = max(length_bucket(length), self.length), self.pages
            self.pages = max(self._pages(), before)
            self._nothing = None
            if self._cache is None:
                self._cache = self.functions.empty(**self._sizes)
            elif self.pages > before:
                self._cache = self.functions.lengthen(self._cache, self.pages - before)

    @property
    def _sizes(self) -> dict[str, int]:
        sizes = {"pages": self.parts * self.pages, "size": self.shape.page}
        return sizes | ({"states": self.parts * self.states} if self.states else {})

    def _pages(self) -> int:
        """Return the pages of a part for rows as long as now."""
        all_rows = self.slots // self.parts * (self.columns - 1)
        return all_rows if self._most_pages is None else min(self._most_pages, all_rows)

    def sizes(self) -> list[int]:
        """Return the numbers of rows that a block can have."""
        return sorted({-(-self.slots // divisor) for divisor in self._row_fractions})

    def prefill(self) -> Prefill:
        """Return an empty collection of what a block prefills."""
        return Prefill(
            self.shape,
            parts=self.parts,
            chunks=self.chunks,
            columns=self.columns,
            steps=self.steps,
            copies=self.slots // self.parts,
            states=self.states,
            places=self.places,
        )

    def decode(
        self,
        rows: device.Rows,
        prompts: device.Prompts | None = None,
        before: device.Rows | None = None,
        begins: Array | None = None,
    ) -> tuple[device.Rows, device.Block]:
        """Begin a block; return its rows as it leaves them, and what it draws, on the device.

        Args:
            rows: as many as one of `sizes` says, as the host knows them.
            prompts: what it prefills; None = nothing.
            before: the rows of a block that is not fetched; those which do not begin go on there.
            begins: [B] bool.
        """
        rows = self.of_rows(rows)
        if before is not None:
            has_history = None not in (rows.history, before.history)
            names = [name for name in device.PROGRESS if name != "history" or has_history]
            given, left = ({name: getattr(x, name) for name in names} for x in (rows, before))
            begins = self.of_rows(begins)
            rows = rows.replace(**self.functions.go_on(given, left, begins))
        if prompts is None:
            if self._nothing is None:
                self._nothing = self._place(self.prefill().arrays(1))
            given_prompts = self._nothing
        else:
            given_prompts = self._place(prompts)
        self._cache, after, block = self.functions.decode(
            self.params, self._cache, rows, given_prompts, steps=self.steps
        )
        for x in jax.tree.leaves(block):
            x.copy_to_host_async()
        return after, block

    def _place(self, prompts: device.Prompts) -> device.Prompts:
        kinds = bool(self.states), bool(self.places)
        return self._to_devices(prompts, prompt_shardings(self.placement, *kinds))

    def of_rows(self, arrays: Any) -> Any:
        """Return arrays [B, ...] of rows or tiles on the devices, spread over these."""
        return self._to_devices(arrays, self._by_row)

    def fetch(self, block: device.Block) -> device.Block:
        """Wait for a block, and return it on the host."""
        return jax.device_get(block)

    def take(self, part: int, pages: Sequence[int], state: int | None = None) -> Any:
        """Return what is in some pages of a part, those of a row, on the host; see `put`.

        Args:
            state: of the row, of a model that keeps some.
        """
        whole = self.functions.take(self._cache, self._ids(part, pages))
        mine = slice(part * self.columns, (part + 1) * self.columns)  # of few shapes, to compile
        held = jax.device_get(jax.tree.map(lambda x: x[mine], whole))
        held = jax.tree.map(lambda x: x[: len(pages)], held)
        if state is None:
            return held, None
        return held, jax.device_get(self.functions.take_state(self._cache, self._at(part, state)))

    def put(self, part: int, pages: Sequence[int], held: Any, state: int | None = None) -> None:
        """Put what `take` returned, as far as there are pages, into those of a part."""
        first, (of_pages, of_state) = part * self.columns, held

        def spread(x: np.ndarray) -> np.ndarray:
            out = np.zeros((self.parts * self.columns, *x.shape[1:]), x.dtype)
            out[first : first + len(pages)] = x[: len(pages)]
            return out

        given = self._ids(part, pages), jax.tree.map(spread, of_pages)
        self._cache = self.functions.put(self._cache, *given)
        if state is not None:
            at = self._at(part, state)
            self._cache = self.functions.put_state(self._cache, at, of_state)

    def _at(self, part: int, state: int) -> np.ndarray:
        """Return the number of a state among those of all parts [1]; beyond them, of none."""
        none = self.parts * self.states
        return np.array([none if state >= self.states else part * self.states + state], np.int32)

    def read_routes(
        self, rows: Sequence[tuple[int, Sequence[int]]]
    ) -> Callable[[], list[np.ndarray]]:
        """Begin to fetch the experts of rows, each given by its part and its pages.

        Returns:
            A call that waits for them: of each row [positions of its pages, Lx, k].
        """
        assert self._cache is not None
        ids: list[list[int]] = [[] for _ in range(self.parts)]
        begins = []
        for part, pages in rows:
            begins.append(len(ids[part]))
            ids[part] += pages
        width = 1 << (max(map(len, ids)) - 1).bit_length()  # few shapes, to compile
        padded = np.zeros((self.parts, width), np.int32)
        for part, pages in enumerate(ids):
            padded[part, : len(pages)] = pages
        found = self.functions.read(self._cache._replace(layers=()), padded.ravel()).routes
        found.copy_to_host_async()

        def fetch() -> list[np.ndarray]:
            shape = self.parts, width * self.shape.page, *routes_shape(self.config)
            by_part, size = np.asarray(found).reshape(shape), self.shape.page
            return [
                by_part[part, first * size : (first + len(pages)) * size]
                for (part, pages), first in zip(rows, begins, strict=True)
            ]

        return fetch

    def _ids(self, part: int, pages: Sequence[int]) -> np.ndarray:
        """Return as many ids for every part as a table has columns: of its pages, and of none."""
        ids = np.full((self.parts, self.columns), self.pages, np.int32)
        ids[part, : len(pages)] = pages
        return ids.ravel()

    def warm_up(self, padding: Callable[[int], Sequence[device.Rows]]) -> None:
        """Compile everything; nothing is drawn.

        Args:
            padding: number of rows -> `Rows` of nothing but padding, for each program that differs.
        """
        blanks = [blank for size in self.sizes() for blank in padding(size)]
        with activity.doing("sampler", len(blanks)) as programs:
            for blank in blanks:
                programs.next(f"a block of {len(blank.live)}")
                after, block = self.decode(blank)
                if self.ahead:
                    _, block = self.decode(blank, None, after, ~blank.live)
                self.fetch(block)
        for part in range(self.parts):
            nowhere = self.states or None
            self.put(part, [], self.take(part, [self.pages], nowhere), nowhere)
        if self._cache is not None and self._cache.routes is not None:
            most = self.slots // self.parts * self.columns
            for number in range(most.bit_length() + 1):
                self.read_routes([(0, [0] * (1 << number))])()

    def calls(
        self, params: Params, longest: int, rows: Callable[[], device.Rows]
    ) -> dict[str, Call]:
        """Return the largest programs of "load" and "decode", of shapes.

        Args:
            params: shapes and shardings of the trainer's.
            longest: tokens of a row.
            rows: makes padding for all slots, when the length is known.
        """
        functions = self.functions
        self.length = max(length_bucket(longest), self.length)
        self.pages = max(self._pages(), self.pages)
        loads = functions.loads(params, self.group_bytes)
        weights = functions.decode_params.eval_shape(functions.abstract_input(params))
        cache = functions.empty.eval_shape(**self._sizes)

        def shapes(x: Any, sharding: Any) -> Any:
            return jax.ShapeDtypeStruct(np.shape(x), x.dtype, sharding=sharding)

        blank = jax.tree.map(lambda x: shapes(x, self._by_row), rows())
        prompts = jax.tree.map(
            shapes,
            self.prefill().arrays(1),
            prompt_shardings(self.placement, bool(self.states), bool(self.places)),
        )
        given = weights, cache, blank, prompts
        return {
            "load": max(loads, key=_elements),
            "decode": Call(functions.decode, given, {"steps": self.steps}),
        }

    def describe(self) -> str:
        """Describe the shapes of all programs."""
        chunk = self.parts * self.shape.tiles * self.shape.tile
        return (
            f"blocks of {self.sizes()} rows x {self.steps} steps, with at most {self.chunks} "
            f"chunks of {chunk} prompt tokens; {self.parts * self.pages} pages of "
            f"{self.shape.page} positions"
        )


def _elements(call: Call) -> int:
    return sum(x.size for x in jax.tree.leaves(call.args))


def prompt_shardings(
    placement: Placement, states: bool = False, adapters: bool = False
) -> device.Prompts:
    """Return the shardings of `Prompts`, of a model that keeps states or none, with adapters."""
    part, whole = ("batch",), placement.sharding((), ())
    sizes = placement.size(placement.rules.batch)
    tiles = placement.sharding((1, sizes), (None, *part))
    parts = placement.sharding((sizes,), part)
    shardings = device.Prompts(tiles, tiles, tiles, tiles, whole, whole, parts, parts)
    shardings = shardings.replace(adapter=tiles if adapters else None)
    if not states:
        return shardings
    places = device.Places(tiles, tiles, tiles)
    return shardings.replace(states=places, state_copies=parts, state_copied=parts)


class Compiled(NamedTuple):
    """Hold functions of `decode.py` and `kv_cache.py` for one architecture and placement."""

    config: TransformerConfig
    whole: Any  # sharding
    dtype: jnp.dtype
    decode_params: Any
    rest: Any  # shardings of what is not stacked
    decode_layers: Any  # by their kind and number
    decode_rest: Any
    empty: Any
    lengthen: Any
    take: Any
    put: Any
    take_state: Any
    put_state: Any
    read: Any
    go_on: Any
    decode: Any
    states_of_layers: Any
    logits_of: Any
    score: Any
    put_adapter: Any

    def load(self, params: Params, group_bytes: int = GROUP_BYTES) -> Params:
        """Return the decode layout of the trainer's parameters, from whatever devices they are on.

        From other devices they come in groups of layers, cast before: beside what is there for good
        there is one group at a time, or one layer where that is larger.
        """
        if not self._elsewhere(params):
            return self.decode_params(params)
        dtype, spans = self.dtype, hosts_of(self.whole.mesh) > 1

        def near(part: Any, sharding: Any, stacked: bool = False) -> Any:
            if spans:
                part = to_engine(part, self.whole.mesh, stacked=stacked)
            if not (spans and stacked):  # layers stay spread
                part = jax.device_put(part, sharding)
            return jax.block_until_ready(part)

        layers: dict[str, list] = {}
        for kind, stacked in by_kind(self.config, params[STACKED]).items():
            layers[kind] = []
            for first, count in layer_ranges(whole_pieces(named(stacked), dtype), group_bytes):
                # nothing keeps a name for what is on its way: the next group begins when it is gone
                layers[kind] += jax.block_until_ready(
                    self.decode_layers(kind, count)(
                        near(
                            take_layers(stacked, first, count=count, dtype=dtype),
                            self.whole,
                            stacked=True,
                        )
                    )
                )
        rest = {name: x for name, x in params.items() if name != STACKED}
        moved = {
            piece.name: near(take(rest, (piece,))[0], self.rest[piece.name])
            for piece in whole_pieces(rest, dtype)
        }
        return {**self.decode_rest(moved), STACKED: device.in_order(self.config, layers)}

    def loads(self, params: Params, group_bytes: int = GROUP_BYTES) -> list[Call]:
        """Return the programs that `load` runs on the engine's devices, of shapes.

        Devices of several processes get the layers group by group.

        Args:
            params: shapes and shardings; for several processes as `to_engine` places them.
        """
        if hosts_of(self.whole.mesh) == 1:
            return [Call(self.decode_params, (self.abstract_input(params),), {})]
        found = []
        for kind, stacked in by_kind(self.config, params[STACKED]).items():
            for _, count in layer_ranges(whole_pieces(named(stacked), self.dtype), group_bytes):
                group = jax.tree.map(
                    lambda x, n=count: jax.ShapeDtypeStruct(
                        (n, *x.shape[1:]), self.dtype, sharding=x.sharding
                    ),
                    stacked,
                )
                found.append(Call(self.decode_layers(kind, count), (group,), {}))
        return found

    def abstract_input(self, params: Params) -> Params:
        """Return shapes of the trainer's parameters, as if `decode_params` got them at once."""
        if not self._elsewhere(params):
            return params
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, self.dtype, sharding=self.whole), params
        )

    def _elsewhere(self, params: Params) -> bool:
        return jax.tree.leaves(params)[0].sharding.device_set != self.whole.device_set


@functools.lru_cache(maxsize=32)  # an engine made anew finds what was compiled for the last one
def compiled(
    config: TransformerConfig,
    placement: Placement,
    dtype: jnp.dtype,
    kernel: str | None = None,
    experts_kernel: str | None = None,
    rule_kernel: str | None = None,
    *,
    page: int = Shape().page,
    keep_routes: bool = False,
    tiles: Tiles | None = None,
    quantization: str | None = None,
    kv_cache_dtype: str = "auto",
    fused: bool = True,
) -> Compiled:
    """Return the functions of `decode.py`, jitted with the shardings of their results.

    Args:
        kernel, experts_kernel, rule_kernel: of `PAGED_ATTENTION`, `GROUPED_PRODUCT` and
            `DELTA_RULE`; None = the fastest that can.
        page: positions of a page.
        keep_routes, tiles, quantization, kv_cache_dtype: see `Programs`.
        fused: products of the same states are one, where neither tiles nor adapters need them.
    """
    bind, jit = functools.partial, jax.jit
    kernels = {
        "kernel": kernel_of(config, placement.mesh, dtype, kernel, kv_cache_dtype),
        "experts_kernel": experts_kernel_of(config, placement.mesh, dtype, experts_kernel),
        "rule_kernel": rule_kernel_of(config, placement.mesh, dtype, rule_kernel),
    }
    shards, whole = shards_of(placement), placement.sharding((), ())
    fused = fused and tiles is None
    of_layers = {"shards": shards if fused else None, "quantization": quantization}
    split = shards > 1 or placement.size(placement.rules.experts) > 1
    # also over a single TPU: within `shard_map` its kernel knows the chip, wherever it is compiled
    alone = placement.mesh.size == 1 and placement.platform != "tpu"
    spread = None if alone else placement
    empty = bind(_empty, config, placement.mesh.devices.flat[0], dtype, keep_routes=keep_routes)
    empty = bind(empty, apart=tiles is None, kv_cache_dtype=kv_cache_dtype)
    parts = placement.size(placement.rules.batch)
    some = {"states": parts} if keeps_states(config) else {}
    shapes = jax.eval_shape(bind(empty, pages=parts, size=page, **some))
    cache = kv_cache.cache_shardings(shapes, placement)
    by_row = placement.sharding((parts,), ("batch",))
    # what is fetched is whole where other processes have devices of the engine
    alone_here = hosts_of(placement.mesh) == 1
    layout = {"fused": fused, "quantization": quantization}
    _, weights = _decode_weights(config, placement, dtype, **layout)
    rest = {name: one if split else whole for name, one in weights.items() if name != STACKED}

    @functools.cache
    def decode_layers(kind: str, count: int) -> Any:
        run = bind(device.decode_layers, count=count, dtype=dtype, **of_layers)
        some = weights[STACKED][dict(layer_stacks(config))[kind][0]]
        return jit(run, out_shardings=(some,) * count if split else whole)

    return Compiled(
        config=config,
        whole=whole,
        dtype=dtype,
        decode_params=jit(
            bind(device.decode_params, config, dtype=dtype, **of_layers),
            out_shardings=weights if split else whole,
        ),
        rest=rest,
        decode_layers=decode_layers,
        decode_rest=jit(
            bind(device.decode_rest, dtype=dtype), donate_argnums=0, out_shardings=rest
        ),
        empty=jit(empty, static_argnames=("pages", "size", "states"), out_shardings=cache),
        lengthen=jit(
            bind(kv_cache.lengthen, placement=spread), static_argnums=1, out_shardings=cache
        ),
        take=jit(
            bind(kv_cache.take_pages, placement=spread),
            out_shardings=cache._replace(states=()) if alone_here else whole,
        ),
        put=jit(bind(kv_cache.put_pages, placement=spread), donate_argnums=0, out_shardings=cache),
        take_state=jit(kv_cache.take_states, out_shardings=whole),
        put_state=jit(kv_cache.put_states, donate_argnums=0, out_shardings=cache),
        read=jit(
            bind(kv_cache.take_pages, placement=spread),
            out_shardings=None if alone_here else whole,
        ),
        go_on=jit(device.go_on, out_shardings=by_row),
        decode=jit(
            bind(device.decode, config, placement=spread, tiles=tiles, **kernels),
            static_argnames="steps",
            donate_argnums=1,
            out_shardings=(cache, by_row, by_row if alone_here else whole),
        ),
        states_of_layers=jit(
            bind(device.states_of_layers, config, placement=spread, tiles=tiles, **kernels),
            static_argnames="every",
            donate_argnums=1,
            out_shardings=(None, cache),
        ),
        logits_of=jit(bind(device.logits_of, config, placement=spread, tiles=tiles)),
        score=jit(
            bind(device.score, config, placement=spread, tiles=tiles, **kernels),
            donate_argnums=1,
            out_shardings=(whole, cache),
        ),
        put_adapter=jit(bind(device.put_adapter, config), donate_argnums=0),
    )


def _decode_weights(
    config: TransformerConfig,
    placement: Placement,
    dtype: jnp.dtype,
    *,
    fused: bool = True,
    quantization: str | None = None,
) -> tuple[Params, Params]:
    """Return the shapes of the decode layout, and their shardings."""
    settings = {"shards": shards_of(placement) if fused else None, "quantization": quantization}
    to_decode = Bound(device.decode_params, config, dtype=dtype, **settings)
    shapes = shapes_once(to_decode, abstract_params(config))
    axes = logical_axes(config)
    head = axes.get("unembed", axes["embed"][::-1])
    layers = list(shapes["layers"])
    of_kind = by_kind(config, axes["layers"])
    for kind, numbers in layer_stacks(config):
        layer = {name: names[1:] for name, names in of_kind[kind].items()}
        layer |= {name: layer[parts[0]] for name, (parts, _) in FUSED.items() if parts[0] in layer}
        for i in numbers:
            layers[i] = {
                name: _axes_of(name, w, layer[name]) for name, w in shapes["layers"][i].items()
            }
    decode_axes = {**axes, "layers": tuple(layers), "unembed": head}
    shardings = jax.tree.map(
        lambda x, names: placement.sharding(x.shape, names), shapes, decode_axes
    )
    return shapes, shardings


def _axes_of(name: str, shapes: Any, axes: tuple[str | None, ...]) -> Any:
    """Return the logical axes of a weight of a layer, given those of its matrix."""
    if not isinstance(shapes, QuantisedWeight):
        return axes
    inputs = device.IN_EIGHT_BITS[name]
    of_channels = tuple(axis for dim, axis in enumerate(axes) if dim not in inputs)
    return QuantisedWeight(axes, of_channels)  # pyright: ignore[reportArgumentType]
