"""Columns of a generator's output: the one table of those with an entry per response token.

A column's entry in the table is all that is to be said of it between the sampler and the batch: how
a generator may give it, how it is recorded, merged and padded. A new one is a field in `types.py`
(`Trajectory`, `GeneratorOutput`, `TrainBatch`), a row here, and whoever makes it.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import numpy as np

from jaxrl.types import GeneratorOutput, Trajectory


class Column(NamedTuple):
    """Say what is true of one column with an entry per response token.

    Attributes:
        name: in `GeneratorOutput`, where SkyRL has the column under SkyRL's name.
        field: of `Trajectory`.
        batch: field of `TrainBatch`, [B, T] or, of tuples, [B, T, k].
        blank: entry of a token that the policy did not sample, and of padding.
        dtype: in a batch.
        stored: dtype in a file of recorded rollouts; None = JSON.
        kinds: of numbers that a generator may give ("b", "i", "u", "f"); "" = tuples of ids.
        optional: a generator, or a part of a batch, may lack it.
        if_any: it is left out where all entries are blank.
    """

    name: str
    field: str
    batch: str
    blank: Any
    dtype: Any
    stored: Any
    kinds: str
    optional: bool = False
    if_any: bool = False

    def is_in(self, rows: Sequence[Trajectory]) -> bool:
        """Return whether trajectories have the column: an entry for each token of each."""
        if not self.optional:
            return True
        lists = [getattr(row, self.field) for row in rows]
        if self.if_any:
            return any(map(any, lists))
        return all(len(x) == len(r.response_tokens) for x, r in zip(lists, rows, strict=True))


TOKEN_COLUMNS = (
    Column("loss_masks", "loss_mask", "loss_mask", 0, np.float32, np.int8, "biuf"),
    # shaped before they are a batch, so they stay exact; or one number for the whole response
    Column("rewards", "rewards", "rewards", 0.0, np.float32, np.float64, "biuf"),
    Column(
        name="rollout_logprobs",
        field="rollout_log_probs",
        batch="rollout_log_probs",
        blank=0.0,
        dtype=np.float32,
        stored=np.float32,
        kinds="iuf",
    ),
    Column(
        name="kept",
        field="sampling_mask_ids",
        batch="kept",
        blank=(),
        dtype=np.int32,
        stored=None,
        kinds="",
        optional=True,
        if_any=True,
    ),
    Column(
        name="token_versions",
        field="versions",
        batch="token_versions",
        blank=-1,
        dtype=np.int32,
        stored=np.int32,
        kinds="iu",
        optional=True,
    ),
    Column(
        name="context_versions",
        field="context_versions",
        batch="context_versions",
        blank=-1,
        dtype=np.int32,
        stored=np.int32,
        kinds="iu",
        optional=True,
    ),
)
# The experts of prompt and response are no column with an entry per response token.
ROUTES = "rollout_expert_indices"
NO_ROUTES = np.zeros((0, 0, 0), np.uint8)  # of a row of which nothing is known, or not here
ROUTES_PROCESS = "expert_indices_process"  # of a job: which process has those of a row
BLANKS = {column.name: column.blank for column in TOKEN_COLUMNS}


def trajectory_numbers(is_last_step: Sequence[bool] | np.ndarray) -> np.ndarray:
    """Return the number of each row's trajectory, from 0: [B] bool to [B] int."""
    last = np.asarray(is_last_step, bool)
    return np.cumsum(last) - last


def last_steps(output: GeneratorOutput) -> GeneratorOutput:
    """Keep one row per trajectory: the last, which has the reward."""
    last = output.get("is_last_step")
    return output if last is None else take_rows(output, np.flatnonzero(last))


def take_rows(output: GeneratorOutput, rows: np.ndarray) -> GeneratorOutput:
    """Return the given rows of every column."""
    return cast(
        GeneratorOutput,
        {
            name: [column[row] for row in rows] if isinstance(column, list) else column
            for name, column in output.items()
        },
    )


def take_trajectories(output: GeneratorOutput, chosen: np.ndarray) -> GeneratorOutput:
    """Return all rows of the given trajectories, in the given order."""
    last = output.get("is_last_step")
    if last is None:
        return take_rows(output, chosen)
    ends = np.flatnonzero(last) + 1
    starts = np.concatenate([[0], ends[:-1]])
    rows = [row for i in chosen.tolist() for row in range(int(starts[i]), int(ends[i]))]
    return take_rows(output, np.array(rows, int))
