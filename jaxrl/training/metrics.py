"""Metrics of a batch under SkyRL's names."""

import zlib
from collections.abc import Mapping, Sequence

import numpy as np

from jaxrl.config.generator import SamplingParams
from jaxrl.data.columns import last_steps, take_trajectories
from jaxrl.training.diagnostics import group_metrics, length_metrics
from jaxrl.types import FloatBT, GeneratorOutput, TrainBatch

Metrics = dict[str, float]
SURPRISE_BOUND = 8.0


def outcome(reward: float | Sequence[float]) -> float:
    """Return a trajectory's score: its reward, summed if it came per token."""
    return float(np.sum(reward))


def score_metrics(
    rewards: Sequence[float | Sequence[float]], uids: Sequence[str], samples: int
) -> Metrics:
    """Return mean reward and pass@n; a prompt passes if any of its samples scores more than 0.

    SkyRL looks at the last token alone for token-level rewards; here the sum decides.
    """
    scores = np.array([outcome(r) for r in rewards])
    positive = [float(np.clip(r, 0, None).sum()) for r in rewards]
    passed = {uid: False for uid in uids}
    for uid, value in zip(uids, scores, strict=True):
        passed[uid] |= bool(value > 0)
    return {
        "avg_score": float(scores.mean()),
        f"pass_at_{samples}": float(np.mean(list(passed.values()))),
        "mean_positive_reward": float(np.mean(positive)),
    }


def generate_metrics(output: GeneratorOutput, known_ids: int) -> Metrics:
    """Return length statistics of the responses, in tokens, and a checksum of all tokens.

    Two runs whose `generate/tokens_crc32` agree sampled the same tokens.

    Args:
        known_ids: ids that the tokenizer has; `generate/unknown_ids` counts the tokens beyond.
    """
    tokens = np.concatenate([np.asarray(r, np.int32) for r in output["response_ids"]])
    lengths = np.array([len(r) for r in output["response_ids"]])
    scores = np.array([outcome(r) for r in output["rewards"]])
    rewarded, unrewarded = lengths[scores > 0], lengths[scores <= 0]
    return {
        "generate/batch_num_seq": len(lengths),
        "generate/min_num_tokens": int(lengths.min()),
        "generate/max_num_tokens": int(lengths.max()),
        "generate/avg_num_tokens": float(lengths.mean()),
        "generate/std_num_tokens": float(lengths.std()),
        "generate/avg_tokens_non_zero_rewards": float(rewarded.mean()) if rewarded.size else 0.0,
        "generate/avg_tokens_zero_rewards": float(unrewarded.mean()) if unrewarded.size else 0.0,
        "generate/stop_ratio": float(np.mean([s == "stop" for s in output["stop_reasons"]])),
        **length_metrics(output, scores),
        "generate/unknown_ids": int((tokens >= known_ids).sum()),
        "generate/tokens_crc32": zlib.crc32(tokens.tobytes()),
        **output["rollout_metrics"],
    }


def reward_term_metrics(terms: Sequence[Mapping[str, float]]) -> Metrics:
    """Return `reward/<term>/mean` and `/std` over judged trajectories, before the weights.

    Where not all of them have the term, `/abstained` is the share of those that have others.
    """
    columns: dict[str, list[float]] = {}
    for terms_of_trajectory in terms:
        for name, value in terms_of_trajectory.items():
            columns.setdefault(name, []).append(value)
    judged = sum(map(bool, terms))
    statistics = {"mean": np.mean, "std": np.std}
    shares = {name: 1 - len(column) / judged for name, column in columns.items()}
    return {
        f"reward/{name}/{kind}": float(of(column))
        for name, column in columns.items()
        for kind, of in statistics.items()
    } | {f"reward/{name}/abstained": share for name, share in shares.items() if share}


def rollout_metrics(
    output: GeneratorOutput, uids: Sequence[str], samples: int, known_ids: int
) -> Metrics:
    """Return `generate_metrics`, and the rewards as the environment gave them.

    They are of what was sampled; what demonstrations earn has a name of its own.

    Args:
        uids: prompt of each trajectory.
        known_ids: see `generate_metrics`.
    """
    given = np.array(last_steps(output).get("demonstrated", []), bool)
    if given.any() and not given.all():
        sampled = rollout_metrics(
            take_trajectories(output, np.flatnonzero(~given)),
            [uid for uid, demonstrated in zip(uids, given, strict=True) if not demonstrated],
            samples,
            known_ids,
        )
        earned = [outcome(r) for r in last_steps(output)["rewards"]]
        return sampled | {"reward/demonstrated": float(np.mean(np.array(earned)[given]))}
    last = last_steps(output)
    rewards = last["rewards"]
    reward = score_metrics(rewards, uids, samples)
    return (
        generate_metrics(output, known_ids)
        | reward_term_metrics(last.get("reward_terms", []))
        | group_metrics(np.array([outcome(r) for r in rewards]), uids)
        | {
            f"reward/avg_pass_at_{samples}": reward[f"pass_at_{samples}"],
            "reward/avg_raw_reward": reward["avg_score"],
            "reward/mean_positive_reward": reward["mean_positive_reward"],
        }
    )


def advantage_metrics(batch: TrainBatch) -> Metrics:
    """Return final rewards per trajectory, and advantages per response token."""
    rewards = np.asarray(batch.rewards).sum(-1)
    last = slice(None) if batch.is_last_step is None else batch.is_last_step
    tokens = max(float(batch.response_mask.sum()), 1.0)
    advantages = np.asarray(batch.advantages) * batch.response_mask
    return {
        "loss/avg_final_rewards": float(rewards[last].mean()),
        "loss/avg_raw_advantages": float(advantages.sum() / tokens),
        "loss/avg_raw_advantages_abs": float(np.abs(advantages).sum() / tokens),
    }


def mismatch_metrics(batch: TrainBatch, entropy: FloatBT) -> Metrics:
    """Measure how far sampler and trainer are apart on the log-probs of the sampled tokens.

    Where the sampler gives none, `policy/rollout_surprise_z` tells whether the tokens are of the
    trainer's policy: -log p(token) minus its expectation, the entropy, is then a martingale
    difference, so its mean over n tokens times sqrt(n) / std is about a standard normal number
    (below it for policies that are nearly sure of each token).

    Args:
        entropy: [B, T] of the trainer's policy; read where there are no rollout log-probs.
    """
    sampled = batch.loss_mask > 0
    if batch.demonstrated is not None:
        sampled &= ~batch.demonstrated[:, None]
    if not sampled.any():
        return {}
    if batch.rollout_log_probs is None:
        surprise = -(batch.old_log_probs + entropy)[sampled]
        z = surprise.mean() * np.sqrt(surprise.size) / max(surprise.std(), 1e-8)
        return {"policy/rollout_surprise_z": float(z)}
    difference = np.abs(batch.old_log_probs - batch.rollout_log_probs)[sampled]
    name = "policy/rollout_train_logprobs_abs_diff"
    return {f"{name}_mean": float(difference.mean()), f"{name}_max": float(difference.max())}


def check_surprise(metrics: Metrics, sampling: SamplingParams) -> None:
    """Stop where tokens without log-probs are not of the trainer's policy.

    With filters or a penalty they are not meant to be, and nothing is known.

    Raises:
        RuntimeError: they are less probable than the policy's own by `SURPRISE_BOUND` deviations.
    """
    z = metrics.get("policy/rollout_surprise_z", 0.0)
    filters = sampling.top_k, sampling.top_p, sampling.min_p, sampling.repetition_penalty
    if filters == (-1, 1.0, 0.0, 1.0) and z > SURPRISE_BOUND:
        raise RuntimeError(
            f"policy/rollout_surprise_z={z:.1f}: the sampled tokens are less probable under the "
            f"trainer's weights than their own would be (above {SURPRISE_BOUND:g} deviations of "
            "the mean): the engine samples from stale or wrong weights, or otherwise than "
            "generator.sampling_params says. See that it reads the weights it is given"
        )
