"""Which fields are still to come."""

from jaxrl.config.field_status import status_of
from tests.config.test_schema import KEYS

PLANNED = {  # what is still to come, and nothing else
    # positions over devices, pipeline stages
    *(f"trainer.{role}.mesh.context" for role in ("policy", "ref", "critic")),
    *(f"trainer.{role}.sequence_parallel_size" for role in ("policy", "ref", "critic")),
    *(
        f"trainer.{role}.megatron_config.{kind}_parallel_size"
        for role in ("policy", "ref")
        for kind in ("context", "pipeline_model")
    ),
}


def test_the_only_planned_fields_are_of_later_axes_and_adapters():
    meshes = {f"trainer.{role}.mesh.context" for role in ("ref", "critic")}
    fields = {*KEYS, *meshes}
    planned = {key for key in fields if status_of(key).status == "planned"}
    found = {max((p for p in PLANNED if key.startswith(p)), default=key) for key in planned}
    assert found == PLANNED
