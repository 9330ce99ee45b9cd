r"""Dr. GRPO on MATH with Qwen2.5-Math-7B: R1-Zero-like training from a base model.

    python -m jaxrl.data.prepare math --levels 3 4 5 --output data/math
    python -m jaxrl.plan --config=configs/math_dr_grpo.py --topology=h100:8
    python -m jaxrl.train --config=configs/math_dr_grpo.py

No division by the group's standard deviation, none by the length of the response, no KL. 128
prompts of 8 samples a step in eight updates, from the authors' script (oat). The chat template of
the model is the paper's Qwen-Math template; data.prepare also ends each question with "Let's think
step by step and output the final answer within \boxed{}.", beside the template's own instruction.
The validation set is that of MATH: the paper's figure for AIME 2024 does not show in this run.

Paper: Dr. GRPO, Liu et al. 2025, arXiv:2503.20783
Hardware: 8 H100 (80 GB)
Plan: h100:8, 53.0 of 74.5 GiB, estimated; it fits
Expected: 0.433 of AIME 2024 after 27 hours on 8 A100
Source: literature; abstract of the paper and README of its code. Not measured here.
"""

from jaxrl.config import default_config


def get_config():
    config = default_config()
    config.data.train_data = ["data/math/train.parquet"]
    config.data.val_data = ["data/math/validation.parquet"]
    config.environment.env_class = "math"

    trainer, algorithm = config.trainer, config.trainer.algorithm
    trainer.run_name = "math_dr_grpo"
    trainer.policy.model.path = "Qwen/Qwen2.5-Math-7B"
    trainer.policy.optimizer_config.lr = 1e-6
    algorithm.advantage_estimator = "dr_grpo"
    algorithm.loss_reduction, algorithm.max_seq_len = "seq_mean_token_sum_norm", 3000
    algorithm.use_kl_loss = False

    trainer.epochs = 20
    trainer.train_batch_size = 128
    trainer.policy_mini_batch_size = 16  # 128 samples
    trainer.micro_train_batch_size_per_gpu = 2
    trainer.micro_forward_batch_size_per_gpu = 4
    trainer.max_prompt_length = 1024
    config.generator.n_samples_per_prompt = 8
    config.generator.sampling_params.max_generate_length = 3000

    trainer.bf16 = trainer.flash_attn = trainer.use_sample_packing = True
    config.generator.inference_engine.model_dtype = "bfloat16"

    trainer.eval_interval = 16
    trainer.print_example_interval = 16
    trainer.ckpt_interval = 64
    trainer.max_ckpts_to_keep = 2
    trainer.hf_save_interval = 64
    trainer.logger = ["console", "tensorboard"]
    return config
