"""Runs on a Ray cluster: the only package that imports ray."""

try:
    import ray  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("jaxrl.cluster needs Ray: pip install 'jaxrl[ray]'") from error

from jaxrl.cluster.initialize import initialize_ray

__all__ = ["initialize_ray"]
