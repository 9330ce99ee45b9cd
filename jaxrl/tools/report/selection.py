"""Select the trajectories of a page: all, or as many groups as its size allows.

A group goes in whole or not at all. First everything is tried. Where that is too much, each step
gets its share of the room, by the size of its file, and fills it with groups in the order of a hash
of (step, uid): the same ones for the same run, whoever asks, and the same prompts of two runs. Of
many steps, fewer are read, evenly spaced, and more is kept of each. What a step leaves over goes to
the next one, so that where a step's share holds no group, one goes in every few steps.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rich.console import Console
from rich.markup import escape
from rich.progress import track

from jaxrl.tools.report.blob import inert_json
from jaxrl.tools.report.run_files import RunFiles
from jaxrl.tools.report.series import thinned
from jaxrl.tools.report.trajectories import StepRows, pack_group, read_step
from jaxrl.tools.report.vocabulary import Vocabulary

STEPS, SHARE = 100, 100_000  # steps whose files are read: so many, or one for these bytes of a page
PER_STEP = 120  # bytes of a page that a step takes beside its groups


@dataclass
class Selection:
    """Hold the groups of a page.

    Attributes:
        steps: step -> prompts of its groups in the page, and the number of all its groups.
        blobs: step -> one for each of these prompts.
        total, kept: trajectories that there are in the steps that were read, and in the page.
        steps_left_out: with a file, and none of their groups in the page.
        size: bytes of the page that all this takes.
    """

    vocabulary: Vocabulary
    steps: dict[int, tuple[list[str], int]] = field(default_factory=dict)
    blobs: dict[int, list[str]] = field(default_factory=dict)
    total: int = 0
    kept: int = 0
    steps_left_out: int = 0
    size: int = 0


class _Full(Exception):
    """Signal that not everything fits."""


def select(run: RunFiles, make_vocabulary: Callable[[], Vocabulary], room: int) -> Selection:
    """Select the trajectories of a run in at most `room` bytes.

    Args:
        make_vocabulary: an empty one; what was tried in vain is forgotten.
    """
    steps = list(run.rollouts)
    if sum(run.rollouts[step].stat().st_size for step in steps) <= 4 * room:
        try:
            return _fill(run, Selection(make_vocabulary()), steps, lambda step: room, whole=True)
        except _Full:
            run.step_notes.clear()  # they will be said again
    chosen = [steps[i] for i in thinned(len(steps), max(STEPS, room // SHARE))]
    sizes = {step: run.rollouts[step].stat().st_size for step in chosen}
    total, due = max(sum(sizes.values()), 1), 0.0
    shares = {}
    for step in chosen:
        due += room * sizes[step] / total
        shares[step] = int(due)
    found = _fill(run, Selection(make_vocabulary()), chosen, lambda step: shares[step])
    found.steps_left_out += len(steps) - len(chosen)
    return found


def _fill(
    run: RunFiles,
    found: Selection,
    steps: Sequence[int],
    allowed: Callable[[int], int],
    *,
    whole: bool = False,
) -> Selection:
    """Take groups step by step while the bytes so far are within what is allowed up to a step.

    Raises:
        _Full: `whole`, and a group has no room.
    """
    console = Console(stderr=True)
    text, quiet = escape(f"{run.name}: trajectories"), not console.is_terminal
    for step in track(steps, text, console=console, transient=True, disable=quiet):
        if (rows := read_step(run, step)) is None:
            continue
        take(run, rows, step, found, allowed(step))
        if whole and len(found.steps.get(step, ([], 0))[0]) < len(rows.groups):
            raise _Full
    return found


def take(run: RunFiles, rows: StepRows, step: int, found: Selection, allowed: int) -> None:
    """Add the groups of a step while all that was found is within `allowed` bytes."""
    found.total += len({int(x) for x in rows.trajectories})
    taken = _groups(run, rows, step, found, allowed)
    if not taken:
        found.steps_left_out += 1
        return
    order = sorted(taken)
    found.steps[step] = [rows.groups[index][0] for index in order], len(rows.groups)
    found.blobs[step] = [taken[index] for index in order]
    found.size += PER_STEP


def _groups(
    run: RunFiles, rows: StepRows, step: int, found: Selection, allowed: int
) -> dict[int, str]:
    """Pack groups of a step in the order of their hashes, until one has no room: index -> blob."""
    taken: dict[int, str] = {}
    order = sorted(range(len(rows.groups)), key=lambda i: _hash(step, rows.groups[i][0]))
    for index in order:
        uid, members = rows.groups[index]
        cost = found.vocabulary.cost
        blob = pack_group(run, rows, uid, members, found.vocabulary)
        size = len(blob) + len(inert_json(uid)) + 4 + found.vocabulary.cost - cost
        if found.size + size + PER_STEP > allowed:
            break
        found.size += size
        found.kept += len({int(rows.trajectories[row]) for row in members})
        taken[index] = blob
    return taken


def _hash(step: int, uid: str) -> bytes:
    return hashlib.blake2b(f"{step}:{uid}".encode(), digest_size=8).digest()
