r"""On-policy distillation on questions of mathematics: Qwen3-1.7B-Base learns from Qwen3-4B.

    python -m jaxrl.data.prepare dapo --output data/dapo
    python -m jaxrl.plan --config=configs/distillation_math.py --topology=h100:8
    python -m jaxrl.train --config=configs/distillation_math.py

The student samples; the advantage of a token is how much likelier the teacher, the reference model,
finds it. Rewards are only watched. As the example of SkyRL, whose teacher is its own DAPO run:
`--config.trainer.ref.model.path=FOLDER` for one of yours.

Paper: Agarwal et al. 2023, arXiv:2306.13649; the form of
    https://thinkingmachines.ai/blog/on-policy-distillation/
Hardware: 8 H100 (80 GB)
Plan: h100:8, 39.6 of 74.5 GiB, estimated; it fits
Expected: no figure was found for this teacher
Source: not measured
"""

from pathlib import Path

from jaxrl.config import load_config_file


def get_config():
    config = load_config_file(str(Path(__file__).parent / "dapo_math.py"))
    trainer = config.trainer
    trainer.run_name = "distillation_math"
    trainer.policy.model.path = "Qwen/Qwen3-1.7B-Base"
    trainer.policy.model_config_kwargs = {}
    trainer.ref.model.path = "Qwen/Qwen3-4B"
    trainer.policy.optimizer_config.lr = 1e-5
    trainer.policy.optimizer_config.num_warmup_steps = 0
    algorithm = trainer.algorithm
    algorithm.advantage_estimator = "on_policy_distillation"
    algorithm.policy_loss_type = "importance_sampling"
    algorithm.eps_clip_low = algorithm.eps_clip_high = 0.2
    algorithm.dynamic_sampling.type = algorithm.overlong_buffer = None
    config.generator.apply_overlong_filtering = False
    trainer.policy_mini_batch_size = trainer.train_batch_size  # one update per step
    config.generator.inference_engine.max_num_seqs = 192  # wider keys and values
    trainer.eval_interval = 5
    return config
