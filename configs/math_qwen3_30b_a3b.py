r"""GRPO on MATH with Qwen3-30B-A3B, a mixture of experts.

    python -m jaxrl.data.prepare math --levels 3 4 5 --output data/math
    python -m jaxrl.plan --config=configs/math_qwen3_30b_a3b.py --topology=v5p:2x4x4
    python -m jaxrl.train --config=configs/math_qwen3_30b_a3b.py

128 experts, of which a token uses 8: 30.5 billion parameters, 3.3 of them active. The experts of a
layer are split over 4 devices (`mesh.expert`), all else over all of them. The trainer sends tokens
to the experts that the sampler sent them to (docs/experts.md); for what is left of the difference a
token's weight is its probability under the trainer before the update over that under the sampler,
at most 2 (TIS).

Paper: GRPO, Shao et al. 2024, arXiv:2402.03300
Hardware: 32 TPU v5p
Plan: v5p:2x4x4, 45.8 of 95.7 GiB, estimated; it fits
Expected: not known
Source: none; the settings are those of math_dr_grpo.py and of dapo_math.py. Not measured here.
"""

from jaxrl.config import default_config


def get_config():
    config = default_config()
    config.data.train_data = ["data/math/train.parquet"]
    config.data.val_data = ["data/math/validation.parquet"]
    config.environment.env_class = "math"

    trainer, algorithm = config.trainer, config.trainer.algorithm
    trainer.run_name = "math_qwen3_30b_a3b"
    trainer.policy.model.path = "Qwen/Qwen3-30B-A3B"
    trainer.policy.mesh.expert = 4
    trainer.policy.router_replay = "forward"
    trainer.policy.optimizer_config.lr = 1e-6
    algorithm.use_kl_loss = False
    algorithm.eps_clip_low, algorithm.eps_clip_high = 0.2, 0.28
    algorithm.off_policy_correction.tis_ratio_type = "token"
    algorithm.off_policy_correction.token_tis_ratio_clip_high = 2.0

    trainer.epochs = 20
    trainer.train_batch_size = 128
    trainer.policy_mini_batch_size = 32
    trainer.micro_train_batch_size_per_gpu = 1
    trainer.micro_forward_batch_size_per_gpu = 2
    trainer.max_prompt_length = 1024
    config.generator.n_samples_per_prompt = 8
    config.generator.sampling_params.max_generate_length = 3072

    trainer.bf16 = trainer.flash_attn = trainer.use_sample_packing = True
    config.generator.inference_engine.model_dtype = "bfloat16"
    config.generator.inference_engine.expert_parallel_size = 4

    trainer.eval_interval = 16
    trainer.print_example_interval = 16
    trainer.ckpt_interval = 64
    trainer.max_ckpts_to_keep = 2
    trainer.hf_save_interval = 64
    trainer.logger = ["console", "tensorboard"]
    return config
