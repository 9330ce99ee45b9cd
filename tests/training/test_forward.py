"""The head in chunks, on the wanted tokens alone, against the whole [B, T, V]."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxrl.training.forward
from jaxrl.array_ops import entropy, keep_only, token_log_probs
from jaxrl.data.packing import one_per_row
from jaxrl.models import TransformerConfig, forward, init_params, unembed
from jaxrl.models.kernels import head_log_probs
from jaxrl.models.transformer import abstract_params, head_axes
from jaxrl.parallel import Placement, ShardingRules, batch_sharding, make_mesh
from jaxrl.training.forward import Head, Targets, log_probs_and_entropy, score, shared_axes

TEMPERATURE = 0.8
ROWS, WIDTH = 8, 16
TIED = TransformerConfig(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    initializer_range=0.3,
)
UNTIED = TransformerConfig(**{**vars(TIED), "tie_embeddings": False})


@functools.cache
def drawn():
    """Tokens, lengths, a mask with holes (two turns) and an empty row, and cotangents."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 61, (ROWS, WIDTH))
    lengths = np.array([16, 16, 12, 9, 7, 5, 16, 3], np.int32)
    mask = (np.arange(WIDTH) >= 4) & (np.arange(WIDTH) < lengths[:, None])
    mask[0, 6:9] = False
    mask[6] = False
    return tokens, lengths, mask.astype(np.float32), rng.normal(size=(2, ROWS, WIDTH))


@pytest.fixture(name="rows")
def rows_fixture():
    return drawn()


def whole(config, params, tokens, lengths, mask, keep=True):
    """The same by materialising the logits of every token."""
    positions = jnp.broadcast_to(jnp.arange(WIDTH), tokens.shape)
    segment_ids = (positions < lengths[:, None]).astype(jnp.int32)
    hidden = forward(config, params, tokens, positions, segment_ids)
    logits = jnp.where(keep, unembed(config, params, hidden[:, :-1]) / TEMPERATURE, -1e9)
    first = ((0, 0), (1, 0))
    log_probs = jnp.pad(token_log_probs(logits, tokens[:, 1:]), first)
    return log_probs * mask, jnp.pad(entropy(logits), first) * mask


@pytest.fixture(name="kernel", params=["tiles", "interpret"])
def kernel_fixture(monkeypatch, request):
    """A kernel of the head, by small blocks and tiles."""
    monkeypatch.setattr(head_log_probs, "XLA_TOKENS", 24)  # of 128 there are 48 wanted
    monkeypatch.setattr(head_log_probs, "XLA_IDS", 25)  # of 64: the last tile starts at 39
    return request.param


def weighted(function, cotangents):
    def total(params):
        log_probs, entropies = function(params)
        return (cotangents[0] * log_probs).sum() + (cotangents[1] * entropies).sum()

    return total


def kept_ids():
    """Five of each place, some of which are none, and of some places no list at all."""
    kept = np.random.default_rng(1).integers(-1, 61, (ROWS, WIDTH, 5))
    kept[..., 0] = drawn()[0]  # what was drawn is among them
    kept[:, 5::3] = -1
    return kept


@functools.cache
def of_all_logits(config, tokens_times=1, tokens_plus=0, kept=False):
    """Log-probs, entropies, and the gradient of `weighted`."""
    tokens, lengths, mask, cotangents = drawn()
    keep = np.ones((ROWS, WIDTH, config.vocab_size), bool)
    for b, t in np.ndindex(ROWS, WIDTH) if kept else ():
        ids = kept_ids()[b, t]
        keep[b, t] = ids.max() < 0
        keep[b, t, ids[ids >= 0]] = True

    def theirs(params):
        ids = tokens * tokens_times + tokens_plus
        return whole(config, params, ids, lengths, mask, keep[:, 1:])

    both = jax.jit(lambda params: (theirs(params), jax.grad(weighted(theirs, cotangents))(params)))
    return jax.device_get(both(init_params(config, 0)))


def assert_as_of_all_logits(ours, config, atol, **which):
    params = init_params(config, 0)
    expected, expected_gradient = of_all_logits(config, **which)
    for found, theirs in zip(jax.jit(ours)(params), expected, strict=True):
        np.testing.assert_allclose(found, theirs, rtol=0, atol=atol)
        assert np.abs(theirs).max() > 1
    found = jax.jit(jax.grad(weighted(ours, drawn()[-1])))(params)
    assert_close(found, expected_gradient)


def assert_close(found, expected):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max()),
        found,
        expected,
    )


@pytest.mark.parametrize("config", [TIED, UNTIED], ids=["tied", "untied"])
@pytest.mark.parametrize("chunk_tokens", [1, 40, 10_000], ids=["1 column", "5 columns", "all"])
def test_values_and_gradients_are_those_of_all_logits(monkeypatch, rows, config, chunk_tokens):
    monkeypatch.setattr(jaxrl.training.forward, "CPU_CHUNK_TOKENS", chunk_tokens)
    tokens, lengths, mask, _ = rows
    chunked = functools.partial(
        log_probs_and_entropy,
        config,
        rows=one_per_row(tokens, lengths, mask),
        temperature=TEMPERATURE,
        dtype=jnp.float32,
    )
    assert_as_of_all_logits(chunked, config, 2e-6)


@pytest.mark.parametrize("config", [TIED, UNTIED], ids=["tied", "untied"])
def test_a_chunk_is_as_wide_as_the_logits_of_its_vocabulary_allow(monkeypatch, rows, config):
    """8 rows of 61 logits: 61 x 8 x 9 of them are 9 columns, by eights 8. Width 32 would be 16."""
    widths = []
    monkeypatch.setattr(jaxrl.training.forward, "CHUNK_LOGITS", 61 * 8 * 9)
    monkeypatch.setattr(
        jaxrl.training.forward, "_chunk", lambda x, i, width: widths.append(width) or x[:, :width]
    )
    tokens, lengths, mask, _ = rows
    given = {"rows": one_per_row(tokens, lengths, mask), "temperature": 1.0, "dtype": jnp.float32}
    call = functools.partial(log_probs_and_entropy, config, **given)
    jax.eval_shape(call, init_params(config, 0))
    assert set(widths) == {8}


CAPPED = TransformerConfig(**{**vars(UNTIED), "vocab_size": 64, "final_softcap": 3.0})
SPLIT = {"data": 2, "fsdp": 2, "tensor": 2}


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("config", "mesh"),
    [(TIED, None), (CAPPED, None), (TIED, {"fsdp": 8}), (CAPPED, SPLIT)],
    ids=["tied", "capped", "tied on 8", "capped on 2x2x2"],
)
def test_kernels_give_the_same_on_any_mesh(kernel, rows, config, mesh):
    """The rows want 12, 12, 8, 5, 3, 1, 0 and 0 tokens, less 3: on eight devices two want none."""
    tokens, lengths, mask, _ = rows
    ours = functools.partial(
        log_probs_and_entropy,
        config,
        rows=one_per_row(tokens, lengths, mask),
        temperature=TEMPERATURE,
        dtype=jnp.float32,
        head_kernel=kernel,
        placement=mesh and Placement(make_mesh(**mesh)),
    )
    assert_as_of_all_logits(ours, config, 1e-5)


WIDE = TransformerConfig(**{**vars(TIED), "vocab_size": 512})
WIDE_UNTIED = TransformerConfig(**{**vars(CAPPED), "vocab_size": 512})


@pytest.mark.some(1)
@pytest.mark.parametrize("mesh", [{"fsdp": 8}, SPLIT, {"data": 2, "fsdp": 4}], ids=str)
@pytest.mark.parametrize("config", [WIDE, WIDE_UNTIED], ids=["tied", "untied"])
def test_devices_that_share_the_vocabulary_give_the_same(kernel, rows, config, mesh):
    """512 ids among devices of 15 or 30 tokens. Rows want 9, 12, 8, 5, 3, 1, 0 and 0 of them.

    By "tiles" a block of 24 has 3, 12 or 6 tokens of a device: four, two and two trips for all.
    """
    tokens, lengths, mask, _ = rows
    tokens, placement = tokens * 8 + 7, Placement(make_mesh(**mesh))  # ids of all devices
    on_device = ROWS * (WIDTH - 1) // placement.size(("data", "fsdp"))
    assert shared_axes(config, placement, kernel, jnp.float32, on_device) == ("fsdp",)
    ours = functools.partial(
        log_probs_and_entropy,
        config,
        rows=one_per_row(tokens, lengths, mask),
        temperature=TEMPERATURE,
        dtype=jnp.float32,
        head_kernel=kernel,
        placement=placement,
    )
    assert_as_of_all_logits(ours, config, 1e-5, tokens_times=8, tokens_plus=7)


def head_program(config, tokens):
    """The text of the gradient of the head alone on fsdp 8, with `tokens` on each device."""
    placement = Placement(make_mesh(fsdp=8))
    shapes, axes = abstract_params(config), head_axes(config)

    def array(dtype, shape, names):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=placement.sharding(shape, names))

    weights = {name: array(jnp.float32, shapes[name].shape, axes[name]) for name in axes}
    hidden = array(jnp.float32, (8, tokens, config.hidden_size), ("batch", None, None))
    ids, wanted = (array(dtype, (8, tokens), ("batch", None)) for dtype in (jnp.int32, jnp.bool_))
    head = Head(config, 1.0, jnp.float32, True, kernel="tiles")

    def loss(weights, hidden, ids, wanted):
        return sum(
            x.sum() for x in score(head, weights, hidden, Targets(ids, None), wanted, placement)
        )

    lowered = jax.jit(jax.grad(loss, (0, 1))).lower(weights, hidden, ids, wanted)
    return lowered.compile().as_text()


@pytest.mark.parametrize("config", [WIDE, WIDE_UNTIED], ids=["tied", "untied"])
def test_no_device_gathers_a_matrix_that_is_shared(config):
    """512 x 32 numbers; of 15 tokens a device they are shared, of 150 each has them all."""
    gathered = {
        tokens: [
            int(np.prod([int(size) for size in shape.split(",")]))
            for shape in re.findall(r"f32\[([\d,]+)\]\S* all-gather", head_program(config, tokens))
        ]
        for tokens in (15, 150)
    }
    assert max(gathered[15]) == 8 * 15 * 32  # a block of states
    assert max(gathered[150]) == 512 * 32


@pytest.mark.parametrize(
    ("vocabulary", "fsdp", "tensor", "tokens", "shared"),
    [
        # 151,936 x 1,536 x 6 bytes = 1,335 MiB against an eighth of it and 8 x 4,096 x
        # (1,536 x 8 + 56) = 386 MiB, 553; of 7/8 of them is sent: 1,168 -> 484
        (151_936, 8, 1, 4_096, True),
        (151_936, 8, 1, 12_288, True),  # 167 + 1,157 = 1,324
        (151_936, 8, 1, 12_544, False),  # 167 + 1,181 = 1,348
        (151_936, 4, 2, 4_096, True),  # half of the ids, 668, against 167 + 193 = 360
        (151_937, 8, 1, 4_096, False),  # 8 does not divide it
        (151_936, 1, 8, 4_096, False),  # nobody to share it with
    ],
)
def test_the_vocabulary_is_shared_where_less_is_sent(vocabulary, fsdp, tensor, tokens, shared):
    model = TransformerConfig(**{**vars(TIED), "vocab_size": vocabulary, "hidden_size": 1536})
    placement = Placement(make_mesh(fsdp=fsdp, tensor=tensor))
    found = shared_axes(model, placement, "pallas", jnp.bfloat16, tokens)
    assert found == (("fsdp",) if shared else ())


@functools.cache
def log_probs_alone(kernel):
    settings = {"temperature": TEMPERATURE, "dtype": jnp.float32, "with_entropy": False}
    settings |= {"head_kernel": kernel} if kernel else {}
    return jax.jit(functools.partial(log_probs_and_entropy, TIED, **settings))


@pytest.mark.parametrize("used", [False, True])
def test_entropy_of_kernels_can_be_left_out(kernel, rows, used):
    tokens, lengths, mask, _ = rows
    run = log_probs_alone(kernel)
    # of those that are not used nothing is wanted: zeros, not NaN
    log_probs, entropies = run(init_params(TIED, 0), one_per_row(tokens, lengths, mask * used))
    assert not np.any(entropies) and np.any(log_probs) == used and np.all(np.isfinite(log_probs))


def test_rows_on_eight_devices_give_the_same(rows):
    tokens, lengths, mask, cotangents = rows

    @jax.jit
    def gradient(params, rows):
        call = functools.partial(
            log_probs_and_entropy,
            TIED,
            rows=rows,
            temperature=TEMPERATURE,
            dtype=jnp.float32,
        )
        return jax.grad(weighted(call, cotangents))(params)

    given = one_per_row(tokens, lengths, mask)
    spread = jax.device_put(given, batch_sharding(make_mesh(), ShardingRules()))
    assert_close(gradient(init_params(TIED, 0), spread), of_all_logits(TIED)[1])


def test_only_kept_ids_count():
    """logits [1, 2, 3, 4] of ids 0 to 3; of three places, one keeps 0 and 2, one all, one 3."""
    logits = np.tile(np.float32([1, 2, 3, 4]), (1, 3, 1))
    kept = np.int32([[[0, 2], [-1, -1], [3, -1]]])

    def log_probs_of(x):
        return token_log_probs(keep_only(x, kept), np.int32([[0, 3, 3]]))

    log_probs, entropies = jax.jit(lambda x: (log_probs_of(x), entropy(keep_only(x, kept))))(logits)
    e = np.exp([1.0, 2.0, 3.0, 4.0])
    expected = [1 - np.log(e[0] + e[2]), 4 - np.log(e.sum()), 0.0]
    np.testing.assert_allclose(log_probs[0], expected, rtol=1e-6)
    # of two outcomes e and e^3: p = 1 / (1 + e^2)
    p = 1 / (1 + np.exp(2.0))
    entropies = np.asarray(entropies)[0]
    assert entropies[0] == pytest.approx(-p * np.log(p) - (1 - p) * np.log(1 - p), rel=1e-6)
    assert entropies[2] == 0
    gradient = jax.jit(jax.grad(lambda x: log_probs_of(x).sum()))
    # d log p_0 = 1 - p at 0, -(1 - p) at 2, nothing elsewhere; the third place is certain
    found = np.asarray(gradient(logits))[0]
    np.testing.assert_allclose(found[0], [1 - p, 0, p - 1, 0], rtol=1e-6)
    np.testing.assert_allclose(found[2], 0, atol=0)


@pytest.mark.parametrize("chunk_tokens", [1, 10_000])
def test_kept_ids_go_through_the_chunks(monkeypatch, rows, chunk_tokens):
    monkeypatch.setattr(jaxrl.training.forward, "CPU_CHUNK_TOKENS", chunk_tokens)
    tokens, lengths, mask, _ = rows

    def ours(params):
        given = one_per_row(tokens, lengths, mask, {"kept": kept_ids()})
        return log_probs_and_entropy(
            TIED, params, given, temperature=TEMPERATURE, dtype=jnp.float32
        )

    assert_as_of_all_logits(ours, TIED, 2e-6, kept=True)


def test_without_entropy_it_is_zero(rows):
    tokens, lengths, mask, _ = rows
    run = log_probs_alone(None)
    log_probs, entropies = run(init_params(TIED, 0), one_per_row(tokens, lengths, mask))
    assert not np.any(entropies) and np.any(log_probs)
