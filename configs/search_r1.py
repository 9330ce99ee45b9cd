r"""Search-R1: Qwen2.5-3B-Instruct learns to search before it answers, by GRPO in up to four turns.

    python -m jaxrl.data.prepare searchr1 --output data/searchr1
    python -m jaxrl.plan --config=configs/search_r1.py --topology=h100:8
    python -m jaxrl.train --config=configs/search_r1.py

`<search>` asks a retriever, `<answer>` ends. The retriever is an HTTP server of Search-R1's
protocol at port 8000 (dense index of Wikipedia), or, with
`--config.environment.skyrl_gym.search.corpus=FILE`, a BM25 index of your own documents, without a
server. docs/environments.md (search) says where Search-R1's index and server are. All settings are
those of SkyRL's run.

Paper: Search-R1, Jin et al. 2025, arXiv:2503.09516
Hardware: 8 H100 (80 GB)
Plan: h100:8, 39.3 of 74.5 GiB, estimated; it fits
Expected: 0.403 exact match, average of seven data sets, after 330 steps
Source: literature; SkyRL's documentation (recipes, four turns, 8 H100, Search-R1's dense
    retriever). Not measured here.
"""

from jaxrl.config import default_config


def get_config():
    config = default_config()
    config.data.train_data = ["data/searchr1/train.parquet"]
    config.data.val_data = ["data/searchr1/validation.parquet"]
    config.environment.env_class = "search"
    config.environment.skyrl_gym.search.search_url = "http://127.0.0.1:8000/retrieve"
    config.environment.skyrl_gym.search.topk = 3
    config.environment.skyrl_gym.max_env_workers = 16

    trainer, generator = config.trainer, config.generator
    trainer.run_name = "search_r1"
    trainer.policy.model.path = "Qwen/Qwen2.5-3B-Instruct"
    optimizer = trainer.policy.optimizer_config
    optimizer.lr, optimizer.max_grad_norm, optimizer.num_warmup_steps = 1e-6, 0.5, 94
    trainer.algorithm.use_kl_loss, trainer.algorithm.kl_loss_coef = True, 0.001
    trainer.algorithm.off_policy_correction.tis_ratio_type = "token"
    trainer.algorithm.off_policy_correction.token_tis_ratio_clip_high = 2.0

    trainer.train_batch_size = 512
    trainer.policy_mini_batch_size = 256
    trainer.micro_train_batch_size_per_gpu = trainer.micro_forward_batch_size_per_gpu = 4
    trainer.max_prompt_length = 2048
    generator.max_turns = 4
    generator.max_input_length = 4096
    generator.use_conversation_multi_turn = False  # the turns are one message
    generator.n_samples_per_prompt = 5
    stop = ["</search>", "</answer>"]
    generator.sampling_params.max_generate_length, generator.sampling_params.stop = 500, stop
    generator.eval_sampling_params = {"max_generate_length": 500, "temperature": 0.0, "stop": stop}

    trainer.bf16 = trainer.flash_attn = trainer.use_sample_packing = True
    generator.inference_engine.model_dtype = "bfloat16"
    trainer.eval_before_train = False
    trainer.eval_batch_size, trainer.eval_interval = 256, 50
    trainer.ckpt_interval, trainer.max_ckpts_to_keep, trainer.hf_save_interval = 20, 5, 100
    trainer.logger = ["console", "tensorboard"]
    return config
