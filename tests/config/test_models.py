"""Precision of a model, changes to its config, adapters of the reference."""

import pytest

from jaxrl.config import MixedPrecisionConfig, compute_dtype, model_overrides, resolve, validate
from tests.config.test_mesh import config_of

KWARGS = "trainer.policy.megatron_config.model_config_kwargs"


def test_a_model_computes_in_its_own_precision():
    trainer = config_of({}).trainer
    assert compute_dtype(trainer, "policy") == "float32"
    trainer.bf16 = True
    trainer.ref.fsdp_config.mixed_precision = MixedPrecisionConfig(param_dtype="fp32")
    assert [compute_dtype(trainer, role) for role in ("policy", "ref")] == ["bfloat16", "float32"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"param_dtype": "fp16"}, r"mixed_precision.param_dtype='fp16': must be 'bf16' or"),
        ({"reduce_dtype": "bf16"}, r"mixed_precision.reduce_dtype='bf16': must be 'fp32'"),
        ({"buffer_dtype": "bf16"}, r"mixed_precision.buffer_dtype='bf16': must be 'fp32'"),
    ],
)
def test_precisions_that_are_not_there_are_refused(settings, message):
    config = config_of({})
    config.trainer.policy.fsdp_config.mixed_precision = MixedPrecisionConfig(**settings)
    with pytest.raises(ValueError, match=message):
        validate(config)


def test_megatrons_changes_to_a_model_are_changes_to_the_model():
    config = config_of({KWARGS: "{rope_theta: 7.0}"})
    resolved = resolve(config)
    assert resolve(resolved) == resolved
    for role in (resolved.trainer.policy, resolved.trainer.ref):  # without a path: the policy's
        assert model_overrides(resolved.trainer, role) == {"rope_theta": 7.0}
    both = config_of({KWARGS: "{a: 1}", "trainer.policy.model_config_kwargs": "{a: 2}"})
    with pytest.raises(ValueError, match=r"model_config_kwargs\['a'\]=1: .* says 2; set one"):
        validate(both)


def test_adapters_of_the_reference_need_their_folder():
    with pytest.raises(ValueError, match=r"ref.model.lora.rank=4: needs trainer.ref.model.path"):
        validate(config_of({"trainer.ref.model.lora.rank": 4}))
