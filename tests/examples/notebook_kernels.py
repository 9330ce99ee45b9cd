"""Kernels for the tests: a notebook runs in a process of its own, as a user's does."""

import os
from pathlib import Path

ROOT = Path(__file__).parents[2]
OURS = ("XLA_FLAGS", "JAX_DISABLE_MOST_OPTIMIZATIONS")  # of conftest.py: a user has not got them


def environment():
    """Variables of a user's process on a CPU, which imports this jaxrl."""
    kept = {name: value for name, value in os.environ.items() if name not in OURS}
    return {**kept, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}


def run_notebook(notebook, folder, **options):
    """Execute in a folder; the outputs are in the cells."""
    from nbclient import NotebookClient

    where = {"metadata": {"path": str(folder)}}
    given = {"timeout": 900, "kernel_name": "python3", "coalesce_streams": True, **options}
    NotebookClient(notebook, resources=where, **given).execute(env=environment())
    return notebook


def streams(cell):
    """What a cell wrote, by stream."""
    outputs = [x for x in cell.outputs if x.output_type == "stream"]
    return {
        name: "".join(x.text for x in outputs if x.name == name) for name in ("stdout", "stderr")
    }
