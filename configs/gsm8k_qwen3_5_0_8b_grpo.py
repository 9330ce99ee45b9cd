r"""GRPO on GSM8K with Qwen3.5-0.8B, which has linear attention in three of four layers.

    python -m jaxrl.data.prepare gsm8k --output data/gsm8k
    python -m jaxrl.plan --config=configs/gsm8k_qwen3_5_0_8b_grpo.py --topology=h100:1
    python -m jaxrl.train --config=configs/gsm8k_qwen3_5_0_8b_grpo.py

As gsm8k_qwen2_5_1_5b_grpo.py, without thinking, on one GPU or a TPU slice of one host. A row keeps
keys and values in six layers, and in the others a state of fixed size (docs/linear_attention.md).

Paper: GRPO, Shao et al. 2024, arXiv:2402.03300
Hardware: one H100 (80 GB) or a v6e-4 (v6e:2x2)
Plan: h100:1, 57.2 of 74.5 GiB; v6e:2x2, 15.7 of 31.3 GiB; both estimated, both fit
Expected: not known
Source: none; the settings are those of gsm8k_qwen2_5_1_5b_grpo.py. Not measured here.
"""

from pathlib import Path

from jaxrl.config import load_config_file


def get_config():
    config = load_config_file(str(Path(__file__).parent / "gsm8k_qwen2_5_1_5b_grpo.py"))
    trainer = config.trainer
    trainer.run_name = "gsm8k_qwen3_5_0_8b_grpo"
    trainer.policy.model.path = "Qwen/Qwen3.5-0.8B"
    config.generator.chat_template_kwargs = {"enable_thinking": False}
    return config
