"""Pack the trajectories of a step, group by group, with what was dumped of its training batch.

A group is a prompt with its samples; it becomes one blob. Its header:

    uid, env, row: of the data, what the prompt was made of, by column as JSON; {} = not known
    rows: one entry per row, a trajectory or a turn of one (step-wise training):
        trajectory  number in the group
        prompt      tokens of the prompt; -1 = the same as of the row before
        response    tokens of the response
        turns       [first token, last + 1, reward] of every stretch that the policy sampled
        reward, stop, version, ended, terms

Its arrays run over the rows, one after the other: `tokens` (prompt unless it is the same, then
response), by their numbers in the vocabulary; over response tokens `mask` (1 = sampled by the
policy), `log_probs` of the sampler, `rewards`, `versions` (of the policy that drew it, less the
row's), and of a dumped batch `log_ratios` (trainer - sampler), `advantages`, `values`, `trained`
(its loss mask). An array that there is nothing of is absent; NaN: not of this row.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from jaxrl.data.columns import trajectory_numbers
from jaxrl.records.batch_file import load_batch
from jaxrl.records.ledger import read_rollouts
from jaxrl.tools.report.blob import finite, pack
from jaxrl.tools.report.prompt_rows import env_of, row_of
from jaxrl.tools.report.run_files import TRAINED, RunFiles
from jaxrl.tools.report.vocabulary import Vocabulary
from jaxrl.types import GeneratorOutput, TrainBatch

DUMPED = ("advantages", "values")


@dataclass(frozen=True)
class StepRows:
    """Hold what is recorded of a step.

    Attributes:
        output: rows as columns.
        groups: uid of each prompt, in the order of its first row, and its rows.
        trajectories: number of each row's trajectory within the step.
        batch: of `trainer.dump_data_batch`; None = not dumped, or not of these rows.
        batch_rows: row -> row of the batch.
    """

    output: GeneratorOutput
    groups: list[tuple[str, list[int]]]
    trajectories: np.ndarray
    batch: TrainBatch | None
    batch_rows: dict[int, int]


def read_step(run: RunFiles, step: int, *, with_batch: bool = True) -> StepRows | None:
    """Read the trajectories of a step; None and a note where its file cannot be read.

    Args:
        with_batch: what was dumped of the step's batch too.
    """
    found = run.note_of("trajectories", lambda: _read(run.rollouts[step]), None, step=step)
    if found is None:
        return None
    output, groups, trajectories = found
    path = run.dumped_batch(step) if with_batch else None
    if path is None:
        return StepRows(output, groups, trajectories, None, {})
    batch = run.note_of("dumped batch", lambda: load_batch(path), None, step=step)
    rows = {}
    if batch is not None:
        rows = run.note_of("dumped batch", lambda: _matched(batch, output), {}, step=step)
    return StepRows(output, groups, trajectories, batch if rows else None, rows)


def _read(path: Path) -> tuple[GeneratorOutput, list[tuple[str, list[int]]], np.ndarray]:
    output, uids = read_rollouts(path, with_routes=False)
    rows = len(output["response_ids"])
    numbers = trajectory_numbers(output.get("is_last_step", [True] * rows))
    if rows and len(uids) <= numbers[-1]:
        raise ValueError(
            f"{path} has {numbers[-1] + 1} trajectories and the prompts of {len(uids)}"
        )
    groups: dict[str, list[int]] = {}
    for row, number in enumerate(numbers.tolist()):
        groups.setdefault(uids[number], []).append(row)
    return output, list(groups.items()), numbers


def _matched(batch: TrainBatch, output: GeneratorOutput) -> dict[int, int]:
    """Return row of the rollouts -> row of a batch.

    `row_ids` say it, unless an override reordered them.

    Raises:
        ValueError: tokens differ.
    """
    found: dict[int, int] = {}
    tokens, lengths = np.asarray(batch.tokens), np.asarray(batch.lengths)
    for place, row in enumerate(np.asarray(batch.row_ids).tolist()):
        whole = [] if row >= len(output["response_ids"]) else _tokens(output, row)
        if tokens[place, : lengths[place]].tolist() != whole:
            raise ValueError(
                f"its row {place} is not the recorded trajectory {row}: ratios and advantages of "
                "this step are left out"
            )
        found[row] = place
    return found


def _tokens(output: GeneratorOutput, row: int) -> list[int]:
    return output["prompt_token_ids"][row] + output["response_ids"][row]


def reward_of(output: GeneratorOutput, row: int) -> float:
    """Return the reward of a row: the sum of those of its tokens, where they have their own."""
    reward = cast(Any, output["rewards"][row])
    return float(sum(reward) if isinstance(reward, list) else reward)


def pack_group(
    run: RunFiles, step: StepRows, uid: str, rows: Sequence[int], vocabulary: Vocabulary
) -> str:
    """Pack a group as a blob; the head of this module has its layout."""
    entries, tokens = [], list[int]()
    order = dict.fromkeys(step.trajectories[rows].tolist())
    numbers, before = {trajectory: k for k, trajectory in enumerate(order)}, None
    for row in rows:
        prompt = step.output["prompt_token_ids"][row]
        entry = _entry(run, step, row) | {"trajectory": numbers[int(step.trajectories[row])]}
        entries.append(entry | {"prompt": -1 if prompt == before else len(prompt)})
        tokens += (
            step.output["response_ids"][row] if prompt == before else _tokens(step.output, row)
        )
        before = prompt
    arrays = {"tokens": vocabulary.numbers(np.array(tokens, np.int64))}
    arrays |= {name: x for name, x in _per_token(step, rows) if x is not None}
    prompt = {"uid": uid, "env": env_of(run, uid), "row": row_of(run, uid)}
    return pack(prompt | {"rows": entries}, arrays)


def _entry(run: RunFiles, step: StepRows, row: int) -> dict[str, Any]:
    output = step.output
    ids, terms = output.get("ledger_ids"), output.get("reward_terms")
    ended = "" if ids is None or not run.has_ledger else run.dropped.get(ids[row], TRAINED)
    return {
        "response": len(output["response_ids"][row]),
        "turns": _turns(output, row),
        "reward": finite(reward_of(output, row)),
        "stop": output["stop_reasons"][row],
        "version": output["policy_versions"][row],
        "ended": ended,
        "terms": {k: finite(float(v)) for k, v in (terms[row] if terms else {}).items()},
    }


def _turns(output: GeneratorOutput, row: int) -> list[list[float | None]]:
    """Return stretches that the policy sampled, and what was earned until the next one begins."""
    mask = np.array(output["loss_masks"][row], bool)
    edges = np.flatnonzero(np.diff(mask.astype(int), prepend=0, append=0))
    starts, ends = edges[::2].tolist(), edges[1::2].tolist()
    reward = cast(Any, output["rewards"][row])
    per_token = reward if isinstance(reward, list) else []
    bounds = zip([0, *starts[1:]], [*starts[1:], len(mask)], strict=True) if starts else ()
    earned = [finite(float(sum(per_token[a:b]))) if per_token else None for a, b in bounds]
    return [[a, b, r] for a, b, r in zip(starts, ends, earned, strict=True)]


def _per_token(step: StepRows, rows: Sequence[int]) -> Iterator[tuple[str, np.ndarray | None]]:
    output, versions = step.output, step.output.get("token_versions")
    yield "mask", np.array(_chained(output["loss_masks"], rows), np.uint8)
    if (log_probs := output["rollout_logprobs"]) is not None:
        yield "log_probs", _half(_chained(log_probs, rows))
    rewards = cast(Any, output["rewards"])
    if any(isinstance(rewards[row], list) for row in rows):
        per_token = [
            rewards[r] if isinstance(rewards[r], list) else [0.0] * len(output["response_ids"][r])
            for r in rows
        ]
        yield "rewards", _half([x for row in per_token for x in row])
    if versions is not None:
        first = output["policy_versions"]
        newer = [max(version - first[row], 0) for row in rows for version in versions[row]]
        yield "versions", np.minimum(newer, 255).astype(np.uint8) if any(newer) else None
    if step.batch is not None:
        yield from _of_batch(step, step.batch, rows)


def _of_batch(
    step: StepRows, batch: TrainBatch, rows: Sequence[int]
) -> Iterator[tuple[str, np.ndarray | None]]:
    """Yield what was dumped; `log_ratios` where the step knew the old policy's log-probs."""
    fields = {name: getattr(batch, name) for name in DUMPED}
    if batch.old_log_probs is not None and batch.rollout_log_probs is not None:
        ratios = np.asarray(batch.old_log_probs) - np.asarray(batch.rollout_log_probs)
        fields["log_ratios"] = np.where(np.asarray(batch.loss_mask) > 0, ratios, np.nan)
    for name, array in fields.items():
        if array is not None:
            yield name, _half(np.concatenate([_response(step, array, row) for row in rows]))
    trained = np.concatenate([_response(step, batch.loss_mask, row) for row in rows])
    yield "trained", (np.nan_to_num(trained) > 0).astype(np.uint8)


def _response(step: StepRows, array: Any, row: int) -> np.ndarray:
    """Return of an array [B, T] the response tokens of a row; NaN where the batch lacks the row."""
    size, start = len(step.output["response_ids"][row]), len(step.output["prompt_token_ids"][row])
    if row not in step.batch_rows:
        return np.full(size, np.nan)
    return np.asarray(array)[step.batch_rows[row], start : start + size]


def _chained(column: Sequence[Sequence[Any]], rows: Sequence[int]) -> list[Any]:
    return [x for row in rows for x in column[row]]


def _half(values: Any) -> np.ndarray:
    """Return values in half precision, three digits: enough to look at."""
    with np.errstate(over="ignore"):
        return np.asarray(values, np.float64).astype(np.float16)
