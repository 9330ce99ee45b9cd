"""How many devices and processes make an engine, where the config leaves it to their memory."""

import jax
import jax.numpy as jnp
import pytest

from jaxrl import config as cfg
from jaxrl.models import TransformerConfig
from jaxrl.parallel import make_mesh
from jaxrl.rollout.build_sizes import Sizes, sizes_that_fit
from jaxrl.rollout.native.programs import weight_bytes
from jaxrl.train import sized

ENGINE = "generator.inference_engine"
MODEL = TransformerConfig(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=128,
    num_layers=1,
    num_heads=8,
    num_kv_heads=8,
    head_dim=8,
    tie_embeddings=False,
)
# float32: embeddings and head 64 x 64 each, q, k, v and o 64 x 64 each, MLP 3 x 64 x 128; whole on
# every device 3 norms of 64
SPLIT, NORMS = 4 * (2 * 64 * 64 + 4 * 64 * 64 + 3 * 64 * 128), 4 * 3 * 64
PAGE = 4 * 64 * 2 * 8 * 8  # keys and values of 64 positions, the longest row
RESIDENT = 10_000


def config_of(**engine):
    rows = {"trainer.max_prompt_length": 48, f"{ENGINE}.gpu_memory_utilization": 0.5}
    rows["generator.sampling_params.max_generate_length"] = 16
    given = rows | {f"{ENGINE}.{name}": value for name, value in engine.items()}
    return cfg.resolve(cfg.apply_overrides(cfg.TrainConfig(), given))


def chosen(memory, before=None, **engine):
    """Of four processes with two devices each."""
    devices = jax.devices()
    processes = [devices[i : i + 2] for i in range(0, 8, 2)]
    return sizes_that_fit(
        config_of(**engine), MODEL, processes, resident=RESIDENT, memory=memory, before=before
    )


def to_sample(tensor):
    """Memory of which half of what is free holds weights and a row."""
    return RESIDENT + 2 * ((SPLIT + PAGE) // tensor + NORMS)


def to_load(tensor):
    """Memory for half of a process's copy, and the weights twice."""
    return RESIDENT + (SPLIT + NORMS) // 2 + 2 * (SPLIT // tensor + NORMS)


@pytest.mark.parametrize("tensor", [1, 2, 4, 8])
def test_weights_of_a_device_are_counted_as_they_are_split(tensor):
    mesh = make_mesh(devices=jax.devices(), data=-1, tensor=tensor)
    assert weight_bytes(MODEL, mesh, jnp.dtype("float32")) == SPLIT // tensor + NORMS


@pytest.mark.parametrize(
    ("memory", "sizes"),
    [
        (to_load(1), (1, 1)),
        (to_load(1) - 1, (1, 2)),
        (to_load(2), (1, 2)),
        (to_load(2) - 1, (2, 2)),  # nobody makes a copy for an engine of two processes
        (to_sample(2), (2, 2)),
        (to_sample(2) - 1, (2, 4)),
        (to_sample(4) - 1, (4, 8)),
        (to_sample(8) - 1, (4, 8)),  # which does not fit, as the engine says
    ],
)
def test_the_fewest_processes_and_of_their_devices_the_fewest_that_share_a_matrix(memory, sizes):
    # 470,288 bytes to sample on one device, 503,440 to load; 240,912 and 306,832 on two
    assert chosen(memory) == sizes


@pytest.mark.parametrize(
    ("engine", "sizes"),
    [
        ({"tensor_parallel_size": 1}, (1, 1)),
        ({"tensor_parallel_size": 4}, (2, 4)),
        ({"hosts_per_engine": 1}, (1, 2)),  # of two devices
        ({"hosts_per_engine": 4}, (4, 4)),
        ({"expert_parallel_size": 4}, (2, 4)),
        ({"num_engines": 2}, (1, 1)),  # each within a process, of one device
        ({"enable_http_endpoint": True}, (1, 2)),
    ],
)
def test_what_the_config_says_stays(engine, sizes):
    assert chosen(to_sample(4), **engine) == sizes


def test_a_run_goes_on_with_the_sizes_that_it_began_with_while_they_fit():
    assert chosen(1e9, before=Sizes(2, 4)) == (2, 4)
    assert chosen(1e9, before=Sizes(3, 4)) == (1, 1)  # of another job: 3 do not part 4 processes
    assert chosen(to_sample(4), before=Sizes(1, 2)) == (2, 4)  # of devices with more memory


def test_where_memory_is_not_known_nothing_is_chosen_and_no_model_is_read():
    config = config_of()
    assert sized(config, get_model=pytest.fail) == (config, [])
    given = config_of(tensor_parallel_size=4)  # of eight devices of one process
    assert sized(given, get_model=pytest.fail) == (given, [])


def test_a_run_says_what_was_chosen_and_why(tmp_path, monkeypatch):
    """Eight devices of one process, with no room for the weights on one of them."""
    monkeypatch.setattr("jaxrl.train.beside_the_engine", lambda *_: RESIDENT)
    known = {"devices": jax.devices(), "memory": to_sample(1) - 1, "platform": "gpu"}
    settled, (line,) = sized(config_of(), lambda: MODEL, **known)
    assert settled.generator.inference_engine.tensor_parallel_size == 2
    assert settled.generator.inference_engine.hosts_per_engine is None
    assert line.startswith("tensor_parallel_size=2: by memory, beside 0.00 of 0.00 GiB")
