"""Sweeps: methods, learning rates and seeds on one task, from runs to a table."""

import contextlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from jaxrl import config as cfg
from jaxrl.files import replace_text
from jaxrl.tools.compare.variants import Variant
from jaxrl.tools.sweep.summary import Summary, best_lr, picture, summary, table
from jaxrl.tools.sweep.units import Outcome, outcomes, units


def sweep(
    variants: Sequence[Variant],
    folder: Path,
    *,
    seeds: Sequence[int],
    lrs: Sequence[float] = (),
    tuning_seeds: Sequence[int] = (),
    processes: int = 1,
    say: Callable[[str], object] = print,
) -> list[Summary]:
    """Train every method with every seed, and write table, picture and numbers.

    With learning rates each method is first trained at each of them with the tuning seeds, which
    are none of `seeds`; the rate with the best mean score is the one that `seeds` have.

    Args:
        variants: losses and estimators, as configs; the others are compared with the first.
        folder: of results; runs that have one there are not done again.
        lrs: () = the config's own.
        say: is told of every run, in the order of the table of runs.

    Raises:
        ValueError: learning rates without tuning seeds or the other way round, or a seed of both.
    """
    if bool(lrs) != bool(tuning_seeds):
        raise ValueError("lrs and tuning_seeds belong together: give both, or neither")
    if both := sorted(set(seeds) & set(tuning_seeds)):
        raise ValueError(
            f"tuning_seeds: {both[0]} is one of seeds, too, whose scores would then be too good; "
            "tune with others"
        )

    def run(
        chosen: Sequence[Variant], rates: Sequence[float], drawn: Sequence[int]
    ) -> list[Outcome]:
        todo, ended = units(chosen, rates, drawn, folder), []
        with contextlib.closing(outcomes(todo, processes)) as found:
            for number, x in enumerate(found, start=1):
                how = x.error or f"score {x.score:.3f}"
                say(f"{number} of {len(todo)}: {x.method}, lr {x.lr:g}, seed {x.seed}: {how}")
                ended.append(x)
        return ended

    tried = run(variants, lrs, tuning_seeds) if lrs else []
    chosen: dict[str, tuple[float, dict[float, float]]] = {}
    for variant in variants:
        mine = [x for x in tried if x.method == variant.name]
        own = variant.config.trainer.policy.optimizer_config.lr
        chosen[variant.name] = best_lr(mine) if mine else (own, {})
    ready = [_at(variant, chosen[variant.name][0]) for variant in variants]
    ended = run(ready, (), seeds)
    found = [
        summary(v.name, [x for x in ended if x.method == v.name], chosen[v.name][1]) for v in ready
    ]
    replace_text(folder / "table.md", table(found) + "\n")
    replace_text(folder / "sweep.json", json.dumps([asdict(x) for x in found], indent=1))
    picture(found, folder / "sweep.png", f"{len(seeds)} seeds")
    return found


def _at(variant: Variant, lr: float) -> Variant:
    config = cfg.apply_overrides(variant.config, {"trainer.policy.optimizer_config.lr": lr})
    return Variant(variant.name, config)
