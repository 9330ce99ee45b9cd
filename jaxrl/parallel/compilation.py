"""Compilations: a cache on disk for what XLA compiles, several at a time, and a count of it."""

import contextlib
import os
import warnings
from collections.abc import Hashable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, Self, cast

import jax
import numpy as np

from jaxrl import activity
from jaxrl.parallel.jax_internals import compilation_cache, compiler

COMPILED = "/jax/core/compile/backend_compile_duration"


def enable_cache(folder: str | None) -> None:
    """Keep compiled programs in `folder`, for this and later processes; None = do not.

    JAX_COMPILATION_CACHE_DIR, where set, outranks it. Of a job each process but the first keeps its
    programs in `process_<i>` below: what is for its own devices is no other one's, and where it is
    for those of all the key may differ. Without them a job that starts again compiles for minutes.
    """
    chosen = jax.config.values["jax_compilation_cache_dir"]
    if folder is None and not chosen:
        return
    if not chosen:
        chosen = str(Path(cast(str, folder)).expanduser())
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    if (process := jax.process_index()) and not chosen.endswith(own := f"/process_{process}"):
        chosen += own
        compiler._cache_write = _write_as_first  # JAX lets the first process alone write
    if chosen != jax.config.values["jax_compilation_cache_dir"]:
        jax.config.update("jax_compilation_cache_dir", chosen)
        compilation_cache.reset_cache()  # something may have been compiled already


def _write_as_first(
    key: str, seconds: float, name: str, backend: Any, executable: Any, callbacks: Sequence[Any]
) -> None:
    """Keep a program, as JAX's `_cache_write` does in the first process of a job."""
    if callbacks or seconds < jax.config.values["jax_persistent_cache_min_compile_time_secs"]:
        return
    try:
        compilation_cache.put_executable_and_time(key, name, executable, backend, int(seconds))
    except Exception as error:  # a full disk or a bucket that is away: the program is there
        warnings.warn(f"the compiled {name} is not kept: {error}", stacklevel=2)


class Call(NamedTuple):
    """Hold a jitted function and what it is called with: arrays, or shapes with shardings."""

    function: Any
    args: tuple[Any, ...]
    options: dict[str, Any]  # static

    def run(self) -> Any:
        """Call the function with its arguments and options, and return what it returns."""
        return self.function(*self.args, **self.options)

    def lower(self) -> jax.stages.Lowered:
        """Return the lowered program, to be compiled."""
        return self.function.lower(*self.args, **self.options)

    def results(self) -> Any:
        """Return the shapes of what the function returns."""
        return self.function.eval_shape(*self.args, **self.options)


@contextlib.contextmanager
def lowering(
    functions: Sequence[tuple[Any, str]],
) -> Iterator[dict[Hashable, jax.stages.Lowered]]:
    """Lower jitted functions where the block would call them; they give zeros, nothing is run.

    Where one is called while another is lowered it is a part of that one, and stays itself.

    Args:
        functions: what each is an attribute of, and its name.

    Yields:
        The programs by what tells them apart, in the order of their calls; see `compile_together`.
    """
    programs: dict[Hashable, jax.stages.Lowered] = {}
    inside = False  # a lowering

    def nothing(x: Any) -> np.ndarray:  # gradients are large: no memory for zeros
        return np.broadcast_to(np.zeros((), x.dtype), x.shape)

    def in_place_of(function: Any) -> Any:
        def lower(*args: Any, **options: Any) -> Any:
            nonlocal inside
            if inside:
                return function(*args, **options)
            leaves, structure = jax.tree.flatten(args)
            shapes = tuple((np.shape(x), getattr(x, "dtype", type(x))) for x in leaves)
            name = id(function), structure, shapes, tuple(options.items())
            if name not in programs:
                inside = True
                try:
                    programs[name] = function.lower(*args, **options)
                finally:
                    inside = False
            return jax.tree.map(nothing, programs[name].out_info)

        return lower

    originals = [(owner, name, getattr(owner, name)) for owner, name in functions]
    for owner, name, function in originals:
        setattr(owner, name, in_place_of(function))
    try:
        yield programs
    finally:
        for owner, name, function in originals:
            setattr(owner, name, function)


def compile_together(programs: Iterable[jax.stages.Lowered]) -> None:
    """Compile programs in several threads; calls with their arguments then find them compiled.

    They were lowered one after the other, which holds the interpreter; the compiler does not.
    """
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda program: program.compile(), programs))


class CompilationWatch:
    """Count what XLA compiles in this process while the `with` block runs.

    Example: `watch.take()` after step 7 returns `(["jit(accumulate)"], 2.3)`. A program that comes
    from the cache on disk counts too: the step had to wait for it.

    Args:
        warm_after: the last step of this process that is expected to compile something.
    """

    def __init__(self, warm_after: int = 0) -> None:
        self.warm_after, self.recompiles = warm_after, 0
        self.seconds: list[float] = []
        self.names: list[str] = []

    def __enter__(self) -> Self:
        jax.monitoring.register_event_duration_secs_listener(self._listen)
        return self

    def __exit__(self, *_: object) -> None:
        jax.monitoring.unregister_event_duration_listener(self._listen)

    def take(self) -> tuple[list[str], float]:
        """Return the functions compiled since the last call, by name, and the seconds that took."""
        taken = self.names, sum(self.seconds)
        self.names, self.seconds = [], []
        return taken

    def metrics(self, step: int) -> dict[str, float]:
        """Return the metrics of a step; print what it compiled although all should be warm."""
        names, seconds = self.take()
        if names and step > self.warm_after:
            self.recompiles += len(names)
            activity.say(f"step {step}: {', '.join(names)} compiled again, {seconds:.1f} s")
        return {"compile/seconds": seconds, "compile/recompiles": self.recompiles}

    def _listen(self, event: str, duration_secs: float, **details: Any) -> None:
        if event == COMPILED:
            self.seconds.append(duration_secs)
            self.names.append(str(details.get("fun_name", "?")))
