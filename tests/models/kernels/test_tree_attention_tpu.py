"""Attention over prefix trees by the TPU's kernels, against the one with a mask [T, T]."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.models.kernels.tree_attention_tpu import _meetings, _Tree, tree_attention_tpu

FAR = 2**30  # a window of layers that do not slide


def forest(rng, places, trees, real):
    """Where the subtrees of a random forest end, and depths: trees begin there, then padding."""
    ends, positions, path = np.arange(places) + 1, np.zeros(places, np.int32), []
    for place in range(real):
        if place in trees:
            path = []
        elif rng.random() < 0.04:
            path = path[: rng.integers(1, len(path) // 2 + 2)]  # go on from an early token
        positions[place] = len(path)
        path.append(place)
        ends[path] = place + 1
    return ends.astype(np.int32), positions


def draw(heads):
    """q, k, v, ends and positions of two rows of 180 places."""
    rng = np.random.default_rng(0)
    shapes = (2, 180, heads, 16), *((2, 2, 180, 16),) * 2
    given = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes)
    rows = forest(rng, 180, (0, 117, 130), 163), forest(rng, 180, (0, 10), 90)
    return *given, *(jnp.stack(x) for x in zip(*rows, strict=True))


def sees(ends, positions, window):
    place = jnp.arange(ends.shape[1])
    behind = (place[:, None] >= place) & (place[:, None] < ends[:, None])
    return behind & (positions[:, :, None] - positions[:, None] < window)


def dense(q, k, v, ends, positions, window, *, scale, softcap):
    """What the kernels compute, with all scores and the mask."""
    mask = sees(ends, positions, window)
    keys, values = (jnp.repeat(x, q.shape[2] // k.shape[1], axis=1) for x in (k, v))
    scores = scale * jnp.einsum("bthd,bhsd->bhts", q, keys)
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    weights = jax.nn.softmax(jnp.where(mask[:, None], scores, -jnp.inf))
    return jnp.einsum("bhts,bhsd->bthd", weights, values)


@pytest.mark.parametrize(
    ("heads", "softcap", "window"),
    [
        # heads without groups are groups of one; caps and windows are in the others, too
        pytest.param(2, None, FAR, marks=pytest.mark.slow),
        pytest.param(2, 3.0, 20, marks=pytest.mark.slow),
        (8, None, 20),
        (8, 3.0, FAR),
    ],
    ids=["plain", "capped-window", "grouped-window", "grouped-capped"],
)
def test_it_is_the_attention_with_a_mask(heads, softcap, window):
    """Values and gradients; 180 places are no whole number of blocks."""
    q, k, v, ends, positions = draw(heads)

    def run(way, **more):
        def loss(q, k, v):
            given = q, k, v, ends, positions, jnp.int32(window)
            out = way(*given, scale=0.3, softcap=softcap, **more)
            return jnp.sum(jnp.sin(3 * out)), out

        (_, out), grads = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(q, k, v)
        return out, *grads

    for a, b in zip(run(dense), run(tree_attention_tpu, interpret=True, block=16), strict=True):
        assert float(jnp.abs(a).max()) > 0.1
        np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-5 * float(jnp.abs(a).max()))


def test_blocks_meet_where_a_query_sees_a_key():
    *_, ends, positions = draw(2)
    ends, positions = (x[:, :176] for x in (ends, positions))

    @jax.jit
    def run(window):
        mask = sees(ends, positions, window).reshape(2, 11, 16, 11, 16)
        tree = _Tree(ends[:, None], positions[:, None], jnp.full(1, window))
        return mask.any((2, 4)), _meetings(tree, 16)

    def both(window):
        return map(np.asarray, run(window))

    seen, meets = both(FAR)
    np.testing.assert_array_equal(meets, seen)
    gaps = ~meets & (meets.cumsum(2) > 0) & np.tri(11, dtype=bool)
    assert gaps.any()  # a list is not a range
    seen_near, meets_near = both(20)
    assert not (seen_near & ~meets_near).any()
    assert meets_near.sum() < meets.sum()


def test_blocks_that_do_not_meet_are_not_read():
    """A tree of the first two blocks, and one of the last two: what is not a number stays there."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 2, 128, 16)).astype(np.float32) for _ in range(3))
    ends = np.repeat(np.array([[64, 128]], np.int32), 64, axis=1)
    positions = np.arange(128, dtype=np.int32)[None] % 64
    first = np.arange(128)[:, None] < 64

    def run(q, k, v):
        far = jnp.int32(FAR)
        return tree_attention_tpu(
            q.swapaxes(1, 2),
            k,
            v,
            ends,
            positions,
            far,
            scale=0.3,
            softcap=None,
            interpret=True,
            block=32,
        ).swapaxes(1, 2)

    @jax.jit
    def value_and_gradients(*given):
        out, pull_back = jax.vjp(run, *given)
        return out, *pull_back(v)

    found = value_and_gradients(*(np.where(first, np.float32(np.nan), x) for x in (q, k, v)))
    for a, b in zip(
        map(np.asarray, value_and_gradients(q, k, v)), map(np.asarray, found), strict=True
    ):
        np.testing.assert_array_equal(b[:, :, 64:], a[:, :, 64:])
        assert np.isnan(b[:, :, :64]).all()


@pytest.mark.slow  # the TPU compiler
@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("places", [2048, 8192])
@pytest.mark.parametrize("topology", ["v5e:2x2", "v5p:2x2x1"])
def test_the_tpu_compiler_takes_it(topology, places, width):
    """Its blocks fit in fast memory; nowhere is there an array [T, T]."""
    pytest.importorskip("libtpu")
    from jaxrl.tools.plan.topology import topology_devices

    device = jax.sharding.SingleDeviceSharding(topology_devices(topology)[0])

    def array(dtype, *shape):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=device)

    def loss(q, k, v, *tree):
        out = tree_attention_tpu(q, k, v, *tree, scale=0.1, softcap=30.0)
        return jnp.sum(jnp.square(out.astype(jnp.float32)))

    dtype = jnp.float32 if width == 256 else jnp.bfloat16  # the largest blocks
    q, kv = array(dtype, 2, places, 16, width), array(dtype, 2, 4, places, width)
    by_place = array(jnp.int32, 2, places)
    run = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))
    text = run.lower(q, kv, kv, by_place, by_place, array(jnp.int32)).compile().as_text()
    assert text.count('custom_call_target="tpu_custom_call"') == 3
    assert f"{places},{places}]" not in text
