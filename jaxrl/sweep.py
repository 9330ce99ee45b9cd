"""Train a task with several losses and estimators, each with several seeds: which is better?

    python -m jaxrl.sweep --config=configs/quickstart.py --out=runs/sweep \\
        --losses=regular,gspo+loss_reduction=sequence_mean --estimators=grpo,rloo --seeds=1,2,3 \\
        [--lrs=1e-3,3e-3,1e-2 --tuning-seeds=11,12] [--processes=2] [--config.a.b=value ...]

    --losses        names or "module:function", each with changes of trainer.algorithm if you like:
                    regular+eps_clip_high=0.28,gspo+loss_reduction=sequence_mean
    --estimators    likewise; every loss is trained with every estimator; default: the config's own.
                    The first method is what the others are compared with
    --seeds         of the runs that count
    --lrs           tried by every method with the --tuning-seeds, which are others; the best mean
                    is the one that the seeds have
    --processes     runs beside each other, default 1
    --out           folder: table.md, sweep.json and sweep.png, and a result of every run

A run's score is the mean reward of the last fifth of its steps. The table has the mean over the
seeds with Student's interval, how probable a difference from the first method that large is by
seeds alone (Welch's t, corrected for the number of methods by Holm's rule), and the runs that
failed. What has a result in --out is not done again: a sweep that was stopped goes on with the same
words, and one that has ended prints its table again, the same.

Exit status 0; 2: the words make no sense.
"""

from jaxrl import cli

if __name__ == "__main__":
    cli.answer_early(__doc__)

import sys
from collections.abc import Sequence
from pathlib import Path

from jaxrl import config as cfg
from jaxrl.tools.compare.variants import parse_variants
from jaxrl.tools.sweep.summary import table
from jaxrl.tools.sweep.sweep import sweep


@cli.command(__doc__)
def main(argv: Sequence[str]) -> int:
    """Run `python -m jaxrl.sweep --config=FILE --losses=a,b --seeds=1,2 --out=FOLDER ...`."""
    arguments = cli.Arguments()
    arguments.add_argument("--losses", required=True)
    arguments.add_argument("--estimators")
    arguments.add_argument("--seeds", required=True)
    arguments.add_argument("--lrs", default="")
    arguments.add_argument("--tuning-seeds", default="")
    arguments.add_argument("--processes", type=int, default=1)
    arguments.add_argument("--out", type=Path, required=True)
    options, words = arguments.parse_known_args(argv)
    config = cfg.resolve(cfg.read_command_line(words))
    found = sweep(
        parse_variants(config, options.losses, options.estimators),
        options.out,
        seeds=_numbers("--seeds", options.seeds, int),
        lrs=_numbers("--lrs", options.lrs, float),
        tuning_seeds=_numbers("--tuning-seeds", options.tuning_seeds, int),
        processes=options.processes,
    )
    print(f"\n{table(found)}\n\n{options.out / 'sweep.png'}")
    return cli.DONE


def _numbers(flag: str, text: str, kind: type) -> list:
    try:
        return [kind(x) for x in text.split(",") if x.strip()]
    except ValueError:
        raise ValueError(f"{flag}={text!r} must be numbers with commas between, e.g. 1,2") from None


if __name__ == "__main__":
    sys.exit(main())
