"""Show a few trajectories of a step in a notebook, their tokens coloured as in the report."""

import html
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxrl.tools.report.run_files import read_run
from jaxrl.tools.report.trajectories import StepRows, read_step
from jaxrl.tools.report.vocabulary import Vocabulary, tokenizer_of

Piece = tuple[str, str]  # text of a token; its colour, "" for none
UNLIKELY, GIVEN = "rgba(234, 121, 20, {:.2f})", "rgba(110, 118, 130, 0.28)"
_BOX = "border-left: 3px solid rgba(37, 99, 235, 0.7); padding: 2px 8px; margin: 6px 0"


@dataclass(frozen=True)
class Samples:
    """Hold trajectories to look at: coloured in a notebook, plain where they are printed.

    Attributes:
        step: that sampled them.
        rows: of each trajectory its reward, and what it says.
    """

    step: int
    rows: list[tuple[float, list[Piece]]]

    def __str__(self) -> str:
        lines = [f"reward {reward:.3g}  {_text(pieces)}" for reward, pieces in self.rows]
        return "\n".join([f"step {self.step}", *lines])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """Return what a notebook shows."""
        boxes = [
            f'<div style="{_BOX}"><b>reward {reward:.3g}</b><pre style="margin: 0; background: none'
            f'; white-space: pre-wrap">{"".join(map(_span, pieces))}</pre></div>'
            for reward, pieces in self.rows
        ]
        likely, given = (f'<span style="background: {c}">' for c in (UNLIKELY.format(0.6), GIVEN))
        legend = (
            f"<div>step {self.step}: {likely}unlikely tokens</span> are orange, the less likely "
            f"the darker; {given}grey</span> is what the policy was given</div>"
        )
        return f"<div>{legend}{''.join(boxes)}</div>"


def samples(run: str | Path, step: int | None = None, count: int = 5) -> Samples:
    """Return some trajectories of a recorded step.

    Args:
        run: its folder.
        step: None = the last one.
        count: of trajectories, spread evenly over the step.

    Raises:
        ValueError: the folder is no run's, or has no trajectories of the step.
    """
    files = read_run(run)
    if step is None:
        step = max(files.rollouts, default=0)
    found = read_step(files, step) if step in files.rollouts else None
    if found is None:
        have = f"it has those of steps {', '.join(map(str, files.rollouts))}"
        raise ValueError(f"{files.folder}: no trajectories of step {step}; {have}")
    vocabulary = Vocabulary(tokenizer_of(files, None))
    size = len(found.output["response_ids"])
    rows = np.unique(np.linspace(0, size - 1, min(count, size)).round().astype(int)).tolist()
    return Samples(step, [_row(found, row, vocabulary) for row in rows])


def _row(step: StepRows, row: int, vocabulary: Vocabulary) -> tuple[float, list[Piece]]:
    output, log_probs = step.output, step.output["rollout_logprobs"]
    prompt, response = output["prompt_token_ids"][row], output["response_ids"][row]
    mask = output["loss_masks"][row]
    values = log_probs[row] if log_probs is not None else [0.0] * len(response)
    colours = [GIVEN] * len(prompt) + [
        # as on the page: the whole colour at a log-prob of -5
        UNLIKELY.format(0.6 * min(1.0, -value / 5)) if sampled else GIVEN
        for sampled, value in zip(mask, values, strict=True)
    ]
    numbers = vocabulary.numbers(np.array([*prompt, *response], np.int64)).tolist()
    texts = [vocabulary.entries[number] for number in numbers]
    shown = [x if isinstance(x, str) else bytes(x).decode(errors="replace") for x in texts]
    return float(np.sum(output["rewards"][row])), list(zip(shown, colours, strict=True))


def _span(piece: Piece) -> str:
    text, colour = piece
    return f'<span style="background: {colour}">{html.escape(text)}</span>'


def _text(pieces: list[Piece]) -> str:
    return "".join(text for text, _ in pieces)
