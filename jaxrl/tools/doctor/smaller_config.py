"""Make a config small: few rows, short responses, minutes of work, everything written elsewhere."""

import operator
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrl import config as cfg
from jaxrl.config.objective_requirements import has_critic
from jaxrl.data.packing import length_bucket
from jaxrl.types import Prompt

ROWS = 8  # of a minibatch; at least two for each group of devices
SAMPLES = 4  # of a prompt
RESPONSE_TOKENS = 32  # of a turn
TURNS_TOKENS = 256  # of the inputs of later turns, beyond the prompt
PROMPT_TOKENS = 256  # longer prompts are taken only where there are no shorter ones
BATCHES = 4  # of prompts
WEIGHTS = "generator.inference_engine.weights_folder"

QUIET = {  # what any run writes or does beside training
    "trainer.logger": "console",
    "trainer.eval_before_train": False,
    "trainer.eval_interval": -1,
    "trainer.ckpt_interval": -1,
    "trainer.hf_save_interval": -1,
    "trainer.resume_mode": "latest",
    "trainer.resume_path": None,
}
_SILENT = QUIET | {  # and one that samples
    "trainer.dump_data_batch": False,
    "trainer.dump_eval_results": False,
    "trainer.print_example_interval": -1,
    "trainer.watching.callbacks": [],
    "trainer.policy.record_memory": False,
    "generator.inference_engine.enable_http_endpoint": False,
}
_PLAIN = {  # what would leave nothing of a few short responses, or wait for others
    "trainer.fully_async.enabled": False,
    "trainer.algorithm.dynamic_sampling.type": None,
    "trainer.algorithm.zero_variance_filter": False,
    "trainer.algorithm.overlong_buffer": None,
    "generator.apply_overlong_filtering": False,
    "data.train_data_weights": [],  # few prompts are chosen, not of every source
    "trainer.policy.optimizer_config.num_warmup_steps": 0,
    "trainer.critic.optimizer_config.num_warmup_steps": 0,
}


def written_elsewhere(
    config: cfg.TrainConfig, folder: Path, quiet: Mapping[str, Any] = _SILENT
) -> cfg.TrainConfig:
    """Return the config of a run that writes under `folder` alone.

    The weights for servers go beside others: servers may see no other folder than
    `weights_folder`, and the engine deletes old versions there.

    Args:
        folder: of a name that no other examination has.
        quiet: more changes.
    """
    paths = {"log_path": "run", "ckpt_path": "checkpoints", "export_path": "exports"}
    changes = {f"trainer.{name}": str(folder / part) for name, part in paths.items()}
    if weights := config.generator.inference_engine.weights_folder:
        changes[WEIGHTS] = f"{weights.rstrip('/')}/doctor-{folder.name}"
    return cfg.apply_overrides(config, {**quiet, **changes})


def smaller(
    config: cfg.TrainConfig, prompts: Sequence[Prompt], groups: int
) -> tuple[cfg.TrainConfig, dict[str, tuple[Any, Any]]]:
    """Return the config of a small run, and what was changed for it: field -> (before, now).

    Args:
        config: resolved, of a run that writes elsewhere.
        prompts: that it will have.
        groups: of devices that hold different rows.
    """
    changes = _batches(config, groups) | _lengths(config, prompts) | _PLAIN
    changed = differences(config, changes)
    settings = {name: now for name, (_, now) in changed.items()}
    epochs = {"trainer.epochs": 1000, "trainer.max_training_steps": None}  # as many as are wanted
    return cfg.apply_overrides(config, settings | epochs), changed


def _batches(config: cfg.TrainConfig, groups: int) -> dict[str, Any]:
    """Return changes that keep one minibatch one, and make several two.

    So the loss needs what it needs in the run.
    """
    trainer, generator = config.trainer, config.generator
    samples = min(generator.n_samples_per_prompt, SAMPLES)
    prompts = min(trainer.policy_mini_batch_size, -(-max(ROWS, 2 * groups) // samples))
    several = trainer.train_batch_size > trainer.policy_mini_batch_size
    batch = prompts * (1 + several)
    rows = prompts * samples
    changes = {
        "trainer.train_batch_size": batch,
        "trainer.policy_mini_batch_size": prompts,
        "generator.n_samples_per_prompt": samples,
        "trainer.update_epochs_per_batch": min(trainer.update_epochs_per_batch, 2),
        "trainer.micro_train_batch_size_per_gpu": min(
            trainer.micro_train_batch_size_per_gpu, max(rows // (2 * groups), 1)
        ),
        "trainer.micro_forward_batch_size_per_gpu": min(
            trainer.micro_forward_batch_size_per_gpu, ROWS
        ),
        "trainer.eval_batch_size": min(trainer.eval_batch_size, batch),
        "generator.inference_engine.max_num_seqs": min(
            generator.inference_engine.max_num_seqs, batch * samples
        ),
    }
    if has_critic(trainer):
        whole = trainer.critic_mini_batch_size == trainer.train_batch_size
        changes["trainer.critic_mini_batch_size"] = batch if whole else prompts
    return changes


def _lengths(config: cfg.TrainConfig, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """Return changes that leave prompts whole, and responses and later turns short."""
    generator, trainer = config.generator, config.trainer
    response = min(generator.sampling_params.max_generate_length, RESPONSE_TOKENS)
    longest = max(len(prompt.tokens) for prompt in prompts)
    assert generator.max_input_length is not None  # resolved
    inputs = min(generator.max_input_length, longest + TURNS_TOKENS)
    changes: dict[str, Any] = {
        "trainer.max_prompt_length": longest,
        "generator.max_input_length": longest if generator.max_turns == 1 else inputs,
        "generator.sampling_params.max_generate_length": response,
    }
    if generator.eval_sampling_params is not None:
        shorter = min(generator.eval_sampling_params.max_generate_length, RESPONSE_TOKENS)
        changes["generator.eval_sampling_params.max_generate_length"] = shorter
    more = generator.sampling_params.additional_kwargs or {}
    if more.get("min_tokens", 0) > response:
        changes["generator.sampling_params.additional_kwargs"] = more | {"min_tokens": response}
    if trainer.packed_length is not None:
        rows = 2 * length_bucket(changes["generator.max_input_length"] + response + 1)
        changes["trainer.packed_length"] = min(trainer.packed_length, rows)
    return changes


def choose(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """Choose prompts of every environment in turn.

    None is longer than PROMPT_TOKENS where its environment has shorter ones, and there are enough.
    """
    by_class: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        by_class.setdefault(prompt.env_class, []).append(prompt)
    ranked = []  # (0, place in its class), or (1, length) if it is taken where there are too few
    for found in by_class.values():
        shorter = [prompt for prompt in found if len(prompt.tokens) <= PROMPT_TOKENS]
        in_turn = shorter or sorted(found, key=lambda prompt: len(prompt.tokens))
        ranked += [((0, place), prompt) for place, prompt in enumerate(in_turn)]
        spare = [prompt for prompt in found if shorter and len(prompt.tokens) > PROMPT_TOKENS]
        ranked += [((1, len(prompt.tokens)), prompt) for prompt in spare]
    return [prompt for _, prompt in sorted(ranked, key=lambda pair: pair[0])[:count]]


def differences(config: cfg.TrainConfig, changes: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return which of the changes change a config: field -> (before, now)."""
    fields = {name: operator.attrgetter(name)(config) for name in changes}
    return {name: (fields[name], now) for name, now in changes.items() if fields[name] != now}
