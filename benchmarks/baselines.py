"""What each loss, estimator and term of the objective learns of a small task, with intervals.

    python -m benchmarks.baselines --out=runs/baselines --processes=2
    python -m benchmarks.baselines --out=runs/baselines --only=gspo,pass_at_k

Claim: the table of docs/baselines.md; a second run of the command gives the same.

The model of configs/quickstart.py sorts two digits from random weights, as in
`benchmarks/sort_digits.py`: 100 steps of 16 prompts x 16 samples, four updates a step, of which all
but the first are off policy; entropy bonus 0.1 (0.02 where advantages are not divided by their
deviation), no KL but where the method is one. Each method is trained at three learning rates with
two seeds, then at the best of them with five others. With a critic it is the policy's shape, from
random weights, at the default rate. It goes on where it was stopped, see docs/sweeps.md.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.sort_digits import make_config
from jaxrl import config as cfg
from jaxrl.tools.compare.variants import Variant, parse_variants
from jaxrl.tools.sweep.summary import table
from jaxrl.tools.sweep.sweep import sweep

LRS, TUNING_SEEDS, SEEDS = (1e-3, 3e-3, 1e-2), (11, 12), (1, 2, 3, 4, 5)
STEPS = 100
UNSCALED = "+entropy_loss_coef=0.02"
ROWS = "+loss_reduction=sequence_mean"
RIGHT = "+advantage_kwargs.threshold=0.99"  # all digits, and then the end
KL = "+use_kl_loss=true+kl_loss_coef=0.01"
LOSSES = {  # name -> what the papers say beyond it
    "regular": "",
    "dual_clip": "",
    "gspo": f"{ROWS}+eps_clip_low=3e-4+eps_clip_high=4e-4",
    "gmpo": f"{ROWS}+eps_clip_low=0.4+eps_clip_high=0.4",
    "sapo": ROWS,
    "cispo": "",
    "rollout_is": "",
    "dppo": "",
    "decoupled_ppo": "",
    "clip_cov": "",
    "kl_cov": "",
    "importance_sampling": "",
    "cross_entropy": "",
}
TERMS = {  # of the objective, beside the loss `regular`
    "k3": KL,
    "k3+": f"{KL}+kl_estimator_type=k3+",
    "unbiased KL": f"{KL}+use_unbiased_kl=true+kl_loss_reduction=loss",
    "OPSM": "+opsm_delta=0.01",
    "top entropy": "+top_entropy_quantile=0.2",
    "right rows' likelihood": "+positive_nll_coef=0.1",
    "adaptive entropy": "+entropy_ctrl.type=adaptive+entropy_ctrl.target=0.5",
    "IcePop": "+off_policy_correction.preset=icepop",
    "sequence MIS": "+off_policy_correction.preset=seq_mis",
    "geometric rejection": "+off_policy_correction.preset=geo_rs",
    "k3 rejection": "+off_policy_correction.preset=k3_rs",
}
ESTIMATORS = {
    "dr_grpo": ("+loss_reduction=seq_mean_token_sum_norm+max_seq_len=6+entropy_loss_coef=0.01", ""),
    "rloo": (UNSCALED, ""),
    "maxrl": ("", ""),
    "reinforce++": ("", ""),
    "grpo_token": ("", "+gamma=0.0"),
    "pass_at_k": ("", RIGHT),
    "w_reinforce": (UNSCALED, RIGHT),
    "nsr": (UNSCALED, f"{RIGHT}+advantage_kwargs.positive_weight=0.0"),
}
CRITICS = {"gae": "", "vapo": "+positive_nll_coef=0.1+eps_clip_high=0.28"}
CRITIC = {
    "trainer.critic.model.path": "configs/tiny_char_model",
    "trainer.critic.model.random_init": True,
    "trainer.critic_mini_batch_size": 8,
    "trainer.critic.optimizer_config.lr": 3e-3,
}


def methods(steps: int, only: Sequence[str]) -> list[Variant]:
    """Return what is trained, by the names of the table; () = all."""
    config = make_config({}, 0, steps, Path("runs"))
    wanted = {name: (f"{name}{more}", "grpo") for name, more in LOSSES.items()}
    wanted |= {name: (f"regular{more}", "grpo") for name, more in TERMS.items()}
    for name, (of_loss, own) in ESTIMATORS.items():
        estimator = "w_reinforce" if name == "nsr" else name
        wanted[name] = f"regular{of_loss}", f"{estimator}{own}"
    wanted |= {name: (f"regular{more}", name) for name, more in CRITICS.items()}
    if unknown := set(only) - set(wanted):
        raise ValueError(f"--only: {unknown.pop()!r} is none of {', '.join(wanted)}")
    found = []
    for name, (loss, estimator) in wanted.items():
        if only and name not in only:
            continue
        own = cfg.apply_overrides(config, CRITIC if name in CRITICS else {})
        (variant,) = parse_variants(cfg.resolve(own), loss, estimator)
        found.append(Variant(name, variant.config))
    return found


def main(argv: Sequence[str]) -> int:
    """Train what the flags name and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--steps", type=int, default=STEPS)
    options = parser.parse_args(argv)
    found = sweep(
        methods(options.steps, [x for x in options.only.split(",") if x]),
        options.out,
        seeds=SEEDS,
        lrs=LRS,
        tuning_seeds=TUNING_SEEDS,
        processes=options.processes,
    )
    print(table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
