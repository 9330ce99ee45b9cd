"""A flax module as the policy: the same numbers as a native model, and a run that trains."""

import dataclasses
import functools
import importlib.util
import json
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxrl
from jaxrl import config as cfg
from jaxrl.data.microbatches import Microbatching
from jaxrl.data.packing import one_per_row
from jaxrl.models import (
    TransformerConfig,
    abstract_params,
    adapt_linen,
    adapt_nnx,
    forward,
    init_params,
    logical_axes,
    unembed,
)
from jaxrl.models.adapter import check_packing
from jaxrl.models.transformer import describe
from jaxrl.parallel import ShardingRules, make_mesh, param_shardings
from jaxrl.rollout.native.engine import NativeEngine
from jaxrl.rollout.native.recompute import RecomputeEngine
from jaxrl.rollout.protocol import Request, Sampling
from jaxrl.training.forward import log_probs_and_entropy
from jaxrl.training.forward_pass import ForwardPass
from tests.training.test_update import ROWS, make_batch

CONFIG = TransformerConfig(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    initializer_range=0.3,
)
PROMPTS = [[3, 1, 4], [5, 9, 2, 6, 5, 3, 5]]


def native_logits(params, tokens, positions, segment_ids):
    return unembed(CONFIG, params, forward(CONFIG, params, tokens, positions, segment_ids))


class Linen(nn.Module):
    """The native model inside a linen module: any difference is the adapter's."""

    @nn.compact
    def __call__(self, tokens, positions, segment_ids):
        params = self.param("inner", lambda key: init_params(CONFIG, 0))
        return native_logits(params, tokens, positions, segment_ids)


class NNX(nnx.Module):
    """The same inside an NNX module."""

    def __init__(self, rngs):
        self.inner = nnx.data(jax.tree.map(nnx.Param, init_params(CONFIG, 0)))

    def __call__(self, tokens, positions, segment_ids):
        params = jax.tree.map(
            lambda p: p[...], self.inner, is_leaf=lambda x: isinstance(x, nnx.Param)
        )
        return native_logits(params, tokens, positions, segment_ids)


MODELS = {"linen": adapt_linen(Linen()), "nnx": adapt_nnx(NNX)}


@pytest.fixture(params=MODELS, name="model")
def model_fixture(request):
    return MODELS[request.param]


def sampled(engine, params):
    engine.update_weights(params, 3)
    sampling = Sampling(max_tokens=6, temperature=0.7, stop_token_ids=(40,))
    requests = [
        Request(tuple(p), ((7, 2 * i), (7, 2 * i + 1)), sampling) for i, p in enumerate(PROMPTS)
    ]
    return [c for samples in engine.generate(requests) for c in samples]


def rows_of(completions):
    rows = [
        [*p, *c.tokens]
        for p, c in zip([p for p in PROMPTS for _ in range(2)], completions, strict=True)
    ]
    tokens = np.array([[*row, *[0] * (16 - len(row))] for row in rows], np.int32)
    return tokens, np.array([len(row) for row in rows], np.int32)


@functools.cache
def native_samples():
    mesh = make_mesh(devices=jax.devices()[:2])
    return sampled(NativeEngine(CONFIG, mesh), init_params(CONFIG, 0))


def test_sampler_trainer_and_native_engine_agree(model):
    mesh = make_mesh(devices=jax.devices()[:2])
    params = init_params(model, 0)
    ours = sampled(RecomputeEngine(model, mesh), params)
    native = native_samples()
    assert [c.tokens for c in ours] == [c.tokens for c in native]
    tokens, lengths = rows_of(ours)
    score = functools.partial(log_probs_and_entropy, model, temperature=0.7, dtype=jnp.float32)
    rows = one_per_row(tokens, lengths, np.ones_like(tokens))
    log_probs = np.asarray(jax.jit(score)(params, rows)[0])
    for row, (a, b) in enumerate(zip(ours, native, strict=True)):
        start = lengths[row] - len(a.tokens)
        np.testing.assert_allclose(a.log_probs, b.log_probs, atol=1e-4)
        np.testing.assert_allclose(a.log_probs, log_probs[row, start : lengths[row]], atol=1e-4)
        assert (a.stop_reason, a.versions) == (b.stop_reason, b.versions)


@functools.cache
def gradient_of(model, remat):
    tokens = np.random.default_rng(0).integers(0, 32, (2, 16))
    lengths = np.array([16, 11])

    def loss(params):
        score = functools.partial(
            log_probs_and_entropy, temperature=1.0, dtype=jnp.float32, remat=remat
        )
        return score(model, params, one_per_row(tokens, lengths, np.ones_like(tokens)))[0].sum()

    return jax.jit(jax.grad(loss))(init_params(model, 0))


def test_gradients_are_those_of_the_native_model(model):
    expected = gradient_of(CONFIG, "none")
    for remat in ("none", "full"):
        found = gradient_of(model, remat)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5)


def test_packed_rows_have_the_log_probs_of_padded_ones():
    model, batch = MODELS["nnx"], make_batch()
    params, forward = (
        init_params(model, 0),
        functools.partial(log_probs_and_entropy, model, temperature=1.0, dtype=jnp.float32),
    )
    padded = Microbatching(rows=ROWS, total=ROWS)
    packed = dataclasses.replace(padded, packed=True, packed_length=32)
    expected, found = (
        ForwardPass(forward, jax.device_put, cut)(params, batch)[0] for cut in (padded, packed)
    )
    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
    check_packing(model, params)


class BlindToSegments(nn.Module):
    """Adds up what stands before, whosever it is."""

    @nn.compact
    def __call__(self, tokens, positions, segment_ids):
        return nn.Embed(9, 4)(tokens).cumsum(1)


class BlindToPositions(nn.Module):
    """Takes the column for the position."""

    @nn.compact
    def __call__(self, tokens, positions, segment_ids):
        return nn.Embed(9, 4)(tokens) + nn.Embed(8, 4)(jnp.arange(tokens.shape[1]))


@pytest.mark.parametrize("module", [BlindToSegments, BlindToPositions])
def test_a_module_that_cannot_be_packed_is_refused(module):
    model = adapt_linen(module())
    with pytest.raises(ValueError, match=f"use_sample_packing=True: the logits of {model.name} "):
        check_packing(model, init_params(model, 0))


def test_parameters_are_sharded_and_described(model):
    mesh = make_mesh()
    shapes = abstract_params(model)
    shardings = param_shardings(mesh, logical_axes(model), shapes, ShardingRules())
    params = init_params(model, 0, shardings)
    # w_up [2, 16, 32]: the largest dim over eight devices.
    placed = {x.shape: x.addressable_shards[0].data.shape for x in jax.tree.leaves(params)}
    assert placed[(2, 16, 32)] == (2, 16, 4)
    assert json.loads(json.dumps(describe(model)))["adapted"] in ("Linen", "NNX")
    assert [32, 16] in describe(model).values()


def test_the_recompute_engine_stops_and_refuses_as_the_native_one():
    engine = RecomputeEngine(CONFIG, make_mesh(devices=jax.devices()[:1]), max_num_seqs=2)
    with pytest.raises(RuntimeError, match="no weights"):
        engine.generate([])
    free = sampled(engine, init_params(CONFIG, 0))
    stop = free[0].tokens[2]
    sampling = Sampling(max_tokens=6, temperature=0.7, stop_token_ids=(stop,))
    request = Request(tuple(PROMPTS[0]), ((7, 0),), sampling)
    [[stopped]] = engine.generate([request])
    end = free[0].tokens.index(stop) + 1
    assert (stopped.tokens, stopped.stop_reason) == (free[0].tokens[:end], "stop")
    with pytest.raises(ValueError, match="max_tokens < 1"):
        engine.generate([dataclasses.replace(request, prompt_tokens=())])
    engine.sleep()
    with pytest.raises(RuntimeError, match="no weights"):
        engine.generate([request])


def test_other_state_than_parameters_is_refused():
    class WithDropout(nnx.Module):
        def __init__(self, rngs):
            self.dropout = nnx.Dropout(0.1, rngs=rngs)

    with pytest.raises(ValueError, match=r"WithDropout has state .*dropout/rngs"):
        adapt_nnx(WithDropout)

    class Counting(nn.Module):
        @nn.compact
        def __call__(self, tokens, positions, segment_ids):
            self.variable("counts", "n", lambda: jnp.zeros(()))
            return jax.nn.one_hot(tokens, 4) * self.param("w", nn.initializers.ones, (4,))

    with pytest.raises(ValueError, match="Counting has state that is not a parameter: counts"):
        init_params(adapt_linen(Counting()), 0)


def load_example():
    path = Path(jaxrl.__file__).parents[1] / "examples" / "flax_policy.py"
    spec = importlib.util.spec_from_file_location("flax_policy", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_the_example_trains_resumes_and_refuses_an_export(tmp_path):
    example = load_example()
    small = {
        "data.train_data": ["jaxrl.envs.toys.sort_digits:prompts(size=16, seed=0)"],
        "data.val_data": [],
        "trainer.train_batch_size": 4,
        "trainer.policy_mini_batch_size": 4,
        "generator.n_samples_per_prompt": 4,
        "trainer.policy.optimizer_config.scheduler": "constant",
        "trainer.algorithm.use_kl_loss": True,
        "trainer.eval_interval": -1,
        "trainer.ckpt_interval": 1,
    }
    config = cfg.apply_overrides(example.make_config(2, str(tmp_path)), small)
    trainer = example.FlaxPolicy(config).run()
    start = init_params(trainer.model, config.trainer.seed)
    moved = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), trainer.state.params, start)
    assert all(distance > 0 for distance in jax.tree.leaves(moved))
    lines = (tmp_path / "flax_policy" / "metrics.jsonl").read_text().splitlines()
    metrics = [json.loads(line) for line in lines]
    assert max(m["policy/rollout_train_logprobs_abs_diff_mean"] for m in metrics) < 1e-4

    longer = cfg.apply_overrides(config, {"trainer.max_training_steps": 3})
    assert int(example.FlaxPolicy(longer).run().state.step) == 3
    with pytest.raises(ValueError, match="hf_save_interval=1: TinyTransformer has no Hugging Face"):
        example.FlaxPolicy(cfg.apply_overrides(config, {"trainer.hf_save_interval": 1})).build()
