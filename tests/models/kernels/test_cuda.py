"""Every program of a training step, lowered for CUDA: which kernels are in it. Nothing runs.

Two layers with the true shapes of three families. What asks the machine for a GPU and cuDNN is
answered for it.
"""

import functools
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax._src.cudnn import fused_attention_stablehlo as fused

from jaxrl import config as cfg
from jaxrl.models.attention import Segments
from jaxrl.models.kernels.packed_attention import self_attention
from jaxrl.models.kernels.paged_attention import Pages, layout_of, paged_attention
from jaxrl.models.lora import LoraConfig, attach, select_modules, trained, with_trained
from jaxrl.models.transformer import TransformerConfig, abstract_params
from jaxrl.parallel import Placement, make_mesh
from jaxrl.rollout.native import programs
from jaxrl.rollout.native.decode import decode
from jaxrl.rollout.native.engine import NativeEngine
from jaxrl.rollout.native.kv_cache import empty_cache
from jaxrl.rollout.native.programs import compiled
from jaxrl.rollout.protocol import Request, Sampling
from jaxrl.training.build import assemble_policy, assemble_update
from jaxrl.training.forward import log_probs_and_entropy
from jaxrl.types import ModelRows

ROOT = Path(__file__).parents[3]
ROWS, LENGTH, SLOTS, POSITIONS = 2, 1280, 8, 768
QWEN3 = TransformerConfig(  # 0.6B
    vocab_size=2048,
    hidden_size=1024,
    intermediate_size=3072,
    num_layers=2,
    num_heads=16,
    num_kv_heads=8,
    head_dim=128,
    qk_norm=True,
)
GEMMA3 = TransformerConfig(  # 1B, one layer of either kind
    vocab_size=2048,
    hidden_size=1152,
    intermediate_size=6912,
    num_layers=2,
    num_heads=4,
    num_kv_heads=1,
    head_dim=256,
    qk_norm=True,
    activation="gelu_pytorch_tanh",
    sliding_window=512,
    sliding_layers=(True, False),
    local_rope_theta=10_000.0,
    post_norms=True,
    unit_offset_norm=True,
    scale_embeddings=True,
    query_pre_attn_scalar=256.0,
)
MISTRAL = TransformerConfig(  # 7B of the first version
    vocab_size=2048,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=2,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    sliding_window=512,
    sliding_layers=(True, True),
    tie_embeddings=False,
)
MODELS = {"qwen3": QWEN3, "gemma3": GEMMA3, "mistral": MISTRAL}
# Gemma has layers of both kinds, and the widest heads: where no more is asked, the others are slow.
FIRST = [
    pytest.param(x, id=name, marks=[] if name == "gemma3" else pytest.mark.slow)
    for name, x in MODELS.items()
]
LIBRARIES = r"__cudnn\$\w+|mosaic_gpu(?=_v\d|\b)|__gpu\$\S*triton|triton_kernel_call"


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    pretend_hopper(monkeypatch.setattr)


def pretend_hopper(setattr):
    """Answer for a Hopper with cuDNN 9.10; the engine has pages as there."""
    setattr(programs, "SHAPES", {})
    setattr(fused, "check_cudnn_version", lambda: 91000)
    setattr(fused, "check_compute_capability", lambda capability: True)
    setattr(fused, "is_cuda_compute_capability_equal", lambda capability: False)


def lowered(function, *shapes):
    return for_cuda(jax.jit(function), *shapes)


def for_cuda(jitted, *shapes, **options):
    return jitted.trace(*shapes, **options).lower(lowering_platforms=("cuda",)).as_text()


def with_adapters(config):
    lora = LoraConfig(config, select_modules(config, "all-linear"), rank=8)
    return attach(lora, abstract_params(config), abstract_params(lora))


def training_programs(config, kernel, params=None):
    """The gradient and the pass of the scorer, as text."""
    params = abstract_params(config) if params is None else params
    ints, bools = (jax.ShapeDtypeStruct((ROWS, LENGTH), kind) for kind in (jnp.int32, bool))
    rows = ModelRows(ints, ints, ints, ints, bools)
    score = functools.partial(
        log_probs_and_entropy, config, temperature=1.0, dtype=jnp.bfloat16, kernel=kernel
    )

    def objective(new, params, rows):
        log_probs, entropy = score(with_trained(params, new), rows)
        return log_probs.sum() + 0.01 * entropy.sum()

    gradient = lowered(jax.grad(objective), trained(params), params, rows)
    return gradient, lowered(score, params, rows)


@functools.cache
def by_cudnn(config):
    return training_programs(config, "cudnn")


def placement():
    return Placement(make_mesh(devices=jax.devices()[:1]))


def block_program(config, kernel):
    """A block of the engine, which prefills chunks of prompts and decodes; and its cache's arrays.

    It has room for 8 rows of 6 pages, 128 positions each.
    """
    mesh = placement().mesh
    engine = NativeEngine(
        *(config, mesh),
        dtype=jnp.bfloat16,
        max_num_seqs=SLOTS,
        steps_per_dispatch=4,
    )
    whole = placement().sharding((), ())
    params = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), abstract_params(config)
    )
    longest = Request((0,) * 512, ((0, 0),), Sampling(max_tokens=POSITIONS - 512))
    weights, cache, *given = engine.calls(params, [longest])["decode"].args
    pages = len(cache.layers[0].arrays[0]), 128, jnp.bfloat16
    empty = functools.partial(empty_cache, config, *pages, layout=layout_of("gpu"))
    cache = jax.eval_shape(empty)
    run = functools.partial(decode, config, steps=4, kernel=kernel)
    return for_cuda(jax.jit(run, donate_argnums=1), weights, cache, *given), cache


def libraries(text):
    return set(re.findall(LIBRARIES, text))


def products(text):
    return [line for line in text.splitlines() if "stablehlo.dot_general" in line]


@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
def test_training_of_unpacked_rows_is_by_cudnn(config):
    gradient, forward = by_cudnn(config)
    assert libraries(gradient) == {"__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"}
    assert libraries(forward) == {"__cudnn$fmhaSoftmax"}
    # neither scores nor a mask of all pairs, nor keys and values repeated for every query head
    for text in (gradient, forward):
        assert f"{LENGTH}x{LENGTH}x" not in text
        calls = [line for line in text.splitlines() if "call @__cudnn$fmhaSoftmax" in line]
        heads = f"tensor<{ROWS}x{LENGTH}x{config.num_kv_heads}x{config.head_dim}xbf16>"
        assert calls
        assert all(heads in line for line in calls)


@pytest.mark.parametrize("config", FIRST)
def test_training_of_packed_rows_without_tokamax_keeps_no_scores(config):
    for text in training_programs(config, "chunked"):
        assert libraries(text) == set()
        assert f"{LENGTH}x{LENGTH}x" not in text


@pytest.mark.parametrize("length", [LENGTH, 1344])  # 128 does not divide all buckets
@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
def test_training_of_packed_rows_is_by_tokamax(monkeypatch, config, length):
    pytest.importorskip("tokamax")
    from tokamax._src import gpu_utils

    for name, able in (("has_mosaic_gpu_support", True), ("is_sm90", True), ("is_sm100", False)):
        monkeypatch.setattr(gpu_utils, name, lambda device=None, able=able: able)
    monkeypatch.setitem(globals(), "LENGTH", length)
    for text in training_programs(config, "tokamax"):
        assert libraries(text) == {"mosaic_gpu"}
        assert f"{length}x{length}x" not in text


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(QWEN3, id="qwen3"),
        pytest.param(GEMMA3, id="gemma3"),
        # by the same kernel as Gemma's
        pytest.param(MISTRAL, id="mistral", marks=pytest.mark.slow),
    ],
)
def test_a_block_of_the_engine_is_in_place_and_scores_a_page_at_a_time(config):
    kernel = "cudnn" if config.sliding_window is None else "xla"  # cuDNN's pages have no windows
    text, cache = block_program(config, kernel)
    assert libraries(text) == ({"__cudnn$fmhaSoftmax"} if kernel == "cudnn" else set())
    assert text.count("tf.aliasing_output") == len(jax.tree.leaves(cache))
    assert f"x{POSITIONS}x" not in text  # neither scores nor keys of whole rows
    for x in cache.layers[0].arrays:
        assert x.shape[0] == SLOTS * POSITIONS // 128
        held = f"tensor<{'x'.join(map(str, x.shape))}xbf16>"
        assert held in text
        assert not [x for x in text.splitlines() if "transpose" in x and held in x]


@pytest.mark.parametrize("number", [32, 128])  # pages, fewer and more than the table has places
def test_decoding_from_pages_is_by_cudnn_and_copies_none(number):
    """A tile of a prompt is not: XLA has cuDNN's causal mask begin at position 0."""
    rows, most, size = 8, 8, 64

    def column(*shape, kind=jnp.int32):
        return jax.ShapeDtypeStruct((rows, *shape), kind)

    def step(pages, q, k, v, table, first):
        at = (first[:, None] + jnp.arange(q.shape[1])).reshape(-1)
        places = jnp.repeat(table, q.shape[1], axis=0)[jnp.arange(len(at)), at // size]
        pages = pages.write(places, at % size, k, v)
        return pages, paged_attention(QWEN3, q, pages, table, first, kernel="cudnn")

    def program(queries):
        q, *kv = (
            column(queries, heads, QWEN3.head_dim, kind=jnp.bfloat16)
            for heads in (QWEN3.num_heads, *(QWEN3.num_kv_heads,) * 2)
        )
        tokens = (jax.ShapeDtypeStruct((rows * queries, *x.shape[2:]), x.dtype) for x in kv)
        return lowered(step, pages, q, *tokens, column(most), column())

    empty = functools.partial(Pages.empty, QWEN3, number, size, jnp.bfloat16)
    pages = jax.eval_shape(functools.partial(empty, layout=layout_of("gpu")))
    decode, prefill = program(1), program(128)
    shape = f"tensor<{number}x{size}x{QWEN3.num_kv_heads}x{QWEN3.head_dim}xbf16>"
    assert libraries(decode) == {"__cudnn$fmhaSoftmax"}
    assert "\\22is_paged_attention\\22: true" in decode
    assert libraries(prefill) == set()
    for text in (decode, prefill):
        assert shape in text
        assert not [x for x in text.splitlines() if "transpose" in x and shape in x]


@pytest.mark.parametrize("config", FIRST)
def test_adapters_get_a_gradient_by_cudnn_and_what_is_frozen_gets_none(config):
    gradient, forward = training_programs(config, "cudnn", with_adapters(config))
    assert libraries(gradient) == {"__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"}
    assert libraries(forward) == {"__cudnn$fmhaSoftmax"}
    assert f"{LENGTH}x{LENGTH}x" not in gradient + forward
    width, mlp = config.hidden_size, config.intermediate_size
    frozen = f"-> tensor<{width}x{mlp}xf32>"  # of the gate; by its adapter's A it is [width, 8]
    whole, _ = by_cudnn(config)
    assert any(line.endswith(frozen) for line in products(whole))
    assert not any(line.endswith(frozen) for line in products(gradient))
    assert any(line.endswith(f"-> tensor<{width}x8xf32>") for line in products(gradient))


@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
def test_an_optimizer_step_is_in_place_and_in_float32(config):
    recipe = cfg.resolve(cfg.TrainConfig())
    policy, forward_pass = assemble_policy(recipe, config, placement().mesh)
    _, state, updater = assemble_update(recipe, forward_pass, policy.placement, 1, policy.trained)
    text = for_cuda(updater.apply, state, state.params)
    assert libraries(text) == set() and not products(text)
    assert text.count("tf.aliasing_output") == len(jax.tree.leaves(state))
    assert "bf16" not in text


@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
def test_new_weights_of_the_sampler_are_cast_first_and_adapters_merged_exactly(config):
    load = compiled(config, placement(), jnp.dtype(jnp.bfloat16)).decode_params
    text = for_cuda(load, abstract_params(config))
    merged = for_cuda(load, with_adapters(config))
    layer = f"tensor<{config.hidden_size}x{config.intermediate_size}x"
    for program in (text, merged):
        assert libraries(program) == set()
        assert f"{layer}bf16>" in program and f"{layer}f32>" not in program
    assert not products(text)
    assert len(products(merged)) == 7  # q, k, v, o, gate, up, down
    assert all("HIGHEST" in line for line in products(merged))  # not TF32


def test_kernels_are_split_over_a_mesh():
    split = Placement(make_mesh(devices=jax.devices()[:4], fsdp=2, tensor=2))
    q, kv = (
        jax.ShapeDtypeStruct(shape, jnp.bfloat16)
        for shape in ((4, LENGTH, 16, 128), (4, 8, LENGTH, 128))
    )
    ids = jax.ShapeDtypeStruct((4, LENGTH), jnp.int32)

    def attend(q, k, v, ids):
        segments = Segments(ids, False)
        return self_attention(QWEN3, q, k, v, segments, kernel="cudnn", placement=split)

    assert libraries(lowered(attend, q, kv, kv, ids)) == {"__cudnn$fmhaSoftmax"}


@pytest.mark.slow  # a process of its own
def test_what_is_leaving_jax_is_not_imported():
    """Nor by what the programs import when they are traced."""
    code = """
import sys
import jaxrl.train
from tests.models.kernels import test_cuda as programs
programs.pretend_hopper(setattr)
for kernel in ("cudnn", "chunked"):
    programs.training_programs(programs.GEMMA3, kernel)
programs.block_program(programs.GEMMA3, 'xla')
left = ("jax.experimental.pallas.triton", "jax.experimental.pallas.ops.gpu")
print([name for name in sys.modules if name.startswith(left)])
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"
