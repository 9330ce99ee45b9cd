"""The engine in 8 bits: weights with a scale for each output channel, keys and values in fp8."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.data.packing import one_per_row
from jaxrl.models.kernels.choice import Facts
from jaxrl.models.kernels.paged_attention import FP8_BITS, PAGED_ATTENTION, Pages
from jaxrl.models.linear import EIGHT_BITS, QuantisedWeight, project, quantise
from jaxrl.models.transformer import init_params
from jaxrl.parallel import make_mesh
from jaxrl.rollout.native.decode import IN_EIGHT_BITS, decode_params
from jaxrl.rollout.native.engine import NativeEngine
from jaxrl.rollout.native.programs import pages_that_fit, weight_bytes
from jaxrl.tools.doctor.eight_bits import dequantised
from jaxrl.training.forward import log_probs_and_entropy
from tests.rollout import test_experts
from tests.rollout.test_build_sizes import MODEL
from tests.rollout.test_native import LLAMA, flat, random_params, requests, rows_of

SLOW = pytest.param("experts", marks=pytest.mark.slow)  # to compile, 11 to 18 s
MODELS = {"dense": LLAMA, "experts": test_experts.MODEL}
STARTS = 3, 3, 7, 16  # of the responses to `requests`
F32 = jnp.float32


@functools.cache
def fp8_compiles():
    """Whether XLA can: for a CPU without F16C it calls what it has not got."""
    try:
        for given, wanted in ((F32, jnp.float8_e4m3fn), (jnp.float8_e4m3fn, F32)):
            array = jax.ShapeDtypeStruct((3,), given)
            jax.jit(lambda x, to=wanted: x.astype(to)).lower(array).compile()
    except jax.errors.JaxRuntimeError as error:
        return "Failed to materialize symbols" not in str(error)
    return True


@pytest.fixture(autouse=True)
def _a_processor_that_has_fp8(request):
    if "fp8" in request.node.name and not fp8_compiles():
        pytest.skip("XLA compiles no fp8 for this processor")


def params_of(name):
    return random_params(LLAMA) if name == "dense" else init_params(MODELS[name], 0)


@functools.cache
def samples_of(name, sizes=(), **options):
    sizes = dict(sizes)
    count = int(np.prod(list(sizes.values()))) if sizes else 1
    mesh = make_mesh(devices=jax.devices()[:count], **sizes)
    engine = NativeEngine(MODELS[name], mesh, max_num_seqs=4, shrink=False, **options)
    engine.update_weights(params_of(name), 0)
    return engine.generate(requests())


@functools.cache
def score(name):
    settings = {"temperature": 0.7, "dtype": F32}
    return jax.jit(functools.partial(log_probs_and_entropy, MODELS[name], **settings))


def scored(name, params, completions):
    tokens, lengths = rows_of(completions)
    rows = one_per_row(tokens, lengths, np.ones_like(tokens))
    found = np.asarray(score(name)(params, rows)[0])
    return [row[start : start + 10] for row, start in zip(found, STARTS, strict=True)]


def differences(name, params, completions):
    pairs = zip(flat(completions), scored(name, params, completions), strict=True)
    return np.concatenate([np.abs(np.array(c.log_probs) - x) for c, x in pairs])


# ---------------------------------------------------------------- weights


def test_a_channel_has_the_scale_of_its_largest_weight():
    # channels: 254 / 127 = 2; 1.27 / 127 = 0.01; of zeros 1
    w = jnp.array([[254.0, -1.27, 0.0], [-3.0, 0.006, 0.0]])
    found = quantise(w, "int8", (0,))
    np.testing.assert_allclose(found.scale, [2, 0.01, 1], rtol=1e-6)
    # -3 / 2 = -1.5 to the even -2; 0.006 / 0.01 = 0.6 to 1
    assert found.values.tolist() == [[127, -127, 0], [-2, 1, 0]]
    assert (found.values.dtype, found.scale.dtype) == (jnp.int8, F32)


def test_a_channel_in_fp8_too():
    found = quantise(jnp.array([[896.0], [-34.0], [0.0]]), "fp8", (0,))
    assert found.scale.tolist() == [2]
    # of e4m3 from 16 on every second number: -17 lies between -16 and -18, and goes to the even
    assert found.values.astype(F32).tolist() == [[448], [-16], [0]]


def test_experts_have_a_scale_each_and_wo_one_for_both_of_its_inputs():
    w = jnp.array([[[127.0], [1]], [[254], [2]]])  # [E, in, out]
    assert quantise(w, "int8", IN_EIGHT_BITS["experts_up"]).scale.tolist() == [[1], [2]]
    assert quantise(w, "int8", IN_EIGHT_BITS["wo"]).scale.tolist() == [2]  # [H, h, D]


@pytest.mark.parametrize("kind", EIGHT_BITS)
def test_a_product_is_rounded_once(kind):
    dtype = EIGHT_BITS[kind][0]
    w = QuantisedWeight(jnp.array([[96], [1]], dtype), jnp.array([1 / 3], F32))
    # (2 x 96 + 3) / 3 = 65; (2.6875 x 96 + 1) / 3 = 259 / 3 = 86.33, 86.5 in bfloat16, which has
    # halves there; rounded before, 259 would be 260
    x = jnp.array([[[2, 3], [2.6875, 1]]], jnp.bfloat16)
    assert project(x, w).astype(F32).tolist() == [[[65], [86.5]]]


@pytest.mark.parametrize("name", ["dense", SLOW])
@pytest.mark.parametrize("kind", EIGHT_BITS)
def test_log_probs_are_those_of_the_dequantised_weights(name, kind):
    found, params = samples_of(name, quantization=kind), params_of(name)
    near = dequantised(params, kind, F32)
    assert differences(name, near, found).max() < 1e-4
    assert differences(name, params, found).max() > 1e-3  # of the policy itself


@pytest.mark.parametrize("name", ["dense", SLOW])
@pytest.mark.parametrize("options", [{"quantization": "int8"}, {"kv_cache_dtype": "fp8"}], ids=str)
def test_two_devices_sample_what_one_does(name, options):
    alone, split = (samples_of(name, sizes, **options) for sizes in ((), (("tensor", 2),)))
    assert [c.tokens for c in flat(split)] == [c.tokens for c in flat(alone)]
    for a, b in zip(flat(split), flat(alone), strict=True):
        np.testing.assert_allclose(a.log_probs, b.log_probs, atol=2e-5)


@pytest.mark.slow
def test_experts_of_their_own_devices_have_their_scales():
    alone, apart = (
        samples_of("experts", sizes, quantization="int8") for sizes in ((), (("expert", 2),))
    )
    assert [c.tokens for c in flat(apart)] == [c.tokens for c in flat(alone)]


def in_eight_bits(name, kind):
    return functools.partial(decode_params, MODELS[name], dtype=F32, quantization=kind)


def test_weights_of_other_devices_are_quantised_alike():
    engine = NativeEngine(LLAMA, make_mesh(devices=jax.devices()[1:2]), quantization="int8")
    engine.update_weights(random_params(LLAMA), 0)  # which are on the first device
    here = jax.jit(in_eight_bits("dense", "int8"))(random_params(LLAMA))
    jax.tree.map(np.testing.assert_array_equal, engine.programs.params, here)


def test_what_stays_as_it_is():
    layer = jax.eval_shape(in_eight_bits("dense", "fp8"), params_of("dense"))["layers"][0]
    kept = {name for name, w in layer.items() if not isinstance(w, QuantisedWeight)}
    assert kept == {"attn_norm", "mlp_norm"}
    shapes = jax.eval_shape(in_eight_bits("experts", "int8"), params_of("experts"))
    of_experts = shapes["layers"][1]
    assert not isinstance(of_experts["router"], QuantisedWeight)
    assert of_experts["experts_down"].scale.shape == (8, 32)  # [E, D]


@pytest.mark.parametrize("tensor", [1, 2])
def test_the_bytes_of_weights_and_pages_are_those_of_8_bits(tensor):
    mesh = make_mesh(devices=jax.devices()[:tensor], tensor=tensor)
    # embeddings and head 2 x 64 x 64 in float32; q, k, v, o and the MLP a byte each
    split = 4 * 2 * 64 * 64 + 4 * 64 * 64 + 3 * 64 * 128
    split += 4 * (3 * 64 + 2 * 128)  # scales of q, k, v, gate and up
    whole = 4 * 3 * 64 + 4 * 2 * 64  # norms, and scales of o and down
    assert weight_bytes(MODEL, mesh, jnp.dtype(F32), "int8") == split // tensor + whole
    given = {"max_model_len": 64, "utilization": 1.0, "memory": 1e6, "platform": "cpu"}
    left = 1e6 - (split // tensor + whole)
    page = 64 * 2 * 8 * 8 // tensor  # keys and values of 64 positions, a byte each
    options = {"quantization": "int8", "kv_cache_dtype": "fp8"}
    assert pages_that_fit(MODEL, mesh, jnp.dtype(F32), **given, **options) == left // page


# ---------------------------------------------------------------- keys and values


@pytest.mark.parametrize("layout", ["transposed", "joined", "apart"])
def test_pages_in_fp8_have_the_nearest_number_and_none_beyond_448(layout):
    pages = Pages.empty(LLAMA, 2, 16, FP8_BITS, layout=layout)
    k = jnp.full((1, 2, 8), 17.0).at[0, 0, 0].set(1e30)
    v = jnp.full((1, 2, 8), -jnp.inf)
    written = pages.write(jnp.array([1]), jnp.array([3]), k, v)
    keys, values = (x.astype(F32) for x in written.read(jnp.array([[1]]), jnp.bfloat16))
    assert keys[0, 0, 0, 3] == 448
    assert keys[0, 1, 1, 3] == 16
    assert values[0, 1, 3, 0] == -448
    assert jnp.isfinite(keys).all()
    assert jnp.isfinite(values).all()


def test_keys_and_values_in_fp8_move_log_probs_by_little():
    found = samples_of("dense", kv_cache_dtype="fp8")
    apart = differences("dense", params_of("dense"), found)
    assert 1e-3 < apart.mean() < 0.15  # exactly kept they are 5e-7 apart


def test_keys_beyond_all_numbers_of_fp8_give_no_nan():
    params = params_of("dense")
    params["layers"] = params["layers"] | {
        name: 1e4 * params["layers"][name] for name in ("wk", "wv")
    }
    mesh = make_mesh(devices=jax.devices()[:1])
    engine = NativeEngine(LLAMA, mesh, max_num_seqs=4, shrink=False, kv_cache_dtype="fp8")
    engine.update_weights(params, 0)
    assert all(np.isfinite(c.log_probs).all() for c in flat(engine.generate(requests())))


@pytest.mark.parametrize(("platform", "fast"), [("gpu", "cudnn"), ("tpu", "ragged")])
def test_a_kernel_that_reads_no_fp8_is_not_chosen(platform, fast):
    facts = Facts(platform, jnp.dtype(jnp.bfloat16), LLAMA)
    assert PAGED_ATTENTION.choose(facts).name == fast
    narrow = facts._replace(pages=FP8_BITS)
    choice = PAGED_ATTENTION.choose(narrow)
    assert choice.name == "xla"
    assert "kv_cache_dtype='auto'" in str(choice)
    with pytest.raises(ValueError, match=f"{fast}' needs pages in the engine's dtype"):
        PAGED_ATTENTION.choose(narrow, fast)
