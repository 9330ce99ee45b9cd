"""Ray, which only runs on a Ray cluster need."""

try:
    import ray
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("jaxrl.cluster needs Ray: pip install 'jaxrl[ray]'") from error

__all__ = ["ray"]
