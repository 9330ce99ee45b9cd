"""Rotary position embedding, and the scalings that stretch it to longer contexts.

Su et al., https://arxiv.org/abs/2104.09864. Shape legend: see `transformer.py`.
"""

import dataclasses
import difflib
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class RopeScaling:
    """Describe how frequencies are stretched, in the fields of Hugging Face's `rope_parameters`.

    Attributes:
        rope_type: "linear" (all frequencies / factor), "llama3" (the low ones, with a smooth
            crossing; Llama 3.1, https://arxiv.org/abs/2407.21783), "yarn"
            (https://arxiv.org/abs/2309.00071) or "longrope" (https://arxiv.org/abs/2402.13753).
        original_max_position_embeddings: context length before stretching; not of linear.
        attention_factor: of cos and sin; None = yarn's 0.1 ln(factor) + 1, or longrope's
            sqrt(1 + ln(factor) / ln(original_max_position_embeddings)).
        short_factor, long_factor: longrope's divisors of each frequency. The long ones would be
            those of rows longer than the original context, but then a token's keys would depend on
            the tokens behind it: here the short ones hold, for rows up to that length.
    """

    rope_type: str
    factor: float
    original_max_position_embeddings: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool | None = None
    short_factor: tuple[float, ...] | None = None
    long_factor: tuple[float, ...] | None = None

    def to_hf(self) -> dict[str, Any]:
        """Return the fields that are set."""
        known = {k: v for k, v in dataclasses.asdict(self).items() if v is not None}
        return {k: list(v) if isinstance(v, tuple) else v for k, v in known.items()}


@dataclass(frozen=True)
class QueryGrowth:
    """Describe how queries grow with their position p, times 1 + beta ln(1 + floor(p / length)).

    Llama 4's temperature, which Ministral 3 has in all layers.
    """

    beta: float
    length: int

    def factor(self, positions: jax.Array) -> jax.Array:
        """Return the factor [B, T, 1, 1] float32 of queries at positions [B, T]."""
        lengths = jnp.floor_divide(positions, self.length).astype(jnp.float32)
        return (1 + self.beta * jnp.log1p(lengths))[..., None, None]


# Fields of each type: needed, optional.
_YARN_OPTIONS = [
    *("attention_factor", "beta_fast", "beta_slow"),
    *("mscale", "mscale_all_dim", "truncate"),
]
_FIELDS: dict[str, tuple[Sequence[str], Sequence[str]]] = {
    "linear": (["factor"], []),
    "llama3": (
        ["factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"],
        [],
    ),
    "yarn": (["factor", "original_max_position_embeddings"], _YARN_OPTIONS),
    "longrope": (
        ["factor", "original_max_position_embeddings", "short_factor", "long_factor"],
        ["attention_factor"],
    ),
}


def parse_scaling(
    rope: Mapping[str, Any], where: str, max_position_embeddings: int | None = None
) -> RopeScaling | None:
    """Parse a Hugging Face `rope_parameters` or `rope_scaling`; None for the default type.

    Args:
        rope: may also hold rope_theta, which is not read.
        where: the name of the field, for messages.
        max_position_embeddings: context length where `rope` does not name the original one.

    Raises:
        ValueError: another type, a field missing or unknown; names it and what is supported.
    """
    kind = rope.get("rope_type", rope.get("type", "default"))
    nested = any(isinstance(value, Mapping) for value in rope.values())
    if nested or rope.get("partial_rotary_factor", 1.0) != 1.0 or "mrope_section" in rope:
        kind = None
    if kind == "default":
        return None
    if kind not in _FIELDS:
        raise ValueError(
            f"{where}={dict(rope)!r} is not supported; supported: null, or rope_type 'default', "
            f"{', '.join(map(repr, _FIELDS))} on the whole head"
        )
    needed, optional = _FIELDS[kind]
    values: dict[str, Any] = {k: v for k, v in rope.items() if v is not None}
    if "original_max_position_embeddings" in needed and max_position_embeddings is not None:
        values.setdefault("original_max_position_embeddings", max_position_embeddings)
    missing = [name for name in needed if name not in values]
    if missing:
        raise ValueError(f"{where}={dict(rope)!r} of rope_type {kind!r} lacks {', '.join(missing)}")
    known = [*needed, *optional]
    read_elsewhere = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
    for name in sorted(values.keys() - {*known, *read_elsewhere}):
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
        raise ValueError(f"{where} of rope_type {kind!r} has the unknown field {name!r}; {hint}")
    values = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
    return RopeScaling(rope_type=kind, **{k: values[k] for k in known if k in values})


def inverse_frequency(head_dim: int, theta: float, scaling: RopeScaling | None) -> np.ndarray:
    """Return the radians per position [h / 2], float32."""
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    plain = np.float32(1) / np.float32(theta) ** exponent
    if scaling is None:
        return plain
    if scaling.rope_type == "linear":
        return plain / np.float32(scaling.factor)
    if scaling.short_factor is not None:
        return plain / np.asarray(scaling.short_factor, np.float32)
    stretch = _llama3_share if scaling.rope_type == "llama3" else _yarn_share
    share = stretch(scaling, plain, theta).astype(np.float32)
    return plain * (1 - share) + plain / np.float32(scaling.factor) * share


def amplitude(scaling: RopeScaling | None) -> float:
    """Return the factor of cos and sin: 1 but for yarn, section 3.4 of its paper, and longrope."""
    if scaling is None or scaling.rope_type not in ("yarn", "longrope"):
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.rope_type == "longrope":
        assert scaling.original_max_position_embeddings is not None
        longer = max(math.log(scaling.factor), 0.0)
        return math.sqrt(1 + longer / math.log(scaling.original_max_position_embeddings))

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(scaling.factor) + 1 if scaling.factor > 1 else 1.0

    if scaling.mscale and scaling.mscale_all_dim:
        return mscale(scaling.mscale) / mscale(scaling.mscale_all_dim)
    return mscale(1.0)


def rotary(
    positions: jax.Array, head_dim: int, theta: float, scaling: RopeScaling | None
) -> tuple[jax.Array, jax.Array]:
    """Compute cos and sin [B, T, 1, h / 2] float32 of positions [B, T] int."""
    frequency = inverse_frequency(head_dim, theta, scaling)
    angle = positions[..., None, None].astype(jnp.float32) * frequency
    scale = amplitude(scaling)
    return jnp.cos(angle) * scale, jnp.sin(angle) * scale


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array, pairs: bool = False) -> jax.Array:
    """Turn the first r dims of queries or keys x [B, T, heads, h] by cos, sin [B, T, 1, r / 2].

    Dims i and i + r / 2 turn together, in Hugging Face's layout, or with `pairs` 2 i and 2 i + 1.
    The angles are constants: their gradient is 0.
    """
    turn: Any = _turn
    return turn(pairs, x, cos, sin)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _turn(pairs: bool, x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    by_product = functools.partial(_by_product, pairs=pairs)
    by_halves = functools.partial(_by_halves, pairs=pairs)
    return jax.lax.platform_dependent(x, cos, sin, tpu=by_product, default=by_halves)


def _rotate(pairs: bool, x: jax.Array, cos: jax.Array, sin: jax.Array) -> tuple[jax.Array, tuple]:
    return rotate(x, cos, sin, pairs), (cos, sin)


def _rotate_back(pairs: bool, angle: tuple, g: jax.Array) -> tuple[jax.Array, ...]:
    def by_product(g: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
        return _by_product(g, cos, -sin, pairs)

    def by_halves(g: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
        return jax.linear_transpose(lambda x: _by_halves(x, cos, sin, pairs), g)(g)[0]

    cos, sin = angle
    turned = jax.lax.platform_dependent(g, cos, sin, tpu=by_product, default=by_halves)
    return turned, jnp.zeros_like(cos), jnp.zeros_like(sin)


_turn.defvjp(_rotate, _rotate_back)


def _by_halves(x: jax.Array, cos: jax.Array, sin: jax.Array, pairs: bool = False) -> jax.Array:
    turned = 2 * cos.shape[-1]
    wide, still = x[..., :turned].astype(jnp.float32), x[..., turned:]
    if pairs:
        x1, x2 = wide[..., 0::2], wide[..., 1::2]
        both = jnp.stack([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1).reshape(wide.shape)
    else:
        x1, x2 = jnp.split(wide, 2, axis=-1)
        both = jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1)
    if still.shape[-1] == 0:
        return both.astype(x.dtype)
    return jnp.concatenate([both.astype(x.dtype), still], axis=-1)


def _by_product(x: jax.Array, cos: jax.Array, sin: jax.Array, pairs: bool = False) -> jax.Array:
    """Turn x by x cos + (-x2, x1) sin, whose second term a matrix of 0, 1 and -1 makes, exactly.

    For TPUs, whose registers have 128 lanes: halves of a head leave half of them empty, and cost
    more than the product. So does a roll by h / 2, which XLA cuts into the same halves.
    """
    width, half = x.shape[-1], cos.shape[-1]
    step = 1 if pairs else half  # from one dim to that which turns with it
    firsts = np.arange(half) * (2 if pairs else 1)
    swap = np.zeros((width, width))
    swap[firsts, firsts + step] = 1
    swap[firsts + step, firsts] = -1
    crossed = jnp.einsum(
        "bthd,de->bthe",
        x,
        jnp.asarray(swap, x.dtype),
        precision=jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
    still = [(0, 0)] * (cos.ndim - 1) + [(0, width - 2 * half)]
    cos, sin = (
        jnp.repeat(y, 2, axis=-1) if pairs else jnp.concatenate([y, y], axis=-1) for y in (cos, sin)
    )
    cos, sin = jnp.pad(cos, still, constant_values=1), jnp.pad(sin, still)
    return (x.astype(jnp.float32) * cos + crossed * sin).astype(x.dtype)


def _llama3_share(scaling: RopeScaling, plain: np.ndarray, _: float) -> np.ndarray:
    """Return how much of each frequency is stretched: 0 for short wavelengths, 1 for long ones."""
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    assert low is not None and high is not None and scaling.original_max_position_embeddings
    turns = scaling.original_max_position_embeddings * plain / (2 * math.pi)
    return 1 - np.clip((turns - low) / (high - low), 0, 1)


def _yarn_share(scaling: RopeScaling, plain: np.ndarray, theta: float) -> np.ndarray:
    """Return a ramp over the dims between beta_fast and beta_slow turns in the original context."""
    dim = 2 * len(plain)
    assert scaling.original_max_position_embeddings is not None
    context = scaling.original_max_position_embeddings

    def dim_of(turns: float) -> float:
        return dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = dim_of(scaling.beta_fast or 32), dim_of(scaling.beta_slow or 1)
    if scaling.truncate is None or scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    return np.clip((np.arange(dim // 2) - first) / ((last - first) or 0.001), 0, 1)
