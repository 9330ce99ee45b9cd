"""The device mesh of a config."""

import pytest

from jaxrl.config import TrainConfig, batch_groups, resolve, validate
from jaxrl.config.placement import sharding_rules

RECIPE = {"trainer.policy.model.path": "m", "data.train_data": "['d.jsonl']"}
POLICY, REF = "trainer.policy", "trainer.ref"
TENSOR = "megatron_config.tensor_model_parallel_size"
RULES = "trainer.sharding_rules"


def config_of(overrides):
    settings = RECIPE | overrides
    return TrainConfig.from_cli_overrides([f"{name}={value}" for name, value in settings.items()])


def sizes(mesh):
    return mesh.data, mesh.fsdp, mesh.tensor


@pytest.mark.parametrize(
    ("overrides", "expected", "groups"),
    [
        ({}, (1, -1, 1), 8),
        ({f"{POLICY}.mesh.tensor": 2}, (1, -1, 2), 4),  # 8 / 2 groups
        ({f"{POLICY}.fsdp_config.fsdp_size": 4}, (-1, 4, 1), 8),
        ({f"{POLICY}.{TENSOR}": 4}, (1, -1, 4), 2),
        ({f"{POLICY}.{TENSOR}": 2, f"{POLICY}.fsdp_config.fsdp_size": 2}, (-1, 2, 2), 4),
        ({f"{POLICY}.{TENSOR}": 2, f"{POLICY}.mesh.tensor": 2}, (1, -1, 2), 4),
    ],
)
def test_skyrls_fields_are_mapped_onto_the_mesh(overrides, expected, groups):
    config = config_of(overrides)
    validate(config, num_devices=8)
    assert sizes(resolve(config).trainer.policy.mesh) == expected
    assert batch_groups(resolve(config), 8) == groups


def test_the_reference_has_the_policys_mesh_or_its_own():
    assert resolve(config_of({f"{POLICY}.mesh.tensor": 2})).trainer.ref.mesh is None
    own = resolve(config_of({f"{REF}.{TENSOR}": 2})).trainer.ref.mesh
    assert sizes(own) == (1, -1, 2)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            {f"{POLICY}.mesh.fsdp": 3},
            r"trainer.policy.mesh={'fsdp': 3}: the sizes must multiply to 8, the number of dev",
        ),
        ({f"{POLICY}.fsdp_config.fsdp_size": 3}, r"{'data': -1, 'fsdp': 3}: the sizes must"),
        ({f"{POLICY}.mesh.tensor": -1}, r"every size must be at least 1, and one may be -1"),
        ({f"{POLICY}.mesh.tensor": 0}, r"every size must be at least 1"),
        ({f"{REF}.{TENSOR}": 16}, r"trainer.ref.mesh={'fsdp': -1, 'tensor': 16}: .* multiply"),
        (
            {f"{POLICY}.mesh.tensor": 4, f"{POLICY}.{TENSOR}": 2},
            rf"trainer.policy.mesh.tensor=4: trainer.policy.{TENSOR}=2 says otherwise",
        ),
        ({f"{POLICY}.mesh.context": 3}, r"context: 1, 2, 4 or 8 would fit"),
        (
            {f"{POLICY}.mesh.context": 2, f"{POLICY}.sequence_parallel_size": 4},
            r"mesh.context=2: trainer.policy.sequence_parallel_size=4 says otherwise",
        ),
        ({RULES: "{width: tensor}"}, r"sharding_rules='width': must be 'batch' or 'embed' or"),
        ({RULES: "{mlp: pipeline}"}, r"sharding_rules\['mlp'\]='pipeline': must be None or 'data'"),
        ({RULES: "{embed: tensor}"}, r"\['embed'\]='tensor': must be among those of tokens"),
        ({RULES: "{heads: fsdp}"}, r"\['heads'\]='fsdp': must be one axis that is not of batch"),
    ],
)
def test_what_cannot_be_placed_is_refused(overrides, message):
    with pytest.raises(ValueError, match=message):
        validate(config_of(overrides), num_devices=8)


def test_rules_can_be_changed():
    validate(config_of({RULES: "{embed: [data, fsdp], vocab: null}"}), num_devices=8)


def test_rows_over_the_axes_of_before_there_were_experts_are_allowed():
    assert sharding_rules({"batch": ["data", "fsdp"]}).embed == ("fsdp", "context")
    validate(config_of({RULES: "{batch: [data, fsdp]}", f"{POLICY}.mesh.fsdp": -1}), 8)
    with pytest.raises(ValueError, match=r"sharding_rules\['mlp'\]='expert': must be"):
        validate(config_of({RULES: "{mlp: expert}"}), 8)


@pytest.mark.parametrize(
    ("tensor", "experts", "within", "found"),
    # Megatron: 8 devices have all experts, whole; ours: 2 parts, and 4 devices split each expert
    [(4, 8, 1, 2), (4, 2, 1, 1), (2, 4, None, 4), (1, 4, None, 4)],
)
def test_megatrons_sizes_of_experts_become_those_of_the_mesh(tensor, experts, within, found):
    sizes = {
        "tensor_model_parallel_size": tensor,
        "expert_model_parallel_size": experts,
        "expert_tensor_parallel_size": within,
    }
    given = {name: size for name, size in sizes.items() if size is not None}
    fields = {f"{POLICY}.megatron_config.{name}": size for name, size in given.items()}
    mesh = resolve(config_of(fields)).trainer.policy.mesh
    assert (mesh.tensor, mesh.expert) == (tensor, found)
