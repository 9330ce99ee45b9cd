r"""GRPO (arXiv:2402.03300) in conversations of up to four turns: a policy learns to use its
calculator from the reward of the last answer alone.

    python -m jaxrl.sft --config=configs/sft_calculator.py
    python -m jaxrl.train --config=configs/calculator_grpo.py

"58-(37*24)" needs two calls, <calc>37*24</calc> and <calc>58-888</calc>, whose results come back in
<result>..</result>, and then <answer>-830</answer>. The reward is 1 for the right answer, else 0.
docs/tool_use.md has the curves.

Paper: GRPO, Shao et al. 2024, arXiv:2402.03300
Hardware: a CPU; one device suffices
Plan: none needed, 125k parameters
Expected: 0.48 to 0.92 of the held-out answers right after 100 steps, sampled; 0.12 to 0.34 before
Source: measured here, docs/tool_use.md, three seeds
"""

from jaxrl.config import default_config


def get_config():
    config = default_config()
    config.data.train_data = ["jaxrl.envs.toys.calculator:prompts(size=6400, split='train')"]
    config.data.val_data = ["jaxrl.envs.toys.calculator:prompts(size=256, split='eval')"]

    trainer = config.trainer
    trainer.run_name = "calculator_grpo"
    trainer.policy.model.path = "runs/sft_calculator/exports/global_step_350/policy"
    optimizer = trainer.policy.optimizer_config
    optimizer.lr, optimizer.num_warmup_steps = 3e-4, 10
    optimizer.weight_decay = 0.0
    trainer.algorithm.use_kl_loss = False  # the task is all that the model shall know
    trainer.gradient_checkpointing = False

    trainer.epochs = 10
    trainer.max_training_steps = 100
    trainer.train_batch_size = 16
    trainer.policy_mini_batch_size = 16
    trainer.micro_train_batch_size_per_gpu = 256
    trainer.micro_forward_batch_size_per_gpu = 256
    trainer.max_prompt_length = 12
    config.generator.n_samples_per_prompt = 16
    config.generator.max_turns = 4
    config.generator.max_input_length = 68
    config.generator.sampling_params.max_generate_length = 12
    # the policy as it is, not its likeliest words
    config.generator.eval_sampling_params = {"temperature": 1.0, "max_generate_length": 12}

    trainer.eval_interval = 20
    trainer.eval_batch_size = 256
    trainer.print_example_interval = 20
    trainer.ckpt_interval = 50
    trainer.max_ckpts_to_keep = 1
    config.environment.env_class = "calculator"
    return config
