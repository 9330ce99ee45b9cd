"""Finished conversations as columns, and the numbers about them."""

import functools
from collections import Counter
from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from jaxrl import envs
from jaxrl.data.columns import NO_ROUTES, ROUTES, TOKEN_COLUMNS
from jaxrl.rollout.conversations.step_wise import steps_of
from jaxrl.types import GeneratorOutput, Measured, Trajectory, TrajectoryID

CARRIED = "carried"  # stop reason of a sample that is not at its end


class AllFailed(RuntimeError):
    """Signal that nine in ten environments of a batch failed: the rest teaches nothing of use."""


def to_columns(
    trajectories: Sequence[Trajectory],
    ids: Sequence[TrajectoryID] | None = None,
    *,
    step_wise: bool = False,
    log_probs: bool = True,
    part: bool = False,
) -> GeneratorOutput:
    """Turn trajectories into the columns that `Trainer.postprocess_generator_output` works on.

    Args:
        ids: None = the samples of each uid are numbered.
        step_wise: a row per turn.
        log_probs: whether the rollouts carry them.
        part: of a batch; the column `measured` is for the metrics of the whole.
    """
    ids = _numbered(trajectories) if ids is None else ids
    steps = [steps_of(t) if step_wise else [t] for t in trajectories]
    rows = [row for trajectory in steps for row in trajectory]
    measured = [_measured(t) for t in trajectories]
    # an environment has no numbers yet of samples that go on in the next step
    ended = [
        m
        for m, t in zip(measured, trajectories, strict=True)
        if t.stop_reason != CARRIED and not t.demonstrated
    ]
    per_token: dict[str, list[Any] | None] = {
        column.name: [getattr(row, column.field) for row in rows]
        for column in TOKEN_COLUMNS
        if column.is_in(rows)
    }
    if not log_probs:
        per_token["rollout_logprobs"] = None
    output = cast(
        GeneratorOutput,
        {
            "prompt_token_ids": [t.prompt_tokens for t in rows],
            "response_ids": [t.response_tokens for t in rows],
            "stop_reasons": [t.stop_reason for t in rows],
            "policy_versions": [t.policy_version for t in rows],
            "rollout_metrics": batch_metrics(ended) if ended else {},
            "trajectory_ids": [i for i, s in zip(ids, steps, strict=True) for _ in s],
            **per_token,
        },
    )
    if any(t.routes is not None for t in rows):
        output[ROUTES] = [NO_ROUTES if t.routes is None else t.routes for t in rows]
    if step_wise:
        output["is_last_step"] = [row is s[-1] for s in steps for row in s]
        output["turn_rewards"] = [row.turn_reward for row in rows]
    if part:
        output["measured"] = [m for m, s in zip(measured, steps, strict=True) for _ in s]
    if any(t.feedback for t in rows):
        output["feedback"] = [t.feedback for t in rows]
    if any(t.demonstrated for t in rows):
        output["demonstrated"] = [t.demonstrated for t in rows]
    if any(t.reward_terms for t in rows):
        output["reward_terms"] = [t.reward_terms for t in rows]
    return output


def batch_metrics(measured: Sequence[Measured]) -> dict[str, float]:
    """Compute the `rollout_metrics` of a batch from one entry per trajectory."""
    return _environment_metrics(measured) | _conversation_metrics(measured)


def refuse_all_failed(failures: Sequence[Exception | str | None]) -> None:
    """Refuse a batch of which more than nine in ten environments failed; None, "": one did not.

    Raises:
        AllFailed: gives the first one's reason.
    """
    failed = [failure for failure in failures if failure]
    if len(failed) > 0.9 * len(failures):
        count = "all" if len(failed) == len(failures) else f"{len(failed)} of"
        message = (
            f"{count} {len(failures)} trajectories of the batch failed; the first: {failed[0]}"
        )
        raise AllFailed(message) from (failed[0] if isinstance(failed[0], Exception) else None)


def _measured(t: Trajectory) -> Measured:
    failure = t.failure or "the environment failed" if t.stop_reason == "env_error" else ""
    of_environment = t.env_class, t.env_metrics, t.env_seconds
    return Measured(*of_environment, t.turns, failure, t.rejudged, t.steps)


def _environment_metrics(measured: Sequence[Measured]) -> dict[str, float]:
    """Return the environments' metrics as `environment/<name>`.

    The class is in the name if there are several environments.
    """
    load = functools.cache(envs.load)
    by_env: dict[Any, list[dict[str, Any]]] = {}  # families of one environment together
    for m in measured:
        if not m.failure:
            by_env.setdefault(load(m.env_class), []).append(m.env_metrics)
    metrics = {}
    for env, values in by_env.items():
        label = "environment" if len(by_env) == 1 else f"environment/{env.__name__}"
        averages = env.aggregate_metrics(values)
        metrics |= {f"{label}/{name}": value for name, value in averages.items()}
    return metrics


def _conversation_metrics(measured: Sequence[Measured]) -> dict[str, float]:
    """Count turns, sampled tokens, failures and second judgements.

    Also gives the seconds waited for an environment.
    """
    turns, failed = [len(m.turns) for m in measured], [bool(m.failure) for m in measured]
    sampled = sum(end - start for m in measured for start, end in m.turns)
    steps = sum(m.steps for m in measured)
    guessed = {"generate/tokens_per_decode_step": sampled / steps} if steps else {}
    return guessed | {
        "generate/avg_turns": float(np.mean(turns)),
        "generate/max_turns": float(np.max(turns)),
        "generate/sampled_tokens": float(sampled),
        "generate/env_errors": float(sum(failed)),
        "generate/env_error_ratio": float(np.mean(failed)),
        "reward/rejudged": float(sum(m.rejudged is not None for m in measured)),
        "reward/rejudged_differently": float(sum(m.rejudged is False for m in measured)),
        "timing/environment": float(np.mean([m.env_seconds for m in measured])),
    }


def _numbered(trajectories: Sequence[Trajectory]) -> list[TrajectoryID]:
    seen: Counter[str] = Counter()
    ids = []
    for t in trajectories:
        ids.append(TrajectoryID(t.uid, seen[t.uid]))
        seen[t.uid] += 1
    return ids
