r"""GMPO (arXiv:2507.20673) on one-digit sums with SmolLM2-135M-Instruct.

    python examples/smollm2_to_hf.py --out models/smollm2-135m-instruct
    python -m jaxrl.train --config=configs/arithmetic_smollm2_gmpo.py

As arithmetic_smollm2_grpo.py, with the geometric mean of the token ratios. The log of a ratio is
clipped at the paper's +-0.4 (sec. 4). Two updates per step: with one, every ratio is 1.

Paper: GMPO, Zhao et al. 2025, arXiv:2507.20673 (sec. 4)
Hardware: a CPU; one device suffices
Plan: none needed, 135M parameters
Expected: no run of its full length is on record
Source: not measured
"""

from pathlib import Path

from jaxrl.config import load_config_file


def get_config():
    config = load_config_file(str(Path(__file__).parent / "arithmetic_smollm2_grpo.py"))
    trainer = config.trainer
    trainer.run_name = "arithmetic_smollm2_gmpo"
    trainer.algorithm.policy_loss_type = "gmpo"
    trainer.algorithm.loss_reduction = "sequence_mean"
    trainer.algorithm.eps_clip_low = trainer.algorithm.eps_clip_high = 0.4
    trainer.policy_mini_batch_size = 2
    return config
