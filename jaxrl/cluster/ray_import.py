"""Import Ray, which only what runs on a Ray cluster needs, or say how to install it."""

try:
    import ray
    import ray.cloudpickle
    import ray.exceptions
    import ray.util.scheduling_strategies
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("jaxrl.cluster needs Ray: pip install 'jaxrl[ray]'") from error

__all__ = ["ray"]
