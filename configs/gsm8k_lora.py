r"""GRPO with adapters on GSM8K: Qwen2.5-0.5B-Instruct, rank 32 in every linear layer.

    python -m jaxrl.data.prepare gsm8k --output data/gsm8k
    python -m jaxrl.plan --config=configs/gsm8k_lora.py --topology=h100:1
    python -m jaxrl.train --config=configs/gsm8k_lora.py

As gsm8k_qwen2_5_0_5b_grpo.py, at thirty times its learning rate; rank, alpha and rate are those of
the LoRA example of SkyRL. Exports are PEFT folders (docs/lora.md).

Paper: LoRA, Hu et al. 2021, arXiv:2106.09685; GRPO, arXiv:2402.03300
Hardware: one H100 (80 GB)
Plan: h100:1, 22.9 of 74.5 GiB, estimated; it fits
Expected: 0.543 of the test set
Source: literature; GRPO-LoRA of rank 32 in the algorithm baselines of verl, with 64 prompts a step.
    Not measured here.
"""

from pathlib import Path

from jaxrl.config import load_config_file


def get_config():
    config = load_config_file(str(Path(__file__).parent / "gsm8k_qwen2_5_0_5b_grpo.py"))
    trainer = config.trainer
    trainer.run_name = "gsm8k_lora"
    trainer.policy.model.lora.rank = 32
    trainer.policy.model.lora.alpha = 32
    trainer.policy.optimizer_config.lr = 3e-5
    return config
