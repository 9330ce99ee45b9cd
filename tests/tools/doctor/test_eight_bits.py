"""The doctor of a run whose sampler computes in 8 bits."""

import ml_dtypes
import numpy as np
import pytest

from jaxrl.doctor import examine
from jaxrl.tools.doctor.eight_bits import _nearest_e4m3
from tests.test_train import small
from tests.tools.doctor import planted
from tests.tools.doctor.test_doctor import SIZES

ENGINE = "generator.inference_engine"
CORRECTED = {"trainer.algorithm.off_policy_correction.tis_ratio_type": "token"}
INT8 = CORRECTED | {f"{ENGINE}.quantization": "int8"}


def test_the_doctors_own_rounding_is_that_of_e4m3():
    drawn = np.random.default_rng(0).normal(size=4000) * 2.0 ** np.arange(-12, 8).repeat(200)
    x = np.clip(drawn, -448, 448).astype(np.float32)
    ties = np.array([0, 17, 19, -(2.0**-10), 3 * 2.0**-10, 2.0**-11, 448], np.float32)
    for some in (x, ties):
        np.testing.assert_array_equal(
            _nearest_e4m3(some), some.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
        )


@pytest.mark.slow
def test_a_right_sampler_passes_by_the_ordinary_bound(tmp_path):
    only = ["sampler.first", "weights.first", "sampler.update"]
    found = {f.name: f for f in examine(small(tmp_path, **SIZES, **INT8), only=only).findings}
    assert all(f.passed for f in found.values())
    assert found["sampler.first"].bound == "5e-05, 0.0005"
    assert "; in 8 bits they are mean " in found["sampler.first"].about


@pytest.mark.slow
def test_a_wrong_scale_is_found(tmp_path):
    config = small(tmp_path, **SIZES, **INT8)
    (found,) = examine(config, planted.WrongScaleExp, only=["sampler.first"]).findings
    assert found.passed is False
    assert "the trainer with the weights in 8 bits ('int8')" in found.cause


@pytest.mark.slow
def test_keys_and_values_in_fp8_have_a_bound_of_their_own(tmp_path):
    config = small(tmp_path, **SIZES, **CORRECTED, **{f"{ENGINE}.kv_cache_dtype": "fp8"})
    only = ["sampler.first", "sampler.update"]
    found = examine(config, only=only).findings
    assert [(f.passed, f.bound) for f in found] == [(True, "0.2, 2")] * 2
