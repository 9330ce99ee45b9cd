"""Products with a weight matrix: alone, with a low-rank adapter (LoRA) beside it, or in 8 bits.

Hu et al., 2021, https://arxiv.org/abs/2106.09685. 8 bits are for sampling alone: they have no
gradient.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxrl.parallel import embedding
from jaxrl.parallel.rules import Placement, gather_parameter
from jaxrl.types import Array


class LoraWeight(struct.PyTreeNode):
    """Hold a frozen matrix and its adapter, in the parameters where the matrix stood.

        y = x w + scale * (dropout(x) a) b

    A stacked matrix has a leading L in every array, and E of experts; the scale is 0 where there is
    no adapter.

    Example: w [L, D, H, h], a [L, D, r], b [L, r, H, h], scale [L].
    """

    w: jax.Array  # [in..., out...]
    a: jax.Array  # [in..., r]
    b: jax.Array  # [r, out...]
    scale: Array  # [], alpha / r
    keys: Array | None = None  # [B, T] PRNG keys; None = no dropout
    dropout: float = struct.field(pytree_node=False, default=0.0)

    def each_part(
        self,
        change: Callable[[jax.Array, tuple[str | None, ...]], jax.Array],
        names: tuple[str | None, ...],
    ) -> "LoraWeight":
        """Apply `change(array, logical axes)` to w, a and b; `names` are the axes of w."""
        stack, inputs = self.scale.ndim, self.a.ndim - 1
        return self.replace(
            w=change(self.w, names),
            a=change(self.a, (*names[:inputs], "lora_rank")),
            b=change(self.b, (*names[:stack], "lora_rank", *names[inputs:])),
        )


class LoraStack(struct.PyTreeNode):
    """Hold a matrix and adapters of S models, of which each row has one, for sampling.

        y = x w + (x a_i) b_i

    With b times its scale, all of one rank; i is the row's place in the stack.

    Example: w [D, H, h], a [D, S, r], b [S, r, H, h], rows [B].
    """

    w: jax.Array  # [in..., out...]
    a: jax.Array  # [in..., S, r]
    b: jax.Array  # [S, r, out...]
    rows: Array | None = None  # [B]; None = not known yet

    def of_row(self, low_rank: jax.Array) -> jax.Array:
        """Return x a [B, T, S, r] of all models with 0 but for the row's own."""
        assert self.rows is not None
        mine = self.rows[:, None, None, None] == jnp.arange(self.a.shape[-2])[:, None]
        return jnp.where(mine, low_rank, 0)


class QuantisedWeight(struct.PyTreeNode):
    """Hold a matrix in 8 bits: values times a scale for each output channel.

    A matrix of experts has a leading E in both arrays.

    Example: values [D, H, h], scale [H, h].
    """

    values: jax.Array  # [in..., out...] int8 or float8_e4m3fn
    scale: jax.Array  # [out...] float32


Weight = jax.Array | LoraWeight
SampledWeight = Weight | QuantisedWeight  # of a layer that samples, too
# by the name of a kind of 8 bits: what holds them, and its largest value
EIGHT_BITS = {"int8": (jnp.int8, 127.0), "fp8": (jnp.float8_e4m3fn, 448.0)}


def quantise(w: jax.Array, kind: str, inputs: Sequence[int]) -> QuantisedWeight:
    """Return a matrix in 8 bits: the largest value of a channel is the largest that there is.

        scale = max |w| / 127 (int8) or / 448 (fp8),  values = w / scale, to the nearest

    The maximum is that over the inputs of an output channel; a channel of zeros has scale 1.
    Symmetric per-channel quantisation: Nagel et al., 2021, https://arxiv.org/abs/2106.08295; e4m3:
    Micikevicius et al., 2022, https://arxiv.org/abs/2209.05433.

    Args:
        kind: of `EIGHT_BITS`.
        inputs: dims of the inputs, from 0 on; all others are of output channels, or of experts.
    """
    dtype, largest = EIGHT_BITS[kind]
    wide = w.astype(jnp.float32)
    most = jnp.abs(wide).max(axis=tuple(inputs), keepdims=True)
    scale = jnp.where(most > 0, most / largest, 1.0)
    values = jnp.clip(wide / scale, -largest, largest)  # a rounding above 448 would be no number
    values = jnp.round(values) if jnp.issubdtype(dtype, jnp.integer) else values
    return QuantisedWeight(values.astype(dtype), scale.squeeze(tuple(inputs)))


def einsum_float32(spec: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """Compute `jnp.einsum` of narrow types, summed up and returned in float32.

    XLA's CPU backend has no product of bfloat16 that is float32 outside of its fusions. There the
    operands are cast first, which changes nothing: float32 holds their products exactly.
    """
    if x.dtype == jnp.float32:
        return jnp.einsum(spec, x, y)

    def narrow(x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.einsum(spec, x, y, preferred_element_type=jnp.float32)

    def cast(x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.einsum(spec, x.astype(jnp.float32), y.astype(jnp.float32))

    return jax.lax.platform_dependent(x, y, cpu=cast, default=narrow)


def is_adapted(x: object) -> bool:
    """Return whether `x` is a matrix with an adapter (which is itself a pytree)."""
    return isinstance(x, LoraWeight)


def project(x: jax.Array, w: SampledWeight | LoraStack, contract: int = 1) -> jax.Array:
    """Multiply x [B, T, in...] by w [in..., out...] -> [B, T, out...], contracting `contract` dims.

    As one matrix product: on the CPU the backward of the einsum with two batch dims takes twice as
    long (12.4 against 6.7 ms for [256, 16, 64] x [64, 256] on two cores). An adapter is applied to
    x rather than added to w: that costs 2 r (in + out) operations a token instead of a matrix and
    its gradient in every microbatch.
    """
    if isinstance(w, LoraWeight):
        low_rank = project(drop_out(x, w.keys, w.dropout), w.a, contract)
        return project(x, w.w, contract) + project(times(low_rank, w.scale), w.b)
    if isinstance(w, QuantisedWeight):
        return _project_quantised(x, w, contract)
    if isinstance(w, LoraStack):
        low_rank = w.of_row(project(x, w.a, contract))
        return project(x, w.w, contract) + project(low_rank, w.b, 2)
    inner = math.prod(w.shape[:contract])
    out = multiply(x.reshape(-1, inner), w.reshape(inner, -1))
    return out.reshape(*x.shape[:2], *w.shape[contract:])


def _project_quantised(x: jax.Array, w: QuantisedWeight, contract: int) -> jax.Array:
    """Do `project`: summed up and scaled in float32, and rounded once.

    Every value of 8 bits is one of bfloat16, too.
    """
    x, values = kept_narrow(x, w.values)
    inner = math.prod(values.shape[:contract])
    matrix = values.reshape(inner, -1).astype(x.dtype)
    out = einsum_float32("ni,io->no", x.reshape(-1, inner), matrix) * w.scale.reshape(-1)
    return out.astype(x.dtype).reshape(*x.shape[:2], *values.shape[contract:])


def project_float32(x: jax.Array, w: jax.Array | LoraStack) -> jax.Array:
    """Multiply x [..., D] by w [D, V], in the dtype of x, summed up and returned in float32.

    Args:
        w: of a stack of adapters x is [B, T, D].
    """
    if not isinstance(w, LoraStack):
        return einsum_float32("...d,dv->...v", x, w.astype(x.dtype))
    low_rank = w.of_row(einsum_float32("btd,dsr->btsr", x, w.a.astype(x.dtype))).astype(x.dtype)
    adapted = einsum_float32("btsr,srv->btv", low_rank, w.b.astype(x.dtype))
    return project_float32(x, w.w) + adapted


def kept_narrow(x: jax.Array, values: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return both as they are; a cast of the values then stays where x is.

    Without it XLA casts the weights of all layers before the loop of decode steps, which do not
    change in it, and keeps them as wide as if they had never been narrow.
    """
    return jax.lax.optimization_barrier((x, values))


def times(x: jax.Array, scale: Array) -> jax.Array:
    """Return x times the scale of an adapter, in float32 but for the result.

    A scale of 2/3 rounded to bfloat16 would make every adapter 0.2 % larger than the merged one.
    """
    return (x.astype(jnp.float32) * scale).astype(x.dtype)


def add_bias(x: jax.Array, b: jax.Array) -> jax.Array:
    """Return x [..., out...] plus a bias [out...], in the dtype of x; see `rounded`."""
    return (x.astype(jnp.float32) + rounded(b, x.dtype)).astype(x.dtype)


def rounded(w: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Return a parameter with values that `dtype` has, but in its own dtype.

    So its gradient, a sum over tokens and devices, is made in its own dtype as well: the transpose
    of a cast would sum it in `dtype`.
    """
    if w.dtype == dtype:
        return w
    target = jnp.finfo(dtype)
    narrow = jax.lax.reduce_precision(w, exponent_bits=target.nexp, mantissa_bits=target.nmant)
    return w + jax.lax.stop_gradient(narrow - w)  # exactly `narrow`


@jax.custom_vjp
def multiply(x: jax.Array, w: jax.Array) -> jax.Array:
    """Multiply x [n, in] by w [in, out] in the dtype of x.

    The gradient of w is made in the dtype of w: cast afterwards, as the transpose of a cast before
    the product has it, it is summed over devices in bfloat16.
    """
    return x @ w.astype(x.dtype)


def _multiply(x: jax.Array, w: jax.Array) -> tuple[jax.Array, tuple]:
    cast = w.astype(x.dtype)
    return x @ cast, (x, cast, jnp.zeros((), w.dtype))


def _multiply_backward(residuals: tuple, g: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, w, stored = residuals
    for_w = jnp.einsum("ni,no->io", x, g, preferred_element_type=stored.dtype)
    return g @ w.T, for_w


multiply.defvjp(_multiply, _multiply_backward)


def look_up(
    table: Weight, tokens: jax.Array, dtype: jnp.dtype, placement: Placement | None
) -> jax.Array:
    """Look up rows [B, T, D] of a table [V, D]; PEFT applies no dropout here."""
    if isinstance(table, LoraWeight):
        a = embedding.look_up(table.a, ("vocab", "lora_rank"), tokens, placement, dtype)
        b = gather_parameter(table.b, ("lora_rank", "embed"), placement, dtype)
        return look_up(table.w, tokens, dtype, placement) + project(times(a, table.scale), b)
    return embedding.look_up(table, ("vocab", "embed"), tokens, placement, dtype)


def gather_weight(
    w: Weight, names: tuple[str | None, ...], placement: Placement | None, dtype: jnp.dtype
) -> Weight:
    """Gather a weight of logical axes `names` as a layer needs it, see `gather_parameter`."""
    if isinstance(w, LoraWeight):
        return w.each_part(lambda x, axes: gather_parameter(x, axes, placement, dtype), names)
    return gather_parameter(w, names, placement, dtype)


def drop_out(x: jax.Array, keys: jax.Array | None, rate: float) -> jax.Array:
    """Set each element of x [B, T, ...] to 0 with probability `rate`, else divide it by 1 - rate.

    Args:
        keys: [B, T] PRNG keys, one for each token; None returns x itself.
    """
    if keys is None:
        return x
    keep = jax.vmap(jax.vmap(lambda key: jax.random.bernoulli(key, 1 - rate, x.shape[2:])))(keys)
    return jnp.where(keep, x / (1 - rate), 0)


def of_rows(params: Any, rows: Array | None) -> Any:
    """Return parameters whose stacks of adapters know which one each row has, [B]."""
    if rows is None:
        return params

    def known(w: Any) -> Any:
        return w.replace(rows=rows) if isinstance(w, LoraStack) else w

    return jax.tree.map(known, params, is_leaf=lambda w: isinstance(w, LoraStack))


def merge(params: Any) -> Any:
    """Return the parameters with every adapter added to its matrix, w + scale a b.

    For a sampler, which multiplies by a matrix many times before it changes.
    """
    return jax.tree.map(
        lambda w: _merged(w) if isinstance(w, LoraWeight) else w, params, is_leaf=is_adapted
    )


def base(params: Any) -> Any:
    """Return the parameters without their adapters."""
    return jax.tree.map(lambda w: w.w if is_adapted(w) else w, params, is_leaf=is_adapted)


def _merged(weight: LoraWeight) -> jax.Array:
    stack, rank = weight.scale.shape, weight.b.shape[weight.scale.ndim]
    a, b = weight.a.reshape(*stack, -1, rank), weight.b.reshape(*stack, rank, -1)
    product = jnp.matmul(a, b, precision="highest") * weight.scale[..., None, None]
    return weight.w + product.reshape(weight.w.shape)
