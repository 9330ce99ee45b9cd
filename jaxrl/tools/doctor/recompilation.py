"""Steps whose batches differ compile nothing once the run is warm."""

import contextlib
import logging
from collections.abc import Iterator, Sequence
from typing import Any, cast

from jaxrl.data.columns import BLANKS, ROUTES
from jaxrl.data.packing import length_bucket
from jaxrl.parallel.jax_internals import COMPILE_LOGGER
from jaxrl.tools.doctor.examined_run import ExaminedRun, Program
from jaxrl.tools.doctor.finding import Finding, failed, passed
from jaxrl.types import GeneratorOutput

STEPS = 3  # the first one compiles the optimizer's update
PER_TOKEN = ("response_ids", *BLANKS)
# jax says there, at the level DEBUG, what it compiles; its record has name and shapes as arguments
MESSAGE = "Compiling %s with global shapes and types %s"


def recompilation(examined: ExaminedRun) -> Finding:
    """Check that steps of short and of long responses compile nothing after a first step.

    Warm-up comes before the first step.
    """
    trainer, programs = examined.trainer, examined.programs
    trainer.warm_up()
    sample, widths, compiled = trainer.rollouts, [], []

    def rollouts(step: int) -> tuple[GeneratorOutput, list[str]]:
        output, uids = sample(step)
        if widths:  # not of the first step
            output = shortened(output, other_width(output, widths))
        widths.append(longest(output))
        return output, uids

    vars(trainer)["rollouts"] = rollouts
    try:
        for _ in range(STEPS):
            trainer.train_step(int(trainer.state.step) + 1)
            compiled.append(len(programs))
    finally:
        del vars(trainer)["rollouts"]
    warm = compiled[0]
    again = programs[warm:]
    about = f"two steps after the first one, longest rows of {widths[1]} and {widths[2]} tokens"
    if not again:
        return passed(0, 0, about)
    names = list(dict.fromkeys(name for name, _ in again))
    new = what_is_new(again[0], programs[:warm])
    return failed(
        len(again),
        0,
        about,
        cause=f"warm steps compile {', '.join(names[:4])}: {new}",
        fix="keep shapes to those of the config: rows padded to jaxrl.data.packing.length_bucket, "
        "numbers that change given as arrays, not as static arguments or new functions",
    )


def longest(output: GeneratorOutput) -> int:
    """Return the number of tokens of the longest row."""
    rows = zip(output["prompt_token_ids"], output["response_ids"], strict=True)
    return max(len(prompt) + len(response) for prompt, response in rows)


def other_width(output: GeneratorOutput, seen: Sequence[int]) -> int:
    """Return the shortest length that no batch has had yet, and that is no bucket of its own.

    Then the longest: what pads to the longest row of a batch meets new shapes.
    """
    most, least = longest(output), max(map(len, output["prompt_token_ids"])) + 1
    new = [n for n in range(least, most + 1) if n not in seen and length_bucket(n) != n]
    return (new[0] if len(seen) == 1 else new[-1]) if new else most


def shortened(output: GeneratorOutput, width: int) -> GeneratorOutput:
    """Cut responses so that no row is longer than `width`; one token of each stays."""
    rows = zip(output["prompt_token_ids"], output["response_ids"], strict=True)
    ends = [max(min(len(response), width - len(prompt)), 1) for prompt, response in rows]
    cut: dict[str, Any] = dict(output)
    for name in PER_TOKEN:
        column = cut.get(name)
        if isinstance(column, list):
            cut[name] = [
                values[:end] if isinstance(values, Sequence) else values
                for values, end in zip(column, ends, strict=True)
            ]
    if ROUTES in cut:
        wide = zip(cut[ROUTES], output["prompt_token_ids"], ends, strict=True)
        cut[ROUTES] = [known[: len(prompt) + end] for known, prompt, end in wide]
    return cast(GeneratorOutput, cut)


# ---------------------------------------------------------------- what XLA compiles


@contextlib.contextmanager
def compiled_programs() -> Iterator[list[Program]]:
    """Yield a list to which every program is added that is compiled while the block runs."""
    programs: list[Program] = []
    logger, handler = logging.getLogger(COMPILE_LOGGER), _CompilationHandler(programs)
    level, propagate = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    try:
        yield programs
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagate


class _CompilationHandler(logging.Handler):
    """Add the program of each of jax's log records that is about a compilation to a list."""

    def __init__(self, programs: list[Program]) -> None:
        super().__init__(logging.DEBUG)
        self.programs = programs

    def emit(self, record: logging.LogRecord) -> None:
        """Add the program of a record."""
        if str(record.msg).startswith(MESSAGE) and isinstance(record.args, tuple):
            name, shapes = cast(tuple[Any, Any], record.args[:2])
            words = (x.str_short() if hasattr(x, "str_short") else str(x) for x in shapes)
            self.programs.append((str(name), tuple(words)))


def what_is_new(program: Program, earlier: Sequence[Program]) -> str:
    """Return in words what differs from when a program was compiled last, if it was."""
    name, shapes = program
    before = next((known for other, known in reversed(earlier) if other == name), None)
    if before is None or len(before) != len(shapes):
        return f"{name} for {len(shapes)} arguments, the last: {', '.join(shapes[-4:])}"
    if before == shapes:
        return f"{name} for the same shapes: a static value or the function itself is new"
    pairs = enumerate(zip(shapes, before, strict=True))
    changed = [f"argument {i} is {now}, was {was}" for i, (now, was) in pairs if now != was]
    more = f" and {len(changed) - 2} more" if len(changed) > 2 else ""
    return f"{name}: {'; '.join(changed[:2])}{more}"
