r"""Supervised fine-tuning of Qwen2.5-0.5B on the worked solutions of GSM8K.

    python -m jaxrl.data.prepare gsm8k --output data/gsm8k
    python -m jaxrl.sft --config=configs/sft_gsm8k.py

The policy that it leaves ends its answers with "#### NUMBER", which the environment rewards:

    python -m jaxrl.train --config=configs/gsm8k_qwen2_5_0_5b_grpo.py \
        --config.trainer.policy.model.path=runs/sft_gsm8k/exports/global_step_174/policy

Paper: GSM8K, Cobbe et al. 2021, arXiv:2110.14168
Hardware: one H100 (80 GB)
Plan: none, jaxrl.plan knows reinforcement learning only
Expected: no figure was found for these settings
Source: not measured
"""

from jaxrl.config import default_config


def get_config():
    config = default_config()
    config.data.train_data = ["data/gsm8k/train.parquet"]
    config.data.val_data = ["data/gsm8k/validation.parquet"]

    trainer = config.trainer
    trainer.run_name = "sft_gsm8k"
    trainer.policy.model.path = "Qwen/Qwen2.5-0.5B"
    optimizer = trainer.policy.optimizer_config
    optimizer.lr, optimizer.num_warmup_steps, optimizer.scheduler = 1e-5, 17, "cosine"
    config.sft.max_length = 1024

    trainer.epochs = 3  # of 58 steps
    trainer.train_batch_size = 128
    trainer.micro_train_batch_size_per_gpu = trainer.micro_forward_batch_size_per_gpu = 16
    trainer.bf16 = trainer.flash_attn = trainer.use_sample_packing = True

    trainer.eval_interval = 29
    trainer.ckpt_interval = trainer.hf_save_interval = 58
    trainer.max_ckpts_to_keep = 1
    return config
