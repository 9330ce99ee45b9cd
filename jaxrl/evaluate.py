"""Evaluation: score a set of prompts, per data source and over all."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jaxrl.files import replace_text
from jaxrl.metrics import outcome, score_metrics
from jaxrl.rollout.step_wise import last_steps
from jaxrl.types import GeneratorOutput, Prompt


def evaluate(
    generate: Callable[[Sequence[Prompt], int, int], GeneratorOutput],
    prompts: Sequence[Prompt],
    step: int,
    *,
    samples: int,
    batch_size: int,
    tokenizer: Any,
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Generate and score `samples` answers to every prompt.

    Args:
        generate: `(prompts, step, samples) -> GeneratorOutput`.
        batch_size: prompts generated together.

    Returns:
        Metrics `eval/<data source>/<name>` and `eval/all/<name>`; one row per answer.
    """
    rows = []
    for start in range(0, len(prompts), batch_size):
        batch = prompts[start : start + batch_size]
        output = last_steps(generate(batch, step, samples))
        for i, prompt in enumerate(p for p in batch for _ in range(samples)):
            rows.append(
                {
                    "uid": prompt.uid,
                    "data_source": str(prompt.extras.get("data_source", "unknown")),
                    "prompt": prompt.messages,
                    "response": tokenizer.decode(output["response_ids"][i]),
                    "reward": output["rewards"][i],
                    "score": outcome(output["rewards"][i]),
                    "stop_reason": output["stop_reasons"][i],
                }
            )
    metrics = {}
    for source in [*dict.fromkeys(row["data_source"] for row in rows), "all"]:
        chosen = [row for row in rows if source in ("all", row["data_source"])]
        scores = score_metrics([r["reward"] for r in chosen], [r["uid"] for r in chosen], samples)
        metrics |= {f"eval/{source}/{name}": value for name, value in scores.items()}
    return metrics, rows


def dump_rows(folder: Path, step: int, rows: Sequence[dict[str, Any]]) -> None:
    """Write the answers of an evaluation to `global_step_<step>_evals.jsonl`."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    replace_text(folder / f"global_step_{step}_evals.jsonl", lines)
