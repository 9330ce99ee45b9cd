"""Which devices each part of a run has."""

import pytest

from jaxrl.config import device_ranges, resolve, validate
from tests.config.test_mesh import config_of

PLACEMENT = "trainer.placement"
APART = {f"{PLACEMENT}.colocate_all": False}
REF_APART = {f"{PLACEMENT}.colocate_policy_ref": False}
POLICY = f"{PLACEMENT}.policy_num_gpus_per_node"
REF = f"{PLACEMENT}.ref_num_gpus_per_node"
SERVER = {
    "generator.inference_engine.run_engines_locally": False,
    "generator.inference_engine.remote_urls": "['http://a:1']",
}


@pytest.mark.parametrize(
    ("overrides", "policy", "ref", "engine"),
    [
        ({}, (0, 8), (0, 8), (0, 8)),
        ({POLICY: 4}, (0, 8), (0, 8), (0, 8)),  # all are shared
        ({**APART, POLICY: 4}, (0, 4), (0, 4), (4, 8)),
        (APART, (0, 1), (0, 1), (1, 8)),
        ({**APART, **REF_APART, POLICY: 4, REF: 2}, (0, 4), (4, 6), (6, 8)),
        ({**REF_APART, POLICY: 6, REF: 2}, (0, 6), (6, 8), (0, 6)),
        ({**APART, **SERVER}, (0, 8), (0, 8), (0, 8)),  # its devices are not ours
    ],
)
def test_shares(overrides, policy, ref, engine):
    config = config_of(overrides)
    validate(config, num_devices=8)
    expected = tuple(range(*part) for part in (policy, ref, engine))
    assert device_ranges(config, 8) == expected
    assert (resolve(config).trainer.ref.mesh is None) == (ref == policy)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            {**APART, POLICY: 8},
            r"colocate_all=False: policy_num.*=8 of 8 devices leaves the engine",
        ),
        ({**APART, POLICY: 0}, r"policy_num_gpus_per_node=0: must be at least 1"),
        (
            {**APART, **REF_APART, POLICY: 6, REF: 2},
            r"policy_num_gpus_per_node=6 \+ ref_num_gpus_per_node=2 of 8 devices leaves the engine",
        ),
        ({**REF_APART, POLICY: 6, REF: 4}, r"colocate_policy_ref=False: .*=4 of 8 devices is more"),
        (
            {**REF_APART, POLICY: 4, REF: 2},
            r"colocate_policy_ref=False: .* leaves some of 8 .*idle",
        ),
        (
            {**APART, POLICY: 4, "trainer.policy.mesh.fsdp": 8},
            r"trainer.policy.mesh={'fsdp': 8}: the sizes must multiply to 4",
        ),
        (
            {**APART, POLICY: 5, "generator.inference_engine.num_engines": 2},
            r"num_engines=2: times tensor_parallel_size=1 is 2, which does not divide 3 devices",
        ),
    ],
)
def test_devices_that_do_not_suffice_or_idle_are_refused(overrides, message):
    with pytest.raises(ValueError, match=message):
        validate(config_of(overrides), num_devices=8)
