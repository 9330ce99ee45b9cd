"""Replay recorded steps and compare bits; or find where two runs part.

    python -m jaxrl.replay RUN --step=12
    python -m jaxrl.replay RUN --against=RUN2

    RUN            folder of a run (config.yaml, run.db, rollouts)
    --step         the last step to replay, from the newest checkpoint before it; without it all
                   steps from the oldest checkpoint on
    --checkpoint   to start from instead: .../global_step_<N>, or "start" for what the run began
                   with, its models or the checkpoint of another run
    --device-count devices of the CPU, if not as many as the run had
    --against      another run: compares what both recorded, computes nothing; takes none of the
                   other options

A replayed step takes its rollouts from RUN and does everything else again: log-probs, advantages,
updates. The checksum of every array of its batch and of its state is compared with the recorded
one; metrics, exports and evaluations are not. All is done with the config of the last attempt: a
run that was resumed with other micro batch sizes, packing or meshes may differ in bits before that.
Exit status 0: bit-identical; 1: not, and where first; 2: the run cannot be replayed.
docs/replay.md explains.
"""

import argparse
import sys
from collections.abc import Sequence

from jaxrl.tools.replay.recorded_run import (
    CorruptedRollouts,
    RecordedRun,
    use_devices,
)
from jaxrl.tools.replay.steps import (
    Compared,
    against,
    replay,
)


def main(argv: Sequence[str]) -> int:
    """Run `python -m jaxrl.replay RUN [--step=N | --against=RUN2] ...`."""
    if not argv or "--help" in argv or "-h" in argv:
        print(__doc__)
        return 0
    parser = argparse.ArgumentParser("python -m jaxrl.replay", allow_abbrev=False)
    parser.add_argument("run")
    for name, kind in (("step", int), ("checkpoint", str), ("device-count", int)):
        parser.add_argument(f"--{name}", type=kind)
    parser.add_argument("--against")
    given = parser.parse_args(argv)
    if given.against is not None:
        for name in ("step", "checkpoint", "device_count"):
            if getattr(given, name) is not None:
                flag = name.replace("_", "-")
                parser.error(f"--against compares what was recorded, without --{flag}; leave it")
    result = None
    try:
        if given.against is None:
            use_devices(RecordedRun(given.run), given.device_count)
            results = replay(given.run, given.step, checkpoint=given.checkpoint)
        else:
            results = against(given.run, given.against)
        for result in results:
            print(result, flush=True)
    except CorruptedRollouts as error:
        print(error)
        return 1
    except (ValueError, OSError) as error:  # what a user can mend
        print(f"error: {error}", file=sys.stderr)
        return 2
    return int(isinstance(result, Compared) and bool(result.different))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
