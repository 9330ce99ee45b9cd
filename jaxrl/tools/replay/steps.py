"""Do recorded steps again and compare their bits; or compare what two runs recorded."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from jaxrl import config as cfg
from jaxrl.config.objective_requirements import kl_in_reward
from jaxrl.parallel.checksums import checksums
from jaxrl.records.ledger.writer import machine_of, step_checksums
from jaxrl.records.resume_identity import differences
from jaxrl.tools.replay.recorded_run import RecordedRun, restored, step_of
from jaxrl.train import BasePPOExp
from jaxrl.types import TrainState

# In the order in which a step makes them: the first that differs is the cause of the others.
MADE_BY = {
    "batch.tokens": "what was sampled: prompts, keys, weights of the sampler",
    "batch.rollout_log_probs": "the sampler's arithmetic, or its weights",
    "batch.rewards": "the environment, or the shaping of rewards",
    "batch.old_log_probs": "the policy's forward pass",
    "batch.ref_log_probs": "the reference, or its forward pass",
    **dict.fromkeys(
        (f"batch.{name}" for name in ("teacher_ids", "teacher_log_probs", "teacher_states")),
        "the teacher, or its forward pass",
    ),
    "batch.values": "the critic, or its forward pass",
    "batch.advantages": "the advantage estimator",
    "batch.returns": "the advantage estimator",
    "batch": "the rollouts",
    "state": "the update",
}

# Fields that say where a run writes, in which two runs always differ.
PLACES = {f"trainer.{name}" for name in ("ckpt_path", "export_path", "log_path", "run_name")}


@dataclass(frozen=True)
class Compared:
    """Hold a step, and the arrays in which it differs, those first that are made first.

    Attributes:
        arrays: that were compared.
    """

    step: int
    different: list[str]
    arrays: int

    def __str__(self) -> str:
        if not self.different:
            return f"step {self.step}: bit-identical, {self.arrays} arrays"
        first, *others = self.different
        return (
            f"step {self.step}: {first} differs first ({_maker(first)}); "
            f"{len(self.different)} of {self.arrays} arrays do"
            + (f": then {_some(others)}" if others else "")
        )


def replay(
    run: str | Path,
    step: int | None = None,
    *,
    checkpoint: str | None = None,
    run_class: type[BasePPOExp] = BasePPOExp,
) -> Iterator[str | Compared]:
    """Do recorded steps again, up to the first that differs.

    Args:
        run, step, checkpoint: see the command.
        run_class: whose `get_` methods give model, tokenizer and trainer.

    Yields:
        What is done or odd, in words; a `Compared` for the checkpoint and for every step.

    Raises:
        ValueError, OSError: the run cannot be replayed.
    """
    recorded = RecordedRun(run)
    last = max(recorded.steps) if step is None else recorded.step(step).step
    source = recorded.find_checkpoint(step, checkpoint)
    first = step_of(source)
    numbers = range(first + 1, last + 1)
    for number in numbers:
        recorded.checksums(number)  # or nothing would be compared
    recorded.check_files(numbers)
    yield f"step {first}: {recorded.described(source)}"
    with restored(recorded, source, run_class=run_class) as trainer:
        machine = recorded.steps[last].machine
        yield from other_machine(machine, machine_of(trainer.mesh))
        if (count := machine.get("processes", 1)) != jax.process_count():
            yield (
                f"the run had {count} process(es), and this is {jax.process_count()}: see how to "
                f"replay a job in docs/replay.md (jaxrl launch --local-processes={count} "
                "--module=jaxrl.replay)"
            )
        for result in redone(
            recorded, numbers, trainer.train_step, lambda: (trainer.batch, trainer.state)
        ):
            yield result
            if result.different:
                return


def redone(
    run: RecordedRun,
    numbers: Iterable[int],
    do_step: Callable[[int], Any],
    reached: Callable[[], tuple[Any, TrainState]],
) -> Iterator[Compared]:
    """Compare the restored state with the recorded one; then do each step again and compare it.

    What has no checksums is done, and not compared.

    Args:
        numbers: of the steps that follow the restored state.
        do_step: does the step of a number, as `Trainer.train_step` of a restored trainer.
        reached: returns the batch of the last step, and the state after it.
    """
    # neither batch nor state has a name here: the next step needs their memory
    first, penalized = int(reached()[1].step), kl_in_reward(run.config.trainer.algorithm)
    if first in run.steps and (recorded := run.steps[first].checksums):
        found = {f"state{name}": x for name, x in checksums(reached()[1]).items()}
        states = {name: x for name, x in recorded.items() if name.startswith("state")}
        yield compared(first, states, found)
    for number in numbers:
        do_step(number)
        if recorded := run.steps[number].checksums:
            found = step_checksums(*reached())
            yield compared(number, recorded, found, kl_in_rewards=penalized)


def compared(
    step: int,
    recorded: Mapping[str, int],
    found: Mapping[str, int],
    *,
    kl_in_rewards: bool = False,
) -> Compared:
    """Find the arrays whose checksums differ, or that only one of the two has.

    Args:
        kl_in_rewards: rewards are made of log-probs, so they come after these.
    """
    names = {*recorded, *found}
    different = [name for name in names if recorded.get(name) != found.get(name)]
    order = list(MADE_BY)
    if kl_in_rewards:
        order.remove("batch.rewards")
        order.insert(order.index("batch.advantages"), "batch.rewards")
    return Compared(step, sorted(different, key=lambda x: _when_made(x, order)), len(names))


def against(run: str | Path, other: str | Path) -> Iterator[str | Compared]:
    """Compare two runs by what they recorded, up to the first step that differs.

    Yields:
        What is different in their configs, in words; a `Compared` for every common step.

    Raises:
        ValueError: one cannot be read, has no checksums, or they have no step in common.
    """
    left, right = RecordedRun(run), RecordedRun(other)
    if not (common := sorted(left.steps.keys() & right.steps.keys())):
        raise ValueError(
            f"{left.folder} has the steps {_span(left)}, {right.folder} {_span(right)}: none in "
            "common; take runs that overlap"
        )
    different = differences(*(cfg.get_config_as_dict(x.config) for x in (left, right)))
    if different := {name: pair for name, pair in different.items() if name not in PLACES}:
        yield "configs differ: " + "; ".join(
            f"{name}: {a!r} | {b!r}" for name, (a, b) in different.items()
        )
    yield from other_machine(left.steps[common[-1]].machine, right.steps[common[-1]].machine)
    yield f"steps {_span(left)} and {_span(right)}, {len(common)} in common"
    penalized = any(kl_in_reward(x.config.trainer.algorithm) for x in (left, right))
    for step in common:
        pair = left.checksums(step), right.checksums(step)
        yield (result := compared(step, *pair, kl_in_rewards=penalized))
        if result.different:
            return


def _maker(name: str) -> str:
    return MADE_BY.get(name, MADE_BY[name.partition(".")[0].partition("[")[0]])


def _when_made(name: str, order: Sequence[str]) -> tuple[int, int, str]:
    """Return the place in a step: batch arrays in their order, then parameters, then the rest."""
    if name.startswith("batch"):
        return 0, order.index(name) if name in order else 0, name
    return 1, 0 if name.startswith("state.params") else 1, name


def _some(names: Sequence[str], most: int = 6) -> str:
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")


def _span(run: RecordedRun) -> str:
    return f"{min(run.steps)} to {max(run.steps)}"


def other_machine(recorded: Mapping[str, object], now: Mapping[str, object]) -> Iterator[str]:
    """Yield what differs between two machines, if anything, and what that means; in words."""
    different = [
        f"{name} {recorded.get(name)!r} | {now.get(name)!r}"
        for name in dict.fromkeys((*recorded, *now))
        if recorded.get(name) != now.get(name)
    ]
    if different:
        yield (
            f"other machines: {'; '.join(different)}. Sums are taken in another order there, so "
            "bits may differ although nothing is wrong"
        )
