"""Columns of a generator's output: rows of trajectories, chosen and counted."""

from collections.abc import Sequence
from typing import cast

import numpy as np

from jaxrl.types import GeneratorOutput


def trajectory_numbers(is_last_step: Sequence[bool] | np.ndarray) -> np.ndarray:
    """Number of each row's trajectory: [B] bool to [B] int from 0."""
    last = np.asarray(is_last_step, bool)
    return np.cumsum(last) - last


def last_steps(output: GeneratorOutput) -> GeneratorOutput:
    """One row per trajectory: the last, which has the reward."""
    last = output.get("is_last_step")
    return output if last is None else take_rows(output, np.flatnonzero(last))


def take_rows(output: GeneratorOutput, rows: np.ndarray) -> GeneratorOutput:
    """These rows of every column."""
    return cast(
        GeneratorOutput,
        {
            name: [column[row] for row in rows] if isinstance(column, list) else column
            for name, column in output.items()
        },
    )


def take_trajectories(output: GeneratorOutput, chosen: np.ndarray) -> GeneratorOutput:
    """All rows of these trajectories, in this order."""
    last = output.get("is_last_step")
    if last is None:
        return take_rows(output, chosen)
    ends = np.flatnonzero(last) + 1
    starts = np.concatenate([[0], ends[:-1]])
    rows = [row for i in chosen.tolist() for row in range(int(starts[i]), int(ends[i]))]
    return take_rows(output, np.array(rows, int))
