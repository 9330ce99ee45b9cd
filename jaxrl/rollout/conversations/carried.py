"""Samples that go on in the next step, so that a step does not wait for its longest answers.

A sample draws at most so many tokens in a step; one that is not at its end then is carried: what it
has is kept as a row like any other, in the checkpoint too, and the next step goes on from there.
Its prompt and all that it has are prefilled anew, by the weights of that step, so a run that was
killed in between computes the same. Kimi Team, 2025, https://arxiv.org/abs/2501.12599 (sec. 2.6.2).
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from jaxrl.data.columns import ROUTES, TOKEN_COLUMNS, take_rows
from jaxrl.rollout.conversations.concat_outputs import concat_outputs
from jaxrl.rollout.conversations.stream import Unit
from jaxrl.rollout.conversations.trajectories import CARRIED
from jaxrl.rollout.protocol import Completion, Sampling
from jaxrl.types import GeneratorOutput, Measured, Prompt


@dataclasses.dataclass(frozen=True)
class Begun(Completion):
    """Hold what a sample has so far, and the prompt that it was drawn from; () before any token."""

    prompt_tokens: tuple[int, ...] = ()


NOTHING = Begun([], [], CARRIED, [])  # what a sample has before its first token
NO_ROWS = cast(GeneratorOutput, {"stop_reasons": []})  # of a group before its first round


# ---------------------------------------------------------------- a sample


def next_piece(sampling: Sampling, begun: Completion | None, most: int | None) -> Sampling:
    """Return the sampling of the next `most` tokens of a sample; None begun = of a whole one."""
    if begun is None or most is None:
        return sampling
    drawn = len(begun.tokens)
    max_tokens = min(sampling.max_tokens - drawn, most)
    min_tokens = min(max(sampling.min_tokens - drawn, 0), max_tokens)
    return dataclasses.replace(sampling, max_tokens=max_tokens, min_tokens=min_tokens)


def joined(begun: Completion, piece: Completion) -> Completion:
    """Return a sample with the piece that it has drawn now.

    Of the experts, which the piece has from the prompt on, those stay that its tokens were drawn
    by.
    """
    routes = piece.routes
    if routes is not None and begun.routes is not None:
        routes = np.concatenate([begun.routes, routes[len(begun.routes) :]])
    return dataclasses.replace(
        piece,
        tokens=begun.tokens + piece.tokens,
        log_probs=begun.log_probs + piece.log_probs,
        versions=begun.versions + piece.versions,
        context_versions=begun.context_versions + (piece.context_versions or piece.versions),
        sampling_mask_ids=begun.sampling_mask_ids + piece.sampling_mask_ids,
        routes=routes,
        steps=begun.steps + piece.steps,
    )


def goes_on(begun: Completion, piece: Completion, sampling: Sampling, most: int | None) -> bool:
    """Return whether a sample may have more tokens than its piece let it draw.

    A piece that an engine ended before, because it has no more room, is the sample's last.
    """
    asked = next_piece(sampling, begun, most).max_tokens
    whole = len(begun.tokens) + len(piece.tokens) < sampling.max_tokens
    return piece.stop_reason == "length" and len(piece.tokens) == asked and whole


# ---------------------------------------------------------------- a group


def unfinished(unit: Unit, samples: int) -> list[int]:
    """Return the numbers of a group's samples that are not at their end."""
    reasons = unit.output["stop_reasons"] or [CARRIED] * samples
    return [number for number, reason in enumerate(reasons) if reason == CARRIED]


def going_on(prompt: Prompt, unit: Unit, samples: int, uid: str) -> Prompt:
    """Return the prompt of a group with what its unfinished samples have so far.

    Args:
        uid: what names the random numbers of the group, which no other in the call has.
    """
    begun = {number: _so_far(unit.output, number) for number in unfinished(unit, samples)}
    return dataclasses.replace(prompt, uid=uid, begun=begun)


def _so_far(output: GeneratorOutput, row: int) -> Begun:
    """Return what a row of a group has been sampled of; one without tokens has nothing."""
    columns = cast(dict[str, Any], output)
    if not columns["stop_reasons"]:
        return NOTHING
    fields = {column.field: columns.get(column.name) for column in TOKEN_COLUMNS}
    of_row = {name: list(column[row]) if column else [] for name, column in fields.items()}
    measured = columns.get("measured")
    return Begun(
        prompt_tokens=tuple(columns["prompt_token_ids"][row]),
        tokens=list(columns["response_ids"][row]),
        log_probs=of_row["rollout_log_probs"],
        stop_reason=CARRIED,
        versions=of_row["versions"],
        context_versions=of_row["context_versions"],
        sampling_mask_ids=of_row["sampling_mask_ids"],
        routes=columns[ROUTES][row] if ROUTES in columns else None,
        steps=Measured(*measured[row]).steps if measured else 0,
    )


def with_samples(units: Sequence[Unit], output: GeneratorOutput, samples: int) -> list[Unit]:
    """Return groups with what was sampled of their unfinished samples, group after group.

    Raises:
        ValueError: a generator of one's own gave other rows, or not what metrics are made of.
    """
    found, begin = [], 0
    asked = sum(len(unfinished(unit, samples)) for unit in units)
    if len(output["response_ids"]) != asked or "measured" not in output:
        raise ValueError(
            f"generator.partial_rollouts: the generator gave {len(output['response_ids'])} rows "
            f"for {asked} samples, or no column 'measured': it needs one row of each, as "
            "ConversationGenerator gives them; leave max_tokens_per_step unset"
        )
    for unit in units:
        numbers = unfinished(unit, samples)
        new = take_rows(output, np.arange(begin, begin + len(numbers)))
        begin += len(numbers)
        if unit.output["stop_reasons"]:
            rows = np.arange(samples)
            rows[numbers] = samples + np.arange(len(numbers))
            new = take_rows(concat_outputs([unit.output, new]), rows)
        new = cast(GeneratorOutput, {**new, "rollout_metrics": {}})  # of the batch, not of it
        found.append(Unit(unit.ordinal, new))
    return found
