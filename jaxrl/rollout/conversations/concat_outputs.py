"""Batches that are sampled in parts, put together."""

import itertools
from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from jaxrl.data.columns import BLANKS, NO_ROUTES, ROUTES, ROUTES_PROCESS, TOKEN_COLUMNS
from jaxrl.rollout.conversations.trajectories import batch_metrics, refuse_all_failed
from jaxrl.types import GeneratorOutput, Measured

# Columns that a part may lack, because none of its rows has anything in them.
_MAY_LACK = {column.name for column in TOKEN_COLUMNS if column.optional}
_MAY_LACK |= {ROUTES, ROUTES_PROCESS, "reward_terms", "feedback", "demonstrated"}


def concat_batch(parts: Sequence[GeneratorOutput]) -> GeneratorOutput:
    """Put together the batch that was sampled in these parts.

    Its metrics are those of the whole where the parts have the column `measured`, which is left
    out; else means over the parts.

    Raises:
        AllFailed: the environment of every trajectory failed.
    """
    whole = concat_outputs(parts)
    measured = cast(dict, whole).pop("measured", None)
    if measured is None:
        return whole
    last = whole.get("is_last_step", [True] * len(measured))
    given = whole.get("demonstrated", [False] * len(measured))
    ended = [
        (Measured(*m), g) for m, g, is_last in zip(measured, given, last, strict=True) if is_last
    ]
    refuse_all_failed([m.failure for m, _ in ended])
    return {**whole, "rollout_metrics": batch_metrics([m for m, g in ended if not g])}


def concat_outputs(parts: Sequence[GeneratorOutput]) -> GeneratorOutput:
    """Concatenate the columns of parts; the metrics are means over the parts that have them."""
    names = dict.fromkeys(itertools.chain.from_iterable(parts))
    whole: dict[str, Any] = {name: _column(name, parts) for name in names}
    metrics = [part["rollout_metrics"] for part in parts]
    keys = dict.fromkeys(itertools.chain.from_iterable(metrics))
    means = {key: float(np.mean([m[key] for m in metrics if key in m])) for key in keys}
    return cast(GeneratorOutput, whole | {"rollout_metrics": means})


def _column(name: str, parts: Sequence[GeneratorOutput]) -> Any:
    columns: list[Any] = [cast(dict, part).get(name) for part in parts]
    if not any(isinstance(column, list) for column in columns):
        return columns[0]
    if name in _MAY_LACK:
        columns = [
            [_nothing(name, response) for response in part["response_ids"]] if c is None else c
            for c, part in zip(columns, parts, strict=True)
        ]
    if not all(isinstance(column, list) for column in columns):
        raise ValueError(f"the generator gives {name} for some prompts only; give it for all")
    return list(itertools.chain.from_iterable(columns))


def _nothing(name: str, response: Sequence[int]) -> Any:
    """Return what a row has in a column that its part lacks."""
    if name == ROUTES:
        return NO_ROUTES
    if name == ROUTES_PROCESS:
        return 0  # any: none of them knows
    of_rows: dict[str, Any] = {"reward_terms": {}, "feedback": "", "demonstrated": False}
    return of_rows[name] if name in of_rows else [BLANKS[name]] * len(response)
