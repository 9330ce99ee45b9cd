r"""A 126k-parameter model learns to guess a digit in up to four turns, from random weights, by GRPO
(arXiv:2402.03300).

    python -m jaxrl.train --config=configs/guess_number.py

The environment answers a wrong guess with "higher" or "lower"; with four guesses each of the ten
digits can be found. The reward is 1 for the right one.

Paper: GRPO, Shao et al. 2024, arXiv:2402.03300
Hardware: a CPU; one device suffices
Plan: none needed, 126k parameters
Expected: no run of its full length is on record
Source: not measured
"""

from pathlib import Path

from jaxrl.config import default_config


def get_config():
    config = default_config()
    config.data.train_data = ["jaxrl.envs.toys.guess_number:prompts(size=800, seed=0)"]
    config.data.val_data = ["jaxrl.envs.toys.guess_number:prompts(size=80, seed=1)"]

    trainer = config.trainer
    trainer.run_name = "guess_number"
    trainer.policy.model.path = str(Path(__file__).parent / "tiny_char_model")
    trainer.policy.model.random_init = True
    optimizer = trainer.policy.optimizer_config
    optimizer.lr, optimizer.num_warmup_steps, optimizer.scheduler = 2e-3, 20, "linear"
    optimizer.weight_decay = 0.0
    trainer.algorithm.use_kl_loss = False  # there is nothing to stay close to
    trainer.algorithm.use_entropy_loss = True
    trainer.algorithm.entropy_loss_coef = 0.01
    trainer.algorithm.max_seq_len = 54
    trainer.gradient_checkpointing = False

    trainer.epochs = 10
    trainer.max_training_steps = 200
    trainer.train_batch_size = 32
    trainer.policy_mini_batch_size = 16  # two updates per step
    trainer.micro_train_batch_size_per_gpu = 512
    trainer.micro_forward_batch_size_per_gpu = 512
    trainer.max_prompt_length = 16
    config.generator.n_samples_per_prompt = 16
    config.generator.max_turns = 4
    # a prompt of 13 tokens and three times a guess of 2, its end if it has none, "a number?>"
    config.generator.max_input_length = 52
    config.generator.sampling_params.max_generate_length = 2

    trainer.eval_interval = 50
    trainer.eval_batch_size = 128
    trainer.print_example_interval = 50
    trainer.ckpt_interval = 50
    trainer.max_ckpts_to_keep = 2
    trainer.logger = ["console", "tensorboard"]
    config.environment.env_class = "guess_number"
    return config
