"""Replay of the sampler's experts in training: what it computes, and that no cut changes it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.data.columns import NO_ROUTES, ROUTES
from jaxrl.data.packing import collate, empty_batch, one_per_row
from jaxrl.data.recorded import from_arrays, to_arrays
from jaxrl.models.experts import route
from jaxrl.models.lora import LoraConfig, select_modules
from jaxrl.models.transformer import init_params, routed_forward
from jaxrl.rollout.conversations.concat_outputs import concat_outputs
from jaxrl.rollout.conversations.step_wise import merge_steps, steps_of
from jaxrl.rollout.conversations.trajectories import to_columns
from jaxrl.rollout.conversations.turns import Transcript
from jaxrl.rollout.generator import checked_output
from jaxrl.training.forward import log_probs_and_entropy
from jaxrl.training.routes import routes_of_model
from jaxrl.types import Trajectory
from tests.training.test_loads import load_sums
from tests.training.test_router_losses import MIXED
from tests.training.test_update import ROWS, algorithm_with, assert_same, gradient, make_batch

EXPERTS = MIXED.experts
SETTINGS = {"temperature": 1.0, "dtype": jnp.float32}
REPLAYED = algorithm_with(router_z_loss_coef=0.02)
REPLAY = {"model": MIXED, "replay": "forward"}


def with_routes(batch, seed=0):
    """Random experts of every token but the last, which nobody knows."""
    rng, (rows, width) = np.random.default_rng(seed), batch.tokens.shape
    routes = rng.random((rows, width, 1, EXPERTS.count)).argsort(axis=-1)[..., :2].astype(np.uint8)
    last = np.arange(width) >= batch.lengths[:, None] - 1
    return batch.replace(routes=np.where(last[..., None, None], np.uint8(255), routes))


def rows_of(batch):
    return one_per_row(batch.tokens, batch.lengths, batch.loss_mask, {"routes": batch.routes})


@jax.jit
def own_choice(params, rows):
    settings = {
        "dtype": jnp.float32,
        "remat": "none",
        "kernel": "xla",
        "experts_kernel": "xla",
        "context": "gather",
    }
    settings |= {"context": "gather", "placement": None, "observe": lambda routing: routing.ids}
    given = rows.tokens, rows.positions, rows.segment_ids
    ids = routed_forward(MIXED, params, *given, **settings)[1]
    return jnp.moveaxis(ids, 0, 2).astype(jnp.uint8)


def test_replay_of_what_the_router_chooses_changes_nothing():
    batch, params = make_batch(), init_params(MIXED, 0)
    score = jax.jit(
        functools.partial(log_probs_and_entropy, MIXED, **SETTINGS, routers=("differs",))
    )
    free = rows_of(batch)
    chosen = np.asarray(own_choice(params, free))
    plain = score(params, free)
    for routes in (chosen, chosen[..., ::-1], np.full_like(chosen, EXPERTS.count)):
        replayed = score(params, free.replace(routes=routes))
        np.testing.assert_allclose(replayed[0], plain[0], atol=1e-6)
        assert not np.asarray(replayed[2]).any()


def test_the_share_that_differs_is_counted():
    batch, params = with_routes(make_batch()), init_params(MIXED, 0)
    rows = rows_of(batch)
    own = np.asarray(own_choice(params, rows_of(make_batch())))  # one layer has experts
    found = log_probs_and_entropy(MIXED, params, rows, **SETTINGS, routers=("differs",))
    expected = 1 - (batch.routes[..., None] == own[..., None, :]).any(-1).mean(-1)[..., 0]
    known = batch.routes[..., 0, 0] < EXPERTS.count
    assert 0.2 < expected[known].mean() < 0.8
    np.testing.assert_allclose(np.where(known, found[2], 0), np.where(known, expected, 0))
    assert not np.asarray(found[2])[~known & (batch.tokens > 0)].any()


def test_weights_of_replayed_experts_are_computed_and_differentiated():
    """Of experts 3 and 1 with scores 1/8 and 1/2: weights 1/5 and 4/5 of the normalised two."""
    logits = jnp.log(jnp.array([[2.0, 4.0, 1.0, 1.0]]))
    replay = jnp.array([[3, 1]], jnp.uint8)
    routes, _ = route(EXPERTS, logits, replay=replay)
    assert routes.ids.tolist() == [[3, 1]]
    np.testing.assert_allclose(routes.weights, [[0.2, 0.8]], rtol=1e-6)
    slope = jax.grad(lambda x: route(EXPERTS, x, replay=replay)[0].weights[0, 0])(logits)
    # w = e^x3 / (e^x1 + e^x3): dw/dx3 = w (1 - w), dw/dx1 = -w (1 - w)
    np.testing.assert_allclose(slope, [[0, -0.16, 0, 0.16]], atol=1e-6)


@pytest.mark.some(1)
@pytest.mark.parametrize(
    "cut",
    [
        {"microbatch_rows": 3, "widths": (16,)},
        {"microbatch_rows": 1, "packed": True, "packed_length": 32},
        {"microbatch_rows": 8, "devices": 8, "sizes": (("fsdp", 2), ("expert", 4))},
    ],
    ids=["microbatches", "packed", "mesh"],
)
def test_no_cut_changes_the_gradient(cut):
    batch = with_routes(make_batch())
    whole = gradient(REPLAYED, batch, microbatch_rows=ROWS, **REPLAY)
    assert_same(gradient(REPLAYED, batch, **REPLAY, **cut), whole)
    assert 0.2 < whole[1]["router_differs"] < 0.8
    other = gradient(REPLAYED, with_routes(make_batch(), 1), microbatch_rows=ROWS, **REPLAY)
    assert np.linalg.norm(whole[0] - other[0]) > 1e-2 * np.linalg.norm(other[0])


def test_ids_that_no_expert_has_are_counted_as_dropped():
    batch = with_routes(make_batch())
    batch.routes[0, 3, 0, 1] = 17
    sums = load_sums(REPLAYED, batch, microbatch_rows=ROWS, replay="forward")
    assert sums["sent"] - sums["tokens"].sum() == 1


@pytest.mark.slow  # experts over a mesh: test_meshes.py; their adapters: test_lora.py
@pytest.mark.parametrize(
    "sizes", [(("fsdp", 2), ("expert", 4)), (("expert", 2), ("tensor", 2), ("fsdp", 2))], ids=str
)
def test_no_mesh_changes_the_gradient_of_adapters_of_experts(sizes):
    modules = select_modules(MIXED, ["q_proj", ".*experts.*"])
    given = {"model": MIXED, "lora": LoraConfig(MIXED, modules, rank=4), "replay": "forward"}
    algorithm, batch = algorithm_with(), with_routes(make_batch())
    whole = gradient(algorithm, batch, microbatch_rows=ROWS, **given)
    cut = gradient(algorithm, batch, microbatch_rows=ROWS, devices=8, sizes=sizes, **given)
    assert_same(cut, whole)


# ---- from the sampler to the batch


def ids(*numbers):
    """Routes of tokens, of one layer and one expert."""
    return np.array(numbers, np.uint8).reshape(-1, 1, 1)


def test_a_transcript_keeps_the_routes_that_came_first():
    transcript = Transcript([1, 2])
    transcript.add_sampled([3, 4, 5], [0.0] * 3, routes=ids(10, 11, 12, 13))
    transcript.keep(2)  # and with the third token goes what nobody knows of it anyhow
    assert transcript.routes.ravel().tolist() == [10, 11, 12, 13]
    transcript.add_given([6])
    transcript.add_sampled([7, 8], [0.0] * 2, routes=ids(90, 91, 92, 93, 14, 15))
    assert transcript.routes.ravel().tolist() == [10, 11, 12, 13, 14, 15]
    transcript.keep(1)
    transcript.add_sampled([9], [0.0])  # an engine that does not say
    assert transcript.routes.ravel().tolist() == [10, 11, 12, 13, 14, 15]
    transcript.keep(0)
    transcript.end_at_turn()
    assert len(transcript.routes) == 6
    transcript = Transcript([1, 2])
    transcript.add_sampled([3, 4, 5], [0.0] * 3, routes=ids(10, 11, 12, 13))
    transcript.keep(1)
    assert transcript.routes.ravel().tolist() == [10, 11, 12]


def trajectory(prompt, response, routes, turns=((0, 2),)):
    n = len(response)
    return Trajectory(
        uid="0:0",
        prompt_tokens=prompt,
        response_tokens=response,
        loss_mask=[1] * n,
        rollout_log_probs=[0.0] * n,
        rewards=[0.0] * n,
        stop_reason="stop",
        policy_version=0,
        turns=list(turns),
        env_class="sort_digits",
        versions=[0] * n,
        context_versions=[0] * n,
        routes=routes,
    )


def test_rows_of_turns_have_the_routes_of_their_prompts():
    whole = trajectory([1, 2], [3, 4, 5, 6], ids(*range(10, 15)), turns=((0, 2), (3, 4)))
    first, last = steps_of(whole)
    assert first.routes.ravel().tolist() == [10, 11, 12, 13]
    assert last.routes.ravel().tolist() == [10, 11, 12, 13, 14]
    for routes in ((first.routes, NO_ROUTES), (NO_ROUTES, last.routes)):  # one was aborted
        columns = to_columns([whole], step_wise=True) | {ROUTES: list(routes)}
        (kept,) = merge_steps(columns)[ROUTES]
        assert len(kept) == max(map(len, routes))
    (merged,) = merge_steps(to_columns([whole], step_wise=True))[ROUTES]
    assert merged.ravel().tolist() == [10, 11, 12, 13, 14]


def test_rows_without_routes_are_padded_with_none():
    known = to_columns([trajectory([1], [2, 3], ids(7, 8)), trajectory([1], [2, 3], None)])
    unknown = to_columns([trajectory([1, 4, 5], [2, 3], None)])
    assert ROUTES not in unknown
    whole = concat_outputs([known, unknown])
    batch = collate(whole, [0, 1, 2])
    assert batch.routes.shape == (3, 8, 1, 1)
    assert batch.routes[0].ravel().tolist() == [7, 8] + [255] * 6
    assert (batch.routes[1:] == 255).all()


def test_recorded_routes_come_back_as_they_were():
    rows = [trajectory([1], [2, 3], r) for r in (ids(7, 8), None, ids(9), ids(1, 2, 3))]
    output = to_columns(rows)
    back = from_arrays(to_arrays(output))
    for mine, stored in zip(output[ROUTES], back[ROUTES], strict=True):
        assert stored.dtype == np.uint8
        np.testing.assert_array_equal(stored.reshape(-1), mine.reshape(-1))
    np.testing.assert_array_equal(collate(back, range(4)).routes, collate(output, range(4)).routes)
    nothing = from_arrays(to_arrays({**output, ROUTES: [NO_ROUTES] * 4}))
    assert [len(row) for row in nothing[ROUTES]] == [0] * 4


def test_a_generator_may_give_lists_and_is_told_what_is_wrong():
    output = to_columns([trajectory([1], [2, 3], ids(7, 8))])
    given = {**output, ROUTES: [[[[7]], [[8]]]]}
    (row,) = checked_output(given, "Mine", 1)[ROUTES]
    assert row.dtype == np.uint16
    assert row.ravel().tolist() == [7, 8]
    for wrong in ([7, 8], [[[0.5]]], [[[1]]] * 4, [[[1], [2]], [[1]]], None, [[[-1]]]):
        with pytest.raises(ValueError, match=r"Mine.generate gave rollout_expert_indices\[0\]"):
            checked_output({**output, ROUTES: [wrong]}, "Mine", 1)


def test_routes_are_brought_to_the_dtype_and_the_layers_of_the_model():
    given = [np.array([[[0, 1]], [[3, 4]], [[2, 3]]], np.uint16), NO_ROUTES]
    known, unknown = routes_of_model(given, MIXED)  # of four experts, one layer, two of a token
    assert known.dtype == unknown.dtype == np.uint8
    assert known.tolist() == [[[0, 1]], [[255, 255]], [[2, 3]]]
    assert unknown.shape == (0, 1, 2)
    row = {
        "prompt_token_ids": [[1]],
        "response_ids": [[2]],
        "rewards": [[0.0]],
        "loss_masks": [[1]],
    }
    output = row | {"rollout_logprobs": None, "policy_versions": [0], ROUTES: [unknown]}
    assert (collate(output, [0]).routes == 255).all()
    with pytest.raises(ValueError, match=r"rollout_expert_indices\[0\] has \(2, 2\)"):
        routes_of_model([np.zeros((3, 2, 2), np.uint8)], MIXED)


def test_an_empty_batch_has_the_shapes_of_a_real_one():
    routes = np.zeros((2, 3), np.uint8)
    assert empty_batch(4, 8, routes=routes).routes.shape == (4, 8, 2, 3)
    assert empty_batch(4, 8).routes is None


def test_ids_fit_their_dtype_with_a_number_for_none():
    assert dataclasses.replace(EXPERTS, count=255).id_dtype == np.uint8
    assert dataclasses.replace(EXPERTS, count=256).id_dtype == np.uint16
