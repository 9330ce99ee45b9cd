"""A real local Ray cluster with two workers, for all tests of this folder.

`ray.init` takes seconds, so it is started once, and once before to be shut down: every test runs in
the second session of its process.
"""

import sys
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import ray

from jaxrl.cluster import initialize_ray
from jaxrl.config import TrainConfig
from jaxrl.registry import AdvantageEstimatorRegistry, PolicyLossRegistry

HELPER = "SCALE = 3.0\n\ndef scaled(x):\n    return SCALE * x\n"
LOSSES = """
    import user_helper as helper
    from user_helper import scaled

    def through_function(log_probs, old_log_probs, advantages, config, loss_mask=None):
        return scaled(log_probs), {}

    def through_module(log_probs, old_log_probs, advantages, config, loss_mask=None):
        return helper.SCALE * log_probs, {}
"""


@ray.remote(num_cpus=0)
class Worker:
    """A process that keeps its registries between calls."""

    def run(self, func: Callable[..., Any], *args: Any) -> Any:
        return func(*args)


class Workers:
    """Two processes; `workers(0, f, x)` is f(x) in the first."""

    def __init__(self) -> None:
        self._actors = [Worker.remote() for _ in range(2)]

    def __call__(self, number: int, func: Callable[..., Any], *args: Any) -> Any:
        return ray.get(self._actors[number].run.remote(func, *args))


def start_ray() -> None:
    """A new session; Ray gives a node 30 seconds to start, which a busy machine may exceed."""
    for attempt in range(5):
        ray.shutdown()
        try:
            initialize_ray(TrainConfig(), num_cpus=2, include_dashboard=False)
            return
        except Exception as error:
            if attempt == 4 or "timed out during startup" not in str(error):
                raise


def early_loss(log_probs, old_log_probs, advantages, config, loss_mask=None):
    return 7 * log_probs, {}


@pytest.fixture(scope="package")
def cluster(tmp_path_factory):
    """Workers of a session whose driver registered `early_loss` before, and used another one."""
    PolicyLossRegistry.register("early", early_loss)
    for _ in range(2):
        start_ray()
    yield Workers()
    ray.shutdown()
    PolicyLossRegistry.repopulate()
    AdvantageEstimatorRegistry.repopulate()


@pytest.fixture
def user_folder(tmp_path, monkeypatch):
    """Two modules that this process can import and the workers cannot."""
    (tmp_path / "user_helper.py").write_text(HELPER)
    (tmp_path / "user_losses.py").write_text(textwrap.dedent(LOSSES))
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in ("user_helper", "user_losses"):
        sys.modules.pop(name, None)
