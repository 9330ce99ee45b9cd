"""What a checkpoint gives back is what was saved, and training goes on from it as without it."""

import shutil
from typing import NamedTuple

import jax

from jaxrl.parallel.checksums import checksums
from jaxrl.tools.doctor.examined_run import ExaminedRun
from jaxrl.tools.doctor.finding import Finding, failed, not_here, passed

Sums = dict[str, int]
GIB, SLACK = 2**30, 2**26  # bytes; slack: what is written beside the arrays


class Saved(NamedTuple):
    """Hold checksums of a state, and of it a step later, without and with a checkpoint between."""

    before: Sums
    restored: Sums
    step: Sums
    restored_step: Sums


def state(examined: ExaminedRun) -> Finding:
    """Check that the run's own checkpointer gives back every array of the state, bit for bit."""
    if reason := no_room(examined):
        return not_here(reason)
    saved = _saved(examined)
    different = _different(saved.before, saved.restored)
    about = f"{len(saved.before)} arrays saved and restored"
    if not different:
        return passed(0, 0, about)
    return failed(
        len(different),
        0,
        about,
        cause=f"a lossy checkpoint: {_named(different)} come back as something else than was saved",
        fix="save and restore the whole TrainState in its own dtypes: a cast, or a field that is "
        "left out, makes a resumed run another one",
    )


def step(examined: ExaminedRun) -> Finding:
    """Compare a training step after restoring with the same step without."""
    if reason := no_room(examined):
        return not_here(reason)
    saved = _saved(examined)
    different = _different(saved.step, saved.restored_step)
    about = f"{len(saved.step)} arrays after one more step, resumed against not"
    if not different:
        return passed(0, 0, about)
    if lossy := _different(saved.before, saved.restored):
        cause = f"a lossy checkpoint: {_named(lossy)} were not restored, and the next step differs"
        fix = "mend what check 'checkpoint.state' names"
    else:
        cause = (
            f"the same state and batch give another step, in {_named(different)}: something that "
            "the step reads is in no checkpoint, or the device adds in no fixed order"
        )
        fix = (
            "keep in TrainState all that a step changes; on GPUs set "
            "XLA_FLAGS=--xla_gpu_deterministic_ops=true"
        )
    return failed(len(different), 0, about, cause=cause, fix=fix)


def no_room(examined: ExaminedRun) -> str:
    """Return why the state cannot be saved in the temporary folder; "" where it can."""
    if "saved" in examined.known:
        return ""
    needed = sum(x.nbytes for x in jax.tree.leaves(examined.trainer.state))
    free = shutil.disk_usage(examined.folder).free
    if needed + SLACK <= free:
        return ""
    return (
        f"a checkpoint has {needed / GIB:.3g} GiB, {examined.folder.parent} {free / GIB:.3g} GiB "
        "free: set TMPDIR to a larger folder"
    )


def _saved(examined: ExaminedRun) -> Saved:
    if "saved" not in examined.known:
        trainer = examined.trainer
        examined.train()  # moments of 0 would survive any rounding
        before = checksums(trainer.state)
        trainer.commit(int(trainer.state.step))
        trainer.checkpointer.wait()
        examined.train()
        after = checksums(trainer.state)
        trainer.state = trainer.restore_or_init()
        trainer.batches_drawn = int(trainer.state.batches_drawn)
        trainer.load_reference(trainer.state.ref_params)
        restored = checksums(trainer.state)
        examined.train()
        examined.known["saved"] = Saved(before, restored, after, checksums(trainer.state))
    return examined.known["saved"]


def _different(left: Sums, right: Sums) -> list[str]:
    return [name for name in sorted({*left, *right}) if left.get(name) != right.get(name)]


def _named(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(names[:3])}{more}"
