"""The policy as a sampler in 8 bits has it: what its log-probs must be those of.

Computed from the trainer's parameters with arithmetic of its own, not with `linear.quantise` and no
cast to 8 bits: a wrong scale or a wrong rounding there is not repeated here.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl.models.linear import is_adapted, merge
from jaxrl.models.transformer import Params
from jaxrl.rollout.native.decode import IN_EIGHT_BITS
from jaxrl.rollout.weights.groups import STACKED

STEPS = 127  # of int8, on either side of 0
# e4m3: 3 bits behind the leading one, exponents from -6 on, up to 1.75 x 2^8
FRACTION_BITS, LEAST_EXPONENT, LARGEST = 3, -6, 448


def dequantised(params: Params, quantization: str, dtype: Any) -> Params:
    """Return parameters in the trainer's layout, adapters merged, rounded as the sampler's are.

    Args:
        params: of the trainer, whose places they keep.
        quantization: "int8" or "fp8".
        dtype: of the engine, to which its weights are cast before.
    """
    places = jax.tree.map(
        lambda w: w.w.sharding if is_adapted(w) else w.sharding, params, is_leaf=is_adapted
    )
    run = functools.partial(_dequantised, quantization=quantization, dtype=dtype)
    return jax.jit(run, out_shardings=places)(params)


def _dequantised(params: Params, *, quantization: str, dtype: Any) -> Params:
    def rounded(path: Any, w: jax.Array) -> jax.Array:
        if path[0].key != STACKED or path[-1].key not in IN_EIGHT_BITS:
            return w
        inputs = tuple(dim + 1 for dim in IN_EIGHT_BITS[path[-1].key])  # behind that of layers
        wide = w.astype(dtype).astype(jnp.float32)
        most = jnp.abs(wide).max(axis=inputs, keepdims=True)
        one = jnp.where(most == 0, 1, most / (STEPS if quantization == "int8" else LARGEST))
        near = jnp.round if quantization == "int8" else _nearest_e4m3
        return one * near(wide / one)

    return jax.tree_util.tree_map_with_path(rounded, merge(params))


def _nearest_e4m3(x: jax.Array) -> jax.Array:
    """Return the nearest number of e4m3, a multiple of its spacing there; ties are to even."""
    exponent = jnp.frexp(x)[1] - 1  # frexp has its fractions from 1/2 on
    spacing = jnp.exp2(jnp.maximum(exponent, LEAST_EXPONENT) - FRACTION_BITS)
    return jnp.clip(jnp.round(x / spacing) * spacing, -LARGEST, LARGEST)
