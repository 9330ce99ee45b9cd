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

A run of several processes is replayed by as many, started as a job's are: on one machine by

    python -m jaxrl.cluster.launch --local-processes=2 --module=jaxrl.replay RUN

A replayed step takes its rollouts from RUN and does everything else again: log-probs, advantages,
updates. The checksum of every array of its batch and of its state is compared with the recorded
one; metrics, exports and evaluations are not. All is done with the config of the last attempt: a
run that was resumed with other micro batch sizes, packing or meshes may differ in bits before that.
Exit status 0: bit-identical; 1: not, and where first; 2: the run cannot be replayed.
docs/replay.md explains.
"""

from jaxrl import cli

if __name__ == "__main__":
    cli.answer_early(__doc__)

import sys
from collections.abc import Sequence

from jaxrl.parallel.processes import joined_main
from jaxrl.tools.replay.recorded_run import CorruptedRollouts, RecordedRun, use_devices
from jaxrl.tools.replay.steps import Compared, against, replay


@cli.command(__doc__)
def main(argv: Sequence[str]) -> int:
    """Run `python -m jaxrl.replay RUN [--step=N | --against=RUN2] ...`."""
    arguments = cli.Arguments()
    arguments.add_argument("run")
    replaying = [
        arguments.add_argument("--step", type=int),
        arguments.add_argument("--checkpoint"),
        arguments.add_argument("--device-count", type=int),
    ]
    arguments.add_argument("--against")
    options = arguments.parse_args(argv)
    if options.against is None:
        use_devices(RecordedRun(options.run), options.device_count)
        results = replay(options.run, options.step, checkpoint=options.checkpoint)
    else:
        for option in replaying:
            if getattr(options, option.dest) is not None:
                flag = option.option_strings[0]
                arguments.error(f"--against compares what was recorded, without {flag}; leave it")
        results = against(options.run, options.against)
    result = None
    try:
        for result in results:
            print(result, flush=True)
    except CorruptedRollouts as error:
        print(error)
        return cli.FAILED
    return cli.FAILED if isinstance(result, Compared) and result.different else cli.DONE


if __name__ == "__main__":
    sys.exit(joined_main(main, sys.argv[1:]))
