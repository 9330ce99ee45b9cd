"""Losses of the routers of a mixture of experts: their values, and that no cut changes them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.config import AlgorithmConfig, PolicyConfig, TrainerConfig
from jaxrl.models.architecture import Experts
from jaxrl.models.experts import Routing, router_terms
from jaxrl.training.build import _check_routers
from tests.training.test_update import (
    MODEL,
    ROWS,
    algorithm_with,
    assert_same,
    gradient,
    make_batch,
)

MIXED = dataclasses.replace(
    MODEL, experts=Experts(count=4, per_token=2, width=16, normalise=True, dense_layers=(0,))
)
TERMS = {"router_balance_loss_coef": 0.3, "router_z_loss_coef": 0.02}


def test_terms_of_a_token_add_up_to_the_losses_of_its_trajectory():
    """Two of four experts; a trajectory of 2 tokens, one of 1, then padding."""
    even, one_sided = np.zeros(4), np.log([3.0, 3.0, 1.0, 1.0])
    routing = Routing(
        ids=jnp.array([[[0, 1], [2, 3], [0, 1], [0, 1]]]),
        weights=jnp.zeros((1, 4, 2)),
        logits=jnp.array([[even, one_sided, one_sided, even]], jnp.float32),
        differs=jnp.zeros((1, 4)),
    )
    found = router_terms(Experts(count=4, per_token=2, width=1), routing, jnp.array([[1, 1, 2, 0]]))
    # first: every expert has 1 of 4 choices, f = 4 / (2 * 2) * 1 = 1, and P adds up to 1
    # second: f = 4 / (2 * 1) * (1, 1, 0, 0), P = (3, 3, 1, 1) / 8: 2 * 3/8 + 2 * 3/8 = 1.5
    balance = np.asarray(found.balance)[0]
    assert balance[:2].sum() == pytest.approx(1.0)
    assert balance[2] == pytest.approx(1.5)
    # logsumexp: log 4 and log 8
    z = np.asarray(found.z)[0]
    assert z[:2].sum() == pytest.approx((np.log(4) ** 2 + np.log(8) ** 2) / 2)
    assert z[2] == pytest.approx(np.log(8) ** 2)
    assert balance[3] == z[3] == 0


def test_the_gradient_is_of_the_scores_alone_and_pushes_the_load_apart():
    experts = Experts(count=4, per_token=2, width=1)

    def balance(logits):
        ids = jax.lax.top_k(logits, 2)[1]
        routing = Routing(ids, jnp.zeros(ids.shape), logits, jnp.zeros(ids.shape[:2]))
        return router_terms(experts, routing, jnp.ones((1, 3), int)).balance.sum()

    logits = jnp.array([[[2.0, 1.0, 0.0, 0.0]] * 3])
    slope = np.asarray(jax.grad(balance)(logits))[0]
    assert (slope[:, :2].sum(axis=1) > 0.01).all()  # less for those that all have chosen
    assert (slope[:, 2:] < -0.01).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    "cut",
    [
        {"microbatch_rows": 3},
        {"microbatch_rows": 1, "packed": True, "packed_length": 32},
        pytest.param(
            {"microbatch_rows": 8, "devices": 8, "sizes": (("fsdp", 2), ("expert", 4))},
            marks=pytest.mark.slow,  # tests/parallel has meshes in the default run
        ),
    ],
    ids=["microbatches", "packed", "mesh"],
)
def test_no_cut_changes_the_gradient(cut):
    algorithm, batch = algorithm_with(**TERMS), make_batch()
    whole = gradient(algorithm, batch, model=MIXED, microbatch_rows=ROWS)
    assert_same(gradient(algorithm, batch, model=MIXED, **cut), whole)
    assert 1 < whole[1]["router_balance_loss"] < 2  # of at most E / k
    without = gradient(algorithm_with(), batch, model=MIXED, microbatch_rows=ROWS)
    assert np.linalg.norm(whole[0] - without[0]) > 1e-2 * np.linalg.norm(without[0])
    expected = sum(
        TERMS[f"router_{name}_coef"] * whole[1][f"router_{name}"]
        for name in ("balance_loss", "z_loss")
    )
    assert whole[1]["final_loss"] - without[1]["final_loss"] == pytest.approx(expected, rel=1e-4)


def test_a_model_without_experts_is_refused():
    losses = TrainerConfig(algorithm=AlgorithmConfig(router_z_loss_coef=0.1))
    with pytest.raises(ValueError, match="router_z_loss_coef.*the model has none"):
        _check_routers(losses, MODEL)
    replay = TrainerConfig(policy=PolicyConfig(router_replay="forward"))
    with pytest.raises(ValueError, match="router_replay='forward' has no effect.*set it to 'off'"):
        _check_routers(replay, MODEL)
