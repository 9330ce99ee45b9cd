"""Adapters: which matrices, what they compute, what of them is trained."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxrl.data.packing import one_per_row
from jaxrl.models.architecture import Experts
from jaxrl.models.linear import LoraWeight, drop_out, merge, project
from jaxrl.models.lora import (
    LoraConfig,
    adapter_specs,
    attach,
    select_modules,
    trained,
    with_dropout,
    with_token_keys,
    with_trained,
)
from jaxrl.models.peft_format import load_adapter, save_adapter
from jaxrl.models.transformer import (
    TransformerConfig,
    abstract_params,
    forward,
    init_params,
    logical_axes,
    unembed,
)
from jaxrl.rollout.native.decode import decode_params
from jaxrl.types import ModelRows

MODEL = TransformerConfig(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    initializer_range=0.2,
    tie_embeddings=False,
)
TIED = dataclasses.replace(MODEL, tie_embeddings=True)
LINEAR = {"w_down", "w_gate", "w_up", "wk", "wo", "wq", "wv"}
TOKENS = jnp.asarray(np.random.default_rng(0).integers(1, 32, (2, 6)))


def lora_of(target="all-linear", model=MODEL, exclude=None, **fields):
    modules = select_modules(model, target, exclude)
    return LoraConfig(model, modules, **({"rank": 4, "alpha": 8} | fields))


def moved(lora, scale=0.1):
    """Adapters as after some training: B is not 0."""
    rng = np.random.default_rng(1)
    return jax.tree.map(
        lambda x: x + np.float32(scale) * rng.standard_normal(x.shape).astype("f4"),
        init_params(lora, 0),
    )


@functools.partial(jax.jit, static_argnames="model")
def logits(params, model=MODEL):
    positions = jnp.broadcast_to(jnp.arange(TOKENS.shape[1]), TOKENS.shape)
    hidden = forward(model, params, TOKENS, positions, jnp.ones_like(TOKENS))
    return unembed(model, params, hidden)


# ---------------------------------------------------------------- the arithmetic


def test_the_adapter_adds_scale_x_a_b():
    weight = LoraWeight(
        w=jnp.array([[1.0, 0.0], [0.0, 1.0]]),
        a=jnp.array([[1.0], [2.0]]),
        b=jnp.array([[3.0, -1.0]]),
        scale=np.float32(0.5),
    )
    x = jnp.array([[[4.0, 1.0]]])
    # x w = (4, 1); x a = 4 + 2 = 6; times 0.5 = 3; times b = (9, -3)
    np.testing.assert_array_equal(project(x, weight), [[[13.0, -2.0]]])
    # w + 0.5 a b = ((1, 0), (0, 1)) + 0.5 ((3, -1), (6, -2))
    np.testing.assert_array_equal(merge(weight), [[2.5, -0.5], [3.0, 0.0]])


@pytest.mark.parametrize("alpha", [16, 32, 64])
def test_in_bfloat16_the_adapter_has_the_scale_of_the_merged_one(alpha):
    """alpha / 24 = 2/3, 4/3, 8/3: bfloat16 has 0.66797, 1.33594, 2.67188, all 0.2 % larger."""
    one = jnp.ones((1, 1))
    weight = LoraWeight(w=0 * one, a=one, b=one, scale=np.float32(alpha / 24))
    x = (1 + jnp.arange(128) / 128).astype(jnp.bfloat16)  # all of bfloat16 from 1 to 2
    exact = np.asarray(x, np.float32) * np.float32(alpha / 24)
    np.testing.assert_array_equal(
        project(x.reshape(1, -1, 1), weight).ravel(), exact.astype(jnp.bfloat16)
    )


def test_without_training_nothing_changes_bit_for_bit():
    base = init_params(MODEL, 0)
    for init_method in ("kaiming", "gaussian"):
        lora = lora_of([".*"], init_method=init_method)
        np.testing.assert_array_equal(
            logits(attach(lora, base, init_params(lora, 0))), logits(base)
        )


def test_initial_values():
    adapters = init_params(lora_of([".*"]), 0)
    a = np.asarray(adapters["wo"]["a"])  # inputs 4 heads x 8: uniform in +-1 / sqrt(32) = 0.1768
    assert 0.17 < np.abs(a).max() <= 32**-0.5
    assert abs(a.std() - 32**-0.5 / 3**0.5) < 0.01
    gaussian = init_params(lora_of("down_proj", init_method="gaussian"), 0)["w_down"]["a"]
    assert abs(np.asarray(gaussian).std() - 1 / 4) < 0.03
    assert not np.any(adapters["wo"]["b"]) and not np.any(adapters["embed"]["a"])
    assert abs(np.asarray(adapters["embed"]["b"]).std() - 1) < 0.15


def test_merged_equals_applied():
    lora, base = lora_of([".*"]), init_params(MODEL, 0)
    params = attach(lora, base, moved(lora))
    applied = logits(params)
    assert float(jnp.abs(applied - logits(base)).max()) > 1
    np.testing.assert_allclose(logits(merge(params)), applied, atol=1e-5)
    decode = decode_params(MODEL, params, jnp.float32)
    whole = decode_params(MODEL, merge(params), jnp.float32)
    jax.tree.map(np.testing.assert_array_equal, decode, whole)


def test_experts_and_their_router_have_no_adapters_and_each_stack_has_its_own(tmp_path):
    experts = Experts(count=4, per_token=2, width=12, shared_width=20, dense_layers=(0,))
    model = dataclasses.replace(MODEL, num_layers=3, experts=experts)
    lora, base = lora_of("all-linear", model), init_params(model, 0)
    adapters = moved(lora)
    attention = {"wq", "wk", "wv", "wo"}
    shared = {"shared_gate", "shared_up", "shared_down"}
    assert adapters.keys() == {
        *(f"dense/{name}" for name in attention | {"w_gate", "w_up", "w_down"}),
        *(f"experts/{name}" for name in attention | shared),
    }
    params = attach(lora, base, adapters)
    jax.tree.map(np.testing.assert_array_equal, trained(params), adapters)
    applied = logits(params, model)
    assert float(jnp.abs(applied - logits(base, model)).max()) > 1
    np.testing.assert_allclose(logits(merge(params), model), applied, atol=1e-5)
    some = lora_of(["model.layers.0..*q_proj", "shared_expert.gate_proj"], model)
    for number, one in enumerate((lora, some)):  # of the second others have the same last name
        folder, adapters = tmp_path / f"adapter{number}", moved(one)
        save_adapter(folder, one, adapters, base="a/base")
        again, found = load_adapter(folder, model)
        assert sorted(again.modules) == sorted(one.modules)
        jax.tree.map(np.testing.assert_array_equal, found, adapters)


EXPERTS = dataclasses.replace(
    MODEL, experts=Experts(count=4, per_token=2, width=12, dense_layers=(0,)), num_layers=3
)


def test_experts_have_adapters_where_a_pattern_names_them():
    lora, base = lora_of(["q_proj", ".*experts.*"], EXPERTS), init_params(EXPERTS, 0)
    adapters = moved(lora)
    of_experts = {f"experts/experts_{name}" for name in ("gate", "up", "down")}
    assert adapters.keys() == {"dense/wq", "experts/wq", *of_experts}
    assert adapters["experts/experts_down"]["a"].shape == (2, 4, 12, 4)
    assert adapters["experts/experts_down"]["b"].shape == (2, 4, 4, 16)
    params = attach(lora, base, adapters)
    jax.tree.map(np.testing.assert_array_equal, trained(params), adapters)
    applied = logits(params, EXPERTS)
    without = lora_of(["q_proj"], EXPERTS)
    some = {name: x for name, x in adapters.items() if name.endswith("wq")}
    assert float(jnp.abs(applied - logits(attach(without, base, some), EXPERTS)).max()) > 0.1
    np.testing.assert_allclose(logits(merge(params), EXPERTS), applied, atol=1e-5)


def test_adapters_of_experts_lie_in_folders_as_those_of_modules(tmp_path):
    every = lora_of([".*experts.*"], EXPERTS)
    some = lora_of(["model.layers.2.mlp.experts.3.up_proj", "experts.1.down_proj"], EXPERTS)
    for number, lora in enumerate((every, some)):
        folder, adapters = tmp_path / f"adapter{number}", moved(lora)
        save_adapter(folder, lora, adapters, base="a/base")
        again, found = load_adapter(folder, EXPERTS)
        assert sorted(again.modules) == sorted(lora.modules)
        assert len(again.modules) == (2 * 4 * 3, 3)[number]
        used = attach(again, init_params(EXPERTS, 0), found)
        expected = attach(lora, init_params(EXPERTS, 0), adapters)
        np.testing.assert_array_equal(logits(used, EXPERTS), logits(expected, EXPERTS))
    tensors = load_file(tmp_path / "adapter1" / "adapter_model.safetensors")
    name = "base_model.model.model.layers.2.mlp.experts.3.up_proj.lora_{}.weight"
    up = moved(some)["experts/experts_up"]  # of layer 2, the second with experts
    np.testing.assert_array_equal(tensors[name.format("A")], up["a"][1, 3].T)
    np.testing.assert_array_equal(tensors[name.format("B")], up["b"][1, 3].T)
    settings = json.loads((tmp_path / "adapter0" / "adapter_config.json").read_text())
    assert settings["target_modules"][0] == "experts.0.down_proj"
    with pytest.raises(ValueError, match="dropout=0.1 is not available for experts"):
        dataclasses.replace(every, dropout=0.1)


@pytest.mark.slow
def test_the_gradient_of_adapters_of_experts_is_that_of_the_merged_matrices():
    """dA = s dW B^T and dB = s A^T dW."""
    lora = lora_of(["experts.2.gate_proj", "experts.0.down_proj"], EXPERTS)
    base, adapters = init_params(EXPERTS, 0), moved(lora)
    merged = merge(attach(lora, base, adapters))

    def loss(params):
        return jnp.sum(jnp.sin(logits(params, EXPERTS)))

    def dense_loss(some):
        layers = merged["layers"]
        return loss(merged | {"layers": layers | {"experts": layers["experts"] | some}})

    ours = jax.grad(lambda new: loss(attach(lora, base, new)))(adapters)
    names = "experts_gate", "experts_down"
    dense = jax.grad(dense_loss)({name: merged["layers"]["experts"][name] for name in names})
    scale = lora.alpha / lora.rank
    for name, expert in (("experts_gate", 2), ("experts_down", 0)):
        g = np.asarray(dense[name], np.float64)[:, expert]
        pair, found = adapters[f"experts/{name}"], ours[f"experts/{name}"]
        a, b = (np.asarray(pair[part], np.float64)[:, expert] for part in "ab")
        for part, expected in (("a", scale * g @ b.mT), ("b", scale * a.mT @ g)):
            limit = 1e-4 * np.abs(expected).max()
            np.testing.assert_allclose(found[part][:, expert], expected, atol=limit)
        others = [i for i in range(4) if i != expert]
        assert not any(np.asarray(x)[:, others].any() for x in found.values())


def test_the_gradient_is_that_of_the_dense_formula():
    """d/da and d/db of f(w + s a b) by the chain rule through the whole matrix."""
    model = dataclasses.replace(MODEL, num_layers=1)
    lora, base = lora_of(["o_proj", "up_proj"], model), init_params(model, 0)
    adapters = moved(lora)
    merged = merge(attach(lora, base, adapters))

    def loss(params):
        return jnp.sum(jnp.sin(logits(params, model)))

    def dense_loss(some):
        return loss(merged | {"layers": merged["layers"] | some})

    ours = jax.grad(lambda new: loss(attach(lora, base, new)))(adapters)
    dense = jax.grad(dense_loss)({leaf: merged["layers"][leaf] for leaf in ("wo", "w_up")})
    for leaf, split in (("wo", 32), ("w_up", 16)):
        g = np.asarray(dense[leaf], np.float64).reshape(1, split, -1)
        a = np.asarray(adapters[leaf]["a"], np.float64).reshape(1, split, 4)
        b = np.asarray(adapters[leaf]["b"], np.float64).reshape(1, 4, -1)
        expected = {"a": 2 * g @ b.swapaxes(1, 2), "b": 2 * a.swapaxes(1, 2) @ g}  # alpha / r = 2
        for part, value in expected.items():
            got = np.asarray(ours[leaf][part])
            np.testing.assert_allclose(got.reshape(value.shape), value, rtol=1e-3, atol=1e-4)


def test_shapes_and_logical_axes():
    specs = adapter_specs(lora_of(["q_proj", "o_proj", "embed_tokens"]))
    assert {leaf: (s["a"].shape, s["b"].shape) for leaf, s in specs.items()} == {
        "embed": ((32, 4), (4, 16)),
        "wo": ((2, 4, 8, 4), (2, 4, 16)),
        "wq": ((2, 16, 4), (2, 4, 4, 8)),
    }
    assert logical_axes(lora_of("o_proj"))["wo"] == {
        "a": ("layers", "heads", "head_dim", "lora_rank"),
        "b": ("layers", "lora_rank", "embed"),
    }
    weight = attach(lora_of("o_proj"), init_params(MODEL, 0), moved(lora_of("o_proj")))
    seen = []
    weight["layers"]["wo"].each_part(
        lambda x, names: seen.append(names) or x, ("layers", "heads", "head_dim", "embed")
    )
    assert seen[1:] == list(logical_axes(lora_of("o_proj"))["wo"].values())


# ---------------------------------------------------------------- which matrices


@pytest.mark.parametrize(
    ("target", "exclude", "leaves"),
    [
        ("all-linear", None, LINEAR),
        ("q_proj", None, {"wq"}),
        ("mlp.up_proj", None, {"w_up"}),
        (["q_proj", "lm_head"], None, {"wq", "unembed"}),
        (r".*\.(gate|up)_proj", None, {"w_gate", "w_up"}),
        ("all-linear", ["o_proj", r".*mlp\..*"], {"wq", "wk", "wv"}),
        ([".*"], None, {*LINEAR, "embed", "unembed"}),
    ],
)
def test_patterns(target, exclude, leaves):
    assert set(adapter_specs(lora_of(target, exclude=exclude))) == leaves


def test_layers_that_are_not_chosen_keep_their_matrix():
    lora, base = lora_of(r"model\.layers\.1\..*q_proj"), init_params(MODEL, 0)
    assert lora.modules == ("model.layers.1.self_attn.q_proj",)
    params = attach(lora, base, moved(lora))
    merged = np.asarray(merge(params)["layers"]["wq"])
    np.testing.assert_array_equal(merged[0], base["layers"]["wq"][0])
    assert np.abs(merged[1] - base["layers"]["wq"][1]).max() > 1e-3
    grads = jax.grad(lambda new: logits(attach(lora, base, new)).sum())(moved(lora))["wq"]
    assert not np.any(grads["a"][0]) and np.any(grads["a"][1])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: lora_of("qproj"),
            r"lora.target_modules: 'qproj' matches no matrix; there are down_proj, embed_tokens, "
            r"gate_proj, k_proj, lm_head, o_proj, q_proj, up_proj, v_proj, or in full",
        ),
        (lambda: lora_of(["q_proj", "x"]), "lora.target_modules: 'x' matches no matrix"),
        (lambda: lora_of(exclude="x"), "lora.exclude_modules: 'x' matches no matrix"),
        (lambda: lora_of("lm_head", TIED), "embed_tokens and lm_head are one matrix here"),
        (lambda: lora_of("q_proj", exclude="q_proj"), "'q_proj' leaves nothing of"),
        (lambda: lora_of("(q"), r"'\(q' is not a regular expression"),
        (lambda: lora_of(rank=0), "rank=0 must be at least 1"),
        (lambda: lora_of(dropout=1.0), r"dropout=1.0 in \[0, 1\)"),
        (lambda: lora_of(init_method="pissa"), "init_method='pissa' is unknown; choose one of"),
        (lambda: lora_of("lm_head", dropout=0.1), "dropout=0.1 is not available for lm_head"),
    ],
)
def test_bad_input_is_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# ---------------------------------------------------------------- what is trained


def test_the_trained_part_goes_out_and_in():
    lora, base = lora_of(), init_params(MODEL, 0)
    adapters = moved(lora)
    params = attach(lora, base, init_params(lora, 0))
    assert params["layers"]["wq"].w is base["layers"]["wq"]  # no copy
    assert trained(base) is base and with_trained(base, adapters) is adapters
    jax.tree.map(np.testing.assert_array_equal, trained(with_trained(params, adapters)), adapters)
    assert jax.tree.map(lambda x: x.shape, abstract_params(lora)) == jax.tree.map(
        lambda x: x.shape, adapters
    )


# ---------------------------------------------------------------- dropout


def test_dropout_keeps_the_mean_and_scales():
    keys = jax.random.split(jax.random.key(0), (4, 50))
    x = drop_out(jnp.full((4, 50, 20), 3.0), keys, 0.25)
    assert set(np.unique(x)) == {0.0, 4.0}  # 3 / (1 - 0.25)
    assert abs(float((x == 0).mean()) - 0.25) < 0.02  # 4000 draws: 3 deviations


def test_what_drops_out_is_named_by_the_row_and_position_alone():
    """The keys of trajectories 3 and 5, one per row, and packed in the other order into one."""
    lora, base = lora_of("q_proj", dropout=0.5), init_params(MODEL, 0)
    params, key = attach(lora, base, moved(lora)), jax.random.key(7)
    tokens, row_ids = np.asarray(TOKENS), np.array([3, 5], np.int32)
    rows = one_per_row(tokens, np.array([6, 6]), np.ones((2, 6)))
    packed = ModelRows(
        tokens=tokens[::-1].reshape(1, 12),
        positions=np.tile(np.arange(6, dtype=np.int32), 2)[None],
        segment_ids=np.repeat([1, 2], 6)[None],
        targets=np.roll(tokens[::-1], -1, axis=1).reshape(1, 12),
        wanted=np.tile(np.arange(6) < 5, 2)[None],
        source=np.array([[6, 7, 8, 9, 10, 11], [0, 1, 2, 3, 4, 5]]),
    )
    alone = with_token_keys(params, rows, row_ids, key)
    together = with_token_keys(params, packed, row_ids, key)
    bits = np.asarray(jax.random.key_data(alone.keys))  # [2, 6, words]
    np.testing.assert_array_equal(bits[::-1].reshape(12, -1), jax.random.key_data(together.keys)[0])
    assert len(np.unique(bits.reshape(12, -1), axis=0)) == 12
    layers = with_dropout(params, alone.keys)["layers"]["wq"].keys
    assert layers.shape == (2, 2, 6) and not np.any(layers[0] == layers[1])
    undropped = attach(dataclasses.replace(lora, dropout=0.0), base, moved(lora))
    assert with_token_keys(undropped, rows, row_ids, key) is rows
    assert with_token_keys(params, rows, row_ids, None) is rows
    assert with_dropout(params, None) is params
