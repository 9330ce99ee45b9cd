r"""GRPO on GSM8K with Qwen2.5-1.5B-Instruct.

    python -m jaxrl.data.prepare gsm8k --output data/gsm8k
    python -m jaxrl.plan --config=configs/gsm8k_qwen2_5_1_5b_grpo.py --topology=h100:4
    python -m jaxrl.train --config=configs/gsm8k_qwen2_5_1_5b_grpo.py

The batch, the group and the learning rate are those of SkyRL's first example.

Paper: GRPO, Shao et al. 2024, arXiv:2402.03300
Hardware: 4 H100 (80 GB) or a v6e-4 (v6e:2x2)
Plan: h100:4, 20.0 of 74.5 GiB, estimated; v6e:2x2, 20.5 of 31.3 GiB, compiled; both fit
Expected: 0.796 of the test set after 140 steps
Source: literature; SkyRL's documentation (recipes, FSDP backend, 4 H100). Not measured here.
"""

from jaxrl.config import default_config


def get_config():
    config = default_config()
    config.data.train_data = ["data/gsm8k/train.parquet"]
    config.data.val_data = ["data/gsm8k/validation.parquet"]
    config.environment.env_class = "gsm8k"

    trainer = config.trainer
    trainer.run_name = "gsm8k_qwen2_5_1_5b_grpo"
    trainer.policy.model.path = "Qwen/Qwen2.5-1.5B-Instruct"
    trainer.policy.optimizer_config.lr = 1e-6
    trainer.algorithm.advantage_estimator = "grpo"
    trainer.algorithm.use_kl_loss, trainer.algorithm.kl_loss_coef = True, 0.001

    trainer.epochs = 20  # of seven steps
    trainer.train_batch_size = 1024
    trainer.policy_mini_batch_size = 256  # four updates per step
    trainer.micro_train_batch_size_per_gpu = 8
    trainer.micro_forward_batch_size_per_gpu = 16
    trainer.max_prompt_length = 512
    config.generator.n_samples_per_prompt = 5
    config.generator.sampling_params.max_generate_length = 1024

    trainer.bf16 = trainer.flash_attn = trainer.use_sample_packing = True
    config.generator.inference_engine.model_dtype = "bfloat16"

    trainer.eval_interval = 5
    trainer.print_example_interval = 5
    trainer.ckpt_interval = 10
    trainer.max_ckpts_to_keep = 2
    trainer.hf_save_interval = 140
    trainer.logger = ["console", "tensorboard"]
    return config
