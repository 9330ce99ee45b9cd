"""Compare losses and estimators on a recorded batch: what would each do to the parameters?

    python -m jaxrl.compare RUN --step=12 --losses=regular,gspo,sapo --estimators=grpo,rloo

    RUN            folder of a run (config.yaml, run.db, rollouts)
    --step         whose recorded rollouts; the parameters are those before it, as replay has them
    --losses       names or "module:function", each with changes of trainer.algorithm if you like:
                   regular+eps_clip_high=0.28,gspo+loss_reduction=sequence_mean
    --estimators   likewise, e.g. grpo,rloo+advantage_batch_normalize=true; default: the run's own
    --minibatch    of the step, from 1 over all its passes (default: the last); the run's own
                   updates on those before it are made first, so that ratios are not all 1
    --checkpoint   to start from instead of the newest before the step: .../global_step_<N>, or
                   "start" for what the run began with, its models or a checkpoint of another run
    --device-count devices of the CPU, if not as many as the run had
    --json         file for all numbers; --plot: file for a heat map of the cosines (.png, .pdf)

Steps between the start and the step are done again and compared with what RUN recorded; what
differs is said first.

Exit status 0, or 2: the run cannot be read, or a choice makes no sense. docs/replay.md explains.
"""

from jaxrl import cli

if __name__ == "__main__":
    cli.answer_early(__doc__)

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxrl.files import check_file, replace_text
from jaxrl.tools.compare.table import as_json, check_picture, compare, described, heat_map, table
from jaxrl.tools.replay.recorded_run import RecordedRun, use_devices


@cli.command(__doc__)
def main(argv: Sequence[str]) -> int:
    """Run `python -m jaxrl.compare RUN --step=N --losses=a,b,c ...`."""
    arguments = cli.Arguments()
    arguments.add_argument("run")
    arguments.add_argument("--step", type=int, required=True)
    arguments.add_argument("--losses", required=True)
    arguments.add_argument("--estimators")
    arguments.add_argument("--minibatch", type=int)
    arguments.add_argument("--checkpoint")
    arguments.add_argument("--device-count", type=int)
    arguments.add_argument("--json", type=Path)
    arguments.add_argument("--plot", type=Path)
    options = arguments.parse_args(argv)
    check_file("--json", options.json)
    check_picture("--plot", options.plot)
    use_devices(RecordedRun(options.run), options.device_count)
    found = compare(
        options.run,
        options.step,
        options.losses,
        options.estimators,
        minibatch=options.minibatch,
        checkpoint=options.checkpoint,
    )
    where = f"{options.run}, step {options.step}, minibatch {found.minibatch}"
    if options.json is not None:
        replace_text(options.json, json.dumps(as_json(found), indent=2) + "\n")
    if options.plot is not None:
        heat_map(found, options.plot, where)
    print(*found.notes, sep="\n")
    print(f"{where}: {described(found)}\n\n{table(found)}")
    return cli.DONE


if __name__ == "__main__":
    sys.exit(main())
