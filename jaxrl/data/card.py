"""The data card: what a run is given to learn from, and what of it is also in the evaluation."""

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxrl.data.order import DataOrder
from jaxrl.types import Prompt

# A mark of punctuation that is not part of a number.
_PUNCTUATION = re.compile(r"(?<!\d)[.,;:!?'\"`]+|[.,;:!?'\"`]+(?!\d)")
_SHOWN = 3
_READ, _PIECES = 100, 8  # prompts that are read for what they lack, pieces of it shown


@dataclass(frozen=True)
class DataCard:
    """Hold some lines for each source; `warnings` are among them.

    Attributes:
        folded: one line for each source, and the warnings.
    """

    lines: tuple[str, ...]
    warnings: tuple[str, ...]
    folded: str = ""

    def __str__(self) -> str:
        return "\n".join(self.lines)


def data_card(
    train: Sequence[Prompt],
    evaluation: Sequence[Prompt],
    *,
    sources: Sequence[str],
    eval_sources: Sequence[str] = (),
    too_long: Mapping[str, int] | None = None,
    need_truth: Collection[str] = (),
    order: DataOrder | None = None,
    steps: int = 0,
    unknown_token: int | None = None,
    unknown_text: Callable[[str], Sequence[str]] = lambda text: (),
) -> DataCard:
    """Describe the rows, lengths, environments, duplicates and shares of the data of a run.

    A duplicate is counted twice: as it is, and ignoring case, whitespace, punctuation and the form
    of characters (Unicode's NFKC).

    Args:
        train, evaluation: the prompts that are short enough.
        sources, eval_sources: their data sets, by the numbers in their uids.
        too_long: prompts of a data set that were left out.
        need_truth: environments that judge by the ground truth of a row; for them is said how many
            rows lack it.
        unknown_token: id that stands for text which the vocabulary lacks; None: there is none.
        unknown_text: gives the pieces of a text that this token stands for.
        order: with it shares of a batch, and passes over each source in `steps` batches.
    """
    keys = [_Keys(prompts) for prompts in (train, evaluation)]
    lines, folded = ["data:"], list[str]()
    for kind, names, prompts, these, others in (
        ("train", sources, train, *keys),
        ("eval", eval_sources, evaluation, *keys[::-1]),
    ):
        for number, name in enumerate(names):
            rows = [i for i, prompt in enumerate(prompts) if prompt.source == number]
            left_out = (too_long or {}).get(name, 0)
            lines.append(f"  {kind} {number}: {name}")
            lines += _described([prompts[i] for i in rows], left_out, need_truth)
            folded.append(f"{kind:<5} {_rows_of(len(rows), left_out)}: {name}")
            repeated = f"    repeat an earlier prompt: {these.repeated(rows)}"
            if kind == "train" and evaluation:
                repeated += f"; are also in the evaluation: {others.found(these, rows)}"
            lines.append(repeated)
            if kind == "train" and order is not None:
                lines.append(f"    {_drawn(order, number, steps)}")
    warnings = (
        *_overlap(train, evaluation, *keys),
        *_unknown_tokens([*train, *evaluation], unknown_token, unknown_text),
    )
    return DataCard((*lines, *warnings), warnings, "\n".join((*folded, *warnings)))


def _described(prompts: Sequence[Prompt], left_out: int, need_truth: Collection[str]) -> list[str]:
    """Describe the numbers, lengths and environments of the prompts of a source."""
    rows = _rows_of(len(prompts), left_out)
    if not prompts:
        return [f"    {rows}"]
    lengths = np.array([len(prompt.tokens) for prompt in prompts])
    low, middle, high, most = np.percentile(lengths, [0, 50, 95, 100], method="higher").tolist()
    names = Counter(prompt.env_class for prompt in prompts).most_common()
    shown = ", ".join(f"{name} {count}" if len(names) > 1 else name for name, count in names)
    judged = [prompt for prompt in prompts if prompt.env_class in need_truth]
    missing = sum(not _has_truth(prompt.extras) for prompt in judged)
    truth = f"; {missing} without a ground truth" if judged else ""
    return [
        f"    {rows}; {low} / {middle} / {high} / {most} tokens (min / median / p95 / max)",
        f"    environment {shown}{truth}",
    ]


def _rows_of(prompts: int, left_out: int) -> str:
    without = f" ({left_out} are too long and left out)" if left_out else ""
    return f"{_number(prompts, 'prompt')}{without}"


def _drawn(order: DataOrder, source: int, steps: int) -> str:
    """Say which part of a batch a source has, and how often the run goes through it."""
    batches = _number(steps, "batch", "batches")
    if len(order.counts) == 1:  # one pool
        return f"all sources in one pool, {order.passes(steps)[0]:.2f} passes in {batches}"
    count, passes = order.counts[source], order.passes(steps)[source]
    return (
        f"{count} of {order.batch_size} prompts of a batch ({count / order.batch_size:.1%}), "
        f"{passes:.2f} passes in {batches}"
    )


def _number(count: int, one: str, many: str = "") -> str:
    return f"{count} {one if count == 1 else many or f'{one}s'}"


def _has_truth(extras: Mapping[str, Any]) -> bool:
    specs = (extras.get("reward_spec"), extras.get("reward_model"))
    truths = [spec.get("ground_truth") for spec in specs if isinstance(spec, Mapping)]
    return any(truth not in (None, "", []) for truth in truths)


def _overlap(
    train: Sequence[Prompt], evaluation: Sequence[Prompt], of_train: "_Keys", of_eval: "_Keys"
) -> tuple[str, ...]:
    """Return a warning where evaluation prompts are trained on, else ()."""
    found = [
        (evaluation[i].uid, train[of_train.first[key]].uid)
        for i, key in enumerate(of_eval.loose)
        if key in of_train.first
    ]
    if not found:
        return ()
    shown = ", ".join(f"{theirs} is {ours} of train" for theirs, ours in found[:_SHOWN])
    return (
        f"WARNING: {len(found)} of {len(evaluation)} evaluation prompts also occur in the training "
        f"data, ignoring case, whitespace and punctuation ({shown}): the evaluation then measures "
        "memory. Take them out of data.train_data",
    )


def _unknown_tokens(
    prompts: Sequence[Prompt], unknown: int | None, unknown_text: Callable[[str], Sequence[str]]
) -> tuple[str, ...]:
    """Return a warning where the model cannot read a part of some prompts, else ()."""
    found = [prompt for prompt in prompts if unknown in prompt.tokens]
    if unknown is None or not found:
        return ()
    shown = ", ".join(prompt.uid for prompt in found[:_SHOWN])
    said = [m.get("content") for prompt in found[:_READ] for m in prompt.messages]
    pieces = dict.fromkeys(x for text in said if isinstance(text, str) for x in unknown_text(text))
    examples = ", ".join(repr(piece) for piece in [*pieces][:_PIECES])
    such_as = f", such as {examples}" if examples else ""
    return (
        f"WARNING: {len(found)} of {len(prompts)} prompts have text that the vocabulary lacks"
        f"{such_as}, and the model reads the unknown token there ({shown}, ..): write them in its "
        "characters, or take a model that knows them",
    )


class _Keys:
    """Hold what prompts say: as it is, and ignoring case, whitespace and punctuation."""

    def __init__(self, prompts: Sequence[Prompt]) -> None:
        texts = [_said(prompt) for prompt in prompts]
        self.exact = [hash(text) for text in texts]
        self.loose = [hash(normalized(text)) for text in texts]
        self.first_exact, self.first = _first_rows(self.exact), _first_rows(self.loose)

    def repeated(self, rows: Sequence[int]) -> str:
        """Say how many of the rows repeat what a row before them said, in any source."""
        same = sum(self.first_exact[self.exact[row]] < row for row in rows)
        alike = sum(self.first[self.loose[row]] < row for row in rows)
        return _counted(same, alike)

    def found(self, other: "_Keys", rows: Sequence[int]) -> str:
        """Say how many rows of `other` are among these."""
        same = sum(other.exact[row] in self.first_exact for row in rows)
        alike = sum(other.loose[row] in self.first for row in rows)
        return _counted(same, alike)


def _counted(same: int, alike: int) -> str:
    """Say how many prompts are the same, and where it differs, how many are without case."""
    return f"{same or 'none'}" + f" ({alike} without case and punctuation)" * (alike != same)


def _first_rows(keys: Sequence[int]) -> dict[int, int]:
    """Return the first row that has each key, by key."""
    found: dict[int, int] = {}
    for row, key in enumerate(keys):
        found.setdefault(key, row)
    return found


def _said(prompt: Prompt) -> str:
    return "\n".join(f"{m.get('role')}\t{m.get('content')}" for m in prompt.messages)


def normalized(text: str) -> str:
    """Rid a text of case, whitespace, punctuation outside numbers and forms of characters."""
    if not text.isascii():
        text = unicodedata.normalize("NFKC", text)
    return " ".join(_PUNCTUATION.sub(" ", text.casefold()).split())
