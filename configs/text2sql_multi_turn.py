r"""GRPO on text to SQL in several turns: Qwen2.5-Coder-7B-Instruct queries real databases.

    python -m jaxrl.data.prepare text2sql --output data/text2sql
    python -m jaxrl.plan --config=configs/text2sql_multi_turn.py --topology=h100:8
    python -m jaxrl.train --config=configs/text2sql_multi_turn.py

Up to six turns: `<sql>` runs a query and shows its rows, `<solution>` hands one in. 653 questions
of SynSQL and Spider; their databases are in `data.zip` (22 GB) of seeklhy/OmniSQL-datasets on the
Hugging Face hub (docs/environments.md, text2sql). All settings are SkyRL-SQL's, in its form of a
message for each turn.

Paper: SkyRL-SQL, Liu et al. 2025, https://novasky-ai.notion.site/skyrl-sql; GRPO, arXiv:2402.03300
Hardware: 8 H100 (80 GB)
Plan: h100:8, 59.9 of 74.5 GiB, estimated; it fits
Expected: 79.2 % execution accuracy with five turns, average of five Spider test sets
Source: literature; SkyRL's documentation (recipes, 8 H100), in its form of one message for all
    turns. Not measured here.
"""

from jaxrl.config import default_config


def get_config():
    config = default_config()
    config.data.train_data = ["data/text2sql/train.parquet"]
    config.data.val_data = ["data/text2sql/validation.parquet"]
    config.environment.env_class = "text2sql"
    config.environment.skyrl_gym.text2sql.db_path = "data/text2sql/databases"

    trainer, generator = config.trainer, config.generator
    trainer.run_name = "text2sql_multi_turn"
    trainer.policy.model.path = "Qwen/Qwen2.5-Coder-7B-Instruct"
    trainer.policy.optimizer_config.lr = 1e-6
    trainer.policy.optimizer_config.max_grad_norm = 0.5
    trainer.algorithm.use_kl_loss = False

    trainer.epochs = 30
    trainer.train_batch_size = trainer.policy_mini_batch_size = 256
    trainer.max_prompt_length = 6000
    generator.max_turns = 6
    generator.max_input_length = 29_000
    generator.n_samples_per_prompt = 5
    sampling = generator.sampling_params
    sampling.max_generate_length, sampling.temperature, sampling.top_p = 3000, 0.6, 0.95
    sampling.stop = ["</sql>", "</solution>"]
    generator.eval_sampling_params = {
        "max_generate_length": 3000,
        "temperature": 0.0,
        "stop": ["</sql>", "</solution>"],
    }

    trainer.bf16 = trainer.flash_attn = trainer.use_sample_packing = True
    generator.inference_engine.model_dtype = "bfloat16"
    generator.inference_engine.max_num_seqs = 160  # at a time: their cache must fit
    trainer.eval_interval = 5
    trainer.ckpt_interval = trainer.hf_save_interval = 10
    trainer.max_ckpts_to_keep = 2
    trainer.logger = ["console", "tensorboard"]
    return config
