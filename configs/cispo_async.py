r"""CISPO in a fully asynchronous run on GSM8K: two devices train while two sample.

    python -m jaxrl.data.prepare gsm8k --output data/gsm8k
    python -m jaxrl.plan --config=configs/cispo_async.py --topology=h100:4
    python -m jaxrl.train --config=configs/cispo_async.py

The weight of a token, relative to the policy that drew it, is bounded to [0, 5], and no token loses
its gradient: SkyRL's bounds, the paper names none. Sampling is at most four steps ahead
(docs/asynchrony.md). Batch and staleness are those of the asynchronous example of SkyRL.

Paper: CISPO, MiniMax 2025, arXiv:2506.13585
Hardware: 4 H100 (80 GB)
Plan: h100:4, 31.2 of 74.5 GiB, estimated; it fits
Expected: no figure was found for this model and task
Source: not measured
"""

from pathlib import Path

from jaxrl.config import load_config_file


def get_config():
    config = load_config_file(str(Path(__file__).parent / "gsm8k_qwen2_5_1_5b_grpo.py"))
    trainer = config.trainer
    trainer.run_name = "cispo_async"
    trainer.placement.colocate_all = False
    trainer.placement.policy_num_gpus_per_node = 2  # the engine has the others
    trainer.fully_async.enabled, trainer.fully_async.max_staleness_steps = True, 4
    trainer.train_batch_size = trainer.policy_mini_batch_size = 256
    trainer.fully_async.num_parallel_generation_workers = 1280  # 256 x (4 + 1)

    trainer.algorithm.policy_loss_type = "cispo"
    trainer.algorithm.cispo.cispo_anchor = "rollout"
    trainer.algorithm.cispo.cispo_eps_clip_low = 1.0
    trainer.algorithm.cispo.cispo_eps_clip_high = 4.0
    trainer.algorithm.use_kl_loss = False
    trainer.eval_interval = 20
    return config
