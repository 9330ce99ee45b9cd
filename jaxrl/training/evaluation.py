"""Evaluation inside a run and by `python -m jaxrl.evaluate`: answers, scores, files."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl import activity
from jaxrl.config import TrainConfig
from jaxrl.data.columns import last_steps
from jaxrl.files import replace_text
from jaxrl.training.eval_metrics import default_ks, eval_metrics
from jaxrl.training.metrics import outcome, score_metrics
from jaxrl.types import GeneratorOutput, Prompt

Rows = list[dict[str, Any]]


def evaluate(
    generate: Callable[[Sequence[Prompt], int, int], GeneratorOutput],
    prompts: Sequence[Prompt],
    step: int,
    config: TrainConfig,
    *,
    tokenizer: Any,
) -> tuple[dict[str, float], Rows]:
    """Generate and score `eval_n_samples_per_prompt` answers to every prompt.

    Args:
        generate: `(prompts, step, samples) -> GeneratorOutput`.
        config: resolved.

    Returns:
        Metrics `eval/<data source>/<name>` and `eval/all/<name>`; one row per answer, the answers
        to a prompt neighbours.

    Raises:
        ValueError: see `check_sources`.
    """
    check_sources(prompts)
    samples, size = config.generator.eval_n_samples_per_prompt, config.trainer.eval_batch_size
    rows: Rows = []
    with activity.doing("evaluating", len(prompts)) as done:
        for start in range(0, len(prompts), size):
            batch = prompts[start : start + size]
            rows += _rows(batch, last_steps(generate(batch, step, samples)), samples, tokenizer)
            done.done += len(batch)
    ks = config.generator.eval_pass_at_k or default_ks(samples)
    metrics = {}
    for source in [*dict.fromkeys(row["data_source"] for row in rows), "all"]:
        chosen = [row for row in rows if source in ("all", row["data_source"])]
        found = source_metrics(chosen, samples, ks)
        metrics |= {f"eval/{source}/{name}": value for name, value in found.items()}
    return metrics, rows


def check_sources(prompts: Sequence[Prompt]) -> None:
    """Refuse names of data sources that mean something else.

    Raises:
        ValueError: a data source is called "all" or "aggregated_results".
    """
    for name in {_source(prompt) for prompt in prompts} & {"all", "aggregated_results"}:
        raise ValueError(
            f"data_source={name!r} is the name of all sources together; choose another"
        )


def source_metrics(rows: Rows, samples: int, ks: Sequence[int]) -> dict[str, float]:
    """Return scores of the answers of one source: SkyRL's, pass@k, intervals, and what was said."""
    scores = np.array([row["score"] for row in rows]).reshape(-1, samples)
    return {
        **score_metrics([row["reward"] for row in rows], [row["uid"] for row in rows], samples),
        **eval_metrics(scores, ks),
        "num_prompts": len(scores),
        "avg_num_tokens": float(np.mean([len(row["tokens"]) for row in rows])),
        "stop_ratio": float(np.mean([row["stop_reason"] == "stop" for row in rows])),
        "env_errors": float(sum(row["stop_reason"] == "env_error" for row in rows)),
    }


def _source(prompt: Prompt) -> str:
    return str(prompt.extras.get("data_source", "unknown"))


def _rows(prompts: Sequence[Prompt], output: GeneratorOutput, samples: int, tokenizer: Any) -> Rows:
    return [
        {
            "uid": prompt.uid,
            "data_source": _source(prompt),
            "env_class": prompt.env_class,
            "extras": prompt.extras,
            "prompt": prompt.messages,
            "response": tokenizer.decode(output["response_ids"][i]),
            "tokens": list(output["response_ids"][i]),
            "reward": output["rewards"][i],
            "score": outcome(output["rewards"][i]),
            "stop_reason": output["stop_reasons"][i],
            "policy_version": output["policy_versions"][i],
        }
        for i, prompt in enumerate(p for p in prompts for _ in range(samples))
    ]


def evals_folder(export_path: str | Path, step: int) -> Path:
    """Return where the answers of an evaluation in a run go."""
    return Path(export_path) / "dumped_evals" / f"global_step_{step}_evals"


def dump_evaluation(folder: Path, rows: Rows, metrics: Mapping[str, float]) -> None:
    """Write `<data source>.jsonl`, an answer per line, and the metrics `aggregated_results.jsonl`.

    Characters of a source's name that file names do not take become "_".

    Raises:
        FolderError: they could not be written.
    """
    lines: dict[str, list[str]] = {}
    for row in rows:
        name = re.sub(r"[^\w.-]", "_", row["data_source"])
        lines.setdefault(name, []).append(json.dumps(row, default=str))
    for name, answers in lines.items():
        replace_text(folder / f"{name}.jsonl", "\n".join(answers) + "\n")
    replace_text(folder / "aggregated_results.jsonl", json.dumps(metrics) + "\n")
