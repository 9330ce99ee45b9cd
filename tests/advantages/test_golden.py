"""Built-in estimators against SkyRL's own numbers."""

import functools

import jax
import numpy as np
import pytest

from jaxrl.advantages import ESTIMATORS
from tests.golden import cases

CASES = [c for c in cases("advantages") if c["estimator"] in ESTIMATORS and "raises" not in c]


@functools.cache
def jitted(name, keywords):
    """Cached, so that cases with the same shapes share their compilation."""
    return jax.jit(functools.partial(ESTIMATORS[name], **dict(keywords)))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_estimator_equals_skyrl(case):
    index = np.unique(case.i["index"], return_inverse=True)[1].astype(np.int32)
    for bits, tolerance in ((32, 1e-4), (64, 1e-9)):
        with jax.enable_x64(bits == 64):
            rewards, mask = (
                np.asarray(case.i[k], f"float{bits}")
                for k in ("token_level_rewards", "response_mask")
            )
            estimate = jitted(case["estimator"], tuple(case.get("kwargs", {}).items()))
            advantages, returns = estimate(rewards, mask, index)
            # equal rewards: SkyRL's float32 mean may be off by an ulp, divided by a std of about 0
            atol = 2e-2 if case["reward"] == "positive" and bits == 32 else tolerance
            np.testing.assert_allclose(advantages, case.o[f"adv{bits}"], rtol=1e-4, atol=atol)
            np.testing.assert_allclose(returns, case.o[f"ret{bits}"], rtol=1e-4, atol=atol)
