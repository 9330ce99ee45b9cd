"""The native engine samples mixtures of experts as the trainer scores them, on any mesh."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.config import InferenceEngineConfig
from jaxrl.models.architecture import Experts, TransformerConfig
from jaxrl.models.transformer import forward, init_params, unembed
from jaxrl.parallel import make_mesh
from jaxrl.rollout.build import meshes_of_engines
from jaxrl.rollout.native.engine import NativeEngine
from jaxrl.rollout.protocol import Request, Sampling
from tests.rollout.test_native import reserve

MODEL = TransformerConfig(
    vocab_size=53,
    hidden_size=32,
    intermediate_size=48,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    qk_norm=True,
    initializer_range=0.3,
    experts=Experts(count=8, per_token=2, width=24, normalise=True, dense_layers=(0,)),
)
PARAMS = init_params(MODEL, 0)
# longer than a tile, so that prompts are prefilled in pieces; two samples of each
REQUESTS = [
    Request(tuple((7 * i + j) % 50 + 1 for j in range(5 + 9 * i)), ((i, 0), (i, 1)), Sampling(24))
    for i in range(4)
]


def samples_of(requests, dtype=jnp.float32, rows=8, **sizes):
    """Completions by an engine of one shape, whatever the requests are."""
    count = int(np.prod(list(sizes.values()))) if sizes else 1
    mesh = make_mesh(devices=jax.devices()[:count], **sizes)
    settings = {"max_num_seqs": rows, "steps_per_dispatch": 5, "dtype": dtype, "shrink": False}
    engine = NativeEngine(MODEL, mesh, **settings)
    engine.update_weights(PARAMS, 0)
    reserve(engine)
    return [sample for group in engine.generate(requests) for sample in group]


@jax.jit
def scores(tokens):
    positions = jnp.arange(tokens.shape[1])[None]
    hidden = forward(MODEL, PARAMS, tokens, positions, jnp.ones_like(tokens))
    return jax.nn.log_softmax(unembed(MODEL, PARAMS, hidden))[0]


def test_log_probs_are_those_of_the_trainer():
    found = samples_of(REQUESTS)
    prompts = [request.prompt_tokens for request in REQUESTS for _ in request.keys]
    for prompt, sample in zip(prompts, found, strict=True):
        row = np.zeros((1, 64), np.int32)  # what follows is not seen
        row[0, : len(prompt) + 24] = (*prompt, *sample.tokens)
        log_probs = scores(row)[np.arange(24) + len(prompt) - 1, np.array(sample.tokens)]
        np.testing.assert_allclose(sample.log_probs, log_probs, atol=2e-5)
        assert sample.routes is None  # without `keep_routes`


@pytest.mark.slow  # test_routes.py has the last mesh
@pytest.mark.parametrize(
    "sizes",
    [{"data": 2}, {"tensor": 2}, {"expert": 4}, {"data": 2, "expert": 2, "tensor": 2}],
    ids=str,
)
def test_every_mesh_draws_the_same(sizes):
    for mine, alone in zip(samples_of(REQUESTS, **sizes), samples_of(REQUESTS), strict=True):
        assert mine.tokens == alone.tokens
        np.testing.assert_allclose(mine.log_probs, alone.log_probs, atol=2e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_neighbours_change_no_bit(dtype):
    together = samples_of(REQUESTS, dtype)
    for number, request in enumerate(REQUESTS):
        alone = samples_of([request], dtype)
        assert alone == together[2 * number : 2 * number + 2]


def test_engines_that_cannot_part_the_experts_are_refused():
    mesh = make_mesh()
    with pytest.raises(ValueError, match="expert_parallel_size=8: the model has no experts; set"):
        dense = dataclasses.replace(MODEL, experts=None)
        meshes_of_engines(InferenceEngineConfig(expert_parallel_size=8), dense, mesh)
    three = dataclasses.replace(MODEL.experts, count=6)
    with pytest.raises(ValueError, match="does not divide the model's 6 experts"):
        odd = dataclasses.replace(MODEL, experts=three)
        meshes_of_engines(InferenceEngineConfig(expert_parallel_size=8), odd, mesh)
    sizes = InferenceEngineConfig(num_engines=2, tensor_parallel_size=2, expert_parallel_size=4)
    parts = [dict(part.shape) for part in meshes_of_engines(sizes, MODEL, mesh)]
    assert parts == [{"data": 1, "fsdp": 1, "context": 1, "expert": 2, "tensor": 2}] * 2
