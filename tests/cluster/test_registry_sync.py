"""User functions in every process of a Ray job: registered anywhere, found everywhere."""

import importlib
import importlib.util
import sys
import threading

import pytest
import ray

from jaxrl import registry
from jaxrl.cluster import registry_sync
from jaxrl.losses import LOSSES
from jaxrl.registry import AdvantageEstimatorRegistry, PolicyLossRegistry, pickling

pytestmark = pytest.mark.usefixtures("cluster")


def make_loss(factor):
    def loss(log_probs, old_log_probs, advantages, config, loss_mask=None):
        return factor * log_probs, {}

    return loss


# What workers run. They import this module by name: the checkout is their working directory.


def register(name, factor, batch_statistics=False):
    PolicyLossRegistry.register(name, make_loss(factor), batch_statistics)


def value(name):
    return float(PolicyLossRegistry.get(name)(2.0, None, None, None)[0])


def names():
    return PolicyLossRegistry.list_available()


def has_batch_statistics(name):
    return PolicyLossRegistry.has_batch_statistics(name)


# ------------------------------------------------------------------ anywhere, everywhere


@pytest.mark.slow  # starts the cluster again
def test_registered_before_ray_and_kept_over_a_shutdown(cluster):
    assert cluster(0, value, "early") == cluster(1, value, "early") == 7 * 2


def test_registered_in_the_driver_after_ray(cluster):
    register("driver", 3.0)
    assert cluster(0, value, "driver") == 3 * 2
    assert "driver" in cluster(1, names)


def test_registered_in_a_worker(cluster):
    cluster(0, register, "worker", 4.0)
    assert value("worker") == cluster(1, value, "worker") == 4 * 2


def test_registered_in_a_task(cluster):
    ray.get(ray.remote(num_cpus=0)(register).remote("task", 5.0))
    assert value("task") == cluster(0, value, "task") == 5 * 2


def test_marks_travel(cluster):
    register("whole", 1.0, batch_statistics=True)
    register("rows", 1.0)
    assert cluster(0, has_batch_statistics, "whole")
    assert not cluster(0, has_batch_statistics, "rows")
    assert cluster(0, has_batch_statistics, "kl_cov")


def test_both_kinds_are_shared_and_kept_apart(cluster):
    AdvantageEstimatorRegistry.register("kind", lambda **kwargs: None)
    assert "kind" in cluster(0, AdvantageEstimatorRegistry.list_available)
    assert "kind" not in cluster(0, names)


def test_builtins_are_not_sent():
    assert not set(LOSSES) & set(registry_sync.ask("exchange", "policy loss", {})[1])


def test_modules_that_the_worker_lacks_travel_by_value(cluster, user_folder):
    def can_import():
        return importlib.util.find_spec("user_losses") is not None

    module = importlib.import_module("user_losses")
    PolicyLossRegistry.register("through_function", module.through_function)
    PolicyLossRegistry.register("through_module", module.through_module)
    assert can_import()
    assert not cluster(0, can_import)
    assert cluster(0, value, "through_function") == 3 * 2
    assert cluster(1, value, "through_module") == 3 * 2


def test_a_name_given_by_path_travels_under_that_path(cluster, user_folder):
    from jaxrl.cluster import initialize_ray
    from jaxrl.config import TrainConfig

    path = "user_losses:through_function"
    module = importlib.import_module("user_losses")
    PolicyLossRegistry.register("marked", module.through_function, batch_statistics=True)
    config = TrainConfig()
    config.trainer.algorithm.policy_loss_type = path
    initialize_ray(config)
    initialize_ray(config)  # as often as you like
    assert float(cluster(0, PolicyLossRegistry.resolve, path)(2.0, None, None, None)[0]) == 6
    assert cluster(1, value, path) == 6
    assert cluster(1, has_batch_statistics, path)


# ------------------------------------------------------------------ clashes


def test_the_same_function_may_be_registered_in_every_process(cluster):
    cluster(0, register, "same", 2.0)
    register("same", 2.0)  # unknown here until now
    cluster(1, value, "same")
    cluster(1, register, "same", 2.0)  # received there already
    register("same", 2.0)  # as does a notebook cell that runs again
    with pytest.raises(ValueError, match="^policy loss 'same' already registered: .*make_loss"):
        register("same", 2.5)
    assert value("same") == cluster(0, value, "same") == 2 * 2


def test_one_name_for_two_functions_is_an_error(cluster):
    cluster(0, register, "clash", 2.0)
    expected = (
        "policy loss 'clash' already registered by another process, with another function: "
        r".*test_registry_sync:make_loss.<locals>.loss there, .*make_loss.<locals>.loss here"
    )
    with pytest.raises(ValueError, match=expected):
        register("clash", 2.5)  # the captured number differs
    assert value("clash") == 2 * 2  # the first one stays
    with pytest.raises(ray.exceptions.RayTaskError, match="'clash' already registered"):
        cluster(1, register, "clash", 2.5)


def test_a_marked_and_an_unmarked_function_clash(cluster):
    cluster(0, register, "mark", 2.0)
    with pytest.raises(ValueError, match="'mark' already registered by another process"):
        register("mark", 2.0, batch_statistics=True)


def test_a_function_that_cannot_travel_is_not_registered():
    lock = threading.Lock()

    def locked(log_probs, old_log_probs, advantages, config, loss_mask=None):
        with lock:
            return log_probs, {}

    expected = r"policy loss 'locked' cannot be pickled .*; it captures \['lock'\]"
    with pytest.raises(ValueError, match=expected):
        PolicyLossRegistry.register("locked", locked)
    assert "locked" not in names()


def test_a_builtin_cannot_be_replaced_across_processes():
    PolicyLossRegistry.unregister("sapo")
    try:
        with pytest.raises(ValueError, match="'sapo' is built in .* register yours under another"):
            register("sapo", 1.0)
    finally:
        PolicyLossRegistry.repopulate_registry()
    assert PolicyLossRegistry.get("sapo") is LOSSES["sapo"]


def test_a_package_that_the_worker_lacks_is_named(cluster, tmp_path, monkeypatch):
    """Installed in the driver alone: simulated by a module that looks installed."""
    (tmp_path / "driver_only_package.py").write_text("def f(x):\n    return x\n")
    monkeypatch.syspath_prepend(tmp_path)
    installed = (*pickling.INSTALLED, str(tmp_path))
    monkeypatch.setattr(pickling, "INSTALLED", installed)
    package = importlib.import_module("driver_only_package")

    def loss(log_probs, old_log_probs, advantages, config, loss_mask=None):
        return package.f(log_probs), {}

    PolicyLossRegistry.register("lacking", loss)
    expected = r"'lacking' .* cannot be loaded here \(ModuleNotFoundError: .*'driver_only_package'"
    with pytest.raises(ray.exceptions.RayTaskError, match=expected):
        cluster(0, value, "lacking")
    PolicyLossRegistry.unregister("lacking")
    del sys.modules["driver_only_package"]


# ------------------------------------------------------------------ removal


def test_unregistered_functions_disappear_everywhere(cluster):
    cluster(0, register, "gone", 2.0)
    assert "gone" in cluster(1, names)
    PolicyLossRegistry.unregister("gone")  # this process never looked it up
    assert "gone" not in cluster(0, names)  # nor comes back from where it was registered
    assert "gone" not in cluster(1, names)
    with pytest.raises(ValueError, match="^policy loss 'gone' not registered$"):
        PolicyLossRegistry.unregister("gone")
    register("gone", 3.0)  # the name is free again
    assert cluster(0, value, "gone") == cluster(1, value, "gone") == 3 * 2


def test_a_name_that_is_given_anew_is_the_new_function_everywhere(cluster):
    cluster(0, register, "anew", 2.0)
    assert cluster(1, value, "anew") == 2 * 2
    cluster(0, PolicyLossRegistry.unregister, "anew")
    cluster(0, register, "anew", 3.0)
    assert "anew" in cluster(1, names)  # it asks, with the old one in its hands
    assert cluster(1, value, "anew") == 3 * 2


def test_reset_empties_the_actor_too(cluster):
    AdvantageEstimatorRegistry.register("estimator", lambda **kwargs: None)
    assert "estimator" in cluster(0, AdvantageEstimatorRegistry.list_available)
    AdvantageEstimatorRegistry.repopulate()
    assert "estimator" not in cluster(0, AdvantageEstimatorRegistry.list_available)
    assert cluster(0, value, "early") == 7 * 2  # the other kind stays


# ------------------------------------------------------------------ calls


def test_known_names_never_ask_the_actor(monkeypatch):
    register("known", 2.0)

    def fail(*args):
        raise AssertionError("a remote call")

    monkeypatch.setattr(registry_sync, "ask", fail)
    assert value("known") == 2 * 2
    assert PolicyLossRegistry.resolve("gspo") is LOSSES["gspo"]
    with pytest.raises(AssertionError, match="a remote call"):
        PolicyLossRegistry.get("unknown")


def test_the_snapshot_holds_what_other_processes_registered(cluster):
    cluster(0, register, "snap", 2.0)
    registry.sync_registries()
    data = registry.snapshot()

    def load():
        PolicyLossRegistry._entries.pop("snap", None)
        registry.load_snapshot(data)
        return value("snap")

    assert cluster(1, load) == 2 * 2
