"""Compilations: the shapes a run will need, a cache on disk, and a count of what came unasked."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax

COMPILED = "/jax/core/compile/backend_compile_duration"


def enable_cache(folder: str | None) -> None:
    """Keep compiled programs in `folder`, for this and later processes; None = do not.

    JAX_COMPILATION_CACHE_DIR, where set, outranks it.
    """
    if folder is None or jax.config.jax_compilation_cache_dir:
        return
    jax.config.update("jax_compilation_cache_dir", str(Path(folder).expanduser()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


class CompilationWatch:
    """Counts what XLA compiles in this process between `start` and `stop`.

    Example: `watch.take()` after step 7 returns `{"compile/count": 1, "compile/seconds": 2.3}` and
    leaves the functions' names in `watch.names`.
    """

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.names: list[str] = []

    def start(self) -> None:
        """Listen to JAX."""
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def stop(self) -> None:
        """Listen no more."""
        jax.monitoring.unregister_event_duration_listener(self._listen)

    def take(self) -> dict[str, float]:
        """Number and seconds of the compilations since the last call."""
        taken = {"compile/count": len(self.seconds), "compile/seconds": sum(self.seconds)}
        self.seconds.clear()
        self.names.clear()
        return taken

    def _listen(self, event: str, seconds: float, **details: Any) -> None:
        if event == COMPILED:
            self.seconds.append(seconds)
            self.names.append(str(details.get("fun_name", "?")))


def buckets_between(shortest: int, longest: int, bucket: Callable[[int], int]) -> list[int]:
    """The buckets that lengths from `shortest` to `longest` fall into, ascending."""
    found = [bucket(shortest)]
    while found[-1] < longest:
        found.append(bucket(found[-1] + 1))
    return found


def bucket_set(lengths: Iterable[int], bucket: Callable[[int], int]) -> list[int]:
    """The buckets of some lengths, ascending."""
    return sorted({bucket(length) for length in lengths})
