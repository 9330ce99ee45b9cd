r"""DAPO on its 17,000 questions of mathematics with Qwen2.5-Math-7B, evaluated on AIME 2024.

    python -m jaxrl.data.prepare dapo --output data/dapo
    python -m jaxrl.plan --config=configs/dapo_math.py --topology=h100:8
    python -m jaxrl.train --config=configs/dapo_math.py

Clip-higher, dynamic sampling, the token-level mean, overlong filtering and soft punishment; no KL.
The paper's model is Qwen2.5-32B with responses of up to 20480 tokens; here it is Qwen2.5-Math-7B
with up to 8192, as in SkyRL's and verl's runs of that model.

Paper: DAPO, Yu et al. 2025, arXiv:2503.14476
Hardware: 8 H100 (80 GB)
Plan: h100:8, 51.2 of 74.5 GiB, estimated; it fits
Expected: 0.348 to 0.363 of AIME 2024, mean of 32 samples
Source: literature; SkyRL's documentation (0.348 after 320 steps on 8 H100, without dynamic
    sampling) and verl's baselines (0.363). Not measured here.
"""

from jaxrl.config import default_config


def get_config():
    config = default_config()
    config.data.train_data = ["data/dapo/train.parquet"]
    config.data.val_data = ["data/dapo/validation.parquet"]
    config.environment.env_class = "aime"

    trainer, algorithm, generator = config.trainer, config.trainer.algorithm, config.generator
    trainer.run_name = "dapo_math"
    trainer.policy.model.path = "Qwen/Qwen2.5-Math-7B"
    trainer.policy.model_config_kwargs = {"max_position_embeddings": 32_768}  # 4096 in its folder
    optimizer = trainer.policy.optimizer_config
    optimizer.lr, optimizer.weight_decay = 1e-6, 0.1
    optimizer.num_warmup_steps = 320  # updates: 20 steps
    algorithm.eps_clip_low, algorithm.eps_clip_high = 0.2, 0.28
    algorithm.loss_reduction = "token_mean"
    algorithm.use_kl_loss = False
    algorithm.dynamic_sampling.type = "filter"
    algorithm.dynamic_sampling.max_sample_batches = 30
    algorithm.overlong_buffer = {"len": 4096, "penalty_factor": 1.0}
    generator.apply_overlong_filtering = True

    trainer.epochs = 20
    trainer.train_batch_size = 512
    trainer.policy_mini_batch_size = 32  # 512 samples: 16 updates per step
    trainer.max_prompt_length = 2048
    generator.n_samples_per_prompt = 16
    generator.sampling_params.max_generate_length = 8192
    generator.eval_sampling_params = {"top_p": 0.7, "max_generate_length": 8192}
    generator.eval_n_samples_per_prompt = 32

    trainer.bf16 = trainer.flash_attn = trainer.use_sample_packing = True
    generator.inference_engine.model_dtype = "bfloat16"
    generator.inference_engine.max_num_seqs = 320  # at a time, of 8192 samples: the cache's size
    trainer.eval_interval = trainer.ckpt_interval = trainer.hf_save_interval = 10
    trainer.max_ckpts_to_keep = 3
    trainer.print_example_interval = 10
    trainer.logger = ["console", "tensorboard"]
    return config
