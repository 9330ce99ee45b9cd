"""The exact mode: sampler and trainer give the same numbers, to the last bit.

What is compared is never close: `==`. Each construction that holds the promise is taken away in a
test, which then sees other bits.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.models import exact, init_params
from jaxrl.models.architecture import Experts, TransformerConfig
from jaxrl.models.exact import check_exact, choose_tiles, in_pairs
from jaxrl.models.placement import model_shardings
from jaxrl.parallel import Placement, ShardingRules, make_mesh
from jaxrl.rollout.native.engine import NativeEngine
from jaxrl.rollout.protocol import Request, Sampling
from jaxrl.training.forward import log_probs_and_entropy
from jaxrl.types import ModelRows
from tests.rollout.test_engine import between_turns

MODEL = TransformerConfig(
    vocab_size=96,
    hidden_size=192,
    intermediate_size=512,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=32,
)
KINDS = {
    "plain": MODEL,
    "windows and caps": dataclasses.replace(
        MODEL,
        sliding_window=24,
        sliding_layers=(True, False),
        attention_softcap=5.0,
        final_softcap=8.0,
        post_norms=True,
        scale_embeddings=True,
    ),
    "sinks and biases": dataclasses.replace(MODEL, attention_sinks=True, attention_bias=True),
    "gate and norms": dataclasses.replace(MODEL, output_gate=True, qk_norm="heads"),
    "head apart": dataclasses.replace(MODEL, tie_embeddings=False),
    "experts": dataclasses.replace(MODEL, experts=Experts(count=6, per_token=2, width=64)),
}
LENGTH, TEMPERATURE = 192, 0.8
pytestmark = pytest.mark.usefixtures("as_users_compile")


@functools.cache
def parameters(model):
    """Weights large enough that a rounding error is seen in what comes out."""
    return jax.tree.map(lambda x: 3 * x if x.ndim > 1 else x + 0.1, init_params(model, 0))


def engine_of(model, tiles, dtype, mesh=None, **options):
    mesh = mesh or make_mesh(devices=jax.devices()[:1])
    settings = {"dtype": dtype, "max_num_seqs": 8, "max_num_batched_tokens": 128}
    settings |= {"enable_prefix_caching": True, "tiles": tiles} | options
    engine = NativeEngine(model, mesh, **settings)
    engine.update_weights(parameters(model), 0)
    return engine


def sampled(engine, **sampling):
    """Return (prompt, completion) of 24 requests, more than slots: in chunks, some again,
    some as the beginning of others; rows end at all times."""
    draw = np.random.default_rng(0)
    prompts = [draw.integers(0, 96, draw.integers(3, 120)).tolist() for _ in range(16)]
    prompts += prompts[:4] + [[*prompt, 1, 2, 3] for prompt in prompts[4:8]]
    requests = [
        Request(
            tuple(prompt),
            ((7, number),),
            Sampling(max_tokens=int(draw.integers(2, 60)), temperature=TEMPERATURE, **sampling),
        )
        for number, prompt in enumerate(prompts)
    ]
    found = [of_request[0] for of_request in engine.generate(requests)]
    return list(zip(prompts, found, strict=True))


def rows_of(samples):
    """Return the trainer's rows of samples, and the log-probs of the sampler."""
    shape = len(samples), LENGTH
    tokens, lengths = np.zeros(shape, np.int32), np.zeros((len(samples), 1), np.int32)
    log_probs, wanted = np.zeros(shape, np.float32), np.zeros(shape, bool)
    kept = None
    if samples[0][1].sampling_mask_ids:
        size = max(len(ids) for _, found in samples for ids in found.sampling_mask_ids)
        kept = np.full((*shape, size), -1, np.int32)
    for row, (prompt, found) in enumerate(samples):
        whole = [*prompt, *found.tokens]
        tokens[row, : len(whole)], lengths[row] = whole, len(whole)
        log_probs[row, len(prompt) : len(whole)] = found.log_probs
        wanted[row, len(prompt) - 1 : len(whole) - 1] = True
        for at, ids in enumerate(found.sampling_mask_ids):
            kept[row, len(prompt) - 1 + at, : len(ids)] = ids
    positions = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), shape)
    rows = ModelRows(
        tokens=tokens,
        positions=positions,
        segment_ids=(positions < lengths).astype(np.int32),
        targets=np.roll(tokens, -1, axis=1),
        wanted=wanted,
        kept=kept,
    )
    return rows, log_probs


def scored(model, tiles, dtype, rows, params=None, placement=None):
    params = parameters(model) if params is None else params
    score = jax.jit(
        functools.partial(
            log_probs_and_entropy,
            model,
            temperature=TEMPERATURE,
            dtype=dtype,
            tiles=tiles,
            placement=placement,
        )
    )
    return np.asarray(score(params, rows)[0])


def difference(model, tiles, dtype, **sampling):
    rows, expected = rows_of(sampled(engine_of(model, tiles, dtype), **sampling))
    return np.abs(scored(model, tiles, dtype, rows) - expected)


TILES = choose_tiles("log_probs", "cpu", tokens=None, parts=1)


@pytest.mark.some(1)
@pytest.mark.parametrize("kind", KINDS)
def test_the_sampler_gives_the_log_probs_of_the_trainer(kind):
    model = KINDS[kind]
    engine = engine_of(model, TILES, jnp.bfloat16, max_num_seqs=2)
    assert engine.programs.sizes() == [1, 2]  # rows of a block
    rows, expected = rows_of(sampled(engine))
    assert np.array_equal(scored(model, TILES, jnp.bfloat16, rows), expected)


@pytest.mark.slow
def test_in_float32_too():
    assert difference(MODEL, TILES, jnp.float32).max() == 0


@pytest.mark.slow
def test_without_tiles_they_are_apart():
    found = difference(MODEL, None, jnp.bfloat16)
    assert found.max() > 1e-3


@pytest.mark.slow
def test_of_what_filters_left():
    sampling = {"top_k": 12, "top_p": 0.9, "keep_sampling_mask": True}
    rows, expected = rows_of(sampled(engine_of(MODEL, TILES, jnp.bfloat16), **sampling))
    assert rows.kept.shape[2] > 1
    assert np.array_equal(scored(MODEL, TILES, jnp.bfloat16, rows), expected)


@pytest.mark.slow
@pytest.mark.parametrize(("sampler", "trainer"), [(2, 1), (1, 2), (2, 2)])
def test_over_devices(sampler, trainer):
    """The sampler over `sampler` devices of tensor, the trainer with FSDP over the others."""
    tiles = choose_tiles("log_probs", "cpu", tokens=None, parts=2)
    mesh = make_mesh(fsdp=8 // sampler, tensor=sampler)
    rows, expected = rows_of(sampled(engine_of(MODEL, tiles, jnp.bfloat16, mesh)))
    placement = Placement(make_mesh(fsdp=8 // trainer, tensor=trainer), ShardingRules())
    params = jax.device_put(parameters(MODEL), model_shardings(MODEL, placement))
    found = scored(MODEL, tiles, jnp.bfloat16, rows, params, placement)
    assert np.array_equal(found, expected)
    # one device, with the same logical parts, gives the same
    assert np.array_equal(scored(MODEL, tiles, jnp.bfloat16, rows), expected)


@pytest.mark.slow
def test_experts_over_devices():
    """The sampler on one device, the trainer with FSDP over eight."""
    model = KINDS["experts"]
    rows, expected = rows_of(sampled(engine_of(model, TILES, jnp.bfloat16)))
    placement = Placement(make_mesh(fsdp=8), ShardingRules())
    params = jax.device_put(parameters(model), model_shardings(model, placement))
    assert np.array_equal(scored(model, TILES, jnp.bfloat16, rows, params, placement), expected)


@pytest.mark.slow
def test_weights_change_in_flight():
    """Each token has the log-prob of the weights that it was drawn with, whose cache is anew."""
    engine = engine_of(MODEL, TILES, jnp.bfloat16, recompute_kv_on_update=True)
    both = parameters(MODEL), jax.tree.map(lambda x: 1.1 * x, parameters(MODEL))
    between_turns(engine, 6, lambda: engine.update_weights(both[1], 1))
    samples = sampled(engine)
    rows, expected = rows_of(samples)
    versions = np.full(rows.tokens.shape, -1)
    for row, (prompt, found) in enumerate(samples):
        versions[row, len(prompt) :][: len(found.tokens)] = found.versions
    assert any(set(found.versions) == {0, 1} for _, found in samples)
    for version, params in enumerate(both):
        of_version = scored(MODEL, TILES, jnp.bfloat16, rows, params)
        assert np.array_equal(of_version[versions == version], expected[versions == version])


# ---------------------------------------------------------------- gradients


def gradient(model, tiles, rows, placement=None):
    params = parameters(model)
    if placement is not None:
        params = jax.device_put(params, model_shardings(model, placement))

    def total(params):
        settings = {"dtype": jnp.float32, "tiles": tiles, "placement": placement}
        return log_probs_and_entropy(model, params, rows, temperature=1.0, **settings)[0].sum()

    return jax.jit(jax.grad(total))(params)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["log_probs", "full"])
@pytest.mark.parametrize("kind", ["plain", "windows and caps", "sinks and biases", "experts"])
def test_the_gradient_is_that_of_the_ordinary_mode(kind, mode):
    model, tiles = KINDS[kind], choose_tiles(mode, "cpu", tokens=None, parts=1)
    draw = np.random.default_rng(0)
    rows = random_rows(draw, (90, 40, 61, 12))
    found, expected = gradient(model, tiles, rows), gradient(model, None, rows)
    for name, x in jax.tree_util.tree_leaves_with_path(expected):
        y = functools.reduce(lambda tree, key: tree[key.key], name, found)
        np.testing.assert_allclose(y, x, atol=3e-5 * float(jnp.abs(x).max()), err_msg=str(name))


def random_rows(draw, lengths):
    shape, ends = (len(lengths), 96), np.array(lengths)[:, None]
    tokens = draw.integers(0, 96, shape).astype(np.int32)
    positions = np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape)
    return ModelRows(
        tokens=tokens,
        positions=positions,
        segment_ids=(positions < ends).astype(np.int32),
        targets=np.roll(tokens, -1, axis=1),
        wanted=positions < ends - 1,
    )


def test_in_pairs():
    """(1 + x) + (x + x) for x = 2^-24, which is lost beside 1, where 2^-23 is not."""
    little = 2.0**-24
    found = [in_pairs(jnp.array([1, *[little] * n], jnp.float32)) for n in (1, 2, 3)]
    # 1 + x = 1; 1 + (x + 0) = 1; 1 + 2 x
    assert [float(x) for x in found] == [1, 1, 1 + 2 * little]


# ---------------------------------------------------------------- what holds it


def test_a_row_of_a_product_depends_on_no_other_and_on_no_place():
    """What tiles rely on, of this machine's products."""
    draw = np.random.default_rng(0)
    for shape in ((64, 192, 512), (64, 512, 192), (64, 192, 6144)):
        x, w = (jnp.asarray(draw.standard_normal(s), jnp.float32) for s in (shape[:2], shape[1:]))
        product = jax.jit(jnp.matmul)
        whole, order = product(x, w), draw.permutation(shape[0])
        assert np.array_equal(product(x[order], w), whole[order])
        others = jnp.asarray(draw.standard_normal(shape[:2]), jnp.float32)
        assert np.array_equal(product(others.at[17].set(x[0]), w)[17], whole[0])


@pytest.mark.slow
def test_with_tiles_of_two_sizes_they_are_apart():
    other = dataclasses.replace(TILES, tokens=16)
    rows, expected = rows_of(sampled(engine_of(MODEL, TILES, jnp.float32)))
    assert np.abs(scored(MODEL, other, jnp.float32, rows) - expected).max() > 0


@pytest.mark.slow
def test_weights_that_are_not_rounded_first_give_other_numbers(monkeypatch):
    monkeypatch.setattr(exact, "_cast", lambda weights, dtype, widened: weights)
    assert difference(MODEL, TILES, jnp.bfloat16).max() > 0


def test_tiles_of_another_platform_are_refused():
    tiles = choose_tiles("log_probs", "tpu", tokens=None, parts=1)
    with pytest.raises(ValueError, match=r"tiles.page=128: .* in pages of 64"):
        NativeEngine(MODEL, make_mesh(devices=jax.devices()[:1]), tiles=tiles)


def test_models_that_have_no_exact_mode_are_refused():
    with pytest.raises(ValueError, match="num_heads=6 is split over some of 4"):
        check_exact(MODEL, 4, "cpu")
    with pytest.raises(ValueError, match="experts"):
        check_exact(KINDS["experts"], 2, "cpu")
    check_exact(KINDS["experts"], 1, "cpu")


def test_on_gpus_products_must_not_be_tuned(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_autotune_level=4")
    with pytest.raises(ValueError, match="set XLA_FLAGS=--xla_gpu_deterministic_ops=true"):
        check_exact(MODEL, 1, "gpu")
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_deterministic_ops=true")
    check_exact(MODEL, 1, "gpu")


@pytest.mark.slow  # the TPU compiler
@pytest.mark.parametrize("kind", ["v5e:2x2", "v5p:2x2x1"])
def test_for_a_tpu_all_programs_have_the_same_products(kind):
    """Of the same tiles, tokens and pages, into the same dtypes: prompts and decoding in the
    engine's block, scoring, and the forward pass within the gradient's program."""
    pytest.importorskip("libtpu")
    from jaxrl.models.placement import placed_params
    from jaxrl.tools.plan.topology import topology_devices

    mesh = make_mesh(devices=topology_devices(kind)[:1])
    placement = Placement(mesh, ShardingRules())
    tiles = choose_tiles("log_probs", "tpu", tokens=None, parts=1)
    model = dataclasses.replace(MODEL, hidden_size=512, head_dim=128, vocab_size=2048)
    params = placed_params(model, placement)
    spread = placement.sharding((8, 512), ("batch", None))
    kinds = (jnp.int32,) * 4 + (bool,)
    rows = ModelRows(*(jax.ShapeDtypeStruct((8, 512), x, sharding=spread) for x in kinds))

    def score(params, rows):
        settings = {"dtype": jnp.bfloat16, "tiles": tiles, "placement": placement}
        return log_probs_and_entropy(model, params, rows, temperature=1.0, **settings)[0]

    engine = NativeEngine(
        model, mesh, dtype=jnp.bfloat16, max_num_seqs=32, tiles=tiles, platform="tpu"
    )
    request = Request(tuple(range(900)), ((1, 1),), Sampling(max_tokens=100))
    gradient = jax.value_and_grad(lambda *given: score(*given).sum())
    programs = [engine.calls(params, [request])["decode"].lower()]
    programs += [jax.jit(call).lower(params, rows) for call in (score, gradient)]
    expected, found, trained = (
        set(re.findall(r"= (\w+\[[\d,]+\])\S* (?:convolution|dot)\(", x.compile().as_text()))
        for x in programs
    )
    assert found == expected
    assert found <= trained  # whose backward pass has products of its own
    n, f = tiles.tokens, model.intermediate_size
    assert {f"bf16[{n},{f}]", f"f32[{n},{model.vocab_size}]"} <= found
    assert all(shape.startswith(f"[{n},") for shape in shapes_of_tokens(found))


def shapes_of_tokens(shapes):
    """Those that are not of attention, whose products have four dims."""
    return [x[x.index("[") :] for x in shapes if x.count(",") < 3]
