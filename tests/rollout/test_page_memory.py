"""How many pages an engine has: as they are allocated, in the memory that is free."""

import jax
import pytest

from jaxrl.config import resolve
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
# embed 32 x 16 and the head made of it; a layer: q and o 16 x 16 each, k and v 16 x 8 each, MLP 3 x
# 16 x 32, norms 2 x 16; final norm 16: float32
WEIGHTS = 4 * (2 * 32 * 16 + 2 * (2 * 16 * 16 + 2 * 16 * 8 + 3 * 16 * 32 + 2 * 16) + 16)
PAGE = 64 * 4 * 2 * 2 * 8  # keys and values of 64 positions in two layers


def engine(memory, length, **options):
    mesh = make_mesh(devices=jax.devices()[:1])
    given = {"max_model_len": length, "device_memory": memory, "gpu_memory_utilization": 0.5}
    made = NativeEngine(MODEL, mesh, **given, **options)
    made.programs.reserve(length)
    return made.programs


def test_pages_are_counted_as_they_are_allocated():
    """Rows of 1030 tokens need 17 pages each."""
    memory = 2 * (WEIGHTS + 40.01 * PAGE)
    programs = engine(memory, 1030)
    assert programs.pages == 40
    assert sum(x.nbytes for x in jax.tree.leaves(programs._cache)) == 40 * PAGE
    assert programs.slots == 1024  # any number of short rows


def test_there_are_no_more_pages_than_all_rows_need():
    assert engine(1e12, 1024, max_num_seqs=3).pages == 3 * 16


def test_what_the_trainer_keeps_on_the_device_is_not_free():
    memory = 2 * (WEIGHTS + 40.01 * PAGE)
    # half of what is not free is missing: ten pages
    assert engine(memory, 1024, resident_bytes=20 * PAGE).pages == 30
    with pytest.raises(ValueError, match=r"of the trainer's, hold .* not one row of 1024"):
        engine(memory, 1024, resident_bytes=memory - WEIGHTS)


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
