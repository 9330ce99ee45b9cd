r"""Dr. GRPO (arXiv:2503.20783) on one-digit sums with SmolLM2-135M-Instruct.

    python examples/smollm2_to_hf.py --out models/smollm2-135m-instruct
    python -m jaxrl.train --config=configs/arithmetic_smollm2_dr_grpo.py

As arithmetic_smollm2_grpo.py, without the two divisions that the paper calls biased: by the group's
standard deviation, and by the length of the response (the loss is summed over tokens and divided by
a constant).

Paper: Dr. GRPO, Liu et al. 2025, arXiv:2503.20783
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
    trainer.run_name = "arithmetic_smollm2_dr_grpo"
    trainer.algorithm.advantage_estimator = "dr_grpo"
    trainer.algorithm.loss_reduction = "seq_mean_token_sum_norm"
    trainer.algorithm.max_seq_len = config.generator.sampling_params.max_generate_length
    return config
