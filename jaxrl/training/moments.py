"""Adam whose moments rest between updates in 16 or in 8 bits.

Every rounding is stochastic. In an update the second moment falls by a factor of 1 - b2 at most,
1e-3 by default, and half a step of bfloat16 is 2e-3 to 4e-3 of a number: rounded to the nearest it
would never fall. Rounded at random, up with the probability that makes the mean right, it does.

In 8 bits a number is a code and the largest magnitude of its row, the last dim of its array. After
Dettmers et al., 2021, https://arxiv.org/abs/2110.02861, with three differences: rows in place of
blocks of the flat array, because a row is the same on every mesh; powers in place of a table,
because TPUs are slow at looking up; and a positive second moment is never rounded to 0, where its
step would be without bound (Li et al., 2023, https://arxiv.org/abs/2309.01507).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxrl.array_ops import Array

# of a moment with a sign, of one without: dtype of the code, its largest, and the power
_SIGNED, _UNSIGNED = (jnp.int8, 127, 2), (jnp.uint8, 255, 8)


class Rows8(NamedTuple):
    """Hold an array in 8 bits: its magnitudes are scale * (|code| / most) ** power.

    Attributes:
        code: an array or its sharding; int8 of first moments (most 127, power 2), uint8 of
            second ones (most 255, power 8).
        scale: float32, the largest magnitude of each row; its last dim is 1.
    """

    code: Any
    scale: Any


def scale_by_resting_adam(b1: float, b2: float, state_dtype: str) -> optax.GradientTransformation:
    """Return `optax.scale_by_adam` whose moments are "bfloat16" or "int8" between updates.

    Updates are computed in float32, from moments that are not rounded yet. The random bits follow
    from the count of updates: a resumed run rounds as an uninterrupted one does.
    """
    adam = optax.scale_by_adam(b1, b2)
    in_bits = {"bfloat16": _bfloat16, "int8": _rows8}[state_dtype]

    def rounded(state: Any) -> optax.ScaleByAdamState:
        key = jax.random.fold_in(jax.random.key(0), state.count)

        def of(moments: Any, key: Array, form: tuple) -> Any:
            leaves, treedef = jax.tree.flatten(moments)
            keys = [jax.random.fold_in(key, number) for number in range(len(leaves))]
            found = [in_bits(*pair, form) for pair in zip(leaves, keys, strict=True)]
            return treedef.unflatten(found)

        first, second = jax.random.split(key)
        mu, nu = of(state.mu, first, _SIGNED), of(state.nu, second, _UNSIGNED)
        return state._replace(mu=mu, nu=nu)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        mu, nu = jax.tree.map(_float32, (state.mu, state.nu), is_leaf=is_rows8)
        updates, new = adam.update(updates, state._replace(mu=mu, nu=nu), params)
        return updates, rounded(new)

    return optax.GradientTransformation(lambda params: rounded(adam.init(params)), update)


def is_rows8(x: object) -> bool:
    """Return whether a part of a state is an array in 8 bits."""
    return isinstance(x, Rows8)


def moment_sharding(moment: Any, sharding: jax.sharding.NamedSharding) -> Any:
    """Return where a moment is, from where its parameter is; the scale of a row has no parts."""
    if not is_rows8(moment):
        return sharding
    others = sharding.spec[: max(moment.code.ndim - 1, 0)]
    return Rows8(sharding, sharding.update(spec=jax.sharding.PartitionSpec(*others)))


def _bfloat16(x: Array, key: Array, _: tuple) -> Array:
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    bits += jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.uint32)
    return jax.lax.bitcast_convert_type((bits >> 16).astype(jnp.uint16), jnp.bfloat16)


def _rows8(x: Array, key: Array, form: tuple) -> Rows8:
    dtype, most, power = form
    size, row = jnp.abs(x.astype(jnp.float32)), tuple(range(x.ndim))[-1:]
    scale = jnp.max(size, row, keepdims=True)
    share = size / jnp.where(scale > 0, scale, 1)
    root = share
    for _ in range(power.bit_length() - 1):  # exact, unlike share ** (1 / power)
        root = jnp.sqrt(root)
    low = jnp.minimum(jnp.floor(most * root), most - 1)
    below, above = (low / most) ** power, ((low + 1) / most) ** power
    draw = jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.float32) / 2**16
    code = low + (draw < (share - below) / (above - below))
    code = code * jnp.sign(x) if dtype == jnp.int8 else jnp.maximum(code, share > 0)
    return Rows8(code.astype(dtype), scale)


def _float32(moment: Any) -> Array:
    if not is_rows8(moment):
        return moment.astype(jnp.float32)
    _, most, power = _SIGNED if moment.code.dtype == jnp.int8 else _UNSIGNED
    share = moment.code.astype(jnp.float32) / most
    return moment.scale * jnp.sign(share) * jnp.abs(share) ** power
