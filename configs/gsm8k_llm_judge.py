r"""GRPO on GSM8K with a language model as the judge, at any OpenAI-compatible endpoint.

    python -m jaxrl.data.prepare gsm8k --env-class llm_as_a_judge --output data/gsm8k_judge
    export OPENAI_API_KEY=...
    python -m jaxrl.plan --config=configs/gsm8k_llm_judge.py --topology=h100:4
    python -m jaxrl.train --config=configs/gsm8k_llm_judge.py

The batch is small, as in the example of SkyRL: every one of its 160 answers is a request. A judge
of your own: `--config.environment.skyrl_gym.llm_as_a_judge.base_url=http://127.0.0.1:8000/v1` (our
server, docs/serving.md, or vLLM).

Paper: LLM-as-a-judge, Zheng et al. 2023, arXiv:2306.05685; GRPO, arXiv:2402.03300
Hardware: 4 H100 (80 GB)
Plan: h100:4, 13.6 of 74.5 GiB, estimated; it fits
Expected: no figure was found
Source: not measured
"""

from pathlib import Path

from jaxrl.config import load_config_file


def get_config():
    config = load_config_file(str(Path(__file__).parent / "gsm8k_qwen2_5_1_5b_grpo.py"))
    trainer = config.trainer
    trainer.run_name = "gsm8k_llm_judge"
    config.data.train_data = ["data/gsm8k_judge/train.parquet"]
    config.data.val_data = ["data/gsm8k_judge/validation.parquet"]
    config.environment.env_class = "llm_as_a_judge"
    config.environment.rejudge_fraction = 0.0  # a sampled judge may say otherwise
    config.environment.skyrl_gym.llm_as_a_judge.model = "gpt-4o-mini"
    trainer.train_batch_size = trainer.policy_mini_batch_size = 32
    trainer.eval_batch_size = 32
    return config
