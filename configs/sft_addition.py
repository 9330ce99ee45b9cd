r"""A 126k-parameter model learns to add two numbers of two digits from examples, by supervised
fine-tuning.

    python -m jaxrl.sft --config=configs/sft_addition.py
    python -m jaxrl.train --config=configs/addition_grpo.py

The second command goes on from its export, with a fresh optimizer. A tenth of all sums is held out.

Paper: none: cross-entropy on what the assistant says (docs/sft.md)
Hardware: a CPU; one device suffices
Plan: none, jaxrl.plan knows reinforcement learning only
Expected: 0.37 to 0.49 of the held-out sums right after 250 steps, greedy
Source: measured here, LOG.md, two seeds
"""

from pathlib import Path

from jaxrl.config import default_config


def get_config():
    config = default_config()
    config.data.train_data = ["jaxrl.envs.toys.addition:prompts(size=6400, split='train')"]
    config.data.val_data = ["jaxrl.envs.toys.addition:prompts(size=640, split='eval')"]

    trainer = config.trainer
    trainer.run_name = "sft_addition"
    trainer.policy.model.path = str(Path(__file__).parent / "tiny_char_model")
    trainer.policy.model.random_init = True
    optimizer = trainer.policy.optimizer_config
    optimizer.lr, optimizer.num_warmup_steps = 3e-3, 20
    optimizer.weight_decay = 0.0
    trainer.gradient_checkpointing = False

    trainer.epochs = 21
    trainer.max_training_steps = 250
    trainer.train_batch_size = 512
    trainer.micro_train_batch_size_per_gpu = 512
    trainer.micro_forward_batch_size_per_gpu = 640
    trainer.eval_interval = 50
    trainer.eval_batch_size = 640
    trainer.ckpt_interval = 50
    trainer.max_ckpts_to_keep = 1
    trainer.hf_save_interval = 50
    return config
