"""Steps whose batches differ compile nothing once the run is warm."""

from collections.abc import Sequence
from typing import Any, cast

from jaxrl.data.columns import BLANKS
from jaxrl.data.packing import length_bucket
from jaxrl.tools.doctor.finding import Finding, failed, passed
from jaxrl.tools.doctor.subject import Subject
from jaxrl.types import GeneratorOutput

STEPS = 3  # the first one compiles the optimizer's update
PER_TOKEN = ("response_ids", *BLANKS)


def recompilation(subject: Subject) -> Finding:
    """Check that steps of short and of long responses compile nothing after a first step.

    Warm-up comes before the first step.
    """
    trainer, programs = subject.trainer, subject.compilations.programs
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
    names = list(dict.fromkeys(program.name for program in again))
    first = again[0]
    return failed(
        len(again),
        0,
        about,
        cause=f"warm steps compile {', '.join(names[:4])}: "
        f"{first.described(subject.compilations.last(first.name, warm))}",
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
    ends = [max(min(len(r), width - len(p)), 1) for p, r in rows]
    cut: dict[str, Any] = dict(output)
    for name in PER_TOKEN:
        column = cast(dict, output).get(name)
        if isinstance(column, list):
            cut[name] = [_first(x, end) for x, end in zip(column, ends, strict=True)]
    return cast(GeneratorOutput, cut)


def _first(values: Any, end: int) -> Any:
    return values[:end] if isinstance(values, Sequence) else values
