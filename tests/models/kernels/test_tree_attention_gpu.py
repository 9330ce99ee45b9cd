"""The kernels for prefix trees on GPUs against attention by a mask. Nothing needs a GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.models.kernels.tree_attention_gpu import (
    ALL,
    NONE,
    SOME,
    Row,
    _lists,
    _meetings,
    tree_attention_gpu,
)

EVERYWHERE = 2**30  # a window that hides nothing


def forest(seed, length, padding):
    """Return ends and depths of random trees in depth-first order, and of padding."""
    draw = np.random.default_rng(seed)
    depths = np.zeros(length + padding, np.int32)
    for place in range(1, length):
        deeper, chance = depths[place - 1] + 1, draw.random()
        # on along the path, back to somewhere on it, or a tree of its own
        depths[place] = deeper if chance < 0.9 else draw.integers(1, deeper + 1)
        if chance > 0.98:
            depths[place] = 0
    ends = np.arange(length + padding, dtype=np.int32) + 1
    for place in range(length):
        later = np.flatnonzero(depths[place + 1 : length] <= depths[place])
        ends[place] = place + 1 + later[0] if later.size else length
    return ends, depths


def rows(length, padding):
    two = (forest(seed, length, padding) for seed in (0, 1))
    return tuple(jnp.stack(x) for x in zip(*two, strict=True))


def mask_of(ends, positions, window):
    """Which query sees which key, [B, T, T] bool."""
    place = jnp.arange(ends.shape[1])
    below = (place[:, None] >= place) & (place[:, None] < ends[:, None, :])
    return below & (positions[:, :, None] - positions[:, None, :] < window)


def dense(q, k, v, ends, positions, window, *, scale, softcap):
    """The same of scores [B, H, T, T] in float32."""
    k, v = (jnp.repeat(x, q.shape[2] // k.shape[1], axis=1) for x in (k, v))
    scores = jnp.einsum("bthd,bhsd->bhts", q, k, precision="highest") * scale
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    seen = mask_of(ends, positions, window)[:, None]
    probs = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
    return jnp.einsum("bhts,bhsd->bthd", probs, v, precision="highest")


def value_and_gradient(attend, arrays, *row, **options):
    """Return the output, and the gradients of q, k and v."""

    @jax.jit
    def run(arrays, row):
        out, pull = jax.vjp(lambda *x: attend(*x, *row, **options), *arrays)
        return out, *pull(jnp.sin(3 * out) + 0.1)

    return [np.asarray(x) for x in run(arrays, row)]


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("heads", "kv", "width", "softcap", "window"),
    [
        (2, 2, 64, None, EVERYWHERE),
        (4, 1, 64, None, 9),
        (4, 1, 40, 2.0, 30),  # a width that is no power of two
    ],
)
def test_values_and_gradients_are_those_of_a_mask(heads, kv, width, softcap, window):
    ends, positions = rows(200, 17)
    draw = np.random.default_rng(0)
    shapes = (2, 217, heads, width), (2, kv, 217, width), (2, kv, 217, width)
    arrays = [jnp.asarray(draw.standard_normal(shape), jnp.float32) for shape in shapes]
    given = arrays, ends, positions, jnp.int32(window)
    options = {"scale": 1.3 * width**-0.5, "softcap": softcap}
    got = value_and_gradient(tree_attention_gpu, *given, **options, interpret=True)
    expected = value_and_gradient(dense, *given, **options)
    for x, y in zip(got, expected, strict=True):
        assert np.linalg.norm(x - y) < 1e-5 * np.linalg.norm(y)


@pytest.mark.parametrize("window", [EVERYWHERE, 40])
def test_blocks_are_listed_where_they_meet(window):
    ends, positions = rows(210, 46)
    meetings = jax.jit(functools.partial(_meetings, queries=16, keys=8))
    found = np.asarray(meetings(Row(ends, positions, jnp.array([window]))))
    mask = np.asarray(jax.jit(mask_of)(ends, positions, window)).reshape(2, 16, 16, 32, 8)
    every, some = mask.all((2, 4)), mask.any((2, 4))
    assert {int(x) for x in found.ravel()} == {ALL, SOME, NONE}
    assert (every | (found != ALL)).all()
    assert (~some | (found != NONE)).all()
    if window == EVERYWHERE:  # intervals say it exactly
        assert ((found == ALL) == every).all()
        assert ((found != NONE) == some).all()
    order, counts = jax.jit(_lists)(found)
    for kinds, listed, (whole, met) in zip(
        *(np.asarray(x).reshape(32, -1) for x in (found, order, counts)), strict=True
    ):
        assert listed[:whole].tolist() == np.flatnonzero(kinds == ALL).tolist()
        assert listed[whole:met].tolist() == np.flatnonzero(kinds == SOME).tolist()
