"""Mixtures of experts against all experts for all tokens, transformers, and others on meshes."""

import dataclasses
import functools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import AutoConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.olmoe.modeling_olmoe import OlmoeSparseMoeBlock
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from jaxrl.models import experts as module
from jaxrl.models.architecture import Experts
from jaxrl.models.experts import expert_mlp, route
from jaxrl.parallel import Placement, ShardingRules, make_mesh

B, T, D, E, K, F, S = 8, 3, 16, 8, 2, 12, 20
PLAIN = Experts(count=E, per_token=K, width=F, normalise=True)
QWEN2 = dataclasses.replace(PLAIN, normalise=False, shared_width=S, shared_gate=True)
DEEPSEEK = dataclasses.replace(
    PLAIN,
    scoring="sigmoid",
    scaling=2.5,
    groups=4,
    groups_per_token=2,
    bias=True,
    shared_width=S,
)
GPT_OSS = dataclasses.replace(
    PLAIN, normalise=True, linear_bias=True, swiglu_limit=1.5, swiglu_alpha=1.702
)
KINDS = {"plain": PLAIN, "qwen2": QWEN2, "deepseek": DEEPSEEK, "gpt-oss": GPT_OSS}
RULES = ShardingRules(batch=("data", "fsdp", "expert"))


def draw(experts, seed=0, rows=B):
    """Weights and rows, float32."""
    rng = np.random.default_rng(seed)
    e, f = experts.count, experts.width
    shapes = {"router": (D, e), "experts_gate": (e, D, f), "experts_up": (e, D, f)}
    shapes["experts_down"] = (e, f, D)
    if experts.bias:
        shapes["router_bias"] = (e,)
    if experts.linear_bias:
        shapes |= {"router_offset": (e,), "experts_down_bias": (e, D)}
        shapes |= {"experts_gate_bias": (e, f), "experts_up_bias": (e, f)}
    if experts.shared_width:
        shapes |= {"shared_gate": (D, S), "shared_up": (D, S), "shared_down": (S, D)}
    if experts.shared_gate:
        shapes["shared_router"] = (D, 1)
    normal = lambda shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    weights = {name: normal(shape) / 2 for name, shape in shapes.items()}
    return jax.device_put(weights), jax.device_put(normal((rows, T, D)))


def by_every_expert(experts, weights, y, ids):
    """Every expert for all tokens, times a weight that is 0 where it was not chosen."""
    logits = y @ weights["router"] + weights.get("router_offset", 0)
    scores = module.SCORES[experts.scoring](logits)
    chosen = jnp.take_along_axis(scores, ids, axis=-1)
    if experts.normalise:
        chosen = chosen / chosen.sum(axis=-1, keepdims=True)
    chosen = chosen * experts.scaling

    def part(name, x):
        product = jnp.einsum("btex,exf->btef", x, weights[f"experts_{name}"])
        return product + weights.get(f"experts_{name}_bias", 0)

    every = jnp.broadcast_to(y[:, :, None], (*y.shape[:2], experts.count, D))
    gate, up = part("gate", every), part("up", every)
    hidden = jax.nn.silu(gate) * up
    if experts.swiglu_limit:  # 1.5
        gate, up = jnp.minimum(gate, 1.5), jnp.clip(up, -1.5, 1.5)
        hidden = gate * jax.nn.sigmoid(1.702 * gate) * (up + 1)
    of_expert = jnp.where(ids[..., None] == jnp.arange(experts.count), chosen[..., None], 0)
    out = (of_expert.sum(axis=2)[..., None] * part("down", hidden)).sum(axis=2)
    if experts.shared_width:
        hidden = jax.nn.silu(y @ weights["shared_gate"]) * (y @ weights["shared_up"])
        shared = hidden @ weights["shared_down"]
        gate = jax.nn.sigmoid(y @ weights["shared_router"]) if experts.shared_gate else 1
        out = out + gate * shared
    return out, module.Routing(ids, chosen, logits, jnp.zeros(y.shape[:2]))


def all_of(run):
    """Return a program: output, routing, and gradients of a loss of output, weights and logits."""

    def loss(weights, y, *ids):
        out, routing = run(weights, y, *ids)
        z = jnp.square(jax.nn.logsumexp(routing.logits, axis=-1)).sum()
        numbers = jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape)
        balance = jnp.square(routing.weights).sum()
        return (numbers * jnp.sin(out)).sum() + 0.1 * (z + balance), (out, routing)

    gradient = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))

    def program(weights, y, *ids):
        (_, (out, routing)), grads = gradient(weights, y, *ids)
        found = {"out": out, **routing._asdict(), **grads[0], "y": grads[1]}
        del found["differs"]  # tests/training/test_router_replay.py
        return {name: np.asarray(x) for name, x in found.items()}

    return program


def assert_close(found, expected, tolerance=1e-5):
    assert found.keys() == expected.keys()
    for name in expected:
        a, b = np.asarray(found[name]), np.asarray(expected[name])
        assert np.abs(a - b).max() <= tolerance * np.abs(b).max(), name


def sparse(experts, **settings):
    """Of weights, tokens and, if they are given, the ids that were chosen."""

    def run(weights, y, ids=None):
        return expert_mlp(experts, jax.nn.silu, weights, y, replay=ids, **settings)

    return run


@functools.cache
def program_of(experts):
    """One for all tests of the same shapes."""
    return all_of(sparse(experts))


@functools.cache
def reference_of(experts):
    return all_of(functools.partial(by_every_expert, experts))


@functools.cache
def on_one_device(kind):
    return program_of(KINDS[kind])(*draw(KINDS[kind]))


@pytest.mark.parametrize("kind", KINDS)
def test_value_and_gradients_are_those_of_every_expert_for_all_tokens(kind):
    experts, found = KINDS[kind], on_one_device(kind)
    assert_close(found, reference_of(experts)(*draw(experts), found["ids"]))
    assert not experts.bias or not found["router_bias"].any()


def test_a_replayed_choice_is_used_and_the_router_has_a_gradient():
    ids = np.random.default_rng(1).permuted(np.tile(np.arange(E), (B, T, 1)), axis=2)
    ids = ids[..., :K].astype(np.int32)
    found = program_of(PLAIN)(*draw(PLAIN), ids)
    np.testing.assert_array_equal(found["ids"], ids)
    assert_close(found, reference_of(PLAIN)(*draw(PLAIN), ids))
    assert np.abs(found["router"]).max() > 0.1


def test_a_row_without_a_recorded_choice_chooses_for_itself():
    live, ids = on_one_device("plain"), np.zeros((B, T, K), np.int32) + np.int32([1, 6])
    ids[::2] = E
    found = program_of(PLAIN)(*draw(PLAIN), ids)
    np.testing.assert_array_equal(found["ids"][::2], live["ids"][::2])
    np.testing.assert_array_equal(found["ids"][1::2], ids[1::2])
    np.testing.assert_allclose(found["out"][::2], live["out"][::2], rtol=1e-5, atol=1e-5)


routed = jax.jit(route, static_argnums=0)


def test_weights_of_softmax():
    """Of the scores 0.1, 0.2, 0.3 and 0.4 the best two, of sum 0.7."""
    expected = np.float32([[0.1, 0.2, 0.3, 0.4], [0.4, 0.3, 0.2, 0.1]])
    logits = np.log(expected)
    experts = Experts(count=4, per_token=2, width=1, normalise=True, scaling=7)
    routes, scores = routed(experts, logits)
    np.testing.assert_array_equal(routes.ids, [[3, 2], [0, 1]])
    np.testing.assert_allclose(routes.weights, [[4, 3], [4, 3]], rtol=1e-6)
    np.testing.assert_allclose(scores, expected, rtol=1e-6)
    replayed, _ = routed(experts, logits, replay=np.array([[0, 1], [4, 4]], np.int32))
    np.testing.assert_array_equal(replayed.ids, [[0, 1], [0, 1]])
    np.testing.assert_allclose(replayed.weights, [[7 / 3, 14 / 3], [4, 3]], rtol=1e-6)


def test_groups_and_bias_decide_the_choice_alone():
    """Groups' two best are 0.9 + 0.1 and 0.6 + 0.5: the best expert is in the one not chosen."""
    scores = np.float32([[0.9, 0.1, 0.0001, 0.6, 0.5, 0.4]])
    logits = np.log(scores / (1 - scores))
    settings = {"groups": 2, "scoring": "sigmoid", "normalise": False}
    experts = Experts(count=6, per_token=2, width=1, bias=True, **settings)
    routes, _ = routed(experts, logits, np.zeros(6, np.float32))
    np.testing.assert_array_equal(routes.ids, [[3, 4]])
    routes, _ = routed(experts, logits, np.float32([0, 0, 0, 0, 0, 0.3]))
    np.testing.assert_array_equal(routes.ids, [[5, 3]])
    np.testing.assert_allclose(routes.weights, [[0.4, 0.6]], rtol=1e-5)
    routes, _ = routed(experts, logits, np.float32([-9.0, -9, -9, -9, -9, -9]))
    np.testing.assert_array_equal(routes.ids, [[3, 4]])  # and none of a closed group


# ---------------------------------------------------------------- transformers

COMMON = {"hidden_size": D, "num_experts_per_tok": K, "hidden_act": "silu"}
NARROW = COMMON | {"moe_intermediate_size": F, "num_experts": E}
DEEPSEEK_HF = COMMON | {
    "moe_intermediate_size": S,  # the shared expert's too
    "n_shared_experts": 1,
    "n_routed_experts": E,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
}
SHARED = {"shared_expert_intermediate_size": S, "norm_topk_prob": False}
BLOCKS = {
    "qwen3_moe": (Qwen3MoeSparseMoeBlock, NARROW | {"norm_topk_prob": True}, PLAIN),
    "qwen2_moe": (Qwen2MoeSparseMoeBlock, NARROW | SHARED, QWEN2),
    "mixtral": (
        MixtralSparseMoeBlock,
        COMMON | {"num_local_experts": E, "intermediate_size": F},
        PLAIN,
    ),
    "olmoe": (
        OlmoeSparseMoeBlock,
        COMMON | {"num_experts": E, "intermediate_size": F, "norm_topk_prob": False},
        dataclasses.replace(PLAIN, normalise=False),
    ),
    "deepseek_v3": (DeepseekV3MoE, DEEPSEEK_HF, dataclasses.replace(DEEPSEEK, width=S)),
}


@pytest.mark.parametrize("kind", BLOCKS)
def test_as_transformers(kind):
    """The same choice, weights, outputs and gradients of y."""
    block_class, numbers, experts = BLOCKS[kind]
    config = AutoConfig.for_model(kind, **numbers)
    config._experts_implementation = "eager"
    block = block_class(config)
    weights, y = draw(experts)
    both = np.concatenate([weights["experts_gate"], weights["experts_up"]], axis=2)
    names = {"experts.gate_up_proj": both, "experts.down_proj": weights["experts_down"]}
    names["gate.weight"] = weights["router"]
    if experts.bias:
        names["gate.e_score_correction_bias"] = weights["router_bias"]
    if experts.shared_width:
        prefix = "shared_expert" if experts.shared_gate else "shared_experts"
        for part in ("gate", "up", "down"):
            names[f"{prefix}.{part}_proj.weight"] = weights[f"shared_{part}"]
    if experts.shared_gate:
        names["shared_expert_gate.weight"] = weights["shared_router"]
    state = {
        name: torch.from_numpy(np.swapaxes(np.array(x), -1, -2) if x.ndim > 1 else np.array(x))
        for name, x in names.items()
    }
    block.load_state_dict(state)
    rows = torch.from_numpy(np.array(y)).requires_grad_()
    out = block.eval()(rows)
    out.sin().sum().backward()
    _, chosen_weights, ids = block.gate(rows.reshape(-1, D))

    loss = lambda y: (jnp.sin((r := sparse(experts)(weights, y))[0]).sum(), r)  # noqa: E731
    gradient, (found, routing) = jax.jit(jax.grad(loss, has_aux=True))(y)
    theirs = by_id(ids.numpy(), chosen_weights.detach().numpy())
    ours = by_id(*(np.asarray(x).reshape(-1, K) for x in (routing.ids, routing.weights)))
    np.testing.assert_array_equal(ours["ids"], theirs["ids"])
    expected = {"out": out.detach(), "y": rows.grad, **theirs}
    assert_close({"out": found, "y": gradient, **ours}, expected)


def by_id(ids, weights):
    """Each row's by rising id: DeepSeek's choice has no order."""
    order = np.argsort(ids, axis=1)
    return {
        "ids": np.take_along_axis(ids, order, axis=1),
        "weights": np.take_along_axis(weights, order, axis=1),
    }


# ---------------------------------------------------------------- few, many, none


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("rows", "count", "chosen"),
    [(B, E, [5, 5]), (B, E, [0, 7]), (1, 16, [15, 2])],
    ids=["all to one expert", "empty experts", "more experts than tokens"],
)
def test_uneven_loads(rows, count, chosen):
    experts = dataclasses.replace(PLAIN, count=count)
    ids = np.zeros((rows, T, K), np.int32) + np.array(chosen, np.int32)
    given = *draw(experts, rows=rows), ids
    found = program_of(experts)(*given)
    assert_close(found, reference_of(experts)(*given))
    unused = np.setdiff1d(np.arange(count), chosen)
    assert not found["experts_gate"][unused].any() and not found["experts_down"][unused].any()


# ---------------------------------------------------------------- meshes

MESHES = (
    {"expert": 8},
    # both axes are in the next one, too
    pytest.param({"expert": 4, "fsdp": 2}, marks=pytest.mark.slow),
    {"expert": 2, "tensor": 2, "fsdp": 2},
    {"fsdp": 8},
    {"data": 2, "tensor": 4},
)


def named(sizes):
    return " ".join(f"{axis} {size}" for axis, size in sizes.items())


@pytest.mark.parametrize("sizes", MESHES, ids=named)
def test_on_any_mesh_as_on_one_device(sizes):
    placement = Placement(make_mesh(**sizes), RULES)
    assert_close(all_of(sparse(QWEN2, placement=placement))(*draw(QWEN2)), on_one_device("qwen2"))


@pytest.mark.parametrize("sizes", [{"expert": 2, "tensor": 2, "fsdp": 2}], ids=named)
def test_biases_are_added_once_on_a_mesh(sizes):
    placement = Placement(make_mesh(**sizes), RULES)
    found = all_of(sparse(GPT_OSS, placement=placement))(*draw(GPT_OSS))
    assert_close(found, on_one_device("gpt-oss"))


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("sizes", "rules", "rows"),
    [
        ({"expert": 4, "data": 2}, RULES, 3),  # rows that no axis divides
        ({"expert": 4, "tensor": 2}, ShardingRules(batch=("data", "fsdp")), B),
        ({"expert": 8}, RULES, 1),  # of 12 experts, which stay whole
    ],
    ids=["whole rows", "experts apart from rows", "whole experts"],
)
def test_what_the_mesh_does_not_divide_stays_whole(sizes, rules, rows):
    experts = dataclasses.replace(DEEPSEEK, count=12 if rows == 1 else E)
    ids = np.random.default_rng(2).integers(0, 3, (rows, T, K)) * 2 + [0, 1]
    given = *draw(experts, rows=rows), ids.astype(np.int32)
    placement = Placement(make_mesh(**sizes), rules)
    assert_close(all_of(sparse(experts, placement=placement))(*given), program_of(experts)(*given))


def test_bfloat16_is_gathered_and_sums_over_devices_are_float32():
    """Tokens travel as they are; sums of value and gradient over experts, width and rows do not."""
    placement = Placement(make_mesh(expert=2, tensor=2, fsdp=2), RULES)
    weights, y = draw(PLAIN)

    def loss(weights, y):
        out, _ = sparse(PLAIN, placement=placement)(weights, y)
        return jnp.square(out.astype(jnp.float32)).sum()

    run = jax.jit(jax.value_and_grad(loss, (0, 1)))
    program = run.lower(weights, y.astype(jnp.bfloat16)).as_text()
    result = r'"stablehlo\.(all_gather|all_reduce|reduce_scatter)".*?-> tensor<([^>]*)>'
    results = re.findall(result, program, re.S)
    assert ("all_gather", "12x16xbf16") in results
    sums = [shape for kind, shape in results if kind != "all_gather"]
    # the output, gradients of tokens and weights over experts; of y and four arrays over the rest
    assert len(sums) == 3 + 5 and all(shape.endswith("f32") for shape in sums)


# ---------------------------------------------------------------- what a row is made of


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_a_row_depends_neither_on_its_neighbours_nor_on_its_place(dtype):
    """To the bit, as policy and sampler need it that see a token among different others."""
    weights, y = draw(QWEN2, rows=32)
    run = jax.jit(functools.partial(sparse(QWEN2), weights))
    y, rng = np.asarray(y).astype(dtype), np.random.default_rng(3)
    out, weights_of = of_run(run, y)
    assert out.dtype == dtype
    order = rng.permutation(32)
    moved, moved_weights = of_run(run, y[order])
    np.testing.assert_array_equal(moved, out[order])
    np.testing.assert_array_equal(moved_weights, weights_of[order])
    for place in (0, 13, 31):
        others = rng.standard_normal(y.shape).astype(dtype)
        others[place] = y[place]
        np.testing.assert_array_equal(of_run(run, others)[0][place], out[place])


def of_run(run, y):
    out, routing = run(y)
    return np.asarray(out), np.asarray(routing.weights)


# ---------------------------------------------------------------- what is not there


def test_nothing_is_larger_than_the_assignments_and_nothing_is_scattered(monkeypatch):
    """Of 512 tokens to 2 of 16 experts the largest array is [1024, 16]: not [512, 16, 12]."""
    experts = dataclasses.replace(PLAIN, count=16)
    weights, _ = draw(experts)
    y = jax.ShapeDtypeStruct((64, 8, D), jnp.float32)
    loss = lambda weights, y: jnp.sin(sparse(experts)(weights, y)[0]).sum()  # noqa: E731
    program = str(jax.make_jaxpr(jax.grad(loss, (0, 1)))(weights, y))
    shapes = re.findall(r"\b[fib]\w*\[([\d,]+)\]", program)
    assert max(np.prod([int(n) for n in shape.split(",")]) for shape in shapes) == 1024 * 16
    first = lambda x, w, sizes, kernel: x @ w[0]  # noqa: E731 - whose own sums are over tiles
    monkeypatch.setattr(module, "grouped_product", first)
    assert "scatter" not in str(jax.make_jaxpr(jax.grad(loss, 1))(weights, y))


def test_the_description_is_json():
    for experts in KINDS.values():
        described = json.loads(json.dumps(dataclasses.asdict(experts)))
        assert Experts(**described | {"dense_layers": tuple(described["dense_layers"])}) == experts


@pytest.mark.slow  # the TPU compiler
@pytest.mark.parametrize("kind", ["v5e:2x2", "v5p:2x2x1"])
@pytest.mark.parametrize("sizes", [{}, {"expert": 4}], ids=["one chip", "expert 4"])
def test_on_a_tpu_a_layer_costs_what_its_tokens_use(kind, sizes):
    """Qwen3-30B-A3B's experts, 4,096 tokens of a chip: 3 products, each with 2 in the gradient."""
    pytest.importorskip("libtpu")
    from jaxrl.tools.plan.topology import topology_devices

    wide = Experts(count=128, per_token=8, width=768, normalise=True)
    width, tokens, chips = 2048, 4096, sizes.get("expert", 1)
    mesh = make_mesh(devices=topology_devices(kind)[:chips], **sizes)
    placement = Placement(mesh)

    def shape(size, names, dtype):
        sharding = jax.sharding.NamedSharding(mesh, placement.spec(size, names))
        return jax.ShapeDtypeStruct(size, dtype, sharding=sharding)

    weights = {
        "router": shape((width, 128), (None, None), jnp.float32),
        **{
            f"experts_{name}": shape((128, *size), ("experts", None, None), jnp.float32)
            for name, size in (
                ("gate", (width, 768)),
                ("up", (width, 768)),
                ("down", (768, width)),
            )
        },
    }
    y = shape((chips, tokens, width), ("batch", None, None), jnp.bfloat16)

    def loss(weights, y):
        out, _ = expert_mlp(wide, jax.nn.silu, weights, y, placement=placement, kernel="megablox")
        return out.astype(jnp.float32).sum()

    compiled = jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).lower(weights, y).compile()
    rows = tokens * 8
    active = 3 * 3 * 2 * rows * width * 768
    router = 3 * 2 * tokens * width * 128
    assert compiled.cost_analysis()["flops"] < 1.3 * (active + router) * chips
    found = re.findall(r"(?:bf16|f32|s32)\[([\d,]+)\]", compiled.as_text())
    largest = max(np.prod([int(n) for n in dims.split(",")]) for dims in set(found))
    # neither [tokens, experts, width] nor a row for each token and expert
    assert largest <= max(rows * chips * width, 128 * width * 768)
