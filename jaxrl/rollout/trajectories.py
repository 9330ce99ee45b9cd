"""Finished conversations as columns, and the numbers about them."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxrl import envs
from jaxrl.rollout.step_wise import steps_of
from jaxrl.types import GeneratorOutput, Trajectory, TrajectoryID


def to_columns(
    trajectories: Sequence[Trajectory],
    ids: Sequence[TrajectoryID] | None = None,
    *,
    step_wise: bool = False,
    log_probs: bool = True,
) -> GeneratorOutput:
    """Trajectories as the columns that `Trainer.postprocess_generator_output` works on.

    Args:
        ids: None = the samples of each uid are numbered.
        step_wise: a row per turn.
        log_probs: whether the rollouts carry them.
    """
    ids = _numbered(trajectories) if ids is None else ids
    steps = [steps_of(t) if step_wise else [t] for t in trajectories]
    rows = [row for of_one in steps for row in of_one]
    output = GeneratorOutput(
        prompt_token_ids=[t.prompt_tokens for t in rows],
        response_ids=[t.response_tokens for t in rows],
        rewards=[t.rewards for t in rows],  # type: ignore[typeddict-item]
        loss_masks=[t.loss_mask for t in rows],
        stop_reasons=[t.stop_reason for t in rows],
        rollout_logprobs=[t.rollout_log_probs for t in rows] if log_probs else None,
        policy_versions=[t.policy_version for t in rows],
        rollout_metrics=environment_metrics(trajectories) | conversation_metrics(trajectories),
        trajectory_ids=[i for i, s in zip(ids, steps, strict=True) for _ in s],
    )
    if step_wise:
        output["is_last_step"] = [row is s[-1] for s in steps for row in s]
    if any(t.reward_terms for t in rows):
        output["reward_terms"] = [t.reward_terms for t in rows]
    if any(any(t.kept) for t in rows):
        output["kept"] = [t.kept for t in rows]
    if all(len(t.versions) == len(t.response_tokens) for t in rows):
        output["token_versions"] = [t.versions for t in rows]
    return output


def environment_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """`environment/<name>`, with the class in the name if there are several environments."""
    by_env: dict[Any, list[dict[str, Any]]] = {}  # families of one environment together
    for t in trajectories:
        if t.stop_reason != "env_error":
            by_env.setdefault(envs.load(t.env_class), []).append(t.env_metrics)
    metrics = {}
    for env, measured in by_env.items():
        label = "environment" if len(by_env) == 1 else f"environment/{env.__name__}"
        averages = env.aggregate_metrics(measured)
        metrics |= {f"{label}/{name}": value for name, value in averages.items()}
    return metrics


def conversation_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Turns, sampled tokens and failures; seconds that a conversation waits for its environment."""
    turns = [len(t.turns) for t in trajectories]
    return {
        "generate/avg_turns": float(np.mean(turns)),
        "generate/max_turns": float(np.max(turns)),
        "generate/sampled_tokens": float(
            sum(end - start for t in trajectories for start, end in t.turns)
        ),
        "generate/env_errors": float(sum(t.stop_reason == "env_error" for t in trajectories)),
        "timing/environment": float(np.mean([t.env_seconds for t in trajectories])),
    }


def _numbered(trajectories: Sequence[Trajectory]) -> list[TrajectoryID]:
    seen: Counter[str] = Counter()
    ids = []
    for t in trajectories:
        ids.append(TrajectoryID(t.uid, seen[t.uid]))
        seen[t.uid] += 1
    return ids
