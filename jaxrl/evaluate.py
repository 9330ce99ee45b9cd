"""Evaluate a policy: scores of its answers, per data source and over all.

    python -m jaxrl.evaluate --config=configs/quickstart.py --subject=WHAT \\
        --config.generator.eval_n_samples_per_prompt=8 \\
        --config.generator.eval_sampling_params.temperature=1.0

    --subject  a checkpoint (.../global_step_<N>), a Hugging Face folder or hub id, a PEFT folder,
               or the address of a server (http://host:port); default trainer.policy.model.path
    --step     number that names the samples' randomness; default that of the checkpoint, else 0
    --output   folder of results.json and the answers; default <export_path>/evaluations/<subject>

The prompts are data.val_data. docs/evaluation.md says what the numbers mean.
"""

import argparse
import sys
from collections.abc import Sequence

from jaxrl import config as cfg
from jaxrl.parallel.devices import check_devices
from jaxrl.tools.evaluate.scores import evaluate_subject, table
from jaxrl.training.eval_metrics import METHOD


def main(argv: Sequence[str]) -> int:
    """Run `python -m jaxrl.evaluate --config=FILE [--subject=WHAT] [--config.a.b=value ...]`."""
    if not argv or "--help" in argv or "-h" in argv:
        print(f"{__doc__}\nFields: generator.eval_* and more in docs/configuration.md.")
        return 0
    parser = argparse.ArgumentParser("python -m jaxrl.evaluate", allow_abbrev=False)
    parser.add_argument("--subject")
    parser.add_argument("--step", type=int)
    parser.add_argument("--output")
    options, rest = parser.parse_known_args(argv)
    try:
        path, overrides = cfg.parse_command_line(rest)
        config = cfg.apply_overrides(cfg.load_config_file(path), overrides)
        check_devices()
        results = evaluate_subject(config, **vars(options))
    except (ValueError, OSError, ImportError) as error:  # what a user can mend
        print(f"error: {error}", file=sys.stderr)
        return 2
    shown = ("subject", "kind", "step", "samples_per_prompt", "seconds")
    print("\n".join(f"{name}: {results[name]}" for name in shown))
    print(f"{table(results['metrics'])}\nintervals: {METHOD}\nwritten to {results['folder']}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
