r"""A 126k-parameter model learns to guess a digit in up to four turns, from random weights, by PPO
(arXiv:1707.06347) with a critic and GAE (arXiv:1506.02438).

    python -m jaxrl.train --config=configs/guess_number_ppo.py

The reward, 1 for the right digit, comes in the last of several turns; there are no groups to
compare with: every prompt is answered once, and the critic says what a guess was worth.

Paper: PPO, Schulman et al. 2017, arXiv:1707.06347; GAE, arXiv:1506.02438
Hardware: a CPU; one device suffices
Plan: none needed, two models of 126k parameters
Expected: 0.9 to 1.0 of the digits found after 160 steps, greedy
Source: measured here, LOG.md: 1.00, 1.00 and 0.89 with three seeds, ten minutes each
"""

import runpy
from pathlib import Path


def get_config():
    path = Path(__file__).parent / "guess_number.py"  # the task, the model and its optimizer
    config = runpy.run_path(str(path))["get_config"]()

    trainer, algorithm = config.trainer, config.trainer.algorithm
    trainer.run_name = "guess_number_ppo"
    algorithm.advantage_estimator, algorithm.gamma, algorithm.lambd = "gae", 1.0, 0.95
    algorithm.entropy_loss_coef = 0.02
    trainer.critic.model.path = trainer.policy.model.path  # the shape alone: weights of its own
    trainer.critic.model.random_init = True
    critic = trainer.critic.optimizer_config
    critic.lr, critic.num_warmup_steps, critic.weight_decay = 2e-3, 20, 0.0

    trainer.epochs = 100
    trainer.max_training_steps = 160
    trainer.train_batch_size = 256
    trainer.policy_mini_batch_size = trainer.critic_mini_batch_size = 128
    trainer.update_epochs_per_batch = 2  # four updates per step, of policy and critic
    config.generator.n_samples_per_prompt = 1

    trainer.eval_interval = 40
    trainer.hf_save_interval = 160  # policy and critic
    return config
