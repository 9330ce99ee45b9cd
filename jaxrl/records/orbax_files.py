"""Steps of arrays and JSON in a folder, each one commit: all that jaxrl asks of orbax.

Orbax writes into a temporary folder and renames it, so that a save that did not finish is never
seen by a restore. Its version 1 has another interface; who changes to that changes this module.
"""

import functools
import logging
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from jaxrl.records.checkpoint_folders import PREFIX


class StepFiles:
    """Save and restore named trees of arrays, and one of JSON, under `<folder>/global_step_<N>`.

    What goes wrong is raised as orbax and tensorstore raise it.

    Args:
        max_to_keep: the latest ones; None = all.
        read_only: of another run; nothing in the folder is touched.

    Raises:
        ImportError: a package for a bucket is missing.
    """

    def __init__(self, folder: epath.Path, *, max_to_keep: int | None, read_only: bool) -> None:
        options = ocp.CheckpointManagerOptions(
            max_to_keep=max_to_keep,
            step_prefix=PREFIX,
            enable_async_checkpointing=True,
            cleanup_tmp_directories=not read_only,  # of a run that was killed in a save
            create=False,
            lightweight_initialize=True,  # a damaged checkpoint must not keep others from loading
        )
        # where one process fails to read, the others must not wait for it within orbax
        alone = ocp.options.MultiprocessingOptions(
            primary_host=jax.process_index(), active_processes={jax.process_index()}
        )
        reading = ocp.CheckpointManagerOptions(
            step_prefix=PREFIX,
            create=False,
            lightweight_initialize=True,
            multiprocessing_options=alone,
        )
        print_no_tracebacks()
        self.manager, self._reader = (
            ocp.CheckpointManager(folder, options=chosen, item_handlers=_item_handlers())
            for chosen in (options, reading)
        )

    def save(
        self,
        step: int,
        arrays: Mapping[str, Any],
        meta: Mapping[str, Any],
        begun: Callable[[], None] = lambda: None,
    ) -> None:
        """Start to write a step, whose arrays may be donated at once.

        Args:
            arrays: a tree under each of the names "state" and "buffer".
            meta: JSON, in the file `meta/metadata`.
            begun: is called once it has begun, before anything can interrupt this call.

        Raises:
            ValueError: a later step is there.
        """
        items = {name: ocp.args.PyTreeSave(tree) for name, tree in arrays.items()}
        args = ocp.args.Composite(**items, meta=ocp.args.JsonSave(dict(meta)))

        def begin() -> None:
            if not self.manager.save(step, args=args):
                raise ValueError(f"the folder already holds a step after {step}")
            begun()

        _in_daemon(begin)

    def wait(self) -> None:
        """Wait until the last save is committed."""
        self.manager.wait_until_finished()

    def steps(self) -> list[int]:
        """Return the steps that are committed."""
        return list(self.manager.all_steps())

    def reload(self) -> None:
        """Look again in the folder which steps are committed there."""
        self.manager.reload()

    def delete(self, step: int) -> None:
        """Remove all that was saved of a step, from the disk, too."""
        self.manager.delete(step)

    def restore(self, step: int, name: str, abstract: Any = None, *, partial: bool = False) -> Any:
        """Return a tree of a step, by this process alone.

        Args:
            abstract: shapes, dtypes and shardings; None: as they were saved.
            partial: only what of it `abstract` has.
        """
        if abstract is None:
            args = ocp.args.PyTreeRestore()
        else:
            wanted = jax.tree.map(ocp.utils.to_shape_dtype_struct, abstract)
            targets = ocp.checkpoint_utils.construct_restore_args(wanted)
            args = ocp.args.PyTreeRestore(wanted, restore_args=targets, partial_restore=partial)
        return self._reader.restore(step, args=ocp.args.Composite(**{name: args}))[name]

    def close(self) -> None:
        """Stop the threads that write."""
        self.manager.close()
        self._reader.close()


def _item_handlers() -> dict[str, Any]:
    """Return orbax's handlers of the items state, meta and buffer.

    That of the state writes the first copy of a replicated array. Orbax's own way, a slice of every
    copy, compiles a program for each slice in the first save.
    """
    handlers = ocp.type_handlers
    first_copy = handlers.create_type_handler_registry(
        (jax.Array, handlers.ArrayHandler(use_replica_parallel=False)),
        (np.ndarray, handlers.NumpyHandler()),
    )
    return {
        "state": ocp.PyTreeCheckpointHandler(type_handler_registry=first_copy),
        "meta": ocp.JsonCheckpointHandler(),
        "buffer": ocp.PyTreeCheckpointHandler(),
    }


def _in_daemon(start: Callable[[], None]) -> None:
    """Let orbax start a save in a daemon thread: so are those that it starts.

    Where it fails, as on a full disk, they wait for minutes for what will not come, and the end of
    the process would wait for them.
    """
    done: Future[None] = Future()

    def run() -> None:
        try:
            done.set_result(start())
        except BaseException as error:
            done.set_exception(error)

    thread = threading.Thread(target=run, name="start of a save", daemon=True)
    try:
        thread.start()
        done.result()
    finally:
        if thread.is_alive():  # at Ctrl-C: it must not go on when the folder is let go of
            thread.join()


@functools.cache
def print_no_tracebacks() -> None:
    """Keep orbax from printing what a `Checkpointer` raises as one error.

    It logs the error of each of its threads. And it closes its event loop when the first array
    fails: each of the others then finds the loop closed, or its error is never asked for, which
    nobody can catch.
    """
    shown = sys.unraisablehook

    def show(unraisable: Any) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            shown(unraisable)

    sys.unraisablehook = show
    logging.getLogger("absl").addFilter(
        lambda record: record.levelno < logging.ERROR or "orbax" not in record.pathname
    )
    logging.getLogger("asyncio").addFilter(lambda record: "orbax" not in record.getMessage())
