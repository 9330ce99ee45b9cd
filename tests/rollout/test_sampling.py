"""Drawing tokens, against a numpy reference."""

import math
import re
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxrl.parallel import make_mesh
from jaxrl.rollout.native.sampling import (
    BLOCK,
    assign,
    filter_weights,
    inverse_cdf,
    pick,
    sample,
    top_tokens,
    uniforms,
)

ROWS, VOCAB = 64, 11
LOGITS = np.random.default_rng(0).normal(0, 2, (ROWS, VOCAB)).astype(np.float32)
U = np.random.default_rng(1).uniform(0, 1, ROWS).astype(np.float32)
BELOW_ONE = np.nextafter(np.float32(1), np.float32(0))

FILTERS = {
    "temperature": {"temperature": 0.7},
    "hot": {"temperature": 3.0},
    "top_k": {"top_k": 3},
    "top_k_1": {"top_k": 1},
    "top_k_above_vocabulary": {"top_k": 100},
    "top_p": {"top_p": 0.6},
    "top_p_tiny": {"top_p": 1e-6},
    "min_p": {"min_p": 0.2},
    "all": {"temperature": 1.5, "top_k": 6, "top_p": 0.9, "min_p": 0.05},
}

draw_filtered = jax.jit(partial(sample, filtered=True))
draw_unfiltered = jax.jit(partial(sample, filtered=False))


def settings(rows=ROWS, *, temperature=1.0, top_k=-1, top_p=1.0, min_p=0.0):
    return {
        "temperature": np.full(rows, temperature, np.float32),
        "top_k": np.full(rows, top_k, np.int32),
        "top_p": np.full(rows, top_p, np.float32),
        "min_p": np.full(rows, min_p, np.float32),
    }


def reference(logits, *, temperature=1.0, top_k=-1, top_p=1.0, min_p=0.0):
    """Probabilities of one row: min-p, then top-k, then top-p of what is left; float64 loops."""
    scaled = logits.astype(np.float64) / temperature
    probs = np.exp(scaled - scaled.max())
    probs /= probs.sum()
    by_rank = np.argsort(-probs, kind="stable")
    kept = [i for i in by_rank if probs[i] >= min_p * probs.max()]
    if top_k > 0:
        kept = kept[:top_k]
    mass = sum(probs[i] for i in kept)
    nucleus, reached = [], 0.0
    for i in kept:
        nucleus.append(i)
        reached += probs[i]
        if top_p < 1 and reached >= top_p * mass:
            break
    result = np.zeros_like(probs)
    result[nucleus] = probs[nucleus]
    return result / result.sum()


@pytest.mark.parametrize("name", FILTERS)
def test_the_token_and_its_log_prob_are_of_the_reference_distribution(name):
    expected = np.stack([reference(row, **FILTERS[name]) for row in LOGITS])
    tokens, log_probs, _ = draw_filtered(LOGITS, U, **settings(**FILTERS[name]))
    chosen = expected[np.arange(ROWS), tokens]
    assert (chosen > 0).all()  # nothing that a filter drops
    np.testing.assert_allclose(log_probs, np.log(chosen), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", FILTERS)
def test_every_token_that_is_kept_can_be_drawn(name):
    # 4000 evenly spaced uniforms draw every token of probability above 1/4000
    row, count = LOGITS[0], 4000
    probs = reference(row, **FILTERS[name])
    u = ((np.arange(count) + 0.5) / count).astype(np.float32)
    tokens, _, _ = draw_filtered(np.tile(row, (count, 1)), u, **settings(count, **FILTERS[name]))
    frequencies = np.bincount(tokens, minlength=VOCAB) / count
    # an interval of length p holds p * count evenly spaced points, give or take one
    np.testing.assert_allclose(frequencies, probs, atol=1.5 / count)


def test_without_filters_the_unsorted_path_has_the_same_distribution():
    tokens, log_probs, _ = draw_unfiltered(LOGITS, U, **settings(temperature=0.7))
    expected = np.stack([reference(row, temperature=0.7) for row in LOGITS])
    np.testing.assert_allclose(
        log_probs, np.log(expected[np.arange(ROWS), tokens]), rtol=1e-5, atol=1e-5
    )
    # the smallest token whose cumulative probability exceeds u
    np.testing.assert_array_equal(tokens, (expected.cumsum(-1) > U[:, None]).argmax(-1))


def test_a_row_without_filters_is_drawn_the_same_beside_rows_with_filters():
    options = settings()
    options["top_k"][1::2] = 2  # every other row filters
    beside, log_probs, _ = draw_filtered(LOGITS, U, **options)
    tokens, expected, _ = draw_unfiltered(LOGITS, U, **settings())
    np.testing.assert_array_equal(beside[::2], tokens[::2])
    np.testing.assert_array_equal(log_probs[::2], expected[::2])


@pytest.mark.parametrize("draw", [draw_filtered, draw_unfiltered])
def test_greedy_is_the_argmax_with_the_untempered_log_prob(draw):
    tokens, log_probs, _ = draw(LOGITS, U, **settings(temperature=0.0))
    np.testing.assert_array_equal(tokens, LOGITS.argmax(-1))
    expected = np.stack([reference(row) for row in LOGITS]).max(-1)
    np.testing.assert_allclose(log_probs, np.log(expected), rtol=1e-5, atol=1e-5)


def test_a_greedy_row_is_scored_by_the_whole_softmax():
    # weights 10 and ten times 1: log(10 / 20) = -0.6931472; of the three that top-k leaves it would
    # be log(10 / 12) = -0.1823216
    logits = np.zeros((ROWS, VOCAB), np.float32)
    logits[:, 4] = np.log(10)
    tokens, log_probs, _ = draw_filtered(logits, U, **settings(temperature=0.0, top_k=3))
    np.testing.assert_array_equal(tokens, 4)
    np.testing.assert_allclose(log_probs, -0.6931472, rtol=1e-5)


def test_rows_have_settings_of_their_own():
    # greedy, top-k 1 (log-prob 0), unfiltered, temperature 0.5
    options = {
        "temperature": np.float32([0, 1, 1, 0.5]),
        "top_k": np.int32([-1, 1, -1, -1]),
        "top_p": np.ones(4, np.float32),
        "min_p": np.zeros(4, np.float32),
    }
    logits = np.tile(LOGITS[0], (4, 1))
    tokens, log_probs, _ = draw_filtered(logits, np.full(4, 0.99, np.float32), **options)
    best = LOGITS[0].argmax()
    assert tokens[0] == tokens[1] == best
    np.testing.assert_allclose(log_probs[1], 0, atol=1e-6)
    for row, temperature in ((0, 1.0), (2, 1.0), (3, 0.5)):
        probs = reference(LOGITS[0], temperature=temperature)
        np.testing.assert_allclose(log_probs[row], np.log(probs[tokens[row]]), atol=1e-5)


def test_top_k_keeps_tied_tokens_in_order():
    # four equal tokens, top-k 2: the first two, log(1/2) each
    logits, u = np.zeros((2, 4), np.float32), np.float32([0.0, BELOW_ONE])
    tokens, log_probs, _ = draw_filtered(logits, u, **settings(2, top_k=2))
    assert tokens.tolist() == [0, 1]
    np.testing.assert_allclose(log_probs, [-0.6931472] * 2, rtol=1e-6)


@pytest.mark.parametrize("name", ["temperature", "all"])
def test_frequencies_of_20000_draws_match_the_probabilities(name):
    count = 20_000
    keys = np.stack([np.arange(count), np.full(count, 7)], axis=1).astype(np.uint32)
    u = jax.jit(uniforms)(keys, np.full(count, 3))
    tokens, _, _ = draw_filtered(
        np.tile(LOGITS[0], (count, 1)), u, **settings(count, **FILTERS[name])
    )
    probs = reference(LOGITS[0], **FILTERS[name])
    counts = np.bincount(tokens, minlength=VOCAB)
    # standard error of a count of n draws of probability p: sqrt(n p (1 - p))
    errors = np.sqrt(count * probs * (1 - probs))
    assert (np.abs(counts - count * probs) <= 4 * errors).all(), (counts, count * probs)


# ------------------------------------------------------------------ the kept set

SET = jax.jit(filter_weights)


def kept_ids(weights, *, top_k=-1, top_p=1.0, min_p=0.0):
    given = settings(1, top_k=top_k, top_p=top_p, min_p=min_p)
    del given["temperature"]
    kept = np.asarray(SET(np.float32([weights]), **given))[0]
    ids = kept.nonzero()[0]
    np.testing.assert_array_equal(kept[ids], np.float32(weights)[ids])  # as they were
    return ids.tolist()


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [
        # in order of weight: 1, 1/2, 1/4, 1/8, 1/8 of 2; sums 1, 3/2, 7/4, 15/8, 2
        (1e-9, [2]),
        (0.5, [2]),  # 1 of 2: reached exactly
        (0.5000001, [0, 2]),
        (0.75, [0, 2]),
        (0.875, [0, 1, 2]),
        (0.876, [0, 1, 2, 3]),
        (0.9375, [0, 1, 2, 3]),  # the first of the two equal ones reaches 15/8
        (0.9376, [0, 1, 2, 3, 4]),
        (1.0, [0, 1, 2, 3, 4]),
    ],
)
def test_top_p_keeps_the_fewest_tokens_that_reach_it(top_p, kept):
    assert kept_ids([0.5, 0.25, 1.0, 0.125, 0.125], top_p=top_p) == kept


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({"top_p": 0.5}, [0, 1, 2]),  # 3 of 6, reached exactly
        ({"top_p": 0.51}, [0, 1, 2, 3]),
        ({"top_k": 1}, [0]),
        ({"top_k": 5}, [0, 1, 2, 3, 4]),
        ({"top_k": 100}, [0, 1, 2, 3, 4, 5]),
        ({"top_k": 4, "top_p": 0.5}, [0, 1]),  # 2 of the 4 that top-k left
        ({"min_p": 1.0, "top_p": 1e-30}, [0]),
    ],
)
def test_of_equal_weights_the_first_are_kept(settings, kept):
    assert kept_ids([1.0] * 6, **settings) == kept


def test_min_p_keeps_what_is_as_large_as_its_bound():
    assert kept_ids([0.5, 1.0, 0.25, 0.2499], min_p=0.25) == [0, 1, 2]


def by_sort(weights, top_k, top_p, min_p):
    """Sizes of the kept set, a beginning of the order: at top_p a little less, and a little more.

    Which of two sets reaches top_p is a matter of rounding where the sum is within 1e-5 of it.
    """
    order = np.argsort(-weights, kind="stable")
    left = order[weights[order] >= min_p][: top_k if top_k > 0 else None]
    sums = np.cumsum(weights[left], dtype=np.float64)
    if top_p >= 1:
        return order, len(left), len(left)
    reach = [sums < top_p * sums[-1] * (1 + sign * 1e-5) for sign in (-1, 1)]
    return order, *(min(int(r.sum()) + 1, len(left)) for r in reach)


@pytest.mark.parametrize("vocab", [7, 256, 1000])
def test_the_kept_set_is_that_of_a_stable_sort(vocab):
    rng, rows, exact = np.random.default_rng(vocab), 400, 0
    logits = rng.normal(0, rng.choice([0.1, 1, 5], (rows, 1)), (rows, vocab))
    logits[::3] = np.round(logits[::3])  # many ties
    logits[::50] = 1.5  # nothing but ties
    logits[1::4][rng.uniform(size=logits[1::4].shape) < 0.6] = -np.inf
    logits[1::4, 3] = 0.0  # not all of them
    weights = np.exp(logits - logits.max(-1, keepdims=True)).astype(np.float32)
    top_k = rng.choice([-1, 1, 2, 5, 40, 10_000], rows).astype(np.int32)
    top_p = rng.choice([1e-30, 0.01, 0.3, 0.7, 0.95, BELOW_ONE, 1.0], rows).astype(np.float32)
    min_p = rng.choice([0, 0, 1e-6, 0.1, 1.0], rows).astype(np.float32)
    kept = np.asarray(SET(weights, top_k, top_p, min_p))
    for row in range(rows):
        order, least, most = by_sort(weights[row], top_k[row], top_p[row], min_p[row])
        size = int((kept[row] > 0).sum())
        possible = int((weights[row] > 0).sum())  # a weight of 0 is never drawn, kept or not
        assert min(least, possible) <= size <= most
        np.testing.assert_array_equal(np.sort(order[:size]), (kept[row] > 0).nonzero()[0])
        exact += least == most
    assert exact > 0.8 * rows


def decode_block(mesh, *, rows, **sampling):
    """A compiled decode block over a vocabulary of 20,000, by default with all filters."""
    from jaxrl.models.placement import placed_params
    from jaxrl.models.transformer import TransformerConfig
    from jaxrl.parallel import Placement
    from jaxrl.rollout.native.engine import NativeEngine
    from jaxrl.rollout.protocol import Request, Sampling

    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_layers": 1, "head_dim": 64}
    model = TransformerConfig(vocab_size=20_000, num_heads=4, num_kv_heads=2, **sizes)
    engine = NativeEngine(model, mesh, max_num_seqs=rows)
    filters = {"top_k": 20, "top_p": 0.95, "min_p": 0.01, **sampling}
    asked = Request((1,) * 8, ((0, 0),), Sampling(max_tokens=8, **filters))
    return engine.calls(placed_params(model, Placement(mesh)), [asked])["decode"].lower().compile()


def test_a_filtered_block_has_no_sort_and_moves_few_elements():
    compiled = decode_block(make_mesh(devices=jax.devices()[:1]), rows=8)
    # attention takes the keys of a page of each row, 2 heads of 64 at 64 positions; that is less
    # than half of the logits
    assert_no_sort(compiled.as_text(), 8 * 2 * 64 * 64)


@pytest.mark.slow  # the TPU compiler
@pytest.mark.parametrize("tensor", [1, 2])
def test_a_filtered_block_of_a_tpu_has_no_sort_and_moves_few_elements(tensor):
    pytest.importorskip("libtpu")
    from jaxrl.tools.plan.topology import topology_devices

    mesh = make_mesh(devices=topology_devices("v5e:2x4")[:tensor], data=1, tensor=tensor)
    # a chunk of a prompt writes keys and values of 512 tokens, with the room of 2 heads of 128:
    # a fifth of the logits
    assert_no_sort(decode_block(mesh, rows=64).as_text(), 512 * 2 * 2 * 128)


INSTRUCTION = re.compile(r"%?([\w.-]+) = \(?\w+\[([\d,]*)\].*? (sort|topk|gather|scatter)\((.*?)\)")
RESULT = re.compile(r"%?([\w.-]+) = \(?\w+\[([\d,]*)\]")
CALL = re.compile(r'custom_call_target="(\w*(?:topk|sort)\w*)"', re.IGNORECASE)


def assert_no_sort(text, most):
    """No sort and no top-k in compiled HLO; gathers and scatters move `most` elements at most."""

    def size(dims):
        return math.prod(map(int, filter(None, dims.split(","))))

    sizes = {name: size(dims) for name, dims in RESULT.findall(text)}
    moved = []
    for name, dims, kind, operands in INSTRUCTION.findall(text):
        if (kind, dims) == ("sort", "8"):  # of rows, by their lengths
            continue
        assert kind in ("gather", "scatter"), (name, kind, dims)
        updates = operands.split("%")[-1].split(",")[0].strip()
        moved.append(sizes[name] if kind == "gather" else sizes[updates])
    assert CALL.findall(text) == []
    assert max(moved, default=0) <= most, moved


@pytest.mark.parametrize(
    "wrong",
    [
        jnp.sort,
        lambda x: jax.lax.top_k(x, 40)[0],
        lambda x: jnp.take_along_axis(x, jnp.flip(jnp.argmax(x) + jnp.arange(64))[None], axis=-1),
    ],
)
def test_a_sort_would_be_noticed(wrong):
    text = jax.jit(wrong).lower(U[None]).compile().as_text()
    with pytest.raises(AssertionError):
        assert_no_sort(text, 32)


# ------------------------------------------------------------------ extremes


@pytest.mark.parametrize("temperature", [1e-45, 1e-36, 1e-20, 1e38])
@pytest.mark.parametrize("draw", [draw_filtered, draw_unfiltered])
def test_no_temperature_draws_an_id_outside_of_the_vocabulary(draw, temperature):
    tokens, _, _ = draw(LOGITS, U, **settings(temperature=temperature))
    assert ((np.asarray(tokens) >= 0) & (np.asarray(tokens) < VOCAB)).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("draw", [draw_filtered, draw_unfiltered])
def test_no_logits_draw_an_id_outside_of_the_vocabulary(draw, bad):
    for logits in (np.full_like(LOGITS, bad), np.where(np.arange(VOCAB) == 3, bad, LOGITS)):
        tokens, _, _ = draw(logits.astype(np.float32), U, **settings(top_k=2, top_p=0.9))
        assert ((np.asarray(tokens) >= 0) & (np.asarray(tokens) < VOCAB)).all()


# ------------------------------------------------------------------ inverse_cdf


draw_of = jax.jit(inverse_cdf)


def test_inverse_cdf_literal():
    # cdf 1, 1, 4, 8 of 8: u * 8 = 0, 0.96, 1, 3.92, 4, 7.92
    probs = np.tile(np.float32([1, 0, 3, 4]), (6, 1))
    u = np.float32([0, 0.12, 0.125, 0.49, 0.5, 0.99])
    assert draw_of(probs, u).tolist() == [0, 0, 2, 2, 3, 3]


@pytest.mark.parametrize("u", [0.0, 1e-45, 0.5, BELOW_ONE])
def test_inverse_cdf_never_returns_an_impossible_token(u):
    rng = np.random.default_rng(2)
    probs = rng.exponential(1, (300, 50)).astype(np.float32) ** 6  # many scales
    probs *= rng.uniform(0, 1, probs.shape) < 0.3
    probs[:, 17] = np.maximum(probs[:, 17], 1e-3)  # at least one is possible
    probs[:100, -20:] = 0
    probs[100:200, :10] = 0
    chosen = np.asarray(draw_of(probs, np.full(300, u, np.float32)))
    assert (probs[np.arange(300), chosen] > 0).all()


@pytest.mark.parametrize("u", [0.0, BELOW_ONE])
def test_filtered_sampling_never_returns_an_impossible_token(u):
    logits = np.where(np.arange(VOCAB) % 2, -np.inf, LOGITS).astype(np.float32)
    for draw in (draw_filtered, draw_unfiltered):
        tokens, log_probs, _ = draw(logits, np.full(ROWS, u, np.float32), **settings())
        assert (np.asarray(tokens) % 2 == 0).all()
        assert np.isfinite(log_probs).all()


def test_a_single_possible_token_is_always_drawn():
    probs = np.zeros((3, 5), np.float32)
    probs[:, 2] = 1e-30
    assert draw_of(probs, np.float32([0, 0.5, BELOW_ONE])).tolist() == [2, 2, 2]


# ------------------------------------------------------------------ a split vocabulary


def over_devices(run, *outputs, tensor=4):
    """`run(..., axes)` over a mesh: matrices are split by row and id, vectors by row."""
    mesh = make_mesh(data=2, tensor=tensor, devices=jax.devices()[: 2 * tensor])
    split = {1: PartitionSpec("data"), 2: PartitionSpec("data", "tensor")}

    @jax.jit
    def call(*given):
        return jax.shard_map(
            partial(run, axes=("tensor",)),
            mesh=mesh,
            in_specs=tuple(split[x.ndim] for x in given),
            out_specs=outputs if len(outputs) > 1 else outputs[0],
            check_vma=False,
        )(*given)

    return call


@pytest.mark.parametrize("vocab", [4, 1000, 4 * (2 * BLOCK + 3)])
def test_a_draw_from_exact_weights_is_the_same_over_devices(vocab):
    rng = np.random.default_rng(vocab)
    weights = rng.integers(0, 100, (64, vocab)).astype(np.float32)  # every sum is below 2^24
    weights *= rng.uniform(size=weights.shape) < 0.3
    weights[:, vocab // 2] = 1
    u = np.append(rng.uniform(size=62), [0, BELOW_ONE]).astype(np.float32)
    spread = over_devices(inverse_cdf, PartitionSpec("data"))
    np.testing.assert_array_equal(spread(weights, u), draw_of(weights, u))


@cache
def drawing(filtered, keep):
    """`sample` and `top_tokens` on one device, and over some."""

    def run(logits, u, temperature, top_k, top_p, min_p, axes=()):
        options = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
        drawn = sample(logits, u, **options, filtered=filtered, keep=keep, axes=axes)
        return *drawn, *top_tokens(logits, temperature, 5, axes)

    return jax.jit(run), over_devices(run, *(PartitionSpec("data"),) * 5)


@pytest.mark.some(8)
@pytest.mark.parametrize("keep", [0, 8])
@pytest.mark.parametrize("name", ["none", "greedy", "ties", *FILTERS])
def test_a_split_vocabulary_draws_the_same(name, keep):
    rows, vocab = 256, 4 * (BLOCK + 3)
    rng = np.random.default_rng(3)
    logits = rng.normal(0, 3, (rows, vocab)).astype(np.float32)
    if name == "ties":
        logits = np.round(logits)
    u = rng.uniform(size=rows).astype(np.float32)
    options = {"none": {}, "greedy": {"temperature": 0.0}, "ties": {"top_k": 7, "top_p": 0.9}}
    given = logits, u, *settings(rows, **{**options, **FILTERS}[name]).values()
    alone, split = drawing(name not in ("none", "greedy"), keep)
    expected, found = alone(*given), split(*given)
    for place in (0, 2, 3):  # ids
        np.testing.assert_array_equal(found[place], expected[place])
    for place in (1, 4):
        np.testing.assert_allclose(found[place], expected[place], atol=2e-6)


def test_picking_and_assigning_over_devices():
    x = np.arange(16, dtype=np.float32).reshape(2, 8)
    chosen = over_devices(pick, PartitionSpec("data"))(x, np.array([7, 2]))
    assert chosen.tolist() == [7, 8 + 2]
    ids = np.array([[0, 5, -1, 9], [-1, 8, 3, 3]])  # -1, 8 and 9 are none of 8
    mesh = make_mesh(data=2, tensor=4)
    both = PartitionSpec("data", "tensor")
    spread = jax.shard_map(
        lambda x, ids: assign(x, ids, -1.0, ("tensor",)),
        mesh=mesh,
        in_specs=(both, PartitionSpec("data")),
        out_specs=both,
        check_vma=False,
    )
    assigned = jax.jit(spread)(x, ids)
    assert assigned.tolist() == [[-1, 1, 2, 3, 4, -1, 6, 7], [8, 9, 10, -1, 12, 13, 14, 15]]
    alone = jax.jit(partial(assign, value=-1.0))(x, ids)
    np.testing.assert_array_equal(alone, assigned)


@pytest.mark.slow  # the TPU compiler
@pytest.mark.parametrize("filters", [{}, {"top_k": 20, "top_p": 0.95}], ids=["plain", "filtered"])
def test_no_device_of_a_tpu_gathers_the_vocabulary(filters):
    """What travels is less than a 64th of the logits: the sums of 4 x 20 blocks are a 250th."""
    pytest.importorskip("libtpu")
    from jaxrl.tools.plan.hlo import collectives
    from jaxrl.tools.plan.topology import topology_devices

    mesh = make_mesh(devices=topology_devices("v5e:2x2"), data=1, tensor=4)
    options = {"top_k": -1, "top_p": 1.0, "min_p": 0.0, "logprobs": 5, **filters}
    found = collectives(decode_block(mesh, rows=64, **options).as_text())
    assert found and max(one.size for one in found) < 64 * 20_000 * 4 / 64


# ------------------------------------------------------------------ uniforms

KEYS = np.array([[1, 2], [3, 4], [1, 2], [2, 1]], np.uint32)
POSITIONS = np.array([5, 5, 5, 5])


def test_uniforms_depend_on_key_and_position_only():
    u = np.asarray(uniforms(KEYS, POSITIONS))
    assert u[0] == u[2]
    assert len(set(u.tolist())) == 3  # the order of the two words of a key matters
    assert ((u >= 0) & (u < 1)).all()
    np.testing.assert_array_equal(uniforms(KEYS[::-1], POSITIONS), u[::-1])  # not on the row
    np.testing.assert_array_equal(uniforms(KEYS[1:2], POSITIONS[:1]), u[1:2])  # nor the batch
    np.testing.assert_array_equal(jax.jit(uniforms)(KEYS, POSITIONS), u)
    assert not np.isin(uniforms(KEYS, POSITIONS + 1), u).any()


def test_uniforms_of_neighbouring_positions_are_independent():
    # correlation of 4000 pairs has standard error 1/sqrt(4000) = 0.016
    key = np.tile(np.uint32([9, 9]), (4001, 1))
    u = np.asarray(jax.jit(uniforms)(key, jnp.arange(4001)))
    assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 4 * 0.016
    assert abs(u.mean() - 0.5) < 4 * 0.2887 / np.sqrt(4001)  # deviation of a uniform: 1/sqrt(12)
