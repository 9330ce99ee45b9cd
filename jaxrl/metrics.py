"""Metrics of a batch under SkyRL's names, and the loggers that keep them."""

import contextlib
import json
import os
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import yaml

from jaxrl.config.generator import SamplingParams
from jaxrl.files import replace_text
from jaxrl.rollout.step_wise import last_steps
from jaxrl.types import Array, GeneratorOutput, TrainBatch

if TYPE_CHECKING:
    from tensorboardX.event_file_writer import EventsWriter

Metrics = dict[str, float]
SURPRISE_BOUND = 8.0
REWARD_CURVES = (("reward/avg_raw_reward", "training"), ("eval/all/avg_score", "evaluation"))


def outcome(reward: float | Sequence[float]) -> float:
    """A trajectory's score: its reward, summed if it came per token."""
    return float(np.sum(reward))


def score_metrics(
    rewards: Sequence[float | Sequence[float]], uids: Sequence[str], samples: int
) -> Metrics:
    """Mean reward and pass@n; a prompt passes if any of its samples scores more than 0.

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


def generate_metrics(output: GeneratorOutput) -> Metrics:
    """Length statistics of the responses, in tokens, and a checksum of all tokens.

    Two runs whose `generate/tokens_crc32` agree sampled the same tokens.
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
        "generate/tokens_crc32": zlib.crc32(tokens.tobytes()),
        **output["rollout_metrics"],
    }


def rollout_metrics(output: GeneratorOutput, uids: Sequence[str], samples: int) -> Metrics:
    """`generate_metrics`, and the rewards as the environment gave them.

    Args:
        uids: prompt of each trajectory.
    """
    reward = score_metrics(last_steps(output)["rewards"], uids, samples)
    return generate_metrics(output) | {
        f"reward/avg_pass_at_{samples}": reward[f"pass_at_{samples}"],
        "reward/avg_raw_reward": reward["avg_score"],
        "reward/mean_positive_reward": reward["mean_positive_reward"],
    }


def advantage_metrics(batch: TrainBatch) -> Metrics:
    """Final rewards per trajectory, and advantages per response token."""
    rewards = np.asarray(batch.rewards).sum(-1)
    last = slice(None) if batch.is_last_step is None else batch.is_last_step
    tokens = max(float(batch.response_mask.sum()), 1.0)
    advantages = np.asarray(batch.advantages) * batch.response_mask
    return {
        "loss/avg_final_rewards": float(rewards[last].mean()),
        "loss/avg_raw_advantages": float(advantages.sum() / tokens),
        "loss/avg_raw_advantages_abs": float(np.abs(advantages).sum() / tokens),
    }


def mismatch_metrics(batch: TrainBatch, entropy: Array) -> Metrics:
    """How far sampler and trainer are apart on the log-probs of the sampled tokens.

    Where the sampler gives none, `policy/rollout_surprise_z` tells whether the tokens are of the
    trainer's policy: -log p(token) minus its expectation, the entropy, is then a martingale
    difference, so its mean over n tokens times sqrt(n) / std is about a standard normal number
    (below it for policies that are nearly sure of each token).

    Args:
        entropy: [B, T] of the trainer's policy; read where there are no rollout log-probs.
    """
    sampled = batch.loss_mask > 0
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


@contextlib.contextmanager
def timed(metrics: Metrics, name: str) -> Iterator[None]:
    """Write the seconds of a block to `timing/<name>`."""
    started = time.perf_counter()
    yield
    metrics[f"timing/{name}"] = time.perf_counter() - started


def progress_line(metrics: Mapping[str, float]) -> dict[str, str]:
    """The numbers that people watch."""
    shown = {
        "reward": "reward/avg_raw_reward",
        "eval": "eval/all/avg_score",
        "loss": "policy/final_loss",
        "entropy": "policy/policy_entropy",
        "tokens": "generate/avg_num_tokens",
        "tok/s": "trainer/tokens_per_second_per_gpu",
    }
    return {label: f"{metrics[name]:.3g}" for label, name in shown.items() if name in metrics}


class RunLogger:
    """Writes one line per step to `metrics.jsonl`, and to TensorBoard if asked.

    A checkpoint must not be ahead of the lines before it: `flush` first, then commit.

    Args:
        folder: the run's folder; created.
        loggers: names from the config; "tensorboard" adds `<folder>/tensorboard`.
        finished_steps: what a resumed run has behind it; later lines of an earlier attempt are cut,
            and all of them if it starts afresh.
    """

    def __init__(self, folder: Path, loggers: Sequence[str], finished_steps: int) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "metrics.jsonl"
        earlier = read_lines(self.path) if finished_steps else []
        kept = [line for line in earlier if line["step"] <= finished_steps]
        replace_text(self.path, "".join(json.dumps(line) + "\n" for line in kept))
        self.file = self.path.open("a")
        self.tensorboard = None
        if "tensorboard" in loggers:
            self.tensorboard = open_events(folder / "tensorboard", finished_steps + 1)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Record the numbers of one step."""
        numbers = {name: float(value) for name, value in metrics.items()}
        self.file.write(json.dumps({"step": step, **numbers}) + "\n")
        self.file.flush()
        if self.tensorboard:
            from tensorboardX.proto.event_pb2 import Event  # pyright: ignore
            from tensorboardX.proto.summary_pb2 import Summary  # pyright: ignore

            values = [Summary.Value(tag=name, simple_value=x) for name, x in numbers.items()]
            event = Event(step=step, wall_time=time.time(), summary=Summary(value=values))
            self.tensorboard.write_event(event)

    def flush(self) -> None:
        """Everything logged so far is on disk."""
        os.fsync(self.file.fileno())
        if self.tensorboard:
            self.tensorboard.flush()

    def write_config(self, config: dict[str, Any]) -> None:
        """Record what the run was asked to do in `config.yaml`."""
        plain = json.loads(json.dumps(config))  # tuples are lists to YAML
        replace_text(self.folder / "config.yaml", yaml.safe_dump(plain, sort_keys=False))

    def plot(
        self, curves: Sequence[tuple[str, str]] = REWARD_CURVES, ylabel: str = "mean reward"
    ) -> Path:
        """Draw metrics over steps, (name, label) each, to `curve.png`."""
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot as plt

        figure, axes = plt.subplots(figsize=(7, 4))
        lines = read_lines(self.path)
        for name, label in curves:
            points = [(line["step"], line[name]) for line in lines if name in line]
            if points:
                axes.plot(
                    *zip(*points, strict=True), label=label, marker="o" if "eval" in name else ""
                )
        axes.set(xlabel="step", ylabel=ylabel, title=self.folder.name)
        axes.grid(alpha=0.3)
        axes.legend()
        path = self.folder / "curve.png"
        figure.savefig(path, dpi=120, bbox_inches="tight")
        plt.close(figure)
        return path

    def close(self) -> None:
        """Flush everything."""
        self.file.close()
        if self.tensorboard:
            self.tensorboard.close()


def open_events(folder: Path, first_step: int) -> "EventsWriter":
    """A TensorBoard event file that hides what earlier files in `folder` hold from `first_step` on.

    The events are written by the caller's thread: tensorboardX's `SummaryWriter` leaves them to
    another one, and its `flush` does not wait for it.
    """
    from tensorboardX.event_file_writer import EventsWriter
    from tensorboardX.proto.event_pb2 import Event, SessionLog  # pyright: ignore

    folder.mkdir(parents=True, exist_ok=True)
    events = EventsWriter(str(folder / "events"))
    start = SessionLog(status=SessionLog.START)
    events.write_event(Event(step=first_step, session_log=start))
    return events


def read_lines(path: Path) -> list[dict[str, float]]:
    """The complete lines of a `metrics.jsonl`; a line cut off by a crash is left out."""
    if not path.exists():
        return []
    lines = []
    for line in path.read_text().splitlines():
        try:
            lines.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return lines
