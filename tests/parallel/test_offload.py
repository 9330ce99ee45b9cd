"""Optimizer state and reference weights in host memory change nothing but where they are."""

from types import SimpleNamespace

import jax
import pytest

from jaxrl.parallel.offload import host_shardings
from jaxrl.train import train
from tests.test_train import assert_bitwise_equal, small


def kinds(tree):
    return {x.sharding.memory_kind for x in jax.tree.leaves(tree)}


@pytest.mark.slow
def test_an_offloaded_run_stopped_and_resumed_is_the_run_on_the_device(finished, tmp_path):
    moments = {"trainer.policy.optimizer_config.offload_after_step": True}
    weights = {f"trainer.{role}.fsdp_config.cpu_offload": True for role in ("policy", "ref")}
    stopped = train(small(tmp_path, **moments, **{"trainer.max_training_steps": 2}))
    assert kinds(stopped.state.opt_state) == {"pinned_host"}
    assert kinds(stopped.state.params) == kinds(stopped.ref_params) == {"device"}
    resumed = train(small(tmp_path, **weights))
    assert int(resumed.state.step) == 4
    assert kinds(resumed.state.opt_state) == kinds(resumed.ref_params) == {"pinned_host"}
    assert kinds(resumed.state.params) == {"pinned_host"}
    assert kinds(resumed.params) == {"device"}
    assert_bitwise_equal(resumed.state, finished[1].state)


def test_a_backend_without_host_memory_is_named():
    device = SimpleNamespace(
        device_kind="Abacus", addressable_memories=lambda: [SimpleNamespace(kind="device")]
    )
    shardings = {"w": SimpleNamespace(device_set=[device])}
    with pytest.warns(UserWarning, match="a.b=True has no effect: Abacus has no pinned_host"):
        assert host_shardings(shardings, "a.b") is shardings
