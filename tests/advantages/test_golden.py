"""Built-in estimators against SkyRL's own numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.advantages import ESTIMATORS
from tests.golden import cases

CASES = [c for c in cases("advantages") if c["estimator"] in ESTIMATORS and "raises" not in c]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_estimator_equals_skyrl(case):
    index = np.unique(case.i["index"], return_inverse=True)[1].astype(np.int32)
    for bits, tolerance in ((32, 1e-4), (64, 1e-9)):
        with jax.enable_x64(bits == 64):
            rewards, mask = (
                jnp.asarray(case.i[k], f"float{bits}")
                for k in ("token_level_rewards", "response_mask")
            )
            advantages, returns = ESTIMATORS[case["estimator"]](
                rewards, mask, index, **case.get("kwargs", {})
            )
            # equal rewards: SkyRL's float32 mean may be off by an ulp, divided by a std of about 0
            atol = 2e-2 if case["reward"] == "positive" and bits == 32 else tolerance
            np.testing.assert_allclose(advantages, case.o[f"adv{bits}"], rtol=1e-4, atol=atol)
            np.testing.assert_allclose(returns, case.o[f"ret{bits}"], rtol=1e-4, atol=atol)
