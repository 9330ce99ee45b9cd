"""What each loss, estimator and term of the objective learns of a small task, with intervals.

    python -m benchmarks.baselines --out=runs/baselines --processes=2
    python -m benchmarks.baselines --out=runs/baselines --only=gspo,pass_at_k
    python -m benchmarks.baselines --out=runs/stale --task=stale
    python -m benchmarks.baselines --out=runs/rewards --task=rewards
    python -m benchmarks.baselines --out=runs/turns --task=turns
    python -m benchmarks.baselines --task=turns --write

Claim: the tables of docs/baselines.md; a second run of a command gives the same. With --write they
are put there, and all runs into docs/curves/baselines_TASK.jsonl; with --only beside those of other
methods. Without --out nothing is trained: the runs that stand there are shown again.

The model of configs/quickstart.py sorts two digits from random weights: 100 steps of 16 prompts x
16 samples, four updates a step, of which all but the first are off policy; entropy bonus 0.1 (0.02
where advantages are not divided by their deviation), no KL but where the method is one. Each method
is trained at three learning rates with two seeds, then at the best of them with five others. With a
critic it is the policy's shape, from random weights, at the default rate. It goes on where it was
stopped, see docs/sweeps.md.

What some methods claim is of another task, where they have one learning rate and three seeds:

    stale     losses and corrections for old rollouts. The same digits, all of a step's rollouts by
              the policy of four steps before, four passes over one minibatch; lr 3e-3
    rewards   gdpo. The same digits with two rewards of a half each: one for an answer of two
              characters and its end, which is easy, one for the share of digits in their places
    turns     gigpo. The model guesses one of seven digits in up to three turns, as in
              configs/guess_number.py, a row a turn; turns of a prompt from the same state are those
              with the same hint before them. 8 prompts x 16 samples, as turns are long
"""

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from jaxrl import config as cfg
from jaxrl.config import load_config_file, to_train_config
from jaxrl.files import replace_text
from jaxrl.tools.compare.variants import Variant, parse_variants
from jaxrl.tools.sweep.summary import Summary, picture, summary, table
from jaxrl.tools.sweep.sweep import sweep
from jaxrl.tools.sweep.units import Outcome

CONFIGS = Path(__file__).parent.parent / "configs"
PAGE = CONFIGS.with_name("docs") / "baselines.md"
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


BATCH = "+advantage_batch_normalize=true"  # as gdpo ends
REWARDS = {
    "grpo": ("regular", "grpo"),
    "grpo, batch": ("regular", f"grpo{BATCH}"),
    "grpo, no std": (f"regular{UNSCALED}", "grpo+grpo_norm_by_std=false"),
    "gdpo": ("regular", "gdpo"),
}
TURNS = {
    "grpo": ("regular", "grpo"),
    "grpo, a row a turn": ("regular", "grpo"),
    "gigpo": ("regular", "gigpo"),
}
STEP_WISE = {"generator.step_wise_trajectories": True}
SAMPLER = "+old_log_probs=rollout"
STALE = {
    "regular": (f"regular{SAMPLER}", "grpo"),
    "dual_clip": (f"dual_clip{SAMPLER}", "grpo"),
    "gspo": (f"gspo{SAMPLER}{ROWS}+eps_clip_low=0.2+eps_clip_high=0.2", "grpo"),
    "cispo": ("cispo+cispo.cispo_anchor=rollout", "grpo"),
    "rollout_is": ("rollout_is+eps_clip_low=0.5+eps_clip_high=4.0", "grpo"),
    "dppo": ("dppo", "grpo"),
    "decoupled_ppo": ("decoupled_ppo", "grpo"),
    "importance_sampling": (f"importance_sampling{SAMPLER}", "grpo"),
    "OPSM": (f"regular{SAMPLER}{TERMS['OPSM']}", "grpo"),
    **{
        name: (f"regular+off_policy_correction.preset={preset}", "grpo")
        for name, preset in (
            ("IcePop", "icepop"),
            ("sequence MIS", "seq_mis"),
            ("geometric rejection, token TIS", "geo_rs_token_tis"),
            ("k3 rejection, token TIS", "k3_rs_token_tis"),
        )
    },
}


def short(action: str, stopped: bool) -> float:
    """Return 1 for an answer of two characters and its end."""
    return float(stopped and len(action) == 2)


def placed(action: str, extras: Mapping[str, Any]) -> float:
    """Return the share of the digits that stand in their places."""
    answer = extras["reward_spec"]["ground_truth"]
    return sum(a == b for a, b in zip(action, answer, strict=False)) / len(answer)


def sort_digits(steps: int, seed: int = 0, folder: Path = Path("runs")) -> cfg.TrainConfig:
    """Make the config of the task that most methods have."""
    source = "jaxrl.envs.toys.sort_digits:prompts(size={}, length=2, split='{}')"
    changes = {
        "data.train_data": [source.format(90, "train")],
        "data.val_data": [source.format(9, "eval")],
        "trainer.seed": seed,
        "trainer.epochs": steps,
        "trainer.max_training_steps": steps,
        "trainer.train_batch_size": 16,
        "trainer.policy_mini_batch_size": 8,
        "trainer.update_epochs_per_batch": 2,
        "trainer.policy.optimizer_config.num_warmup_steps": 10,
        "trainer.policy.optimizer_config.lr": 3e-3,
        "trainer.algorithm.advantage_estimator": "grpo",
        "trainer.algorithm.gamma": 1.0,
        "trainer.eval_before_train": False,
        "trainer.eval_interval": steps,
        "trainer.ckpt_interval": -1,
        "trainer.hf_save_interval": -1,
        "trainer.print_example_interval": -1,
        "trainer.logger": "console",
        "trainer.run_name": "run",
        "trainer.log_path": str(folder),
        "trainer.ckpt_path": str(folder / "checkpoints"),
        "trainer.export_path": str(folder / "exports"),
    }
    return cfg.apply_overrides(
        to_train_config(load_config_file(str(CONFIGS / "quickstart.py"))), changes
    )


def stale_digits(steps: int) -> cfg.TrainConfig:
    """Make the config of the same task on rollouts that are four steps old."""
    changes = {
        "trainer.policy_mini_batch_size": 16,  # an asynchronous run has one
        "trainer.update_epochs_per_batch": 4,
        "trainer.fully_async.enabled": True,
        "trainer.fully_async.schedule": "lockstep",
        "trainer.fully_async.max_staleness_steps": 4,
    }
    return cfg.apply_overrides(sort_digits(steps), changes)


def sort_digits_by_rewards(steps: int) -> cfg.TrainConfig:
    """Make the config of the same task with an easy and a hard reward."""
    changes = {
        "environment.reward_functions": [f"benchmarks.baselines:{f}" for f in ("short", "placed")],
        "environment.reward_weights": {"environment": 0.0, "short": 0.5, "placed": 0.5},
    }
    return cfg.apply_overrides(sort_digits(steps), changes)


def guess_number(steps: int) -> cfg.TrainConfig:
    """Make the config of the task with several turns, with four updates a step as sorting has."""
    config = load_config_file(str(CONFIGS / "guess_number.py"))
    changes = {
        "data.train_data": ["jaxrl.envs.toys.guess_number:prompts(size=800, seed=0, highest=6)"],
        "data.val_data": ["jaxrl.envs.toys.guess_number:prompts(size=80, seed=1, highest=6)"],
        "generator.max_turns": 3,
        "trainer.epochs": steps,
        "trainer.max_training_steps": steps,
        "trainer.train_batch_size": 8,
        "trainer.policy_mini_batch_size": 4,
        "trainer.update_epochs_per_batch": 2,
        "trainer.policy.optimizer_config.num_warmup_steps": 10,
        "trainer.policy.optimizer_config.lr": 3e-3,
        "trainer.eval_before_train": False,
        "trainer.eval_interval": steps,
    }
    return cfg.apply_overrides(to_train_config(config), changes)


@dataclass(frozen=True)
class Task:
    """Hold what is trained on one task.

    Attributes:
        config: number of steps -> what all methods have in common.
        pairs: loss and estimator of each method.
        own: other fields of a method.
        lrs, tuning_seeds, seeds: see `sweep`.
    """

    config: Callable[[int], cfg.TrainConfig]
    pairs: Mapping[str, tuple[str, str]]
    own: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    lrs: Sequence[float] = ()
    tuning_seeds: Sequence[int] = ()
    seeds: Sequence[int] = (1, 2, 3)


def pairs() -> dict[str, tuple[str, str]]:
    """Return loss and estimator of each method that sorts digits."""
    found = {name: (f"{name}{more}", "grpo") for name, more in LOSSES.items()}
    found |= {name: (f"regular{more}", "grpo") for name, more in TERMS.items()}
    for name, (of_loss, own) in ESTIMATORS.items():
        estimator = "w_reinforce" if name == "nsr" else name
        found[name] = f"regular{of_loss}", f"{estimator}{own}"
    return found | {name: (f"regular{more}", name) for name, more in CRITICS.items()}


TASKS = {
    "sort_digits": Task(
        sort_digits, pairs(), dict.fromkeys(CRITICS, CRITIC), LRS, TUNING_SEEDS, SEEDS
    ),
    "stale": Task(stale_digits, STALE),
    "rewards": Task(sort_digits_by_rewards, REWARDS),
    "turns": Task(guess_number, TURNS, dict.fromkeys(("grpo, a row a turn", "gigpo"), STEP_WISE)),
}


def methods(task: Task, steps: int, only: Sequence[str]) -> list[Variant]:
    """Return what is trained, by the names of the table; () = all."""
    if unknown := set(only) - set(task.pairs):
        raise ValueError(f"--only: {unknown.pop()!r} is none of {', '.join(task.pairs)}")
    config, found = task.config(steps), []
    for name in only or task.pairs:
        own = cfg.apply_overrides(config, task.own.get(name, {}))
        found += parse_variants(cfg.resolve(own), {name: task.pairs[name]}, None)
    return found


def numbers(task: str) -> Path:
    """Return the file with all runs of a task that docs speak of, a method in each line."""
    return PAGE.parent / "curves" / f"baselines_{task}.jsonl"


def recorded(task: str) -> list[Summary]:
    """Return what the file of a task says of its methods; nothing where there is none."""
    if not numbers(task).exists():
        return []
    methods = [json.loads(line) for line in numbers(task).read_text().splitlines()]
    return [
        summary(
            x["method"],
            [Outcome(**run) for run in x["outcomes"]],
            {float(lr): score for lr, score in x["tuned"].items()},
        )
        for x in methods
    ]


def with_table(page: str, task: str, rows: str) -> str:
    """Return the text of a page with the rows between the marks of a task."""
    begin, end = f"<!-- {task} -->\n", "<!-- end -->"
    before, mark, rest = page.partition(begin)
    if not mark:
        raise ValueError(f"{PAGE} has no line {begin.strip()!r}")
    return f"{before}{begin}{rows}\n{end}{rest.partition(end)[2]}"


def main(argv: Sequence[str]) -> int:
    """Train what the flags name, if anything, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="folder of results; none: nothing is trained")
    parser.add_argument("--task", choices=TASKS, default="sort_digits")
    parser.add_argument("--only", default="")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--write", action="store_true", help="table, picture and numbers of docs")
    options = parser.parse_args(argv)
    task = TASKS[options.task]
    found = recorded(options.task)
    if not options.out and (options.only or not found):
        parser.error(
            "nothing is trained without --out=FOLDER" + "; --only is of that" * bool(found)
        )
    if options.out:
        only = [x for x in options.only.split(",") if x]
        found = sweep(
            methods(task, options.steps, only),
            options.out,
            seeds=task.seeds,
            lrs=task.lrs,
            tuning_seeds=task.tuning_seeds,
            processes=options.processes,
        )
    print(table(found))
    if options.write:
        known = {x.method: x for x in recorded(options.task) + found}
        found = [known[name] for name in task.pairs if name in known]
        lines = [json.dumps(asdict(x)) + "\n" for x in found]
        replace_text(numbers(options.task), "".join(lines))
        replace_text(PAGE, with_table(PAGE.read_text(), options.task, table(found)))
        picture(found, numbers(options.task).with_suffix(".png"), options.task)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
