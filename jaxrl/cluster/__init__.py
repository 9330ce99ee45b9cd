"""Run jobs of several processes, on a Ray cluster or without; only this package imports ray."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxrl.cluster.initialize import initialize_ray

__all__ = ["initialize_ray"]


def __getattr__(name: str) -> Any:
    if name == "initialize_ray":  # not above: what runs without Ray must not need it
        from jaxrl.cluster.initialize import initialize_ray

        return initialize_ray
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
