"""Steps whose batches differ compile nothing once the run is warm."""

from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from jaxrl.examination.finding import Finding, failed, passed
from jaxrl.examination.subject import Subject
from jaxrl.types import GeneratorOutput
from jaxrl.warm_up import warm_up

PER_TOKEN = (
    *("response_ids", "rewards", "loss_masks", "rollout_logprobs"),
    *("kept", "token_versions"),
)


def recompilation(subject: Subject) -> Finding:
    """Warm-up and a first step, then a step of short responses and one of long ones."""
    trainer, programs = subject.trainer, subject.compilations.programs
    warm_up(trainer)
    sample, widths = trainer.rollouts, []

    def rollouts(step: int) -> tuple[GeneratorOutput, list[str]]:
        output, uids = sample(step)
        short = shortened(output, step) if shorten else output
        rows = zip(short["prompt_token_ids"], short["response_ids"], strict=True)
        widths.append(max(len(p) + len(r) for p, r in rows))
        return short, uids

    vars(trainer)["rollouts"] = rollouts
    try:
        for shorten in (False, True, False):
            if len(widths) == 1:
                warm = len(programs)
            trainer.train_step(int(trainer.state.step) + 1)
    finally:
        del vars(trainer)["rollouts"]
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


def shortened(output: GeneratorOutput, seed: int) -> GeneratorOutput:
    """Each response cut to at most half of its tokens."""
    rng = np.random.default_rng(seed)
    ends = [1 + int(rng.integers(0, max(len(r) // 2, 1))) for r in output["response_ids"]]
    cut: dict[str, Any] = dict(output)
    for name in PER_TOKEN:
        column = cast(dict, output).get(name)
        if isinstance(column, list):
            cut[name] = [_first(x, end) for x, end in zip(column, ends, strict=True)]
    return cast(GeneratorOutput, cut)


def _first(values: Any, end: int) -> Any:
    return values[:end] if isinstance(values, Sequence) else values
