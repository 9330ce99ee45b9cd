r"""On-policy distillation (arXiv:2306.13649): from random weights a 126k-parameter model learns
what a fine-tuned one knows, on samples of its own.

    python -m jaxrl.sft --config=configs/sft_addition.py
    python -m jaxrl.train --config=configs/distillation_addition.py

The teacher is the reference model. The advantage of a token is how much likelier the teacher finds
it; the reward, 1 for a right sum, is only watched.
"""

from pathlib import Path

from jaxrl.config import load_config_file

FOLDER = Path(__file__).parent


def get_config():
    config = load_config_file(str(FOLDER / "addition_grpo.py"))
    trainer = config.trainer
    trainer.run_name = "distillation_addition"
    trainer.ref.model.path = trainer.policy.model.path  # the teacher: where fine-tuning ended
    trainer.policy.model.path = str(FOLDER / "tiny_char_model")
    trainer.policy.model.random_init = True
    trainer.policy.optimizer_config.lr = 2e-3
    trainer.algorithm.advantage_estimator = "on_policy_distillation"
    trainer.algorithm.policy_loss_type = "importance_sampling"
    config.generator.n_samples_per_prompt = 4
    trainer.train_batch_size = trainer.policy_mini_batch_size = 128
    trainer.ckpt_path = "runs/distillation_addition/checkpoints"
    trainer.export_path = "runs/distillation_addition/exports"
    return config
