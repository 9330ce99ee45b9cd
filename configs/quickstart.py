r"""A 126k-parameter model learns to sort three digits, from random weights, by GRPO
(arXiv:2402.03300).

    python -m jaxrl.train --config=configs/quickstart.py

The reward is per token: 1/4 for each right digit and for stopping after the third.

Paper: GRPO, Shao et al. 2024, arXiv:2402.03300
Hardware: a CPU; one device suffices
Plan: none needed, 126k parameters
Expected: a mean reward of 0.98 to 0.99 of 1 on held-out strings after 160 steps, greedy
Source: measured here, LOG.md: 0.988, 0.978 and 0.991 with three seeds
"""

from pathlib import Path

from jaxrl.config import default_config


def get_config():
    config = default_config()
    config.data.train_data = [
        "jaxrl.envs.toys.sort_digits:prompts(size=800, length=3, split='train')"
    ]
    config.data.val_data = ["jaxrl.envs.toys.sort_digits:prompts(size=80, length=3, split='eval')"]

    trainer = config.trainer
    trainer.run_name = "quickstart"
    trainer.policy.model.path = str(Path(__file__).parent / "tiny_char_model")
    trainer.policy.model.random_init = True
    optimizer = trainer.policy.optimizer_config
    optimizer.lr, optimizer.num_warmup_steps, optimizer.scheduler = 2e-3, 20, "linear"
    optimizer.weight_decay = 0.0
    trainer.algorithm.use_kl_loss = False  # there is nothing to stay close to
    # Each digit has a reward of its own: it is judged against the same digit of the other samples.
    trainer.algorithm.advantage_estimator, trainer.algorithm.gamma = "grpo_token", 0.0
    trainer.algorithm.use_entropy_loss = True  # without it some seeds stay at 0.9 (LOG.md)
    trainer.algorithm.entropy_loss_coef = 0.1
    trainer.gradient_checkpointing = False

    trainer.epochs = 10
    trainer.max_training_steps = 160
    trainer.train_batch_size = 32
    trainer.policy_mini_batch_size = 16  # two updates per step
    trainer.micro_train_batch_size_per_gpu = 512
    trainer.micro_forward_batch_size_per_gpu = 512
    trainer.max_prompt_length = 16
    config.generator.n_samples_per_prompt = 16
    config.generator.sampling_params.max_generate_length = 6

    trainer.eval_interval = 40
    trainer.eval_batch_size = 128
    trainer.print_example_interval = 40
    trainer.ckpt_interval = 40
    trainer.max_ckpts_to_keep = 2
    trainer.hf_save_interval = 160
    trainer.logger = ["console", "tensorboard"]
    config.environment.env_class = "sort_digits"
    return config
