"""A model that does not fit its mesh is refused before anything is loaded."""

import dataclasses

import pytest

from jaxrl import config as cfg
from jaxrl.models.adapter import AdaptedModel
from jaxrl.models.placement import place_model
from jaxrl.parallel import make_mesh
from jaxrl.training.build import place_beside
from tests.training.test_update import MODEL

TRAINER = cfg.TrainConfig().trainer
RULES = cfg.sharding_rules({})
NINE_HEADS = dataclasses.replace(MODEL, num_heads=9, num_kv_heads=3, intermediate_size=36)


def test_a_tensor_size_that_does_not_divide_the_heads_is_named():
    # both 9 heads and 8 devices: only 1 divides them
    message = (
        r"trainer.policy.mesh.tensor=2 does not divide the model's num_heads=9; on 8 devices set "
        r"it to one of \[1\]"
    )
    with pytest.raises(ValueError, match=message):
        place_model(NINE_HEADS, make_mesh(fsdp=4, tensor=2), RULES)


def test_a_tensor_size_that_does_not_divide_the_mlp_is_named():
    model = dataclasses.replace(MODEL, intermediate_size=36)  # 4 heads, 36 = 4 x 9
    message = r"mesh.tensor=8 does not divide the model's num_heads=4; .* one of \[1, 2, 4\]"
    with pytest.raises(ValueError, match=message):
        place_model(model, make_mesh(tensor=8), RULES)
    model = dataclasses.replace(model, num_heads=8)
    with pytest.raises(ValueError, match=r"tensor=8 .*intermediate_size=36; .* of \[1, 2, 4\]"):
        place_model(model, make_mesh(tensor=8), RULES)


def test_weights_that_stay_whole_are_warned_of():
    model = dataclasses.replace(MODEL, hidden_size=12)  # 8 does not divide it
    with pytest.warns(UserWarning, match=r"ref.mesh: 8 devices do not divide .*hidden_size=12"):
        place_model(model, make_mesh(fsdp=8), RULES, "ref")


def test_key_value_heads_need_not_be_divided():
    assert place_model(MODEL, make_mesh(fsdp=2, tensor=4), RULES).size("tensor") == 4


def test_the_mesh_of_the_reference_is_named_as_its_own():
    trainer = cfg.TrainConfig().trainer
    policy = place_model(NINE_HEADS, make_mesh(), RULES)
    assert place_beside("ref", trainer, NINE_HEADS, policy) is policy
    trainer.ref.mesh = cfg.MeshConfig(fsdp=-1, tensor=8)
    with pytest.raises(ValueError, match=r"trainer.ref.mesh.tensor=8 .* num_heads=9"):
        place_beside("ref", trainer, NINE_HEADS, policy)


def test_a_flax_module_has_no_tensor_axis():
    model = AdaptedModel("Tiny", lambda params, *_: params, lambda seed: {})
    with pytest.raises(ValueError, match=r"mesh.tensor=2: Tiny is a flax module; set it to 1"):
        place_model(model, make_mesh(fsdp=4, tensor=2), RULES)


def test_rows_of_a_model_with_attention_sinks_stay_whole():
    model = dataclasses.replace(MODEL, attention_sinks=True)
    message = r"trainer.critic.mesh.context=2: .*\(attention sinks\).*; set it to 1"
    with pytest.raises(ValueError, match=message):
        place_model(model, make_mesh(fsdp=4, context=2), RULES, "critic")
    place_model(model, make_mesh(fsdp=8), RULES, "critic")
