"""The items of a checkpoint, and how each is written."""

from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

Buffer = dict[str, np.ndarray]  # what waits to be trained


def item_handlers() -> dict[str, Any]:
    """Of the items state, meta and buffer."""
    return {
        "state": array_handler(),
        "meta": ocp.JsonCheckpointHandler(),
        "buffer": ocp.PyTreeCheckpointHandler(),
    }


def array_handler() -> ocp.PyTreeCheckpointHandler:
    """Of the state; writes the first copy of a replicated array.

    Orbax's own way, a slice of every copy, compiles a program for each slice in the first save.
    """
    handlers = ocp.type_handlers
    return ocp.PyTreeCheckpointHandler(
        type_handler_registry=handlers.create_type_handler_registry(
            (jax.Array, handlers.ArrayHandler(use_replica_parallel=False)),
            (np.ndarray, handlers.NumpyHandler()),
        )
    )
