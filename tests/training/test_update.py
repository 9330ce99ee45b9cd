"""The real update with a model: its gradient must not depend on how the minibatch is cut."""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl.config import AlgorithmConfig, PolicyConfig, TrainerConfig
from jaxrl.config.objective_requirements import distills
from jaxrl.data.microbatches import Microbatching
from jaxrl.data.packing import row_slices
from jaxrl.losses.reduction import REDUCTIONS
from jaxrl.models.lora import attach
from jaxrl.models.transformer import (
    TransformerConfig,
    abstract_params,
    init_params,
    logical_axes,
)
from jaxrl.parallel import (
    Placement,
    batch_sharding,
    make_mesh,
    param_shardings,
    replicated,
)
from jaxrl.parallel.jit_once import Bound
from jaxrl.registry import PolicyLossRegistry
from jaxrl.training.build import observed_of_routers
from jaxrl.training.forward import log_probs_and_entropy
from jaxrl.training.forward_pass import ForwardPass
from jaxrl.training.objective import (
    merge_metrics,
    minibatch_weights,
    policy_objective,
)
from jaxrl.training.optim import (
    abstract_state,
    init_state,
    make_apply,
    make_optimizer,
    make_schedule,
)
from jaxrl.training.update import Updater, pass_order, rows_without_update
from jaxrl.types import TrainBatch

MODEL = TransformerConfig(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    initializer_range=0.2,
)
ROWS, WIDTH = 8, 16


LENGTHS = (16, 9, 12, 14, 6, 10, 16, 7)


def make_batch(width=WIDTH, lengths=LENGTHS):
    """Eight rows of different lengths; row 3 has an observation inside, row 5 an empty mask."""
    rng = np.random.default_rng(0)
    tokens = np.zeros((ROWS, width), np.int32)
    response = np.zeros((ROWS, width), np.float32)
    lengths = np.array(lengths, np.int32)
    for row, length in enumerate(lengths):
        tokens[row, :length] = rng.integers(1, 32, length)
        response[row, 4:length] = 1
    mask = response.copy()
    mask[3, 8:10] = 0
    mask[5] = 0
    noise = lambda scale: (  # noqa: E731
        np.pad(rng.normal(0, scale, (ROWS, WIDTH)), ((0, 0), (0, width - WIDTH))).astype("float32")
    )
    base = -3 + noise(0.3)
    return TrainBatch(
        tokens=tokens,
        lengths=lengths,
        response_mask=response,
        loss_mask=mask,
        rewards=noise(1.0) * response,
        rollout_log_probs=(base + noise(0.1)) * mask,
        index=np.arange(ROWS, dtype=np.int32) // 2,
        policy_versions=np.zeros(ROWS, np.int32),
        row_ids=np.arange(ROWS, dtype=np.int32),
        old_log_probs=base * response,
        ref_log_probs=(base + noise(0.3)) * response,
        advantages=np.repeat(noise(1.0)[:, :1], width, 1) * response,
        returns=np.zeros((ROWS, width), np.float32),
        token_versions=np.where(mask != 0, tokens % 4, -1).astype(np.int32),
        staleness=np.where(mask != 0, 3 - tokens % 4, 0).astype(np.int32),
    )


@functools.cache
def make_updater(
    algorithm,
    *,
    microbatch_rows,
    devices=1,
    sizes=(),
    model=MODEL,
    lora=None,
    replay="off",
    context="gather",
    exchange="auto",
    kernel="xla",
    teacher=None,
    **packing,
):
    """An updater, parameters, and a function that makes a fresh state of them.

    Cached, because an updater holds its compiled functions.
    """
    placement = Placement(make_mesh(devices=jax.devices()[:devices], **dict(sizes)))
    mesh, groups = placement.mesh, placement.size(placement.rules.batch)
    trained = lora or model
    shardings = param_shardings(
        mesh, logical_axes(trained), abstract_params(trained), placement.rules
    )
    params = jax.device_get(init_params(model, 0))  # cut up on the host: no programs
    base = param_shardings(mesh, logical_axes(model), params, placement.rules)
    params = jax.device_put(params, base)
    if lora is not None:
        drawn = jax.device_get(random_adapters(lora))
        params = attach(lora, params, jax.device_put(drawn, shardings))
    schedule = make_schedule("constant", lr=1e-2, num_warmup_steps=0, total_steps=10)
    optimizer = make_optimizer(
        schedule, adam_betas=(0.9, 0.99), weight_decay=0.0, max_grad_norm=1.0
    )
    forward = Bound(  # equal ones are one program, of whichever updater
        log_probs_and_entropy,
        model,
        temperature=0.9,
        dtype=jnp.float32,
        remat="full",
        kernel=kernel,
        context=context,
        exchange=exchange,
        teacher=teacher,
        placement=placement if devices > 1 else None,
    )
    parts = placement.size(placement.rules.seq)
    cut = Microbatching(microbatch_rows, ROWS, groups=groups, context=parts, **packing)
    rows = batch_sharding(mesh, placement.rules)
    replaying = PolicyConfig(router_replay=replay)
    routers = observed_of_routers(TrainerConfig(algorithm=algorithm, policy=replaying))
    mixed = model.experts is not None
    options = {"with_entropy": False, "teacher_beta": None, "top_k": 0, "states": False}
    options |= {"routers": (), "loads": False} if mixed else {}
    beta = algorithm.distillation.beta if distills(algorithm) else None
    updater = Updater(
        ForwardPass(forward, lambda x: jax.device_put(x, rows), cut, options),
        make_apply(optimizer, schedule),
        objective=policy_objective(algorithm, microbatch_rows // groups, routers),
        shardings=jax.tree.map(
            lambda x: x.sharding, abstract_state(optimizer, trained, shardings, replicated(mesh))
        ),
        microbatching=cut,
        options={"teacher_beta": beta} | ({"routers": routers, "loads": True} if mixed else {}),
    )

    def state():
        donated = jax.tree.map(jnp.copy, params)
        return init_state(optimizer, donated, shardings, replicated(mesh))

    return updater, params, state


@functools.partial(jax.jit, static_argnums=0)
def random_adapters(lora):
    """Adapters whose B is not 0."""
    keys = iter(jax.random.split(jax.random.key(3), 100))
    return jax.tree.map(
        lambda x: 0.2 * jax.random.normal(next(keys), x.shape), abstract_params(lora)
    )


def update(updater, state, batch):
    weights, _ = updater.weights(batch)
    return updater.update(state, batch, weights, jax.random.key(0))


def gradient(algorithm, batch, *, reduction="token_mean", term=None, **cut):
    """Flat gradient and metrics; the weights alone know the reduction, and which term counts."""
    updater, params, _ = make_updater(algorithm, **cut)
    reduced = dataclasses.replace(algorithm, loss_reduction=reduction)
    block_rows = updater.microbatching.rows // updater.microbatching.groups
    weights, _ = minibatch_weights(batch, reduced, block_rows=block_rows)
    if term is not None:
        others = {"policy", "kl", "entropy"} - {term}
        weights = weights.replace(**{name: 0 * getattr(weights, name) for name in others})
    grads, parts = updater.gradients(params, batch, jax.device_get(weights), jax.random.key(1))
    flat = np.concatenate([np.ravel(g) for g in jax.tree.leaves(jax.device_get(grads))])
    return flat, merge_metrics(jax.device_get(parts))


def assert_same(cut, whole):
    grad, metrics = cut
    expected, expected_metrics = whole
    assert np.abs(expected).max() > 1e-4  # the comparison means something
    np.testing.assert_allclose(grad, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    assert metrics.keys() == expected_metrics.keys()
    for name, value in metrics.items():
        assert value == pytest.approx(expected_metrics[name], rel=1e-4, abs=1e-6), name


def algorithm_with(**changes):
    settings = {
        "use_kl_loss": True,
        "kl_loss_coef": 0.1,
        "use_entropy_loss": True,
        "entropy_loss_coef": 0.05,
        "max_seq_len": 24,
    }
    return AlgorithmConfig(**{**settings, **changes})


def test_gradient_does_not_depend_on_microbatches():
    algorithm, batch = algorithm_with(), make_batch()
    whole = gradient(algorithm, batch, microbatch_rows=ROWS)
    cuts = [{"microbatch_rows": 3}]  # of three widths; the last is filled with empty rows
    cuts += [{"microbatch_rows": 1, "widths": (WIDTH,)}]  # of one: fewer programs
    for cut in cuts:
        assert_same(gradient(algorithm, batch, **cut), whole)


PACKINGS = [
    # 16, 16, 14, 12, 10 + 6, 9 + 7 tokens, in rows of 16 of which 8 devices take one each
    {"microbatch_rows": 8, "devices": 8},
    # 16 + 16, 14 + 12, 10 + 9, 7 + 6 tokens, four microbatches of one row of 32
    {"microbatch_rows": 1, "packed_length": 32},
]


# test_invariance.py has all losses, on a model that compiles faster
@pytest.mark.parametrize(
    "loss", ["regular", *(pytest.param(x, marks=pytest.mark.slow) for x in ("gspo", "kl_cov"))]
)
def test_gradient_does_not_depend_on_packing(loss):
    algorithm, batch = algorithm_with(policy_loss_type=loss), make_batch()
    names = "old_log_probs", "ref_log_probs", "advantages"
    held = {name: np.where(batch.loss_mask > 0, getattr(batch, name), np.nan) for name in names}
    batch = batch.replace(**held)  # what is masked must not matter
    whole = gradient(algorithm, batch, microbatch_rows=ROWS)
    for cut in PACKINGS:
        assert_same(gradient(algorithm, batch, packed=True, **cut), whole)


def test_packed_log_probs_are_those_of_padded_rows():
    batch, cut = make_batch(), Microbatching(rows=ROWS, total=ROWS)
    updater, params, _ = make_updater(algorithm_with(), microbatch_rows=4)
    padded = updater.forward_pass(params, batch, microbatching=cut, with_entropy=True)
    cut = dataclasses.replace(cut, packed=True, packed_length=40)
    packed = updater.forward_pass(params, batch, microbatching=cut, with_entropy=True)
    np.testing.assert_allclose(packed, padded, rtol=0, atol=1e-5)
    assert not packed[0][5].any()  # nothing is wanted of row 5
    assert packed[0][3, 7] and packed[0][3, 10]
    assert not packed[0][3, 8:10].any()  # an observation


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_gradient_does_not_depend_on_padding(reduction):
    algorithm, options = algorithm_with(), {"reduction": reduction, "microbatch_rows": 3}
    whole = gradient(algorithm, make_batch(), **options)
    assert_same(gradient(algorithm, make_batch(width=40), **options), whole)


@pytest.mark.some(1)  # tests/parallel/test_meshes.py has one of each kind
@pytest.mark.parametrize(("devices", "fsdp"), [(8, 2), (8, -1), (4, 1)])
def test_gradient_does_not_depend_on_the_mesh(devices, fsdp):
    algorithm, batch = algorithm_with(), make_batch()
    whole = gradient(algorithm, batch, microbatch_rows=ROWS)
    cut = gradient(algorithm, batch, microbatch_rows=8, devices=devices, sizes=(("fsdp", fsdp),))
    assert_same(cut, whole)


@pytest.mark.parametrize("term", ["policy", "kl", "entropy"])
def test_the_gradient_of_each_term_depends_on_no_cut(term):
    algorithm, batch = algorithm_with(), make_batch()
    whole = gradient(algorithm, batch, term=term, microbatch_rows=ROWS)
    all_terms, _ = gradient(algorithm, batch, microbatch_rows=ROWS)
    assert np.abs(whole[0] - all_terms).max() > 1e-4  # the others are there
    cuts = [{"packed": True, **cut} for cut in PACKINGS]
    cuts += [{"microbatch_rows": 3}, SPREAD]
    for cut in cuts:
        assert_same(gradient(algorithm, batch, term=term, **cut), whole)
    assert_same(gradient(algorithm, make_batch(width=40), term=term, microbatch_rows=3), whole)


SPREAD = {"microbatch_rows": 8, "devices": 8, "sizes": (("fsdp", 2),)}


def assert_placed_like(tree, params):
    same = jax.tree.map(lambda x, p: x.sharding.is_equivalent_to(p.sharding, p.ndim), tree, params)
    assert all(jax.tree.leaves(same)), same


def test_gradients_start_where_the_parameters_are():
    updater, params, _ = make_updater(algorithm_with(), **SPREAD)
    assert not params["layers"]["wq"].sharding.is_fully_replicated
    assert_placed_like(updater.zeros(params), params)


def test_an_update_leaves_parameters_and_moments_where_they_were():
    updater, params, fresh_state = make_updater(algorithm_with(), **SPREAD)
    state, _, _ = update(updater, fresh_state(), make_batch())
    assert_placed_like(state.params, params)
    assert_placed_like(optax.tree_utils.tree_get(state.opt_state, "mu"), params)


def scalar_loss(log_probs, old_log_probs, advantages, config, loss_mask=None):
    """Not a sum over tokens: its gradient at one token depends on all the others."""
    ratio = jnp.exp(log_probs - old_log_probs)
    mean = (ratio * advantages * loss_mask).sum() / loss_mask.sum()
    return jnp.square(mean) - mean, 0.25


def test_without_old_log_probs_they_are_those_of_the_update_itself():
    algorithm, batch = algorithm_with(), make_batch()
    cut = {"microbatch_rows": 3, "widths": (WIDTH,)}
    updater, params, _ = make_updater(algorithm, **cut)
    old, _ = updater.forward_pass(params, batch, microbatching=Microbatching(rows=4, total=ROWS))
    told = gradient(algorithm, batch.replace(old_log_probs=old), **cut)
    grad, metrics = gradient(algorithm, batch.replace(old_log_probs=None), **cut)
    difference = np.abs(old - batch.rollout_log_probs)[batch.loss_mask > 0]
    name = "rollout_train_logprobs_abs_diff"
    assert metrics.pop(f"{name}_mean") == pytest.approx(difference.mean(), rel=1e-5)
    assert metrics.pop(f"{name}_max") == pytest.approx(difference.max(), rel=1e-5)
    assert_same((grad, metrics), told)


def test_a_scalar_loss_sees_the_whole_minibatch():
    PolicyLossRegistry.register("scalar_for_test", scalar_loss)
    try:
        algorithm = algorithm_with(policy_loss_type="scalar_for_test")
        batch = make_batch(lengths=(16, 13, 14, 16, 13, 15, 16, 14))  # of one bucket
        whole = gradient(algorithm, batch, microbatch_rows=ROWS)
        assert whole[1]["loss_metrics/clip_ratio"] == pytest.approx(0.25)
        # test_invariance.py has the other cuts; here the last microbatch has empty rows
        assert_same(gradient(algorithm, batch, microbatch_rows=3), whole)
    finally:
        PolicyLossRegistry.unregister("scalar_for_test")


def test_a_loss_gets_the_keywords_it_names_and_its_own_hyperparameters():
    seen = {}

    def nosy(log_probs, old, advantages, config, *, key, group_ids, entropy, beta=1.0):
        seen.update(key=key.shape, group_ids=group_ids.shape, entropy=entropy.shape, beta=beta)
        return beta * -log_probs, {"size_max": jnp.abs(log_probs), "size_min": log_probs}

    PolicyLossRegistry.register("nosy_for_test", nosy)
    try:
        batch = make_batch(lengths=(8, 7, 6, 8, 7, 5, 8, 6))
        algorithm = algorithm_with(
            policy_loss_type="nosy_for_test", policy_loss_kwargs={"beta": 0.5}
        )
        _, metrics = gradient(algorithm, batch, microbatch_rows=2)
        # microbatches of two of 16 places, cut to the bucket of 8 tokens
        assert seen == {"key": (), "group_ids": (2,), "entropy": (2, 8), "beta": 0.5}
        assert metrics["loss_metrics/size_max"] == pytest.approx(-metrics["loss_metrics/size_min"])
        typo = algorithm_with(policy_loss_type="nosy_for_test", policy_loss_kwargs={"bta": 0.5})
        with pytest.raises(ValueError, match=r"policy_loss_kwargs.bta=0.5.*beta"):
            make_updater(typo, microbatch_rows=2)
    finally:
        PolicyLossRegistry.unregister("nosy_for_test")


def test_a_loss_of_the_wrong_shape_is_an_error():
    def per_row(log_probs, old_log_probs, advantages, config):
        return log_probs.sum(-1), {}

    PolicyLossRegistry.register("per_row_for_test", per_row)
    try:
        algorithm = algorithm_with(policy_loss_type="per_row_for_test")
        with pytest.raises(ValueError, match=r"per_row_for_test' returned loss of shape \(8,\)"):
            gradient(algorithm, make_batch(), microbatch_rows=4)
    finally:
        PolicyLossRegistry.unregister("per_row_for_test")


def test_a_gradient_that_is_not_finite_changes_nothing_but_the_count():
    algorithm, batch = algorithm_with(), make_batch()
    updater, _, fresh_state = make_updater(algorithm, microbatch_rows=3)
    state, _, _ = update(updater, fresh_state(), batch)
    before = jax.device_get(state)
    poisoned = batch.replace(advantages=np.where(batch.loss_mask > 0, np.nan, 0))
    state, _, applied = update(updater, state, poisoned)
    assert np.isnan(applied["grad_norm"])
    assert int(state.skipped_updates) == 1
    for old, new in zip(
        jax.tree.leaves((before.params, before.opt_state)),
        jax.tree.leaves((state.params, state.opt_state)),
        strict=True,
    ):
        np.testing.assert_array_equal(old, new)
    state, _, applied = update(updater, state, batch)
    assert np.isfinite(applied["grad_norm"])
    assert int(state.skipped_updates) == 1


def test_row_slices_fill_the_last_one_with_zeros():
    slices = list(row_slices({"a": np.array([1, 2, 3]), "b": np.ones((3, 2))}, 2))
    np.testing.assert_array_equal(slices[1]["a"], [3, 0])
    np.testing.assert_array_equal(slices[1]["b"], [[1, 1], [0, 0]])


def test_metrics_of_a_step_are_means_over_its_minibatches_but_for_max_and_min():
    updates = [{"loss": 1.0, "ratio_max": 2.0, "ratio_min": 0.5}]
    updates += [{"loss": 4.0, "ratio_max": 3.0, "ratio_min": 0.75}]
    # (1 + 4) / 2
    expected = {"loss": 2.5, "ratio_max": 3.0, "ratio_min": 0.5}
    assert merge_metrics(updates, np.mean) == expected


def test_rows_without_update_follow_the_order_of_each_pass():
    batch = types.SimpleNamespace(index=np.repeat(np.arange(4), 2), row_ids=np.arange(8))
    order = pass_order(batch, 7, 3, 1)  # of the second pass
    missed = [1, 0, 1, 1]  # first pass: groups 0, 1 and then 2, 3; second: order[:2], order[2:]
    pending = [([], {"skipped_updates": np.int32(x)}) for x in missed]
    rows = rows_without_update(batch, pending, prompts=2, rng_path=(7, 3))
    assert rows.tolist() == [True] * 4 + [False] * 4
    missed[2:] = [0, 1]
    pending = [([], {"skipped_updates": np.int32(x)}) for x in missed]
    learnt = {2, 3, *order[:2].tolist()}
    expected = [group not in learnt for group in range(4) for _ in range(2)]
    assert rows_without_update(batch, pending, prompts=2, rng_path=(7, 3)).tolist() == expected


def test_rows_without_update_of_groups_in_another_order_are_those_of_the_batch_as_it_was_made():
    """Groups 2, 0, 1, 3, two rows each; the minibatch of 2 and 0 was skipped."""
    order = np.array([4, 5, 0, 1, 2, 3, 6, 7])
    batch = types.SimpleNamespace(index=np.repeat([2, 0, 1, 3], 2), row_ids=order)
    pending = [([], {"skipped_updates": np.int32(x)}) for x in (1, 0)]
    rows = rows_without_update(batch, pending, prompts=2, rng_path=(7, 3))
    assert rows.tolist() == [True, True, False, False, True, True, False, False]
