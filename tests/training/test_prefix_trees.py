"""Trajectories that share what they begin with have the gradient of those that do not."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxrl.data.microbatches import avoided_tokens, plan_batch
from jaxrl.data.prefix_trees import SHARING, UNSHARED
from jaxrl.losses import LOSSES
from jaxrl.models.architecture import Experts
from jaxrl.models.lora import LoraConfig, select_modules
from jaxrl.training.objective import merge_metrics
from jaxrl.training.update import every_way
from jaxrl.types import TrainBatch
from tests.test_invariance import algorithm_of, centred, reinforce, user_losses
from tests.training.test_critic import make_updater as critic_updater
from tests.training.test_update import MODEL, ROWS, algorithm_with, make_updater

__all__ = ["centred", "reinforce", "user_losses"]  # what losses of a user are
WIDTH = 24
MIXED = dataclasses.replace(
    MODEL, experts=Experts(count=4, per_token=2, width=16, normalise=True, dense_layers=(0,))
)


def batch_of(rows: list[tuple[list[int], int]], seed: int = 0) -> TrainBatch:
    """Eight trajectories: tokens, and how many of them are the prompt."""
    rng = np.random.default_rng(seed)
    assert len(rows) == ROWS
    tokens, mask = np.zeros((ROWS, WIDTH), np.int32), np.zeros((ROWS, WIDTH), np.float32)
    for row, (line, prompt) in enumerate(rows):
        tokens[row, : len(line)] = line
        mask[row, prompt : len(line)] = 1

    def noise(scale: float) -> np.ndarray:
        return rng.normal(0, scale, (ROWS, WIDTH)).astype(np.float32)

    base = -3 + noise(0.3)
    return TrainBatch(
        tokens=tokens,
        lengths=np.array([len(line) for line, _ in rows], np.int32),
        response_mask=mask,
        loss_mask=mask,
        rewards=noise(1.0) * mask,
        rollout_log_probs=(base + noise(0.1)) * mask,
        index=np.arange(ROWS, dtype=np.int32) // 4,
        policy_versions=np.zeros(ROWS, np.int32),
        row_ids=np.arange(ROWS, dtype=np.int32),
        old_log_probs=base * mask,
        ref_log_probs=(base + noise(0.3)) * mask,
        advantages=np.repeat(noise(1.0)[:, :1], WIDTH, 1) * mask,
        returns=np.zeros((ROWS, WIDTH), np.float32),
        token_versions=np.where(mask != 0, tokens % 4, -1).astype(np.int32),
        staleness=np.where(mask != 0, 3 - tokens % 4, 0).astype(np.int32),
    )


def drawn(rng: np.random.Generator, size: int) -> list[int]:
    return rng.integers(1, 32, size).tolist()


def groups() -> TrainBatch:
    """Two prompts with four samples each; two of the second begin alike, one is drawn twice."""
    rng = np.random.default_rng(1)
    one, other = drawn(rng, 11), drawn(rng, 9)
    rows = [([*one, *drawn(rng, n)], 11) for n in (5, 13, 1, 8)]
    begin = drawn(rng, 3)
    rows += [([*other, *begin, *drawn(rng, n)], 9) for n in (4, 7)]
    return batch_of([*rows, ([*other, 7, 8], 9), ([*other, 7, 8], 9)])


def turns() -> TrainBatch:
    """Two conversations of three turns, a row per turn, and two of one; masks overlap in none."""
    rng, rows = np.random.default_rng(2), []
    for _ in range(2):
        history = drawn(rng, 5)
        for _ in range(3):
            begin = len(history)
            history = [*history, *drawn(rng, 4)]
            rows.append((history, begin))
            history = [*history, *drawn(rng, 2)]
    return batch_of([*rows, (drawn(rng, 20), 6), (drawn(rng, 3), 2)])


def branches() -> TrainBatch:
    """Agents that part within responses: tokens that several trajectories are trained on."""
    rng = np.random.default_rng(3)
    trunk = drawn(rng, 12)
    return batch_of(
        [([*trunk[:cut], *drawn(rng, n)], 4) for cut, n in ((12, 6), (12, 3), (8, 9), (8, 2))]
        + [([*trunk, *drawn(rng, 9)], 4), (trunk, 4), (trunk[:7], 4), (drawn(rng, 5), 1)]
    )


def forest(seed: int) -> TrainBatch:
    """Trajectories that each go on from somewhere in an earlier one, or begin anew."""
    rng, rows = np.random.default_rng(seed), []
    for _ in range(ROWS):
        line = []
        if rows and rng.random() < 0.8:
            earlier = rows[rng.integers(len(rows))][0]
            line = earlier[: rng.integers(len(earlier) + 1)]
        line = [*line, *rng.integers(1, 4, rng.integers(1, 6)).tolist()][:WIDTH]
        rows.append((line, int(rng.integers(len(line) + 1))))
    return batch_of(rows, seed)


BATCHES = {"groups": groups, "turns": turns, "branches": branches}
PLAIN = algorithm_of("regular")


def gradients(algorithm, batch, **cut):
    updater, params, _ = make_updater(algorithm, microbatch_rows=cut.pop("rows", ROWS), **cut)
    weights, _ = updater.weights(batch)
    grads, parts = updater.gradients(params, batch, weights, jax.random.key(1))
    layouts = plan_batch(batch, updater.microbatching)
    return jax.device_get(grads), merge_metrics(jax.device_get(parts)), avoided_tokens(layouts)


def assert_equal(algorithm, batch, sharing_alone=None, **cut):
    """The trees alone are on the mesh of `sharing_alone`."""
    expected, expected_metrics, none = gradients(algorithm, batch, **cut | {"rows": ROWS})
    trees = cut | (sharing_alone or {})
    found, metrics, avoided = gradients(algorithm, batch, sharing=SHARING["on"], **trees)
    assert none == 0
    assert avoided > 0
    assert max(np.abs(g).max() for g in jax.tree.leaves(expected)) > 1e-4

    def compare(path, a, b):
        bound = 1e-5 * np.abs(b).max() + 1e-12
        np.testing.assert_allclose(a, b, rtol=0, atol=bound, err_msg=jax.tree_util.keystr(path))

    jax.tree_util.tree_map_with_path(compare, found, expected)
    assert metrics.keys() == expected_metrics.keys()
    for name, value in metrics.items():
        assert value == pytest.approx(expected_metrics[name], rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize("batch", BATCHES)
def test_shared_prefixes_change_no_gradient(batch):
    assert_equal(PLAIN, BATCHES[batch]())


@pytest.mark.some(2)
@pytest.mark.parametrize("loss", LOSSES)
def test_the_gradient_of_every_loss_is_that_of_flat_rows(loss):
    assert_equal(algorithm_of(loss), branches())


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["reinforce", "centred"])
def test_the_gradient_of_a_loss_of_the_minibatch_is_that_of_flat_rows(user_losses, loss):
    assert_equal(algorithm_of(loss), branches())


@pytest.mark.some(8)
@pytest.mark.parametrize("seed", range(40))
def test_the_gradient_of_random_forests_is_that_of_flat_rows(seed):
    assert_equal(PLAIN, forest(seed), widths=(WIDTH,))  # all are two programs


# ---------------------------------------------------------------- models and cuts

WINDOW = dataclasses.replace(MODEL, sliding_window=6, sliding_layers=(True, False))
MODELS = {
    "window, sinks and caps": dataclasses.replace(
        WINDOW, attention_sinks=True, attention_softcap=5.0
    ),
    "experts": MIXED,
}
ROUTERS = {"router_balance_loss_coef": 0.3, "router_z_loss_coef": 0.02}


@pytest.mark.some(1)
@pytest.mark.parametrize("model", MODELS)
def test_the_gradient_of_other_models_is_that_of_flat_rows(model):
    algorithm = algorithm_with(**(ROUTERS if model == "experts" else {}))
    assert_equal(algorithm, branches(), model=MODELS[model])


def test_adapters_have_the_gradient_of_flat_rows():
    lora = LoraConfig(MODEL, select_modules(MODEL, ["q_proj", "up_proj"]), rank=2, alpha=4)
    assert_equal(PLAIN, groups(), lora=lora)


CUTS = {
    "microbatches": {"rows": 2},
    "packed": {"rows": 2, "packed": True, "packed_length": 48},
    "few shapes": {"rows": 4, "packed": True, "widths": (24,)},
    "tokens": {"rows": 8, "max_tokens": 60},
}


@pytest.mark.some(1)
@pytest.mark.parametrize("cut", CUTS)
def test_several_microbatches_of_trees_have_the_gradient_of_flat_rows(cut):
    for batch in (groups(), turns()):
        assert_equal(PLAIN, batch, **CUTS[cut])


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes", [(("fsdp", 2), ("tensor", 2)), (("fsdp", 1), ("expert", 2), ("tensor", 2))], ids=str
)
def test_trees_on_a_mesh_have_the_gradient_of_one_device(sizes):
    algorithm, mesh = algorithm_with(**ROUTERS), {"devices": 4, "sizes": sizes}
    assert_equal(algorithm, groups(), model=MIXED, sharing_alone=mesh)


# ---------------------------------------------------------------- critic, records of the rollouts


def values_and_gradient(batch, **cut):
    updater, params = critic_updater(microbatch_rows=8, **cut)
    weights, _ = updater.weights(batch)
    grads, _ = updater.gradients(params, batch, weights, jax.random.key(1))
    return updater.forward_pass(params, batch)[0], jax.device_get(grads)


def test_a_critic_values_trees_as_rows():
    batch = turns()
    noise = np.random.default_rng(4).normal(0, 1, (2, ROWS, WIDTH)).astype(np.float32)
    batch = batch.replace(returns=noise[0] * batch.response_mask, values=noise[1])
    values, expected = values_and_gradient(batch)
    found, gradient = values_and_gradient(batch, sharing=SHARING["on"])
    np.testing.assert_allclose(found, values, rtol=0, atol=1e-5 * np.abs(values).max())
    for a, b in zip(jax.tree.leaves(gradient), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max())


def test_what_is_kept_of_the_vocabulary_parts_trajectories():
    batch = branches()
    kept = np.sort(np.random.default_rng(0).permuted(np.tile(np.arange(32), (8, 24, 1)), axis=2))
    kept[..., :8] = np.where(batch.loss_mask[..., None] != 0, kept[..., :8], -1)
    kept = np.where(batch.loss_mask[..., None] != 0, kept, -1)
    kept[0, :, 20:] = -1  # of the first, which is alone with it, a part
    kept[0, :, 0] = np.where(batch.loss_mask[0] != 0, batch.tokens[0], -1)
    assert_equal(PLAIN, batch.replace(kept=kept.astype(np.int32)))


def test_replayed_experts_part_trajectories():
    batch = groups()
    routes = np.random.default_rng(0).integers(0, 4, (ROWS, 1, 1, 2), np.uint8)
    same = np.broadcast_to(routes[:1], (ROWS, WIDTH, 1, 2)).copy()
    same[1, 4:] = (same[0, 4:] + 1) % 4  # has gone another way from its fifth token on
    same[..., 1] = (same[..., 0] + 1) % 4
    replayed = batch.replace(routes=same)
    assert_equal(PLAIN, replayed, model=MIXED, replay="rollout")
    cut = make_updater(PLAIN, microbatch_rows=ROWS, sharing=SHARING["on"])[0].microbatching
    shared, whole = (avoided_tokens(plan_batch(x, cut)) for x in (replayed, batch))
    # it stands between two others of its group, and has 4 of the prompt's 11 tokens from each
    assert shared == whole - 2 * 7


def test_a_role_that_cannot_share_is_not_compiled_for_trees():
    """Beside one that can, such as a critic whose layers keep a state."""
    can, _, _ = make_updater(algorithm_with(), microbatch_rows=8, sharing=SHARING["on"])
    cannot, _, _ = make_updater(algorithm_with(), microbatch_rows=8)
    short, _, _ = make_updater(algorithm_with(), microbatch_rows=8, sharing=SHARING["auto"])
    users = [can, cannot, short]
    before = [user.microbatching.sharing for user in users]
    with every_way(users, WIDTH) as ways:
        found = [[user.microbatching.sharing for user in users] for _ in ways]
    assert found == [[None] * 3, [UNSHARED, None, None]]
    assert [user.microbatching.sharing for user in users] == before
