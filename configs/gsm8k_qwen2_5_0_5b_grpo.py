r"""GRPO on GSM8K with Qwen2.5-0.5B-Instruct.

    python -m jaxrl.data.prepare gsm8k --output data/gsm8k
    python -m jaxrl.plan --config=configs/gsm8k_qwen2_5_0_5b_grpo.py --topology=h100:1
    python -m jaxrl.train --config=configs/gsm8k_qwen2_5_0_5b_grpo.py

As gsm8k_qwen2_5_1_5b_grpo.py, with the smaller model, on one GPU or a TPU slice of one host.

Paper: GRPO, Shao et al. 2024, arXiv:2402.03300
Hardware: one H100 (80 GB) or a v5litepod-8 (v5e:2x4)
Plan: h100:1, 28.3 of 74.5 GiB, estimated; v5e:2x4, 6.9 of 15.8 GiB, compiled; both fit
Expected: no figure was found for these settings; 0.496 before training
Source: literature (Qwen's blog, in verl's algorithm baselines). Not measured here.
"""

from pathlib import Path

from jaxrl.config import load_config_file


def get_config():
    config = load_config_file(str(Path(__file__).parent / "gsm8k_qwen2_5_1_5b_grpo.py"))
    trainer = config.trainer
    trainer.run_name = "gsm8k_qwen2_5_0_5b_grpo"
    trainer.policy.model.path = "Qwen/Qwen2.5-0.5B-Instruct"
    return config
