"""Latent attention: one formula in two forms, sizes, and the engine's cache of latents.

Parity with transformers is in test_parity.py.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.models import config_from_hf
from jaxrl.models.architecture import (
    Latent,
    LayerFlags,
    attention_flops,
    cached_attention,
    layer_params,
    position_elements,
)
from jaxrl.models.attention import attention, causal_mask, layer_views
from jaxrl.models.kernels.choice import Facts
from jaxrl.models.kernels.paged_attention import PAGED_ATTENTION
from jaxrl.models.transformer import TransformerConfig, decoder_layer, init_params
from jaxrl.parallel import make_mesh
from jaxrl.rollout.native.engine import NativeEngine
from jaxrl.rollout.protocol import Request, Sampling
from tests.models.test_transformer import logits_of
from tests.parallel.test_meshes import ALGORITHM, LENGTHS
from tests.training.test_update import ROWS, gradient, make_batch

LATENT = Latent(rank=6, plain=5, turned=4, value_dim=7, query_rank=8)
MODEL = TransformerConfig(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=4,
    head_dim=9,
    rotary_dim=4,
    initializer_range=0.2,
    latent=LATENT,
    names="latent",
)


def test_sizes():
    # the cache: 6 + 4 numbers of a token in 2 layers; expanded 4 heads of 9 + 7 would be 64
    assert position_elements(MODEL) == 2 * 10
    # scores 2 * 9 and values 2 * 7 FLOPs, 4 heads, 2 layers
    assert attention_flops(MODEL) == 2 * 4 * (18 + 14)
    # down 16 x 8, up 8 x 4 x 9; down 16 x 10, up 6 x 4 x 12; out 4 x 7 x 16; MLP 3 x 16 x 32
    assert layer_params(MODEL) == 2 * (128 + 288 + 160 + 288 + 448 + 1536)
    without = dataclasses.replace(MODEL, latent=dataclasses.replace(LATENT, query_rank=None))
    assert layer_params(without) == 2 * (16 * 4 * 9 + 160 + 288 + 448 + 1536)
    # DeepSeek-V3: 576 numbers of a token in each of 61 layers
    published = config_from_hf({"model_type": "deepseek_v3", **V3})
    assert position_elements(published) == 61 * 576


V3 = {
    "vocab_size": 129_280,
    "hidden_size": 7168,
    "intermediate_size": 18_432,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
}


def test_yarn_multiplies_the_scores_twice():
    rope = {"rope_type": "yarn", "factor": 40.0, "rope_theta": 1e4, "mscale_all_dim": 1.0}
    rope |= {"mscale": 1.0, "original_max_position_embeddings": 4096}
    config = config_from_hf({"model_type": "deepseek_v3", **V3, "rope_scaling": rope})
    # 0.1 ln 40 + 1 = 1.36889; 192^-1/2 = 0.0721688; its square times that: 0.135234
    assert config.attention_scale == pytest.approx(0.135234, rel=1e-5)
    assert cached_attention(config).attention_scale == config.attention_scale
    plain = config_from_hf({"model_type": "deepseek_v3", **V3})
    assert plain.attention_scale is None
    assert cached_attention(plain).attention_scale == pytest.approx(192**-0.5)


@pytest.mark.parametrize("query_rank", [8, None])
def test_both_forms_are_one_function(query_rank):
    """The matrices go into keys and values, or into queries and outputs."""
    config = dataclasses.replace(MODEL, latent=dataclasses.replace(LATENT, query_rank=query_rank))
    layer = jax.tree.map(lambda x: x[0], init_params(config, 0)["layers"])
    x = jax.random.normal(jax.random.key(0), (2, 5, 16))
    ids = jnp.array([[1, 1, 1, 2, 2], [1, 1, 1, 1, 0]])
    positions = jnp.tile(jnp.arange(5), (2, 1))
    view = layer_views(config, causal_mask(ids), positions, positions)(LayerFlags(False, True))
    heads = []

    @functools.partial(jax.jit, static_argnums=0, static_argnames="absorbed")
    def run(of_attention, layer, x, **form):
        return decoder_layer(config, layer, x, view, attend_as(of_attention), **form)[0]

    def attend_as(config):
        def attend(q, k, v, mask):
            heads.append((q.shape, k.shape))
            return attention(config, q, k, v, mask)

        return attend

    made = run(config, layer, x)
    asked = run(cached_attention(config), layer, x, absorbed=True)
    np.testing.assert_allclose(asked, made, atol=2e-6)
    assert heads == [((2, 5, 4, 9), (2, 4, 5, 9)), ((2, 5, 4, 10), (2, 1, 5, 10))]


@pytest.mark.parametrize(
    "axes",
    [
        {},
        pytest.param({"tensor": 2}, marks=pytest.mark.slow),
        {"data": 2, "tensor": 4},  # each device has a part of the positions
    ],
    ids=str,
)
def test_the_engine_draws_what_the_trainer_scores(axes):
    """A group over pages that it shares, prompts on both sides of a page's end."""
    mesh = make_mesh(devices=jax.devices()[: int(np.prod([*axes.values(), 1]))], **axes)
    engine, params = NativeEngine(MODEL, mesh, max_num_seqs=4), init_params(MODEL, 0)
    engine.update_weights(params, 1)
    prompts = [np.random.default_rng(n).integers(0, 32, n).tolist() for n in (70, 3)]
    asked = [
        Request(prompt, [(i, j) for j in range(3)], Sampling(8)) for i, prompt in enumerate(prompts)
    ]
    for request, completions in zip(asked, engine.generate(asked), strict=True):
        for completion in completions:
            row = [*request.prompt_tokens, *completion.tokens]
            tokens, places = np.zeros((1, 80), int), np.arange(80)[None]
            tokens[0, : len(row)] = row
            real = (places < len(row)).astype(int)
            scores = jax.nn.log_softmax(logits_of(MODEL, params, tokens, places, real)[0])
            first = len(request.prompt_tokens) - 1
            found = [scores[first + i, token] for i, token in enumerate(completion.tokens)]
            np.testing.assert_allclose(completion.log_probs, found, atol=2e-5)


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("sizes", "packed"),
    [
        ({"fsdp": 2, "tensor": 4}, True),
        ({"data": 2, "fsdp": 4}, False),
        ({"fsdp": 2, "context": 2, "tensor": 2}, True),
    ],
    ids=str,
)
def test_the_gradient_is_that_of_one_device(sizes, packed):
    batch, cut = make_batch(lengths=LENGTHS[packed]), {"model": MODEL, "microbatch_rows": ROWS}
    expected, _ = gradient(ALGORITHM, batch, **cut)
    found, _ = gradient(
        ALGORITHM, batch, packed=packed, devices=8, sizes=tuple(sizes.items()), **cut
    )
    assert np.linalg.norm(found - expected) <= 2e-5 * np.linalg.norm(expected)


def test_what_is_not_computed_is_refused():
    with pytest.raises(ValueError, match="v_head_dim=256 is not supported; supported: at most 192"):
        config_from_hf({"model_type": "deepseek_v3", **V3, "v_head_dim": 256})
    with pytest.raises(ValueError, match="attention_bias=True is not supported"):
        config_from_hf({"model_type": "deepseek_v3", **V3, "attention_bias": True})
    with pytest.raises(ValueError, match="topk_method='group_limited_greedy' is not supported"):
        fields = {"topk_method": "group_limited_greedy", "num_experts_per_tok": 6}
        config_from_hf({"model_type": "deepseek_v2", **V3, **fields})
    facts = Facts("tpu", jnp.dtype("bfloat16"), MODEL)
    assert PAGED_ATTENTION.choose(facts).passed_over == {
        "ragged": ["a model without latent attention"]
    }
