"""The gated delta rule as one kernel, which keeps the state and a chunk's products in fast memory.

`xla` is `jaxrl.models.delta_rule.chunked`: it makes the decays, overlaps and inverses of all chunks
at once, [C, C] for each, and goes through them with the state. `pallas` goes through the chunks of
a row, and makes of each what it needs of it when it comes to it: beside inputs and outputs it
writes the state in front of every chunk, and that only where a gradient is to be taken. Its
backward pass is a second kernel, which goes through the chunks from the last to the first with the
gradient of the state, and differentiates each from the state in front of it.

Shape legend: as of `jaxrl.models.delta_rule`: B rows, T tokens, N chunks, C tokens of a chunk, K
key heads, V value heads, G = V / K, d key width, e value width.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec

from jaxrl.models.delta_rule import CHUNK, chunked, inverse_of_unit_lower
from jaxrl.models.kernels.choice import REFERENCE, Facts, Implementation, Operation, unmet
from jaxrl.parallel.rules import Placement
from jaxrl.types import Array

FORGET = -1e30  # in the place of a first token's log decay: e^FORGET = 0, and no sum of some is inf
TPU_STATES = 2**19  # bytes of the states of a key head, which fast memory has up to six times
TPU_PARAMS = pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary"))


def delta_rule(
    q: Array,
    k: Array,
    v: Array,
    log_decay: Array,
    strength: Array,
    segment_ids: Array,
    *,
    kernel: str = REFERENCE,
    placement: Placement | None = None,
) -> Array:
    """Run the rule over packed rows, for training: `chunked` from an empty state, by any kernel.

    Args:
        q, k, v, log_decay, strength, segment_ids: see `chunked`.
        kernel: of `DELTA_RULE`.
        placement: the mesh over whose batch and head axes a kernel is split, as the compiler cannot
            split it; None = one device.

    Returns:
        [B, T, V, e] float32.
    """

    def run(*given: Array) -> Array:
        return DELTA_RULE.implementations[kernel].run(*given)[0]

    given = q, k, v, log_decay, strength, segment_ids
    if kernel == REFERENCE or placement is None:
        return run(*given)
    rows, _, heads, _ = placement.spec(v.shape, ("batch", None, "heads", None))
    if placement.spec(k.shape, ("batch", None, "heads", None))[2] != heads:
        heads = None  # a device's value heads would miss their keys
    token = PartitionSpec(rows, None, heads)
    return jax.shard_map(
        run,
        mesh=placement.mesh,
        in_specs=(token,) * 5 + (PartitionSpec(rows),),
        out_specs=token,
        check_vma=False,  # a kernel does not say over which axes its output varies
    )(*given)


class Chunks(NamedTuple):
    """Hold what the rule is given, cut into chunks; float32.

    Attributes:
        q, k: [B, K, N, C, d].
        v: [B, K, N, G, C, e].
        log_decay, strength: [B, K, N, G, C].
    """

    q: Array
    k: Array
    v: Array
    log_decay: Array
    strength: Array


def pallas(
    q: Array,
    k: Array,
    v: Array,
    log_decay: Array,
    strength: Array,
    segment_ids: Array,
    state: Array | None = None,
    *,
    chunk: int = CHUNK,
    interpret: bool = False,
) -> tuple[Array, Array]:
    """Do `chunked` by a kernel for TPUs; `interpret` runs it anywhere, slowly, for tests.

    A segment that begins within a row forgets all that was before it: its first token has a decay
    of 0. So the kernel knows of no segments.
    """
    (b, t, heads, width), (values, value_width) = k.shape, v.shape[2:]
    group = values // heads

    def cut(x: Array, *dims: int) -> Array:
        """Cut [B, T, ...] into chunks [B, N, C, ...dims]; what is added leaves the state as it is.

        Keys of 0 write nothing, log decays of 0 forget nothing.
        """
        widths = (0, 0), (0, -t % chunk), *((0, 0),) * (x.ndim - 2)
        padded = jnp.pad(x.astype(jnp.float32), widths)
        return padded.reshape(b, -1, chunk, *dims)

    begins = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)))
    log_decay = jnp.where(begins[..., None], FORGET, log_decay)
    q, k = (cut(x, heads, width).transpose(0, 3, 1, 2, 4) for x in (q, k))
    v = cut(v, heads, group, value_width).transpose(0, 3, 1, 4, 2, 5)
    log_decay, strength = (
        cut(x, heads, group).transpose(0, 3, 1, 4, 2) for x in (log_decay, strength)
    )
    begin = jnp.zeros((b, values, width, value_width)) if state is None else state
    begin = begin.astype(jnp.float32).reshape(b, heads, group, width, value_width)
    both: Any = _all_chunks(Chunks(q, k, v, log_decay, strength), begin, interpret)
    out, end = both
    out = out.transpose(0, 2, 4, 1, 3, 5).reshape(b, -1, values, value_width)[:, :t]
    return out, end.reshape(b, values, width, value_width)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _all_chunks(given: Chunks, begin: Array, interpret: bool) -> tuple[Array, Array]:
    """Return the outputs, as v is, and the state [B, K, G, d, e] behind the last chunk."""
    out, state = _forward(given, begin, interpret, keep=False)
    return out, state


def _forward(given: Chunks, begin: Array, interpret: bool, *, keep: bool) -> list[Array]:
    """Return what `_all_chunks` does; to keep, the states in front of all chunks as well."""
    outputs = [given.v, begin]
    if keep:
        b, heads, chunks = given.k.shape[:3]
        outputs.append(jax.ShapeDtypeStruct((b, heads, chunks, *begin.shape[2:]), jnp.float32))
    return _call(_forward_kernel, [*given, begin], outputs, interpret, name="delta_rule")


def _keep(given: Chunks, begin: Array, interpret: bool) -> tuple[tuple[Array, Array], tuple]:
    out, state, before = _forward(given, begin, interpret, keep=True)
    return (out, state), (given, before)


def _backward(
    interpret: bool, kept: tuple[Chunks, Array], g: tuple[Array, Array]
) -> tuple[Chunks, Array]:
    given, before = kept
    for_out, for_state = g
    *for_given, for_begin = _call(
        _backward_kernel,
        [*given, before, for_out, for_state],
        [*given, for_state],
        interpret,
        backwards=True,
        name="delta_rule_gradient",
    )
    return Chunks(*for_given), for_begin


_all_chunks.defvjp(_keep, _backward, optimize_remat=True)  # a pass that keeps nothing writes none


def _call(
    kernel: Any,
    inputs: list[Any],
    outputs: list[Any],
    interpret: bool,
    *,
    backwards: bool = False,
    name: str,
) -> list[Array]:
    """Run a kernel for each row, key head and chunk; a state [B, K, G, d, e] stays from one to one.

    Args:
        backwards: from the last chunk to the first.
    """
    b, heads, chunks, size, width = inputs[0].shape
    group, value_width = inputs[2].shape[3], inputs[2].shape[5]

    def block(x: Any) -> pl.BlockSpec:
        if x.shape == (b, heads, group, width, value_width):
            return pl.BlockSpec((None, None, *x.shape[2:]), lambda i, j, n: (i, j, 0, 0, 0))
        behind = (0,) * (len(x.shape) - 3)
        return pl.BlockSpec(
            (None, None, None, *x.shape[3:]),
            lambda i, j, n: (i, j, chunks - 1 - n if backwards else n, *behind),
        )

    return pl.pallas_call(
        kernel,
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in outputs],
        grid=(b, heads, chunks),
        in_specs=[block(x) for x in inputs],
        out_specs=[block(x) for x in outputs],
        compiler_params=TPU_PARAMS,
        interpret=interpret,
        name=name,
    )(*inputs)


def _one_chunk(
    q: Array, k: Array, v: Array, log_decay: Array, strength: Array, state: Array
) -> tuple[Array, Array]:
    """Return the outputs [C, e] of a chunk of a value head, and the state [d, e] behind it.

    What it writes is (I + L)^-1 b (v - a S^T k), with L_ij = b_i a_ij k_i^T k_j of the tokens j
    before i, a_ij the decay from behind j to i, and a_i that from in front of the chunk.

    Args:
        q, k: [C, d]; v: [C, e]; log_decay, strength: [1, C]; state: [d, e] in front of the chunk.
    """
    size = (k.shape[0],) * 2
    i, j = (jax.lax.broadcasted_iota(jnp.int32, size, dim) for dim in range(2))
    # each sum begins anew, so that its rounding does not depend on what lies before j
    sums = _product(jnp.where(i >= j, log_decay, 0), jnp.where(i > j, 1.0, 0.0))
    decay = jnp.where(i >= j, jnp.exp(sums), 0)
    from_start = jnp.exp(jnp.sum(jnp.where(i >= j, log_decay, 0), axis=1, keepdims=True))
    to_end = jnp.exp(jnp.sum(jnp.where(j > i, log_decay, 0), axis=1, keepdims=True))
    kept = jnp.exp(jnp.sum(log_decay, axis=1, keepdims=True))
    strength = jnp.sum(jnp.where(i == j, strength, 0), axis=1, keepdims=True)  # as a column

    overlap = _product(k, k, (1, 1)) * decay
    solve = inverse_of_unit_lower(jnp.where(i > j, strength * overlap, 0))
    written = _product(solve, strength * (v - from_start * _product(k, state)))
    within = _product(q, k, (1, 1)) * decay
    out = from_start * _product(q, state) + _product(within, written)
    return out, kept * state + _product(to_end * k, written, (0, 0))


def _product(x: Array, y: Array, contract: tuple[int, int] = (1, 0)) -> Array:
    dims = (((contract[0],), (contract[1],)), ((), ()))
    return jax.lax.dot_general(x, y, dims, precision=jax.lax.Precision.HIGHEST)


def _forward_kernel(
    q: Any,
    k: Any,
    v: Any,
    log_decay: Any,
    strength: Any,
    begin: Any,
    out: Any,
    state: Any,
    *before: Any,
) -> None:
    @pl.when(pl.program_id(2) == 0)
    def start() -> None:
        state[...] = begin[...]

    for ref in before:
        ref[...] = state[...]
    for g in range(v.shape[0]):
        one = pl.ds(g, 1)
        given = q[...], k[...], v[g], log_decay[one], strength[one], state[g]
        out[g], state[g] = _one_chunk(*given)


def _backward_kernel(
    q: Any,
    k: Any,
    v: Any,
    log_decay: Any,
    strength: Any,
    before: Any,
    for_out: Any,
    for_end: Any,
    for_q: Any,
    for_k: Any,
    for_v: Any,
    for_log_decay: Any,
    for_strength: Any,
    for_state: Any,
) -> None:
    @pl.when(pl.program_id(2) == 0)
    def start() -> None:
        for_state[...] = for_end[...]

    for_q[...], for_k[...] = jnp.zeros_like(for_q), jnp.zeros_like(for_k)
    for g in range(v.shape[0]):
        one = pl.ds(g, 1)
        given = q[...], k[...], v[g], log_decay[one], strength[one], before[g]
        _, pull_back = jax.vjp(_one_chunk, *given)
        found = pull_back((for_out[g], for_state[g]))
        for_q[...] += found[0]
        for_k[...] += found[1]
        for_v[g], for_log_decay[one], for_strength[one], for_state[g] = found[2:]


def _pallas_needs(facts: Facts) -> list[str]:
    if facts.model is None or (net := facts.model.delta_net) is None:
        return []
    d, e = net.key_dim, net.value_dim
    states = 4 * net.value_heads // net.key_heads * d * e
    return unmet(
        [
            (d % 128 == e % 128 == 0, f"heads whose widths 128 divides, not {d} and {e}"),
            (states <= TPU_STATES, f"at most {TPU_STATES:,} bytes of states for a key head"),
        ]
    )


DELTA_RULE = Operation(
    "delta_rule",
    "the gated delta rule over rows, in training, scoring and prefill",
    {
        "pallas": Implementation(
            pallas,
            _pallas_needs,
            "128 divides key and value width, states of a key head of at most 512 KiB",
        ),
        REFERENCE: Implementation(chunked),
    },
    {"tpu": ("pallas", REFERENCE)},
)
