"""Compare losses and estimators on a recorded batch: what would each do to the parameters?

    python -m jaxrl.compare RUN --step=12 --losses=regular,gspo,sapo --estimators=grpo,rloo

    RUN            folder of a run (config.yaml, run.db, rollouts)
    --step         whose recorded rollouts; the parameters are those before it, as replay has them
    --losses       names or "module:function", each with changes of trainer.algorithm if you like:
                   regular+eps_clip_high=0.28,gspo+loss_reduction=sequence_mean
    --estimators   likewise, e.g. grpo,rloo+advantage_batch_normalize=true; default: the run's own
    --minibatch    of the step, from 1 over all its passes (default 1); the run's own updates on
                   those before it are made first, so that ratios are not all 1
    --checkpoint   to start from instead of the newest before the step: .../global_step_<N>, or
                   "start" for what the run began with, its models or a checkpoint of another run
    --device-count devices of the CPU, if not as many as the run had
    --json         file for all numbers; --plot: file for a heat map of the cosines (.png, .pdf)

Steps between the start and the step are done again and compared with what RUN recorded; what
differs is said first.

Exit status 0, or 2: the run cannot be read, or a choice makes no sense. docs/replay.md explains.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxrl.files import check_file, replace_text
from jaxrl.tools.compare.table import (
    as_json,
    check_picture,
    compare,
    described,
    heat_map,
    table,
)
from jaxrl.tools.replay.recorded_run import RecordedRun, use_devices


def main(argv: Sequence[str]) -> int:
    """Run `python -m jaxrl.compare RUN --step=N --losses=a,b,c ...`."""
    if not argv or "--help" in argv or "-h" in argv:
        print(__doc__)
        return 0
    parser = argparse.ArgumentParser("python -m jaxrl.compare", allow_abbrev=False)
    parser.add_argument("run")
    for name, kind in (("step", int), ("losses", str)):
        parser.add_argument(f"--{name}", type=kind, required=True)
    for name, kind in (("estimators", str), ("checkpoint", str), ("device-count", int)):
        parser.add_argument(f"--{name}", type=kind)
    parser.add_argument("--minibatch", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    given = parser.parse_args(argv)
    try:
        check_file("--json", given.json)
        check_picture("--plot", given.plot)
        use_devices(RecordedRun(given.run), given.device_count)
        found = compare(
            given.run,
            given.step,
            given.losses,
            given.estimators,
            minibatch=given.minibatch,
            checkpoint=given.checkpoint,
        )
        where = f"{given.run}, step {given.step}, minibatch {given.minibatch}"
        if given.json:
            replace_text(given.json, json.dumps(as_json(found), indent=2) + "\n")
        if given.plot:
            heat_map(found, given.plot, where)
    except (ValueError, OSError) as error:  # what a user can mend
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(*found.notes, sep="\n")
    print(f"{where}: {described(found)}\n\n{table(found)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
