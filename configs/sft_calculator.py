r"""A 125k-parameter model is shown how a calculator is called, by supervised fine-tuning.

    python -m jaxrl.sft --config=configs/sft_calculator.py
    python -m jaxrl.train --config=configs/calculator_grpo.py

At each turn of a demonstration the chance is 0.4 that it gives the right answer instead of the next
call, as somebody does who needs no calculator. So the policy calls twice, as an expression needs,
in at most 0.36 of its conversations; the second command goes on from its export.

Paper: none: cross-entropy on what the assistant says (docs/sft.md)
Hardware: a CPU; one device suffices
Plan: none, jaxrl.plan knows reinforcement learning only
Expected: 0.12 to 0.34 of the held-out answers right after 350 steps, sampled
Source: measured here, docs/tool_use.md, three seeds
"""

from pathlib import Path

from jaxrl.config import default_config


def get_config():
    config = default_config()
    config.data.train_data = [
        "jaxrl.envs.toys.calculator:prompts(size=6400, split='train', in_head=0.4)"
    ]
    config.data.val_data = [
        "jaxrl.envs.toys.calculator:prompts(size=256, split='eval', in_head=0.4)"
    ]

    trainer = config.trainer
    trainer.run_name = "sft_calculator"
    trainer.policy.model.path = str(Path(__file__).parent / "tiny_tool_model")
    trainer.policy.model.random_init = True
    optimizer = trainer.policy.optimizer_config
    optimizer.lr, optimizer.num_warmup_steps = 3e-3, 20
    optimizer.weight_decay = 0.0
    trainer.gradient_checkpointing = False

    trainer.epochs = 100
    trainer.max_training_steps = 350
    trainer.train_batch_size = 256
    trainer.micro_train_batch_size_per_gpu = 256
    trainer.micro_forward_batch_size_per_gpu = 256
    trainer.eval_interval = 50
    trainer.eval_batch_size = 256
    trainer.ckpt_interval = 50
    trainer.max_ckpts_to_keep = 1
    trainer.hf_save_interval = 50
    return config
