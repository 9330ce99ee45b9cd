r"""PPO with a critic and GAE on GSM8K: Qwen2.5-0.5B-Instruct.

    python -m jaxrl.data.prepare gsm8k --output data/gsm8k
    python -m jaxrl.plan --config=configs/gsm8k_ppo.py --topology=h100:1
    python -m jaxrl.train --config=configs/gsm8k_ppo.py

Every prompt is answered once; a critic, which starts as the same model, says what was to be
expected. The KL to the reference is taken off the rewards. Batch sizes, rates and the coefficient
are those of the quickstart of verl.

Paper: PPO, Schulman et al. 2017, arXiv:1707.06347; GAE, arXiv:1506.02438
Hardware: one H100 (80 GB)
Plan: h100:1, 27.8 of 74.5 GiB, estimated; it fits
Expected: 0.567 of the test set
Source: literature; PPO in the algorithm baselines of verl, with prompts of up to 1024 tokens.
    Not measured here.
"""

from pathlib import Path

from jaxrl.config import load_config_file


def get_config():
    config = load_config_file(str(Path(__file__).parent / "gsm8k_qwen2_5_0_5b_grpo.py"))
    trainer = config.trainer
    trainer.run_name = "gsm8k_ppo"
    algorithm = trainer.algorithm
    algorithm.advantage_estimator, algorithm.gamma, algorithm.lambd = "gae", 1.0, 1.0
    algorithm.use_kl_loss, algorithm.use_kl_in_reward = False, True
    algorithm.kl_estimator_type, algorithm.kl_loss_coef = "k1", 0.001
    algorithm.value_clip = 0.5
    trainer.critic.model.path = trainer.policy.model.path
    trainer.critic.optimizer_config.lr = 1e-5

    trainer.epochs = 15  # of 29 steps
    trainer.train_batch_size = 256
    trainer.policy_mini_batch_size = trainer.critic_mini_batch_size = 64
    config.generator.n_samples_per_prompt = 1
    config.generator.sampling_params.max_generate_length = 512
    trainer.eval_interval, trainer.hf_save_interval = 10, 435
    return config
