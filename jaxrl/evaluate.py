"""Evaluate a policy: scores of its answers, per data source and over all.

    python -m jaxrl.evaluate --config=configs/quickstart.py --subject=WHAT \\
        --config.generator.eval_n_samples_per_prompt=8 \\
        --config.generator.eval_sampling_params.temperature=1.0

    --subject  a checkpoint (.../global_step_<N>), a Hugging Face folder or hub id, a PEFT folder,
               or the address of a server (http://host:port); default trainer.policy.model.path
    --step     number that names the samples' randomness; default that of the checkpoint, else 0
    --output   folder of results.json and the answers; default <export_path>/evaluations/<subject>

The prompts are data.val_data. docs/evaluation.md says what the numbers mean,
docs/configuration.md has the fields generator.eval_* and all others.
"""

from jaxrl import cli, config as cfg

ARGUMENTS = cli.Arguments()
ARGUMENTS.add_argument("--subject")
ARGUMENTS.add_argument("--step", type=int)
ARGUMENTS.add_argument("--output")

if __name__ == "__main__":
    cli.answer_early(__doc__, lambda words: cfg.read_early(ARGUMENTS.parse_known_args(words)[1]))

import sys
from collections.abc import Sequence

from jaxrl.parallel.devices import check_devices
from jaxrl.tools.evaluate.scores import evaluate_subject, table
from jaxrl.training.eval_metrics import METHOD


@cli.command(__doc__, mendable=cli.MENDABLE_WITH_EXTRAS)
def main(argv: Sequence[str]) -> int:
    """Run `python -m jaxrl.evaluate --config=FILE [--subject=WHAT] [--config.a.b=value ...]`."""
    options, words = ARGUMENTS.parse_known_args(argv)
    config = cfg.read_command_line(words)
    check_devices()
    results = evaluate_subject(config, options.subject, step=options.step, output=options.output)
    for name in ("subject", "kind", "step", "samples_per_prompt", "seconds"):
        print(f"{name}: {results[name]}")
    print(f"{table(results['metrics'])}\nintervals: {METHOD}\nwritten to {results['folder']}")
    return cli.DONE


if __name__ == "__main__":
    sys.exit(main())
