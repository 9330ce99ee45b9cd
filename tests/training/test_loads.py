"""How evenly the experts of a mixture were used: sums over microbatches, and their metrics."""

import jax
import numpy as np
import pytest

from jaxrl.training.loads import load_metrics
from jaxrl.training.objective import LOADS
from jaxrl.training.ratios import add_ratio_sums
from tests.training.test_router_losses import MIXED
from tests.training.test_update import ROWS, algorithm_with, make_batch, make_updater


def test_metrics_of_two_layers_of_four_experts():
    sums = {
        "tokens": np.array([[10, 10, 10, 10], [20, 20, 0, 0]], np.float32),
        "weight": np.array([[1, 3, 3, 3], [10, 10, 0, 0]], np.float32),
        "sent": np.array([40, 40], np.float32),
    }
    assert load_metrics(sums) == {
        "expert_load_max": 2.0,  # 20 of 40 where 10 would be even
        "expert_load_min": 0.0,
        "expert_load_entropy": pytest.approx((1 + 1 / 2) / 2),  # log 4 and log 2, over log 4
        "expert_weight_max": 2.0,
        "tokens_dropped": 0.0,
    }
    assert load_metrics(sums | {"sent": np.array([50, 50])})["tokens_dropped"] == pytest.approx(0.2)
    assert load_metrics({name: 0 * x for name, x in sums.items()}) == {}


def load_sums(algorithm, batch, **cut):
    updater, params, _ = make_updater(algorithm, model=MIXED, **cut)
    weights, _ = updater.weights(batch)
    _, parts = updater.gradients(params, batch, weights, jax.random.key(1))
    return add_ratio_sums([part[LOADS] for part in jax.device_get(parts)])


def sums_of(batch, policy_loss_type="regular", **cut):
    return load_sums(algorithm_with(policy_loss_type=policy_loss_type), batch, **cut)


@pytest.mark.slow
def test_loads_are_of_real_tokens_whatever_the_cut():
    batch = make_batch()
    whole = sums_of(batch, microbatch_rows=ROWS)
    assert whole["tokens"].shape == (1, 4)  # one layer has experts
    assert whole["tokens"].sum() == whole["sent"] == 2 * batch.lengths.sum()
    np.testing.assert_allclose(whole["weight"].sum(), batch.lengths.sum(), rtol=1e-5)  # normalised
    for cut in (
        {"microbatch_rows": 3},
        {"microbatch_rows": 1, "packed": True, "packed_length": 32},
        {
            "microbatch_rows": 8,
            "devices": 8,
            "sizes": (("fsdp", 2), ("expert", 4)),
            "exchange": "all_to_all",
        },
    ):
        for name, x in sums_of(batch, **cut).items():
            np.testing.assert_allclose(x, whole[name], rtol=1e-5)


@pytest.mark.slow
def test_a_loss_that_sees_the_whole_minibatch_has_them_too():
    batch = make_batch()
    whole = sums_of(batch, microbatch_rows=ROWS)
    found = sums_of(batch, "clip_cov", microbatch_rows=3)  # in two passes over microbatches
    for name, x in found.items():
        np.testing.assert_allclose(x, whole[name], rtol=1e-5)
