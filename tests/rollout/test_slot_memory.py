"""How many slots an engine takes: counted as they are allocated, in the memory that is free."""

import jax
import pytest

from jaxrl.config import resolve
from jaxrl.data.packing import length_bucket
from jaxrl.models import TransformerConfig, hf
from jaxrl.parallel import make_mesh
from jaxrl.rollout.native.engine import NativeEngine
from jaxrl.train import meshes
from jaxrl.training.resident_memory import beside_the_engine
from tests.test_train import small

MODEL = TransformerConfig(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=32,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
)
# embed 32 x 16; a layer: q and o 16 x 16 each, k and v 16 x 8 each, MLP 3 x 16 x 32, norms 2 x 16;
# final norm 16: float32
WEIGHTS = 4 * (32 * 16 + 2 * (2 * 16 * 16 + 2 * 16 * 8 + 3 * 16 * 32 + 2 * 16) + 16)
POSITION = 4 * 2 * 2 * 8  # keys and values of two layers


def slots(memory, length, **options):
    mesh = make_mesh(devices=jax.devices()[:1])
    given = {"max_model_len": length, "device_memory": memory, "gpu_memory_utilization": 0.5}
    return NativeEngine(MODEL, mesh, **given, **options).programs.slots


def test_slots_are_counted_for_the_length_that_is_allocated():
    """Rows of 1030 tokens get 1536 positions: 10.5 of them are 10 slots, not 15 of 1030."""
    assert length_bucket(1030) == 1536
    memory = 2 * (WEIGHTS + 10.5 * 1536 * POSITION)
    assert slots(memory, 1030) == 10
    assert slots(memory, 1536) == 10


def test_what_the_trainer_keeps_on_the_device_is_not_free():
    memory = 2 * (WEIGHTS + 10.5 * 1536 * POSITION)
    # half of what is not free is missing: two rows
    assert slots(memory, 1536, resident_bytes=4 * 1536 * POSITION) == 8
    with pytest.raises(ValueError, match=r"of the trainer's, hold .* not one row of 1536"):
        slots(memory, 1536, resident_bytes=memory - WEIGHTS)


PARAMETERS = 126_336  # of the quickstart, see tests/tools/plan/test_plan.py


@pytest.mark.parametrize(
    ("settings", "copies"),
    [
        ({"trainer.algorithm.use_kl_loss": False}, 3),  # parameters and two moments
        ({}, 4),  # and the reference
        ({"trainer.ref.fsdp_config.cpu_offload": True}, 3),
        ({"trainer.policy.optimizer_config.offload_after_step": True}, 2),
    ],
)
def test_bytes_that_a_run_keeps_beside_its_engine(tmp_path, settings, copies):
    config = resolve(small(tmp_path, **settings))
    model = hf.load_config(config.trainer.policy.model.path, {})
    mesh, of_engine = meshes(config, jax.devices()[:1])
    kept = beside_the_engine(config, model, mesh, frozenset(of_engine.devices.flat))
    assert kept // 4 == pytest.approx(copies * PARAMETERS, abs=8)  # counts of updates
    assert beside_the_engine(config, model, mesh, frozenset(jax.devices()[1:2])) == 0
