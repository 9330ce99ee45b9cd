"""Which way the losses, terms and estimators pull on one recorded batch of a stale run.

    python -m benchmarks.gradients --out=runs/gradients --plot=docs/curves/gradients.png

Claim: the picture of docs/replay.md and what is said of it; `--json` has its numbers.

The task is `sort_digits` of `benchmarks/baselines.py`: 40 steps of 16 prompts x 16 samples, four
passes over the batch, trained by `decoupled_ppo` with rollouts that are one step old, so that the
sampler, the policy before the step and that of the update are three. Compared are the gradients of
the last update of the last step, whose batch the run recorded, by `jaxrl.compare`. A run that is in
--out is not made again.

    losses        all, with the estimator grpo and the settings of `benchmarks.baselines`
    regular, ...  the loss regular with a term of the objective that changes its gradient
    ... alone     a term without a loss
    A: ...        the loss regular with each estimator that needs no critic, teacher, turns,
                  second reward or greedy answers

The entropy bonus of the run is left out but where it is a choice.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from benchmarks import baselines
from jaxrl import config as cfg
from jaxrl.advantages import ROWS as ESTIMATORS
from jaxrl.compare import as_json, check_picture, compare, described, heat_map, table
from jaxrl.files import check_file, replace_text
from jaxrl.losses import ROWS as LOSSES
from jaxrl.train import train
from jaxrl.types import Array

STEPS = 40
SETTINGS = {
    **baselines.LOSSES,
    **dict.fromkeys(("luspo", "topr"), baselines.ROWS),
    "dro": "+policy_loss_kwargs.beta=0.1",  # it has no default
}
TERMS = ("OPSM", "top entropy", "IcePop", "sequence MIS", "geometric rejection", "k3 rejection")
ALONE = {
    "entropy": "+use_entropy_loss=true",
    "right rows' likelihood": "+positive_nll_coef=0.1",
    **{f"KL {kind}": f"{baselines.KL}+kl_estimator_type={kind}" for kind in ("k1", "k2", "k3")},
}
TRAINS = "decoupled_ppo"
OFF = "+use_entropy_loss=false"


def nothing(
    log_probs: Array, old_log_probs: Array, advantages: Array, config: Any
) -> tuple[Array, Any]:
    """Return a loss of 0, to which the other terms of an objective are added."""
    return jnp.zeros_like(log_probs), {}


def choices() -> dict[str, tuple[str, str]]:
    """Return loss and estimator of each gradient, by its name in the picture."""
    losses = [name for name, row in LOSSES.items() if not row.demonstrations]  # here are none
    found = {name: (f"{name}{OFF}{SETTINGS.get(name, '')}", "grpo") for name in losses}
    for name in TERMS:
        found[f"regular, {name}"] = f"regular{OFF}{baselines.TERMS[name]}", "grpo"
    for name, term in ALONE.items():
        off = "" if "entropy" in term else OFF
        found[f"{name} alone"] = f"benchmarks.gradients:nothing{off}{term}", "grpo"
    for name, row in ESTIMATORS.items():
        needs = row.needs_values, row.needs_teacher, row.needs_terms, row.needs_greedy
        if any(needs) or row.per_turn or name == "grpo":  # which the losses have
            continue
        of_loss, own = baselines.ESTIMATORS.get(name, ("", ""))
        found[f"A: {name}"] = f"regular{of_loss}{OFF}", f"{name}{own}"
    return found


def record(folder: Path, steps: int) -> Path:
    """Train and record, where it has not been done; return the folder of the run."""
    config = baselines.sort_digits(steps, 1, folder)
    changes = {
        "trainer.algorithm.policy_loss_type": TRAINS,
        "trainer.policy_mini_batch_size": 16,  # an asynchronous run has one
        "trainer.update_epochs_per_batch": 4,
        "trainer.policy.optimizer_config.scheduler": "constant_with_warmup",
        "trainer.fully_async.enabled": True,
        "trainer.fully_async.schedule": "lockstep",
        "trainer.fully_async.max_staleness_steps": 1,
        "trainer.ckpt_interval": steps - 1,
    }
    run = folder / config.trainer.run_name
    if not (folder / "checkpoints" / f"global_step_{steps}").exists():
        train(cfg.apply_overrides(config, changes))
    return run


def main(argv: Sequence[str]) -> int:
    """Train, compare, and print the numbers."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--steps", type=int, default=STEPS)
    options = parser.parse_args(argv)
    check_picture("--plot", options.plot)
    check_file("--json", options.json)
    found = compare(record(options.out, options.steps), options.steps, choices())
    print(f"{described(found)}\n\n{table(found)}")
    if options.json is not None:
        replace_text(options.json, json.dumps(as_json(found), indent=1) + "\n")
    if options.plot is not None:
        where = f"sort_digits, step {options.steps}, update {found.minibatch}, rollouts a step old"
        heat_map(found, options.plot, where)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
