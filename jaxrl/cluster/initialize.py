"""Starting or joining Ray with what the workers of a run need."""

import dataclasses
import os
from collections.abc import Iterator
from typing import Any

from jaxrl.cluster.ray_import import ray
from jaxrl.user_functions import user_modules

# Settings of the run, the same on every host; nothing secret, Ray's dashboard shows them.
_PASSED_ON = ("JAX_", "XLA_", "LIBTPU_INIT_ARGS", "HF_HOME", "HF_HUB_OFFLINE", "TOKENIZERS_")
_OF_ONE_PROCESS = ("JAX_COORDINATOR_", "JAX_PROCESS_", "JAX_NUM_PROCESSES", "JAX_LOCAL_DEVICE_")


def initialize_ray(config: Any, **options: Any) -> None:
    """Start Ray, or join the cluster of RAY_ADDRESS, and share the user functions with its workers.

    Workers get the driver's JAX and XLA settings. A task that asks Ray for no accelerator still
    sees those of its host, because the trainer runs in such a task. Does not restart a Ray that is
    initialised already.

    Args:
        config: a `TrainConfig`, `ml_collections.ConfigDict` or nested dict. Functions that it names
            as "my_pkg.my_module:my_loss" are registered under that name, so that the module need
            not be importable on the workers.
        options: of `ray.init`, such as num_cpus or address.

    Raises:
        ValueError: see `jaxrl.registry.sync_registries`.
    """
    from jaxrl.config import to_train_config  # not above: the registry's actor needs no jax
    from jaxrl.registry import register_configured_functions, sync_registries

    if not ray.is_initialized():
        ray.init(runtime_env={"env_vars": worker_environment()}, **options)
    train_config = to_train_config(config)
    for config_class in _classes(train_config):  # one of a recipe: workers cannot import that
        for module in user_modules(config_class):
            ray.cloudpickle.register_pickle_by_value(module)
    register_configured_functions(train_config.trainer.algorithm)
    sync_registries()


def worker_environment() -> dict[str, str]:
    """Environment variables that workers must share with the driver."""
    shared = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(_PASSED_ON) and not name.startswith(_OF_ONE_PROCESS)
    }
    return {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", **shared}


def _classes(config: Any) -> Iterator[type]:
    yield type(config)
    for value in vars(config).values():
        if dataclasses.is_dataclass(value):
            yield from _classes(value)
