r"""GSPO on GSM8K with Qwen3-1.7B, which answers without thinking aloud first.

    python -m jaxrl.data.prepare gsm8k --output data/gsm8k
    python -m jaxrl.plan --config=configs/gsm8k_qwen3_gspo.py --topology=h100:4
    python -m jaxrl.train --config=configs/gsm8k_qwen3_gspo.py

One ratio per sequence, clipped at 3e-4 and 4e-4; four minibatches per step and no KL, as in the
paper, whose models and tasks are larger.

Paper: GSPO, Zheng et al. 2025, arXiv:2507.18071 (sec. 5.1)
Hardware: 4 H100 (80 GB)
Plan: h100:4, 51.0 of 74.5 GiB, estimated; it fits
Expected: no figure was found for this model and task
Source: not measured
"""

from pathlib import Path

from jaxrl.config import load_config_file


def get_config():
    config = load_config_file(str(Path(__file__).parent / "gsm8k_qwen2_5_1_5b_grpo.py"))
    trainer = config.trainer
    trainer.run_name = "gsm8k_qwen3_gspo"
    trainer.policy.model.path = "Qwen/Qwen3-1.7B"
    config.generator.chat_template_kwargs = {"enable_thinking": False}
    algorithm = trainer.algorithm
    algorithm.policy_loss_type, algorithm.loss_reduction = "gspo", "sequence_mean"
    algorithm.eps_clip_low, algorithm.eps_clip_high = 3e-4, 4e-4
    algorithm.use_kl_loss = False
    return config
