"""Starting or joining Ray with what the workers of a run need."""

import os
from typing import Any

import ray

# Settings of the run, the same on every host; nothing secret, Ray's dashboard shows them.
_PASSED_ON = ("JAX_", "XLA_", "LIBTPU_INIT_ARGS", "HF_HOME", "HF_HUB_OFFLINE", "TOKENIZERS_")
_OF_ONE_PROCESS = ("JAX_COORDINATOR_", "JAX_PROCESS_", "JAX_NUM_PROCESSES", "JAX_LOCAL_DEVICE_")


def initialize_ray(config: Any) -> None:
    """Start Ray, or join the cluster of RAY_ADDRESS, and share the user functions with its workers.

    Workers get the driver's JAX and XLA settings. A task that asks Ray for no accelerator still
    sees those of its host, because the trainer runs in such a task. Does not restart a Ray that is
    initialised already.

    Args:
        config: a `TrainConfig`, `ml_collections.ConfigDict` or nested dict. Functions that it names
            as "my_pkg.my_module:my_loss" are registered under that name, so that the module need
            not be importable on the workers.

    Raises:
        ValueError: see `jaxrl.registry.sync_registries`.
    """
    from jaxrl.config import to_train_config  # not above: the registry's actor needs no jax
    from jaxrl.registry import register_configured_functions, sync_registries

    if not ray.is_initialized():
        ray.init(runtime_env={"env_vars": worker_environment()})
    register_configured_functions(to_train_config(config).trainer.algorithm)
    sync_registries()


def worker_environment() -> dict[str, str]:
    """Environment variables that workers must share with the driver."""
    shared = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(_PASSED_ON) and not name.startswith(_OF_ONE_PROCESS)
    }
    return {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", **shared}
