"""Layers that keep a state: packing, periods, meshes, and gradients as transformers has them."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.models import (
    forward,
    init_params,
    lora,
    transformer,
    unembed,
)
from jaxrl.models.architecture import (
    LATER_FIELDS,
    NOT_OF_WEIGHTS,
    DeltaNet,
    Experts,
    ShortConvolution,
    TransformerConfig,
    layer_params,
    layer_periods,
    state_elements,
)
from jaxrl.models.linear import base, merge
from jaxrl.models.peft_format import load_adapter, save_adapter
from jaxrl.models.placement import model_shardings, place_model
from jaxrl.models.transformer import abstract_params
from jaxrl.parallel import ShardingRules, make_mesh

DELTA = TransformerConfig(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    qk_norm=True,
    unit_offset_norm=True,
    output_gate=True,
    rotary_dim=4,
    mixers=("delta", "attention"),
    delta_net=DeltaNet(key_heads=2, value_heads=4, key_dim=8, value_dim=12, window=4),
    initializer_range=0.1,  # with 0.3 the last bits of parameters move gradients by 6e-5
)
GROUPED = dataclasses.replace(
    DELTA,
    delta_net=dataclasses.replace(DELTA.delta_net, grouped=True),
    experts=Experts(count=4, per_token=2, width=16, normalise=True),
)
REPEATING = dataclasses.replace(
    GROUPED,
    num_layers=5,
    mixers=("delta", "attention") * 2 + ("delta",),
    experts=dataclasses.replace(GROUPED.experts, dense_layers=(4,)),
)
CONVOLUTION = TransformerConfig(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    qk_norm=True,
    mixers=("convolution", "attention"),
    convolution=ShortConvolution(window=3, bias=True),
    initializer_range=0.1,
)
CONFIGS = {"delta": DELTA, "grouped": GROUPED, "convolution": CONVOLUTION}
LENGTHS = (9, 70, 23)  # of three sequences; a chunk is of 64 tokens


def rows(lengths_of_rows, width, seed=0):
    """Tokens, positions and segments of rows of these sequences; all begin with the same ids."""
    ids = np.random.default_rng(seed).integers(0, 61, (len(LENGTHS), max(LENGTHS)))
    shape = len(lengths_of_rows), width
    tokens, positions, segments = (np.zeros(shape, int) for _ in range(3))
    tokens[:] = 7  # padding is of real ids
    for row, sequences in enumerate(lengths_of_rows):
        at = 0
        for number, which in enumerate(sequences, 1):
            size = LENGTHS[which]
            here = slice(at, at + size)
            tokens[row, here], positions[row, here] = ids[which, :size], np.arange(size)
            segments[row, here] = number
            at += size
    return tokens, positions, segments


@partial(jax.jit, static_argnums=0, static_argnames=("remat", "placement"))
def loss_and_gradient(config, params, tokens, positions, segments, **options):
    """A sum over tokens that counts each with a weight of its id and its place."""

    def loss(params):
        hidden = forward(config, params, tokens, positions, segments, **options)
        logits = jax.nn.log_softmax(unembed(config, params, hidden))
        chosen = jnp.take_along_axis(logits, ((tokens + 1) % 61)[..., None], axis=-1)[..., 0]
        return jnp.sum(chosen * (segments > 0) * jnp.cos(positions + tokens))

    return jax.value_and_grad(loss)(params)


def assert_close(found, expected, tolerance=1e-5):
    """Within a tolerance relative to the largest number of each leaf."""
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, atol=tolerance * max(1.0, np.abs(other).max()))


@pytest.mark.parametrize(
    "name",
    ["delta", *(pytest.param(name, marks=pytest.mark.slow) for name in ("grouped", "convolution"))],
)
def test_loss_and_gradient_depend_on_no_packing(name):
    config, params = CONFIGS[name], init_params(CONFIGS[name], 0)
    alone = loss_and_gradient(config, params, *rows([[0], [1], [2]], 72))
    packed = loss_and_gradient(config, params, *rows([[0, 1, 2]], 128), remat="full")
    assert_close(packed, alone)


# With experts besides, on (expert 2, tensor 2, fsdp 2), the float32 gradient of a Qwen3-Next with
# wide weights is 3.3e-4 from that of one device, and it is rounding: in float64 the two are 1.3e-14
# apart, and float32 is 4.0e-4 from there on one device, 7.5e-5 on eight. A change of the parameters
# by 6e-8 moves the gradient by 1.9e-4, and in proportion down to 6e-10: no router is at a tie.
@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"fsdp": 4}, {"tensor": 2}, {"data": 2, "fsdp": 2, "tensor": 2}])
@pytest.mark.parametrize("name", CONFIGS)
def test_every_mesh_has_the_same_loss_and_gradient(name, sizes):
    config, params = CONFIGS[name], init_params(CONFIGS[name], 0)
    given = rows([[0], [1], [2], [0, 2]], 96)
    expected = loss_and_gradient(config, params, *given)
    mesh = make_mesh(devices=jax.devices()[: int(np.prod([*sizes.values()]))], **sizes)
    placement = place_model(config, mesh, ShardingRules())
    spread = jax.device_put(params, model_shardings(config, placement))
    assert_close(loss_and_gradient(config, spread, *given, placement=placement), expected)


def test_layers_that_repeat_are_one_period():
    """48 layers: three without attention and one with, twelve times; 16 of LFM2-1.2B."""
    next_80b = dataclasses.replace(GROUPED, num_layers=48, experts=Experts(4, 2, 16))
    next_80b = dataclasses.replace(next_80b, mixers=(("delta",) * 3 + ("attention",)) * 12)
    assert [(p.times, [r.kind for r in p.runs]) for p in layer_periods(next_80b)] == [
        (12, ["delta_experts", "experts"])
    ]
    kinds = "ccaccaccacacacac"
    mixers = tuple({"c": "convolution", "a": "attention"}[kind] for kind in kinds)
    lfm2 = dataclasses.replace(CONVOLUTION, num_layers=16, mixers=mixers)
    assert [(p.times, p.layers()) for p in layer_periods(lfm2)] == [(3, 3), (3, 2), (1, 1)]


def test_a_scan_over_periods_goes_through_all_layers(monkeypatch):
    params, given = init_params(REPEATING, 0), rows([[0]], 16)
    assert [p.times for p in layer_periods(REPEATING)] == [2, 1]
    scanned = jax.jit(partial(forward, REPEATING))(params, *given)
    monkeypatch.setattr(transformer, "MAX_UNROLLED_LAYERS", 5)
    apart = jax.jit(partial(forward, REPEATING))(params, *given)
    assert np.std(apart) > 0.1
    np.testing.assert_allclose(scanned, apart, atol=1e-5)


def test_rows_that_are_spread_over_devices_are_refused():
    mesh = make_mesh(devices=jax.devices()[:2], context=2)
    with pytest.raises(ValueError, match=r"policy\.mesh\.context=2: .* state .* set it to 1"):
        place_model(DELTA, mesh, ShardingRules())


def test_heads_that_the_tensor_axis_does_not_divide_are_refused():
    mesh = make_mesh(devices=jax.devices()[:4], tensor=4)
    with pytest.raises(ValueError, match=r"tensor=4 does not divide .* linear_num_key_heads=2"):
        place_model(DELTA, mesh, ShardingRules())


def test_parameters_and_states_are_counted():
    """Of a layer: q, k 2 * 16 and v 48 channels, gate and output 48 each, 2 * 4 of b and a."""
    attention = 32 * 8 * (3 * 4 + 2 * 2)  # queries, their gates, the output; keys, values
    delta = 32 * (80 + 2 * 48 + 2 * 4) + 80 * 4
    assert layer_params(DELTA) == attention + delta + 2 * 3 * 32 * 48
    assert state_elements(DELTA) == 4 * 8 * 12 + 3 * 80
    assert state_elements(CONVOLUTION) == 2 * 32


def test_a_model_of_attention_alone_is_described_as_ever():
    plain = dataclasses.replace(DELTA, mixers=(), delta_net=None, output_gate=False)
    plain = dataclasses.replace(plain, rotary_dim=None)
    known = {f.name for f in dataclasses.fields(plain) if f.compare} - {*NOT_OF_WEIGHTS}
    assert transformer.describe(plain).keys() == known - {*LATER_FIELDS}
    own = {"rotary_dim", "output_gate", "mixers", "delta_net"}
    assert transformer.describe(DELTA).keys() == known - {*LATER_FIELDS} | own


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_adapters_of_every_matrix_are_those_of_the_merged_model(name, tmp_path):
    config, given = CONFIGS[name], rows([[0]], 16)
    modules = lora.select_modules(config, "all-linear")
    made = lora.LoraConfig(config, modules, rank=2)
    rng = np.random.default_rng(0)
    adapters = jax.tree.map(
        lambda x: np.float32(0.1 * rng.standard_normal(x.shape)), abstract_params(made)
    )
    params = lora.attach(made, init_params(config, 0), adapters)
    run = jax.jit(partial(forward, config))
    np.testing.assert_allclose(run(params, *given), run(merge(params), *given), atol=2e-5)
    assert np.abs(run(params, *given) - run(base(params), *given)).max() > 0.01
    save_adapter(tmp_path / "adapter", made, adapters, base="base")
    _, again = load_adapter(tmp_path / "adapter", config)
    jax.tree.map(np.testing.assert_array_equal, again, adapters)
