"""Compare losses and estimators on a recorded batch, as numbers, a table, a heat map."""

import copy
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy.cluster.hierarchy import leaves_list, linkage

from jaxrl.files import check_file, replaced
from jaxrl.records.ledger.writer import machine_of
from jaxrl.tools.compare.loss_comparison import (
    Comparison,
    OtherRuns,
    chosen_minibatch,
    compare_variants,
)
from jaxrl.tools.compare.variants import Pairs, parse_variants
from jaxrl.tools.replay.recorded_run import RecordedRun, restored, step_of
from jaxrl.tools.replay.steps import other_machine, redone
from jaxrl.train import BasePPOExp
from jaxrl.types import GeneratorOutput, TrainBatch

COLUMNS = {
    "loss": "loss",
    "grad_norm": "grad norm",
    "clip_fraction": "clip",
    "effective_sample_size": "ESS",
    "kl_of_update": "KL update",
    "kl_of_length": "KL length",
}


def compare(
    run: str | Path,
    step: int,
    losses: str | Pairs,
    estimators: str | None = None,
    *,
    minibatch: int | None = None,
    checkpoint: str | None = None,
    run_class: type[BasePPOExp] = BasePPOExp,
) -> Comparison:
    """Compare every loss with every estimator on one recorded minibatch; see the command.

    Args:
        losses: as the command has them, or by a name of its own each with its own estimator.
        minibatch: from 1; None: the last of the step.
        run_class: whose `get_` methods give model and trainer.

    Raises:
        ValueError, OSError: the run cannot be read, or a variant makes no sense.
    """
    recorded = RecordedRun(run)
    machine = recorded.step(step).machine
    source = recorded.find_checkpoint(step, checkpoint)
    first = step_of(source)
    recorded.check_files(range(first + 1, step + 1))
    output, uids = recorded.rollouts(step)
    # what makes no sense is said before anything is restored
    parse_variants(recorded.config, losses, estimators)
    minibatch = chosen_minibatch(recorded.config, uids, step, minibatch)
    with restored(recorded, source, run_class=run_class) as trainer:

        def make_batch(**parts: Any) -> TrainBatch:
            """Make the batch by the methods of the run's trainer, with other parts."""
            other = copy.copy(trainer)
            vars(other).update(parts, metrics={})
            judged = other.postprocess_generator_output(GeneratorOutput({**output}), uids)
            return other.add_advantages(other.add_log_probs(other.collate(judged)))

        variants = parse_variants(trainer.config, losses, estimators)
        notes = [f"step {first}: {recorded.described(source)}"]
        notes += other_machine(machine, machine_of(trainer.mesh))
        results = redone(
            recorded,
            range(first + 1, step),
            trainer.train_step,
            lambda: (trainer.batch, trainer.state),
        )
        notes += [str(result) for result in list(results) if result.different][:1]
        if blind := [i for i in range(first + 1, step) if not recorded.steps[i].checksums]:
            notes.append(f"steps {blind} have no checksums, what they give was not compared")
        trainer.remember(**recorded.kept(step, "before"))
        runs = OtherRuns(
            make_batch,
            config=trainer.config,
            state=trainer.state,
            policy=trainer.policy,
            reference=trainer.reference,
            ref_params=trainer.ref_params,
            forward_pass=trainer.forward_pass,
            ref_forward_pass=trainer.ref_forward_pass,
            updater=trainer.updater,
            total_steps=trainer.total_steps,
        )
        del trainer.state  # `runs` has it, and lets go of the critic's part before the updates
        found = compare_variants(runs, uids, variants, step=step, minibatch=minibatch)
        return replace(found, notes=notes, minibatch=minibatch)


def table(comparison: Comparison) -> str:
    """Return the numbers of every variant, and the cosines, as text."""
    rows = [["", *COLUMNS.values()]]
    for variant in comparison.choices:
        rows.append([variant.name, *(_shown(getattr(variant, name)) for name in COLUMNS)])
    numbers = [str(i + 1) for i in range(len(comparison.choices))]
    matrix = [["cosine", *numbers]]
    rows_of_cosines = zip(numbers, comparison.choices, comparison.cosine, strict=True)
    for number, variant, cosines in rows_of_cosines:
        matrix.append([f"{number} {variant.name}", *(_shown(x, "+.4f") for x in cosines)])
    return f"{_aligned(rows)}\n\n{_aligned(matrix)}"


def described(comparison: Comparison) -> str:
    """Describe the minibatch, whatever the losses, and the length of the first one's steps."""
    ratios = comparison.ratios
    alike = ""
    if ratios["ratio_min"] == ratios["ratio_max"] == 1:
        alike = (
            "; where all ratios are 1 losses that differ in what they do with them are alike: take "
            "a step with several minibatches, and a later --minibatch"
        )
    return (
        f"{comparison.tokens} sampled tokens; ratio to the old policy {ratios['ratio_min']:.4g} to "
        f"{ratios['ratio_max']:.4g}, KL {ratios['approx_kl']:.3g}; effective sample size of the "
        f"weights to the sampler {ratios['effective_sample_size']:.4g}; steps of length "
        f"{comparison.length:.3g}{alike}"
    )


def _shown(value: float | None, form: str = ".4g") -> str:
    return "-" if value is None or math.isnan(value) else format(value, form)


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip()
        for row in rows
    )


def as_json(comparison: Comparison) -> dict[str, Any]:
    """Return all numbers, ready for JSON; null where there is none."""
    found = asdict(comparison) | {"cosine": comparison.cosine.tolist()}
    return json.loads(json.dumps(found), parse_constant=lambda _: None)


def heat_map(comparison: Comparison, path: Path, title: str) -> None:
    """Draw the cosines, each with its number where that can be read."""
    from matplotlib.figure import Figure  # pyplot has state, and in a notebook a backend

    places = neighbours(comparison.cosine)
    names = [comparison.choices[place].name for place in places]
    cosine = comparison.cosine[np.ix_(places, places)]
    many = len(names) > 16
    cell, turned, ha = (0.17, 90, "center") if many else (0.62, 45, "right")
    height = 2.5 + cell * len(names)
    figure = Figure(figsize=(height + 1.5, height))
    axes = figure.subplots()
    image = axes.imshow(cosine, vmin=-1, vmax=1, cmap="RdBu_r")
    axes.set_xticks(range(len(names)), names, rotation=turned, ha=ha, fontsize=8)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    for (row, column), value in () if many else np.ndenumerate(cosine):
        color = "white" if abs(value) > 0.6 else "black"
        text = _shown(value, ".2f")
        axes.text(column, row, text, ha="center", va="center", color=color, fontsize=7)
    axes.set_title(title.replace("$", r"\$"), fontsize=9)
    figure.colorbar(image, label="cosine of the gradients", shrink=0.8)
    with replaced(path) as new:
        figure.savefig(new, dpi=130, bbox_inches="tight", format=path.suffix[1:])


def neighbours(cosine: np.ndarray) -> list[int]:
    """Return the order in which gradients that point the same way stand beside each other.

    The leaves of average linkage by 1 - cosine, in the order with the smallest sum of distances
    between neighbours. A gradient of 0 has no direction, and counts as orthogonal to all.
    """
    if len(cosine) < 3:
        return list(range(len(cosine)))
    distances = 1 - np.nan_to_num(cosine)[np.triu_indices(len(cosine), 1)]
    return leaves_list(linkage(distances, "average", optimal_ordering=True)).tolist()


def check_picture(flag: str, path: Path | None) -> None:
    """Check that a picture can be written, by its name.

    Raises:
        ValueError: it cannot; the message says why.
    """
    from matplotlib.backend_bases import FigureCanvasBase

    check_file(flag, path)
    formats = sorted(FigureCanvasBase.get_supported_filetypes())
    if path is not None and path.suffix[1:] not in formats:
        raise ValueError(f"{flag}={path}: its name must end in one of .{', .'.join(formats)}")
