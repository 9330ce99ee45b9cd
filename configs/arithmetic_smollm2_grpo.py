r"""GRPO (arXiv:2402.03300) on one-digit sums with SmolLM2-135M-Instruct.

    python examples/smollm2_to_hf.py --out models/smollm2-135m-instruct
    python -m jaxrl.train --config=configs/arithmetic_smollm2_grpo.py

The prompts are reasoning-gym's chain_sum with two one-digit terms; a tenth of the questions is held
out for evaluation. The reward is 1 if the last number of the answer is right. LOG.md has the run.

Paper: GRPO, Shao et al. 2024, arXiv:2402.03300
Hardware: a CPU; one device suffices
Plan: none needed, 135M parameters
Expected: 0.06 to 0.75 of held-out sums right in 12 steps, 0.59 after 24, greedy
Source: measured here, LOG.md, one seed
"""

from jaxrl.config import default_config

PROMPTS = (
    "jaxrl.envs.adapters.reasoning_gym:prompts(family='chain_sum', size={size}, seed=1, "
    "min_terms=2, max_terms=2, min_digits=1, max_digits=1, "
    "extract='last_number', partial_credit=False, "
    "split='{split}', instruction='Answer with the number only.')"
)


def get_config():
    config = default_config()
    config.data.train_data = [PROMPTS.format(size=400, split="train")]
    config.data.val_data = [PROMPTS.format(size=32, split="eval")]

    trainer = config.trainer
    trainer.run_name = "arithmetic_smollm2_grpo"
    trainer.policy.model.path = "models/smollm2-135m-instruct"
    trainer.policy.optimizer_config.lr = 1e-5
    trainer.policy.optimizer_config.weight_decay = 0.0
    trainer.algorithm.kl_loss_coef = 0.0  # no reference forward; twenty steps do not drift far
    trainer.gradient_checkpointing = False  # 64 tokens a row: memory is not what is short

    trainer.epochs = 1
    trainer.max_training_steps = 24
    trainer.train_batch_size = 4
    trainer.policy_mini_batch_size = 4
    trainer.micro_train_batch_size_per_gpu = 16
    trainer.micro_forward_batch_size_per_gpu = 32
    trainer.max_prompt_length = 64
    config.generator.n_samples_per_prompt = 8
    config.generator.sampling_params.max_generate_length = 12

    trainer.eval_interval = 12
    trainer.eval_batch_size = 32
    trainer.print_example_interval = 4
    trainer.ckpt_interval = 12
    trainer.max_ckpts_to_keep = 1
    trainer.hf_save_interval = 24
    return config
