"""Trajectories of a row per turn: making the rows, merging them, and whose row is whose."""

import dataclasses
from typing import Any, cast

import numpy as np

from jaxrl.data.columns import BLANKS, ROUTES, TOKEN_COLUMNS
from jaxrl.types import GeneratorOutput, Trajectory


def steps_of(trajectory: Trajectory) -> list[Trajectory]:
    """Split a trajectory into a row per turn, whose prompt is all that came before.

    The last row has the reward of the whole trajectory on its last turn, the others have none; each
    has what its turn earned as `turn_reward`, and the trajectory's stop_reason.

    Example: prompt [5], response [1, 2, 9, 3], turns [(0, 2), (3, 4)], rewards [0, 1, 0, 2] become
    prompt [5], response [1, 2], rewards [0, 0] and prompt [5, 1, 2, 9], response [3], rewards [3].
    """
    t = trajectory
    if len(t.turns) < 2:
        return [dataclasses.replace(t, turn_reward=float(np.sum(t.rewards)))]
    rows = [_step(t, start, end) for start, end in t.turns]
    (first, last), total = t.turns[-1], cast(list[float], t.rewards)
    begins = [0, *(start for start, _ in t.turns[1:]), len(total)]  # what follows a turn is its own
    for row, start, end in zip(rows, begins[:-1], begins[1:], strict=True):
        row.turn_reward = float(sum(total[start:end]))
    rewards = [0.0] * (last - first)
    rewards[_last_sampled(rows[-1])] = sum(total)
    rows[-1].rewards = rewards
    return rows


def merge_steps(output: GeneratorOutput) -> GeneratorOutput:
    """Merge neighbouring steps of a trajectory to one row where the later goes on from the earlier.

    That is where its prompt begins with the earlier one's prompt and response. What its prompt has
    beyond them has loss mask, log-prob and reward 0. Of rewards for whole responses and of
    stop_reasons the last one holds; the version is the first one's.
    """
    last = output.get("is_last_step")
    if last is None:
        return output
    rows: dict[str, list[Any]] = {k: [] for k, v in output.items() if isinstance(v, list)}
    for i in range(len(last)):
        row = {name: cast(dict, output)[name][i] for name in rows}
        if i and not last[i - 1] and _goes_on(rows, row):
            _append(rows, row)
            continue
        for name, value in row.items():
            rows[name].append(list(value) if isinstance(value, list) else value)
    return cast(GeneratorOutput, {**output, **rows})


def _step(t: Trajectory, start: int, end: int) -> Trajectory:
    return dataclasses.replace(
        t,
        prompt_tokens=[*t.prompt_tokens, *t.response_tokens[:start]],
        response_tokens=t.response_tokens[start:end],
        turns=[(0, end - start)],
        routes=None if t.routes is None else t.routes[: len(t.prompt_tokens) + end],
        **{column.field: getattr(t, column.field)[start:end] for column in TOKEN_COLUMNS}
        | {"rewards": [0.0] * (end - start)},
    )


def _last_sampled(row: Trajectory) -> int:
    """Return the index of the last sampled token, or of the last one of a row that is masked."""
    sampled = np.flatnonzero(row.loss_mask)
    return int(sampled[-1]) if sampled.size else len(row.loss_mask) - 1


def _goes_on(rows: dict[str, list[Any]], row: dict[str, Any]) -> bool:
    before = rows["prompt_token_ids"][-1] + rows["response_ids"][-1]
    return row["prompt_token_ids"][: len(before)] == before


def _append(rows: dict[str, list[Any]], row: dict[str, Any]) -> None:
    """Add a step to the last row."""
    done = len(rows["prompt_token_ids"][-1]) + len(rows["response_ids"][-1])
    between = row["prompt_token_ids"][done:]  # which the policy did not sample
    for name, column in rows.items():
        if name == "response_ids":
            column[-1] += between + row[name]
        elif name in BLANKS and isinstance(row[name], list):
            column[-1] += [BLANKS[name]] * len(between) + row[name]
        elif name == ROUTES:
            known, more = column[-1], row[name]
            if len(known) and len(more) > len(known):
                column[-1] = np.concatenate([known, more[len(known) :]])
            elif len(more):
                column[-1] = known if len(known) else more
        elif name not in ("prompt_token_ids", "policy_versions"):
            column[-1] = row[name]
