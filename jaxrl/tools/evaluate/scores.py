"""Score the answers of a policy, wherever it is: a run, a folder, a server."""

import contextlib
import json
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxrl import activity, config as cfg
from jaxrl.config.oddities import warn_of_longest_row
from jaxrl.config.platform_defaults import settle_evaluation
from jaxrl.files import replace_text, writable_folder
from jaxrl.models import hf
from jaxrl.models.placement import place_model
from jaxrl.models.transformer import TransformerConfig
from jaxrl.parallel import is_first
from jaxrl.records.display import display_of
from jaxrl.rollout.generator import run_now, sample_prompts
from jaxrl.rollout.protocol import Engine
from jaxrl.tools.evaluate.target import (
    EvalTarget,
    config_for,
    find_target,
    load_weights,
    policy_of,
)
from jaxrl.train import BasePPOExp, meshes
from jaxrl.training.eval_metrics import METHOD
from jaxrl.training.evaluation import Rows, dump_evaluation, evaluate
from jaxrl.types import GeneratorOutput, Prompt

Results = dict[str, Any]


def evaluate_subject(
    config: Any,
    subject: str | None = None,
    *,
    step: int | None = None,
    output: str | Path | None = None,
    run_class: type[BasePPOExp] = BasePPOExp,
) -> Results:
    """Ask the subject every prompt of `data.val_data`, score the answers, write what came out.

    Args:
        config: `TrainConfig`, `ml_collections.ConfigDict` or nested dict; that of the run.
        subject, step, output: see the command.
        run_class: whose `get_` methods give model, engine and conversations.

    Returns:
        What results.json holds; "metrics" has the names that a training run logs.

    Raises:
        ValueError, OSError: the config, a data file, or the subject is wrong; no server is there.
    """
    config = cfg.to_train_config(config)
    target = find_target(subject) if subject else policy_of(config)
    config, step = config_for(config, target), target.step if step is None else step
    name = re.sub(r"[^\w.-]+", "_", target.where).strip("_")
    exports = Path(cfg.resolve(config).trainer.export_path)
    folder = Path(output or exports / "evaluations" / name)
    writable_folder("--output", folder)
    engine = config.generator.inference_engine
    in_bucket = engine.weights_folder is not None and "://" in engine.weights_folder
    own = f"{engine.weights_folder}/evaluate-{name}" if in_bucket else str(folder / "weights")
    engine.weights_folder = own  # not the run's
    config.trainer.policy.model.lora.lora_sync_path = None
    run = run_class(config)
    config, started = run.config, time.perf_counter()
    metrics, rows = ask(run, target, step)
    results: Results = {
        "subject": target.where,
        "kind": target.kind,
        "step": step,
        "policy_versions": sorted({row["policy_version"] for row in rows}),
        "data": list(config.data.val_data),
        "samples_per_prompt": config.generator.eval_n_samples_per_prompt,
        "sampling_params": cfg.get_config_as_dict(config)["generator"]["eval_sampling_params"],
        "seed": config.trainer.seed,
        "intervals": METHOD,
        "seconds": time.perf_counter() - started,
        "metrics": metrics,
    }
    if config.trainer.dump_eval_results:
        dump_evaluation(folder, rows, metrics)
    replace_text(folder / "results.json", json.dumps(results, indent=2) + "\n")
    return results | {"folder": str(folder)}


def ask(run: BasePPOExp, target: EvalTarget, step: int) -> tuple[dict[str, float], Rows]:
    """Return metrics and answers, see `evaluation.evaluate`.

    What is random is named as in a run.
    """
    config, sources = run.config, run.config.data.val_data
    if not sources:
        raise ValueError("data.val_data=[] has no prompts; name at least one file or generator")
    display = display_of(
        f"evaluation of {target.where}",
        config.trainer.watching.display,
        shown=is_first() and "console" in cfg.logger_names(config.trainer.logger),
    )
    run.tokenizer = run.get_tokenizer()
    prompts = run.get_prompts(sources)
    left_out = sum(run.too_long.values())
    without = f"; {left_out} are too long and left out" if left_out else ""
    activity.say(f"{len(prompts)} prompts from {', '.join(sources)}{without}")
    if target.kind != "server":  # whose model is elsewhere
        model = run.settle_ids(run.get_model())
        run.check_ids(model, [], prompts)
        if isinstance(model, TransformerConfig):
            policy = config.trainer.policy.model
            warn_of_longest_row(config, hf.max_positions(policy.path or ""))
    run.check_environments(prompts)
    run.config = settle_evaluation(run.config, len(prompts)).config
    path, params = config.trainer.policy.model.path, config.generator.eval_sampling_params
    assert path is not None and params is not None  # validated, resolved
    eos_token_ids = sorted({run.tokenizer.eos_token_id, *hf.eos_token_ids(path)})
    with asked_engine(run, target, step) as engine:
        generator = run.get_generator(engine, run.tokenizer)

        def generate(prompts: Sequence[Prompt], step: int, samples: int) -> GeneratorOutput:
            return run_now(
                sample_prompts(
                    config, generator, eos_token_ids, "eval", prompts, step, samples, params
                )
            )

        with display:
            return evaluate(generate, prompts, step, config, tokenizer=run.tokenizer)


@contextlib.contextmanager
def asked_engine(run: BasePPOExp, target: EvalTarget, step: int) -> Iterator[Engine]:
    """Keep the target behind the interface of an engine while the block runs.

    It is servers, or its weights in the run's engine.

    Neither a training state, nor an optimizer, nor a reference is built.
    """
    if target.kind == "server":
        from jaxrl.rollout.build_remote import served_engine
        from jaxrl.rollout.remote.engine import RemoteEngineError

        with contextlib.closing(served_engine(run.config)) as engine:
            try:
                yield engine
            except RemoteEngineError as error:
                raise ConnectionError(str(error)) from error
        return
    trainer = run.config.trainer
    model, (mesh, engine_mesh) = run.get_model(), meshes(run.config)
    placement = place_model(model, mesh, cfg.sharding_rules(trainer.sharding_rules))
    engine = run.get_engine(model, engine_mesh)
    try:
        engine.update_weights(load_weights(target, trainer, model, placement), step)
        yield engine
    finally:
        getattr(engine, "close", lambda: None)()  # servers that were started


def table(metrics: dict[str, float]) -> str:
    """Return the scores per source with their intervals, and over all, as text."""
    names = [n.removeprefix("eval/all/") for n in metrics if n.startswith("eval/all/")]
    scores = [n for n in names if f"{n}_ci_low" in names or n.startswith(("avg_score", "pass_"))]
    scores = [n for n in scores if "_ci_" not in n]
    scores.sort(key=lambda n: int(n.rpartition("_")[2]) if n.startswith("pass_at_") else 0)
    sources = list(dict.fromkeys(name[5:].rpartition("/")[0] for name in metrics))
    rows = [["source", "prompts", *scores, "avg_num_tokens", "stop_ratio"]]
    for source in sources:
        numbers = {n.removeprefix(f"eval/{source}/"): x for n, x in metrics.items()}
        cells = [_with_interval(numbers, name) for name in scores]
        lengths = [f"{numbers['avg_num_tokens']:.1f}", f"{numbers['stop_ratio']:.3f}"]
        rows.append([source, f"{numbers['num_prompts']:.0f}", *cells, *lengths])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def _with_interval(metrics: dict[str, float], name: str) -> str:
    low, high = metrics.get(f"{name}_ci_low"), metrics.get(f"{name}_ci_high")
    ends = "" if low is None else f" [{low:.3f}, {high:.3f}]"
    return f"{metrics[name]:.4f}{ends}"
