"""The in-process engine against the trainer's own forward."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.data.packing import one_per_row
from jaxrl.models.rope import RopeScaling
from jaxrl.models.transformer import TransformerConfig, forward, is_spec, param_specs, unembed
from jaxrl.parallel import make_mesh
from jaxrl.rollout.native import programs
from jaxrl.rollout.native.engine import NativeEngine
from jaxrl.rollout.protocol import Request, Sampling
from jaxrl.training.forward import log_probs_and_entropy

LLAMA = TransformerConfig(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    initializer_range=0.3,
)
CONFIGS = {
    "llama": LLAMA,
    "untied": dataclasses.replace(LLAMA, tie_embeddings=False),
    "qwen2": dataclasses.replace(LLAMA, attention_bias=True, tie_embeddings=False),
    "qwen3": dataclasses.replace(LLAMA, qk_norm=True, head_dim=16),
}
WINDOW = 6  # rows are up to 26 tokens long
CONFIGS["mistral"] = dataclasses.replace(
    LLAMA, sliding_window=WINDOW, sliding_layers=(True, True), tie_embeddings=False
)
CONFIGS["gemma3"] = dataclasses.replace(
    LLAMA,
    sliding_window=WINDOW,
    sliding_layers=(True, False),
    rope_scaling=RopeScaling("linear", 8.0),
    local_rope_theta=100.0,
    qk_norm=True,
    post_norms=True,
    unit_offset_norm=True,
    scale_embeddings=True,
    activation="gelu_pytorch_tanh",
    query_pre_attn_scalar=16,
    attention_softcap=4.0,
    final_softcap=5.0,
)
NO_STOP = (1000,)  # outside the vocabulary; present, so that all requests have the same shapes
WIDTH = 32  # of the rows that the trainer's forward sees
ROOM = 96  # tokens of the longest row
MAX_TOKENS = 10


def random_params(config, seed=0):
    """Random matrices, norms around 1 and biases around 0, none of them the identity."""
    rng = np.random.default_rng(seed)
    center = {"normal": 0.0, "ones": 1.0, "zeros": 0.0}
    return jax.tree.map(
        lambda spec: jnp.asarray(rng.normal(center[spec.init], 0.3, spec.shape), jnp.float32),
        param_specs(config),
        is_leaf=is_spec,
    )


def reserve(engine, tokens=ROOM):
    """Make room for rows of so many tokens: one program then serves requests of all lengths."""
    engine.programs.reserve(tokens)
    engine._resize()


@functools.cache
def engine_of(name, devices=1, **options):
    """An engine with weights of version 3, of the same shapes as those of test_engine.py."""
    options = {"max_num_seqs": 4, "steps_per_dispatch": 8, "shrink": False, **options}
    engine = NativeEngine(CONFIGS[name], make_mesh(devices=jax.devices()[:devices]), **options)
    engine.update_weights(random_params(CONFIGS[name]), 3)
    reserve(engine)
    return engine


def request(prompt, *keys, stop=NO_STOP, **sampling):
    options = {"max_tokens": MAX_TOKENS, "temperature": 0.7, **sampling}
    return Request(
        tuple(prompt), tuple((7, key) for key in keys), Sampling(stop_token_ids=stop, **options)
    )


def with_stop(one, stop):
    return dataclasses.replace(
        one, sampling=dataclasses.replace(one.sampling, stop_token_ids=(stop,))
    )


PROMPTS = [[3, 1, 4], [5, 9, 2, 6, 5, 3, 5], [8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6, 4, 3, 3, 8]]


def requests(**options):
    """Prompts of 3, 7 and 16 tokens with 2, 1 and 1 samples."""
    return [
        request(prompt, *keys, **options)
        for prompt, keys in zip(PROMPTS, [(1, 2), (3,), (4,)], strict=True)
    ]


def flat(completions):
    return [c for samples in completions for c in samples]


def rows_of(completions):
    """Tokens [B, WIDTH] and lengths of prompts and completions."""
    rows = [
        [*prompt, *c.tokens]
        for prompt, group in zip(PROMPTS, completions, strict=True)
        for c in group
    ]
    tokens = np.array([[*row, *[0] * (WIDTH - len(row))] for row in rows], np.int32)
    return tokens, np.array([len(row) for row in rows], np.int32)


def assert_same(completions, expected):
    assert [c.tokens for c in flat(completions)] == [c.tokens for c in flat(expected)]
    for a, b in zip(flat(completions), flat(expected), strict=True):
        np.testing.assert_allclose(a.log_probs, b.log_probs, atol=1e-5)
        assert a.stop_reason == b.stop_reason


# ------------------------------------------------------------------ the trainer's forward


@pytest.mark.some(3)
@pytest.mark.parametrize("name", CONFIGS)
def test_log_probs_of_sampled_tokens_equal_the_trainers(name):
    completions = engine_of(name).generate(requests())
    tokens, lengths = rows_of(completions)
    score = jax.jit(
        functools.partial(log_probs_and_entropy, CONFIGS[name], temperature=0.7, dtype=jnp.float32)
    )
    log_probs, _ = score(
        random_params(CONFIGS[name]), one_per_row(tokens, lengths, np.ones_like(tokens))
    )
    starts = [3, 3, 7, 16]
    for row, (completion, start) in enumerate(zip(flat(completions), starts, strict=True)):
        assert len(completion.tokens) == len(completion.log_probs) == MAX_TOKENS
        np.testing.assert_allclose(
            completion.log_probs, log_probs[row, start : start + MAX_TOKENS], atol=1e-4
        )
    sampled = [c.tokens for c in flat(completions)]
    assert sampled[0] != sampled[1]  # two keys of one prompt
    assert len({t for row in sampled for t in row}) > 8  # it did sample


@functools.partial(jax.jit, static_argnums=0)
def next_token(config, params, tokens, lengths):
    """The argmax after each row, by the full forward."""
    positions = jnp.broadcast_to(jnp.arange(WIDTH), tokens.shape)
    segment_ids = (positions < lengths[:, None]).astype(jnp.int32)
    hidden = forward(config, params, tokens, positions, segment_ids)
    last = jnp.take_along_axis(hidden, (lengths - 1)[:, None, None], axis=1)[:, 0]
    return unembed(config, params, last).argmax(-1)


UNTIED = pytest.param("untied", marks=pytest.mark.slow)  # as qwen2 and mistral are


@pytest.mark.parametrize("name", [UNTIED if name == "untied" else name for name in CONFIGS])
def test_greedy_equals_a_loop_with_the_full_forward(name):
    params = random_params(CONFIGS[name])
    rows = [list(PROMPTS[i]) for i in (0, 0, 1, 2)]
    for _ in range(MAX_TOKENS):
        tokens = np.array([[*row, *[0] * (WIDTH - len(row))] for row in rows], np.int32)
        best = next_token(CONFIGS[name], params, tokens, np.array([len(row) for row in rows]))
        for row, token in zip(rows, best.tolist(), strict=True):
            row.append(token)
    completions = engine_of(name).generate(requests(temperature=0.0))
    assert [c.tokens for c in flat(completions)] == [row[-MAX_TOKENS:] for row in rows]


# ------------------------------------------------------------------ what a sample depends on


def test_the_order_of_requests_does_not_matter():
    engine = engine_of("llama")
    expected = engine.generate(requests())
    assert_same(engine.generate(requests()[::-1]), expected[::-1])


def test_neighbours_do_not_matter():
    engine = engine_of("llama")
    expected = engine.generate(requests())
    assert_same(engine.generate(requests()[1:2]), expected[1:2])


@pytest.mark.parametrize("options", [{"max_num_seqs": 2}, {"steps_per_dispatch": 4}])
def test_waves_and_dispatches_do_not_matter(options):
    expected = engine_of("llama").generate(requests())
    assert_same(engine_of("llama", **options).generate(requests()), expected)


def test_eight_devices_equal_one():
    expected = engine_of("llama").generate(requests())
    assert_same(engine_of("llama", devices=8, max_num_seqs=8).generate(requests()), expected)


def test_another_key_gives_other_tokens():
    engine = engine_of("llama")
    first, other = (
        engine.generate([request(PROMPTS[0], 1)]),
        engine.generate([request(PROMPTS[0], 5)]),
    )
    assert flat(first)[0].tokens != flat(other)[0].tokens
    assert_same(engine.generate([request(PROMPTS[0], 1)]), first)


# ------------------------------------------------------------------ ends


def test_a_stop_token_ends_the_row_and_is_kept():
    engine = engine_of("llama")
    free = flat(engine.generate(requests()))
    stop = free[0].tokens[4]
    for sample, whole in zip(flat(engine.generate(requests(stop=(stop,)))), free, strict=True):
        end = whole.tokens.index(stop) + 1 if stop in whole.tokens else MAX_TOKENS
        assert sample.tokens == whole.tokens[:end]
        np.testing.assert_allclose(sample.log_probs, whole.log_probs[:end], atol=1e-6)
        assert sample.stop_reason == ("stop" if stop in whole.tokens else "length")
    assert free[0].stop_reason == "length"


def test_the_first_token_may_be_a_stop_token():
    engine = engine_of("llama")
    free = flat(engine.generate(requests()))[0]
    sample = flat(engine.generate(requests(stop=(free.tokens[0],))))[0]
    assert (sample.tokens, sample.stop_reason) == (free.tokens[:1], "stop")


def test_stop_tokens_belong_to_their_request():
    engine = engine_of("llama")
    free = engine.generate(requests())
    first, second, third = requests()
    stop = free[1][0].tokens[0]
    mixed = engine.generate([first, with_stop(second, stop), third])
    assert_same([mixed[0], mixed[2]], [free[0], free[2]])
    assert mixed[1][0].tokens == [stop]


def test_max_tokens_belongs_to_its_request():
    engine = engine_of("llama")
    free = flat(engine.generate(requests()))
    a, b, c = requests()
    limited = [
        dataclasses.replace(r, sampling=dataclasses.replace(r.sampling, max_tokens=n))
        for r, n in ((a, 1), (b, 5), (c, MAX_TOKENS))
    ]
    completions = flat(engine.generate(limited))
    for completion, whole, n in zip(completions, free, (1, 1, 5, MAX_TOKENS), strict=True):
        assert completion.tokens == whole.tokens[:n]
        assert completion.stop_reason == "length"


def test_sampling_parameters_belong_to_their_request():
    engine = engine_of("llama")
    greedy, free = engine.generate(requests(temperature=0.0)), engine.generate(requests())
    a, b, c = requests()
    one = dataclasses.replace(b.sampling, top_k=1)
    mixed = engine.generate([a, dataclasses.replace(b, sampling=one), c])
    assert mixed[1][0].tokens == greedy[1][0].tokens
    np.testing.assert_allclose(mixed[1][0].log_probs, np.zeros(MAX_TOKENS), atol=1e-6)
    assert_same([mixed[0], mixed[2]], [free[0], free[2]])


# ------------------------------------------------------------------ weights and errors


def test_new_weights_change_tokens_and_version():
    settings = {"max_num_seqs": 4, "steps_per_dispatch": 8, "shrink": False}
    engine = NativeEngine(LLAMA, make_mesh(devices=jax.devices()[:1]), **settings)
    with pytest.raises(RuntimeError, match="no weights: call update_weights"):
        engine.generate(requests())
    engine.update_weights(random_params(LLAMA), 3)
    reserve(engine)
    old = flat(engine.generate(requests()))
    newer = random_params(LLAMA, seed=1)
    engine.update_weights(newer, 4)
    for leaf in jax.tree.leaves(newer):
        leaf.delete()  # as if the trainer had donated them
    new = flat(engine.generate(requests()))
    assert {v for c in old for v in c.versions} == {3}
    assert {v for c in new for v in c.versions} == {4}
    assert all(a.tokens != b.tokens for a, b in zip(old, new, strict=True))
    engine.sleep()
    with pytest.raises(RuntimeError, match="no weights"):
        engine.generate(requests())


def test_an_empty_prompt_and_no_tokens_are_refused():
    engine = engine_of("llama")
    with pytest.raises(ValueError, match=r"empty prompt or max_tokens < 1 in .*prompt_tokens=\(\)"):
        engine.generate([*requests(), request([], 1)])
    with pytest.raises(ValueError, match="max_tokens=0"):
        engine.generate([request([1], 1, max_tokens=0)])


def test_a_block_has_the_steps_of_its_platform(monkeypatch):
    mesh = make_mesh(devices=jax.devices()[:1])
    assert NativeEngine(LLAMA, mesh).programs.steps == 32
    monkeypatch.setitem(programs.DISPATCH_STEPS, "cpu", 5)
    assert NativeEngine(LLAMA, mesh).programs.steps == 5
    assert NativeEngine(LLAMA, mesh, steps_per_dispatch=7).programs.steps == 7


@pytest.mark.parametrize("options", [{"steps_per_dispatch": 0}, {"max_num_seqs": 0}])
def test_sizes_below_one_are_refused(options):
    with pytest.raises(ValueError, match="must be at least 1"):
        NativeEngine(LLAMA, make_mesh(devices=jax.devices()[:1]), **options)


def test_the_planned_programs_are_those_that_run():
    engine, requests = engine_of("llama"), [request((1, 2, 3), 0, 1)]
    (given,) = {x.sharding for x in jax.tree.leaves(engine.programs.params)}
    params = jax.tree.map(
        lambda spec: jax.ShapeDtypeStruct(spec.shape, jnp.float32, sharding=given),
        param_specs(LLAMA),
        is_leaf=is_spec,
    )
    engine.generate(requests)
    shapes = engine.calls(params, requests)["decode"].args
    held = engine.programs.params, engine.programs._cache
    for planned, real in zip(jax.tree.leaves(shapes[:2]), jax.tree.leaves(held), strict=True):
        assert (planned.shape, planned.dtype) == (real.shape, real.dtype)
        assert planned.sharding == real.sharding
