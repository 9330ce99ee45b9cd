"""Compare losses and estimators on a recorded batch: what would each do to the parameters?

    python -m jaxrl.compare RUN --step=12 --losses=regular,gspo,cispo --estimators=grpo,rloo

    RUN            folder of a run (config.yaml, run.db, rollouts)
    --step         whose recorded rollouts; the parameters are those before it, as replay has them
    --losses       names or "module:function", each with changes of trainer.algorithm if you like:
                   regular+eps_clip_high=0.28,gspo+loss_reduction=sequence_mean
    --estimators   likewise, e.g. grpo,rloo+advantage_batch_normalize=true; default: the run's own
    --minibatch    of the step, from 1 over all its passes (default 1); the run's own updates on
                   those before it are made first, so that ratios are not all 1
    --checkpoint   to start from instead of the newest before the step: .../global_step_<N>, or
                   "start" for what the run began with, its models or a checkpoint of another run
    --device-count devices of the CPU, if not as many as the run had
    --json         file for all numbers; --plot: file for a heat map of the cosines (.png, .pdf)

Steps between the start and the step are done again and compared with what RUN recorded; what
differs is said first.

Exit status 0, or 2: the run cannot be read, or a choice makes no sense. docs/replay.md explains.
"""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl.files import check_file, replace_text, replaced
from jaxrl.ledger.books import machine_of
from jaxrl.loss_choices import parse_choices
from jaxrl.loss_comparison import Comparison, check_minibatch, compare_choices
from jaxrl.recorded_run import RecordedRun, restored, step_of, use_devices
from jaxrl.replay import other_machine, redone
from jaxrl.train import BasePPOExp

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
    losses: str,
    estimators: str | None = None,
    *,
    minibatch: int = 1,
    checkpoint: str | None = None,
    run_class: type[BasePPOExp] = BasePPOExp,
) -> Comparison:
    """Every loss with every estimator on one recorded minibatch; see the command.

    Args:
        run_class: whose `get_` methods give model and trainer.

    Raises:
        ValueError, OSError: the run cannot be read, or a choice makes no sense.
    """
    recorded = RecordedRun(run)
    machine = recorded.step(step).machine
    source = recorded.find_checkpoint(step, checkpoint)
    first = step_of(source)
    recorded.check_files(range(first + 1, step + 1))
    rollouts = recorded.rollouts(step)
    # what makes no sense is said before anything is restored
    parse_choices(recorded.config, losses, estimators)
    check_minibatch(recorded.config, rollouts[1], step, minibatch)
    with restored(recorded, source, run_class=run_class) as trainer:
        choices = parse_choices(trainer.config, losses, estimators)
        notes = [f"step {first}: {recorded.described(source)}"]
        notes += other_machine(machine, machine_of(trainer.mesh))
        results = list(redone(recorded, trainer, range(first + 1, step)))
        notes += [str(result) for result in results if result.different][:1]
        if blind := [i for i in range(first + 1, step) if not recorded.steps[i].checksums]:
            notes.append(f"steps {blind} have no checksums, what they give was not compared")
        found = compare_choices(trainer, rollouts, choices, step=step, minibatch=minibatch)
        return replace(found, notes=notes)


def table(comparison: Comparison) -> str:
    """The numbers of every choice, and the cosines, as text."""
    rows = [["", *COLUMNS.values()]]
    for choice in comparison.choices:
        rows.append([choice.name, *(_shown(getattr(choice, name)) for name in COLUMNS)])
    numbers = [str(i + 1) for i in range(len(comparison.choices))]
    matrix = [["cosine", *numbers]]
    for number, choice, cosines in zip(numbers, comparison.choices, comparison.cosine, strict=True):
        matrix.append([f"{number} {choice.name}", *(_shown(x, "+.4f") for x in cosines)])
    return f"{_aligned(rows)}\n\n{_aligned(matrix)}"


def described(comparison: Comparison) -> str:
    """The minibatch, whatever the losses, and the length of the first one's steps."""
    ratios = comparison.ratios
    return (
        f"{comparison.tokens} sampled tokens; ratio to the old policy {ratios['ratio_min']:.4g} to "
        f"{ratios['ratio_max']:.4g}, KL {ratios['approx_kl']:.3g}; effective sample size of the "
        f"weights to the sampler {ratios['effective_sample_size']:.4g}; steps of length "
        f"{comparison.length:.3g}"
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
    """All numbers; null where there is none."""
    found = asdict(comparison) | {"cosine": comparison.cosine.tolist()}
    return json.loads(json.dumps(found), parse_constant=lambda _: None)


def heat_map(comparison: Comparison, path: Path, title: str) -> None:
    """Draw the cosines, each with its number."""
    from matplotlib.figure import Figure  # pyplot has state, and in a notebook a backend

    names = [choice.name for choice in comparison.choices]
    size = 2.5 + 0.62 * len(names)
    figure = Figure(figsize=(size + 1.5, size))
    axes = figure.subplots()
    image = axes.imshow(comparison.cosine, vmin=-1, vmax=1, cmap="RdBu_r")
    axes.set_xticks(range(len(names)), names, rotation=45, ha="right", fontsize=8)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    for (row, column), value in np.ndenumerate(comparison.cosine):
        color = "white" if abs(value) > 0.6 else "black"
        text = _shown(value, ".2f")
        axes.text(column, row, text, ha="center", va="center", color=color, fontsize=7)
    axes.set_title(title.replace("$", r"\$"), fontsize=9)
    figure.colorbar(image, label="cosine of the gradients", shrink=0.8)
    with replaced(path) as new:
        figure.savefig(new, dpi=130, bbox_inches="tight", format=path.suffix[1:])


def check_picture(flag: str, path: Path | None) -> None:
    """Whether a picture can be written, by its name.

    Raises:
        ValueError: it cannot; the message says why.
    """
    from matplotlib.backend_bases import FigureCanvasBase

    check_file(flag, path)
    formats = sorted(FigureCanvasBase.get_supported_filetypes())
    if path is not None and path.suffix[1:] not in formats:
        raise ValueError(f"{flag}={path}: its name must end in one of .{', .'.join(formats)}")


def main(argv: Sequence[str]) -> int:
    """`python -m jaxrl.compare RUN --step=N --losses=a,b,c ...`."""
    if not argv or "--help" in argv or "-h" in argv:
        print(__doc__)
        return 0
    parser = argparse.ArgumentParser("python -m jaxrl.compare", allow_abbrev=False)
    parser.add_argument("run")
    for name, kind in (("step", int), ("losses", str)):
        parser.add_argument(f"--{name}", type=kind, required=True)
    for name, kind in (("estimators", str), ("checkpoint", str), ("device-count", int)):
        parser.add_argument(f"--{name}", type=kind)
    parser.add_argument("--minibatch", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    given = parser.parse_args(argv)
    try:
        check_file("--json", given.json)
        check_picture("--plot", given.plot)
        use_devices(RecordedRun(given.run), given.device_count)
        found = compare(
            given.run,
            given.step,
            given.losses,
            given.estimators,
            minibatch=given.minibatch,
            checkpoint=given.checkpoint,
        )
        where = f"{given.run}, step {given.step}, minibatch {given.minibatch}"
        if given.json:
            replace_text(given.json, json.dumps(as_json(found), indent=2) + "\n")
        if given.plot:
            heat_map(found, given.plot, where)
    except (ValueError, OSError) as error:  # what a user can mend
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(*found.notes, sep="\n")
    print(f"{where}: {described(found)}\n\n{table(found)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
