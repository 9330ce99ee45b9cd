"""Exact gradients: of a minibatch the same bits, however it is cut and wherever it is computed."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.config import AlgorithmConfig
from jaxrl.data.microbatches import Microbatching
from jaxrl.models.exact import choose_tiles
from jaxrl.models.placement import model_shardings
from jaxrl.models.transformer import init_params
from jaxrl.parallel import Placement, ShardingRules, batch_sharding, make_mesh, replicated
from jaxrl.training.forward import log_probs_and_entropy
from jaxrl.training.forward_pass import ForwardPass
from jaxrl.training.objective import minibatch_weights, policy_objective
from jaxrl.training.optim import abstract_state, make_apply, make_optimizer, make_schedule
from jaxrl.training.update import PairwiseSum, Updater
from jaxrl.types import TrainBatch
from tests.models.test_exact import KINDS, MODEL

pytestmark = pytest.mark.usefixtures("as_users_compile")
ROWS, WIDTH = 10, 96


def batch_of(lengths):
    draw, count = np.random.default_rng(1), len(lengths)
    ends = np.array(lengths)[:, None]
    at = np.arange(WIDTH)
    mask = ((at >= 5) & (at < ends)).astype(np.float32)
    tokens = np.where(at < ends, draw.integers(0, 96, (count, WIDTH)), 0).astype(np.int32)
    old = (-draw.random((count, WIDTH)) * mask).astype(np.float32)
    return TrainBatch(
        tokens=tokens,
        lengths=np.array(lengths, np.int32),
        response_mask=mask,
        loss_mask=mask,
        policy_versions=np.zeros(count, np.int32),
        rewards=mask,
        index=np.arange(count, dtype=np.int32) // 2,
        row_ids=np.arange(count, dtype=np.int32),
        rollout_log_probs=old,
        old_log_probs=old,
        advantages=(draw.standard_normal((count, WIDTH)) * mask).astype(np.float32),
        returns=mask,
    )


def gradient(model, microbatch, mesh, dtype, parts=1, mode="full"):
    """The gradient of a minibatch of ten rows, through the real update."""
    tiles = choose_tiles(mode, "cpu", tokens=None, parts=parts)
    placement = Placement(mesh, ShardingRules())
    algorithm = AlgorithmConfig(policy_loss_type="regular", use_kl_loss=False)
    settings = {"temperature": 1.0, "dtype": dtype, "tiles": tiles}
    where = placement if mesh.size > 1 else None
    forward = functools.partial(log_probs_and_entropy, model, **settings, placement=where)
    groups = placement.size(placement.rules.batch)
    total = -(-ROWS // microbatch) * microbatch
    cut = Microbatching(microbatch, total, groups=groups, widths=(WIDTH,))
    schedule = make_schedule("constant", lr=1e-2, num_warmup_steps=0, total_steps=10)
    optimizer = make_optimizer(schedule, adam_betas=(0.9, 0.99), weight_decay=0.0, max_grad_norm=1)
    shardings, spread = model_shardings(model, placement), batch_sharding(mesh, placement.rules)
    state = abstract_state(optimizer, model, shardings, replicated(mesh))
    updater = Updater(
        ForwardPass(forward, lambda x: jax.device_put(x, spread), cut, {"with_entropy": False}),
        make_apply(optimizer, schedule),
        objective=policy_objective(algorithm, microbatch // groups),
        shardings=jax.tree.map(lambda x: x.sharding, state),
        microbatching=cut,
        full=mode == "full",
    )
    params = jax.device_put(init_params(model, 0), shardings)
    batch = batch_of((90, 33, 7, 64, 65, 12, 80, 96, 50, 20))
    weights, _ = minibatch_weights(batch, algorithm, block_rows=1)
    grads, _ = updater.gradients(params, batch, jax.device_get(weights), jax.random.key(0))
    return jax.device_get(grads)


def one_device():
    return make_mesh(devices=jax.devices()[:1])


def differing(found, expected):
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    return sum(int((x != y).sum()) for x, y in pairs)


@functools.cache
def expected(model, dtype, parts=1):
    return gradient(model, 1, one_device(), dtype, parts)


@pytest.mark.some(1)
@pytest.mark.parametrize("kind", ["plain", "head apart"])
@pytest.mark.parametrize("microbatch", [2, 4, 8])
def test_no_cut_into_microbatches_changes_a_bit(kind, microbatch):
    """Of one layer, of which the programs take half as long to compile; the others have more."""
    model = dataclasses.replace(KINDS[kind], num_layers=1)
    found = gradient(model, microbatch, one_device(), jnp.float32)
    assert differing(found, expected(model, jnp.float32)) == 0


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "tensor"), [(4, 2), (8, 1), (2, 2)])
def test_nor_do_devices(rows, tensor):
    mesh = make_mesh(fsdp=rows, tensor=tensor, devices=jax.devices()[: rows * tensor])
    found = gradient(MODEL, 8, mesh, jnp.bfloat16, parts=2)
    assert differing(found, expected(MODEL, jnp.bfloat16, parts=2)) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["plain", "windows and caps", "sinks and biases", "gate and norms", "experts"]
)
def test_in_models_of_all_kinds(kind):
    found = gradient(KINDS[kind], 4, one_device(), jnp.bfloat16)
    assert differing(found, expected(KINDS[kind], jnp.bfloat16)) == 0


@pytest.mark.slow
def test_without_the_tree_they_are_apart():
    one, four = (gradient(MODEL, n, one_device(), jnp.float32, mode="log_probs") for n in (1, 4))
    assert differing(one, four) > 0


@pytest.mark.parametrize("size", [1, 2, 4])
def test_sums_of_microbatches_are_those_of_a_tree(size):
    """Eleven numbers as letters: ((((ab)(cd))((ef)(gh))) ((ij)k)), whatever waits where."""
    letters = "abcdefghijk"

    def pairs(text):
        if len(text) < 2:
            return text
        half = 1 << (len(text) - 1).bit_length() - 1
        return f"({pairs(text[:half])}{pairs(text[half:])})"

    total = PairwiseSum(lambda: "", lambda x, y: f"({x}{y})", lambda x: x)
    for first in range(0, len(letters), size):
        assert total.begin() == ""
        total.put(pairs(letters[first : first + size]))
    assert total.finish() == pairs(letters) == "((((ab)(cd))((ef)(gh)))((ij)k))"
