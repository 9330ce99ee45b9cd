"""The states of the native engine: what layers without attention keep of a row, however long.

A state is a place of fixed size in every such layer. Each live row has one; others hold what a row
had at a border of its prompt, from which other rows begin. They are beside the pages of the cache
(see kv_cache.py) and spread as those are: each part of the mesh's batch axes has states of its own,
split over devices by head.

Shape legend: S states of a part, B rows or tiles of a call, T tokens of each, K key heads, V value
heads, d key width, e value width, W tokens of a convolution's window.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxrl.models.architecture import CONVOLUTION, DELTA, TransformerConfig, layer_mixers
from jaxrl.models.delta_rule import convolve, step
from jaxrl.models.kernels.choice import REFERENCE
from jaxrl.models.kernels.delta_rule import DELTA_RULE
from jaxrl.models.recurrence import Recurrence
from jaxrl.parallel.rules import MeshAxes, Placement
from jaxrl.types import Array


class States(NamedTuple):
    """Hold the states of one layer.

    Attributes:
        windows: [S, W - 1, ...channels] each, the last inputs of its convolutions.
        memory: [S, V, d, e] float32 of the delta rule; None where there is none.
    """

    windows: tuple[Array, ...]
    memory: Array | None = None


class Places(NamedTuple):
    """Say where the states of rows or tiles are, [..., B] each; S or more is nowhere.

    Attributes:
        begin: from where a row goes on; one at position 0 begins with zeros, whatever this says.
        end: where what it has become is kept.
        copy: where it is kept once more; None = nowhere.
    """

    begin: Array
    end: Array
    copy: Array | None = None


def empty_states(config: TransformerConfig, states: int, dtype: Any) -> tuple[States, ...]:
    """Make `states` states for each layer that keeps them; windows are of `dtype`."""
    made = []
    for mixer in layer_mixers(config):
        if mixer == DELTA:
            net = config.delta_net
            assert net is not None
            keys, values = (net.key_heads, net.key_dim), (net.value_heads, net.value_dim)
            windows = tuple(
                jnp.zeros((states, net.window - 1, *shape), dtype) for shape in (keys, keys, values)
            )
            memory = jnp.zeros((states, net.value_heads, net.key_dim, net.value_dim), jnp.float32)
            made.append(States(windows, memory))
        elif mixer == CONVOLUTION:
            assert config.convolution is not None
            shape = states, config.convolution.window - 1, config.hidden_size
            made.append(States((jnp.zeros(shape, dtype),)))
    return tuple(made)


def kept_recurrence(
    kept: States,
    places: Places,
    first: Array,
    count: Array,
    placement: Placement | None,
    note: Callable[[States], None],
    kernel: str = REFERENCE,
) -> Recurrence:
    """Return how a layer goes through neighbouring tokens of rows, from what it has kept of them.

    Rows of one token each are all apart. Of longer ones several may be tiles of one row, in their
    order: each goes on from where the one before ends.

    Args:
        kept: of the layer.
        first: [B] position of the first token of each; below 0, there is none.
        count: [B] of its tokens that are real.
        placement: the mesh that rows and heads are split over; None = one device.
        note: is given the layer's states as they are afterwards.
        kernel: of `DELTA_RULE`, for rows of more than one token.
    """
    of_all = places, first, count
    split = functools.partial(_by_device, of_all=of_all, placement=placement)
    token, head, states = _specs(kept, placement)

    def convolve_all(inputs: Sequence[Array], kernels: Sequence[Array]) -> Sequence[Array]:
        nonlocal kept
        tokens = (token,) * len(inputs)
        run = split(_convolve, tokens, (head,) * len(kernels), states.windows, outputs=tokens)
        out, windows = run(tuple(inputs), tuple(kernels), kept.windows, *of_all)
        kept = kept._replace(windows=windows)
        note(kept)
        return out

    def recur(*inputs: Array) -> Array:
        nonlocal kept
        rule = functools.partial(_recur, kernel)
        run = split(rule, (token,) * len(inputs), (), states.memory, outputs=token)
        out, memory = run(inputs, (), kept.memory, *of_all)
        kept = kept._replace(memory=memory)
        note(kept)
        return out

    return Recurrence(convolve_all, recur)


def copy_states(
    kept: tuple[States, ...],
    pairs: Array,
    until: Array,
    step: Array,
    placement: Placement | None,
) -> tuple[States, ...]:
    """Copy states (from, to) within their part, one after the other; see `copy_pages`."""

    def run(kept: tuple[States, ...], pairs: Array, until: Array, step: Array) -> Any:
        def copy(i: Array, kept: tuple[States, ...]) -> tuple[States, ...]:
            def put(x: Array) -> Array:
                one = jax.lax.dynamic_slice_in_dim(x, pairs[i, 0], 1)
                return jax.lax.dynamic_update_slice_in_dim(x, one, pairs[i, 1], 0)

            return jax.tree.map(put, kept)

        return jax.lax.fori_loop(until[0, step], until[0, step + 1], copy, kept)

    if placement is not None:
        part, spread = PartitionSpec(placement.batch_axes), state_specs(kept, placement)
        run = jax.shard_map(
            run,
            mesh=placement.mesh,
            in_specs=(spread, part, part, PartitionSpec()),
            out_specs=spread,
            check_vma=False,
        )
    return run(kept, pairs, until, step)


def state_specs(kept: Sequence[States], placement: Placement) -> tuple[States, ...]:
    """Return how the states of all layers are spread over a mesh."""
    return tuple(_specs(of_layer, placement).states for of_layer in kept)


class _Specs(NamedTuple):
    """Hold how [B, T, heads, ...], [heads, ...] and states lie on a mesh."""

    token: PartitionSpec
    head: PartitionSpec
    states: Any


def _specs(kept: States, placement: Placement | None) -> _Specs:
    """Return the specs of a layer; its heads are split where the mesh divides all of them."""
    by_row = None if placement is None else placement.batch_axes
    head: MeshAxes = None
    if placement is not None and kept.memory is not None:
        axes = [placement.spec(x.shape[2:3], ("heads",))[0] for x in kept.windows]
        head = None if None in axes else axes[0]
    token = PartitionSpec(by_row, None, head) if head else PartitionSpec(by_row)
    memory = PartitionSpec(by_row, head) if head else PartitionSpec(by_row)
    states = jax.tree.map(lambda _: token, kept)
    if kept.memory is not None:
        states = states._replace(memory=memory)
    return _Specs(token, PartitionSpec(head) if head else PartitionSpec(), states)


def _by_device(
    run: Callable,
    inputs: Any,
    weights: Any,
    states: Any,
    *,
    outputs: Any,
    of_all: tuple[Places, Array, Array],
    placement: Placement | None,
) -> Callable:
    """Return run(inputs, weights, states, places, first, count), by device on its own part."""
    if placement is None:
        return run
    row = PartitionSpec(placement.batch_axes)
    return jax.shard_map(
        run,
        mesh=placement.mesh,
        in_specs=(inputs, weights, states, *jax.tree.map(lambda _: row, of_all)),
        out_specs=(outputs, states),
        check_vma=False,  # of a scan with updates it is not known
    )


def _convolve(
    inputs: tuple[Array, ...],
    kernels: tuple[Array, ...],
    windows: tuple[Array, ...],
    places: Places,
    first: Array,
    count: Array,
) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    def one(
        inputs: tuple[Array, ...], windows: tuple[Array, ...], count: Array
    ) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
        outputs, kept = [], []
        for x, kernel, window in zip(inputs, kernels, windows, strict=True):
            outputs.append(convolve(x, kernel, before=window))
            wide = jnp.concatenate([window, x.astype(window.dtype)], axis=1)
            at = count[:, None] + jnp.arange(window.shape[1])
            kept.append(
                jnp.take_along_axis(wide, at.reshape(*at.shape, *(1,) * (x.ndim - 2)), axis=1)
            )
        return tuple(outputs), tuple(kept)

    return _in_order(one, inputs, windows, places, first, count)


def _recur(
    kernel: str,
    inputs: tuple[Array, ...],
    _: tuple[()],
    memory: Array,
    places: Places,
    first: Array,
    count: Array,
) -> tuple[Array, Array]:
    def one(inputs: tuple[Array, ...], memory: Array, count: Array) -> tuple[Array, Array]:
        if inputs[0].shape[1] == 1:
            q, k, v, log_decay, strength = (x[:, 0] for x in inputs)
            out, memory = step(q, k, v, log_decay, strength, memory)
            return out[:, None], memory
        q, k, v, log_decay, strength = inputs
        real = (jnp.arange(q.shape[1]) < count[:, None])[..., None]
        log_decay, strength = jnp.where(real, log_decay, 0), jnp.where(real, strength, 0)
        ids = jnp.ones(q.shape[:2], jnp.int32)
        run = DELTA_RULE.implementations[kernel].run
        return run(q, k, v, log_decay, strength, ids, memory)

    return _in_order(one, inputs, memory, places, first, count)


def _in_order(
    one: Callable, inputs: Any, kept: Any, places: Places, first: Array, count: Array
) -> tuple[Any, Any]:
    """Run `one` for rows that go on from their states: for tiles one by one, in their order.

    Args:
        one: (inputs, states, count) of rows -> outputs, states.
        inputs: a tree of [B, T, ...].
        kept: a tree of [S, ...].
    """

    def some(kept: Any, given: tuple) -> tuple[Any, Any]:
        inputs, places, first, count = given

        def load(x: Array) -> Array:
            begun = (first > 0).reshape(-1, *(1,) * (x.ndim - 1))
            return jnp.where(begun, x.at[places.begin].get(mode="clip"), 0)

        def store(x: Array, new: Array) -> Array:
            for there in (places.end, places.copy):
                if there is not None:
                    at = jnp.where(count > 0, there, len(x))
                    x = x.at[at].set(new.astype(x.dtype), mode="drop")
            return x

        out, new = one(inputs, jax.tree.map(load, kept), count)
        return jax.tree.map(store, kept, new), out

    given = inputs, places, first, count
    if jax.tree.leaves(inputs)[0].shape[1] == 1:
        kept, out = some(kept, given)
        return out, kept
    kept, out = jax.lax.scan(some, kept, jax.tree.map(lambda x: x[:, None], given))
    return jax.tree.map(lambda x: x[:, 0], out), kept
