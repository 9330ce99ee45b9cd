"""What moments in 16 and 8 bits cost in accuracy: supervised and GRPO runs against float32.

    JAX_PLATFORMS=cpu python -m benchmarks.optimizer_state [--seeds 0 1 2] [--json=FILE]

`configs/sft_addition.py`, in batches of 256 and with a rate that falls to 0, so that losses are not
those of a moment, makes the same updates on the same batches, with the moments of
`trainer.policy.optimizer_config.state_dtype` in each form: bytes of the moments per parameter, how
far the parameters end from those of float32, as a share of how far those moved, and the loss on
held-out sums. "rounding" is float32 again, with gradients summed in other parts: how far runs part
that differ in nothing but the order of sums. Then `sort_digits` of `benchmarks/baselines.py`
(GRPO, 100 steps): greedy reward on held-out digits.

Claim: losses in bfloat16 and int8 are not above float32's by more than other seeds' are.
"""

import argparse
import contextlib
import io
import json
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks import baselines
from jaxrl.config import load_config_file
from jaxrl.models.transformer import init_params
from jaxrl.records.json_lines import read_lines
from jaxrl.sft import sft
from jaxrl.train import train

FORMS = {  # of a run: dtype of the moments, rows of a microbatch
    "float32": ("float32", 256),
    "rounding": ("float32", 64),
    "bfloat16": ("bfloat16", 256),
    "int8": ("int8", 256),
}
ADDITION = Path(__file__).parent.parent / "configs" / "sft_addition.py"


def distance(left: Any, right: Any) -> float:
    """Return the norm of the difference of two trees."""
    return float(optax.tree.norm(jax.tree.map(jnp.subtract, left, right)))


def supervised(form: str, seed: int, steps: int) -> tuple[dict[str, Any], Any, Any]:
    """Run the supervised task; return its figures, its first parameters, and its last."""
    config = load_config_file(str(ADDITION))
    trainer = config.trainer
    state_dtype, trainer.micro_train_batch_size_per_gpu = FORMS[form]
    trainer.policy.optimizer_config.state_dtype = state_dtype
    trainer.policy.optimizer_config.scheduler, trainer.train_batch_size = "linear", 256
    trainer.seed, trainer.max_training_steps, trainer.eval_interval = seed, steps, steps
    trainer.ckpt_interval = trainer.hf_save_interval = -1
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        trainer.log_path = folder
        trainer.ckpt_path, trainer.export_path = f"{folder}/checkpoints", f"{folder}/exports"
        run = sft(config)
        loss = read_lines(Path(folder) / trainer.run_name / "metrics.jsonl")[-1]["eval/loss"]
    moments = [x for x in jax.tree.leaves(run.state.opt_state) if x.ndim]
    count = sum(x.size for x in jax.tree.leaves(run.params))
    figures = {
        "bytes per parameter": sum(x.nbytes for x in moments) / count,
        "held-out loss": loss,
    }
    return figures, init_params(run.model, seed), run.params


def reinforced(state_dtype: str, seed: int, steps: int) -> float:
    """Run the GRPO task; return the greedy reward on held-out digits."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        config = baselines.sort_digits(steps, seed, Path(folder))
        config.trainer.policy.optimizer_config.state_dtype = state_dtype
        train(config)
        return read_lines(Path(folder) / "run" / "metrics.jsonl")[-1]["eval/all/avg_score"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; 1 where a loss is not a number."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200, help="of the supervised task")
    parser.add_argument("--grpo-steps", type=int, default=100)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--json", type=Path, help="write the figures there")
    arguments = parser.parse_args(argv)
    rows = []
    for seed in arguments.seeds:
        exact: Any = None
        for form, (state_dtype, _) in FORMS.items():  # float32 is the first
            figures, start, end = supervised(form, seed, arguments.steps)
            exact = end if exact is None else exact
            figures["distance"] = distance(end, exact) / distance(exact, start)
            if arguments.grpo_steps and form != "rounding":
                figures["greedy reward"] = reinforced(state_dtype, seed, arguments.grpo_steps)
            rows.append({"form": form, "seed": seed, **figures})
            said = ", ".join(f"{name} {value:.4g}" for name, value in figures.items())
            print(f"{form:<9} seed {seed}: {said}", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))
    return int(not all(math.isfinite(row["held-out loss"]) for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
