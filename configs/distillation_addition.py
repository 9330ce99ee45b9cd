r"""On-policy distillation (arXiv:2306.13649): a 126k-parameter model that has seen few examples of
addition learns on samples of its own what one that has seen many knows.

    python -m jaxrl.sft --config=configs/sft_addition.py
    python -m jaxrl.train --config=configs/distillation_addition.py

The teacher is the reference model. The advantage of a token is how much likelier the teacher finds
it; the reward, 1 for a right sum, is only watched.

Paper: Agarwal et al. 2023, arXiv:2306.13649
Hardware: a CPU; one device suffices
Plan: none needed, two models of 126k parameters
Expected: reverse KL per token 1.68 to 0.85, greedy 0.04 to 0.09 in 100 steps; the teacher has 0.37
Source: measured here, LOG.md, one seed
"""

from pathlib import Path

from jaxrl.config import load_config_file


def get_config():
    config = load_config_file(str(Path(__file__).parent / "addition_grpo.py"))
    trainer = config.trainer
    trainer.run_name = "distillation_addition"
    trainer.ref.model.path = trainer.policy.model.path  # the teacher: where fine-tuning ended
    trainer.policy.model.path = "runs/sft_addition/exports/global_step_100/policy"  # the student
    trainer.policy.optimizer_config.lr = 1e-3
    trainer.max_training_steps = 100
    trainer.algorithm.advantage_estimator = "on_policy_distillation"
    trainer.algorithm.policy_loss_type = "importance_sampling"
    config.generator.n_samples_per_prompt = 4
    trainer.train_batch_size = trainer.policy_mini_batch_size = 128
    return config
