"""Start or join Ray with what the workers of a run need."""

import contextlib
import os
import socket
from collections.abc import Iterator
from typing import Any

from jaxrl.cluster.ray_import import ray
from jaxrl.registry.pickling import user_modules

CONNECT_SECONDS = 10.0
# Settings of the run, the same on every host; nothing secret, Ray's dashboard shows them.
_PASSED_ON = (
    *("JAX_", "XLA_", "JAXRL_XLA_FLAGS", "LIBTPU_INIT_ARGS"),
    *("HF_HOME", "HF_HUB_OFFLINE", "TOKENIZERS_"),
)
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
    from jaxrl.config.dataclass_config import config_classes
    from jaxrl.registry import register_configured_functions, sync_registries

    if not ray.is_initialized():
        ray.init(runtime_env={"env_vars": worker_environment()}, **options)
    train_config = to_train_config(config)
    for config_class in config_classes(train_config):  # one of a recipe: workers cannot import that
        for module in user_modules(config_class):
            ray.cloudpickle.register_pickle_by_value(module)
    register_configured_functions(train_config.trainer.algorithm)
    sync_registries()


def worker_environment() -> dict[str, str]:
    """Return the environment variables that workers must share with the driver."""
    shared = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(_PASSED_ON) and not name.startswith(_OF_ONE_PROCESS)
    }
    return {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", **shared}


@contextlib.contextmanager
def joined_ray(config: Any, **options: Any) -> Iterator[None]:
    """Keep Ray initialised while the block runs; leave it after that, if it was not before.

    Raises:
        ValueError: the cluster does not answer, or has other versions of Ray or Python.
    """
    if ray.is_initialized():
        initialize_ray(config)
        yield
        return
    address = options.get("address") or os.environ.get("RAY_ADDRESS")
    starts = address in (None, "", "local")
    if not starts and address != "auto":
        _check_answers(address)
    quiet: dict[str, Any] = {
        "log_to_driver": False,
        **({"include_dashboard": False} if starts else {}),
    }
    try:
        initialize_ray(config, **{**quiet, **options})
    except (ConnectionError, RuntimeError) as error:  # RuntimeError: the versions differ
        raise ValueError(f"RAY_ADDRESS={address!r}: cannot join Ray: {error}") from error
    try:
        yield
    finally:
        ray.shutdown()


def _check_answers(address: str) -> None:
    """Refuse an address that does not answer: Ray itself would try for minutes."""
    if "://" in address:
        fix = "run the launcher on a host of the cluster (ray job submit), with host:port or auto"
        raise ValueError(f"RAY_ADDRESS={address!r}: Ray Client cannot start processes; {fix}")
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS).close()
    except (OSError, ValueError) as error:
        raise ValueError(
            f"RAY_ADDRESS={address!r} does not answer ({error}): is Ray running there (ray status) "
            "and its port open to this host? host:port is expected, or auto"
        ) from error
