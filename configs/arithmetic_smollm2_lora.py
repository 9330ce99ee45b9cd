r"""GRPO with LoRA (arXiv:2106.09685) on one-digit sums with SmolLM2-135M-Instruct.

    python examples/smollm2_to_hf.py --out models/smollm2-135m-instruct
    python -m jaxrl.train --config=configs/arithmetic_smollm2_lora.py

`arithmetic_smollm2_grpo.py` with adapters of rank 32 in every linear layer and ten times its
learning rate. The exports are PEFT folders. docs/lora.md says what the fields mean.

Paper: LoRA, Hu et al. 2021, arXiv:2106.09685; GRPO, arXiv:2402.03300
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
    trainer.run_name = "arithmetic_smollm2_lora"
    trainer.policy.model.lora.rank = 32
    trainer.policy.model.lora.alpha = 32
    trainer.policy.optimizer_config.lr = 1e-4
    return config
