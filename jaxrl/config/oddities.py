"""Warn of what is legal in a config but seldom meant."""

import inspect
import warnings

from jaxrl.config.algorithm import AlgorithmConfig
from jaxrl.config.generator import engine_dtype
from jaxrl.config.model_limits import warn_of_positions, warn_of_stops
from jaxrl.config.objective_requirements import (
    estimator_name,
    estimator_row,
    has_critic,
    kl_in_loss,
    kl_in_reward,
    loss_name,
    loss_row,
    needs_reference,
    ratio_anchor,
    takes_values,
    updates_per_step,
)
from jaxrl.config.rollouts import longest_row
from jaxrl.config.train_config import TrainConfig
from jaxrl.config.trainer import TrainerConfig, compute_dtype
from jaxrl.losses.off_policy import correction_enabled


def warn_of_oddities(config: TrainConfig) -> None:
    """Warn of what is legal in a config but seldom meant.

    Args:
        config: resolved.
    """
    algorithm, samples = config.trainer.algorithm, config.generator.n_samples_per_prompt
    objective = [
        *_odd_loss(algorithm),
        *_odd_kl(algorithm),
        *_odd_groups(algorithm, samples),
        *_odd_rewards(config),
        *_odd_turns(config),
        *_odd_updates(config),
        *_odd_correction(config),
    ]
    oddities = [f"trainer.algorithm.{oddity}" for oddity in objective]
    oddities += [*_odd_models(config.trainer), *_odd_sampling(config)]
    for oddity in oddities:
        warnings.warn(oddity, stacklevel=3)


def warn_of_scale(
    config: TrainConfig,
    *,
    updates: int,
    positions: int | None,
    vocabulary: int | None,
    platform: str,
    devices: int,
) -> None:
    """Warn of what does not fit the run, the model or the machine, once these are known.

    Args:
        config: resolved.
        updates: of the whole run.
        positions: that the model was made for; None: nobody says.
        vocabulary: ids that it has; None: nobody says.
        platform: of the devices: "cpu", "gpu", "tpu".
        devices: of the policy.
    """
    trainer, odd = config.trainer, []
    optimizer = trainer.policy.optimizer_config
    if optimizer.scheduler != "constant" and optimizer.num_warmup_steps >= updates:
        odd.append(
            f"trainer.policy.optimizer_config.num_warmup_steps={optimizer.num_warmup_steps}: the "
            f"run has {updates} updates, so that the learning rate never gets to "
            f"{optimizer.lr:g}; lower it, or train for longer"
        )
    warn_of_longest_row(config, positions)
    if vocabulary is not None:
        warn_of_stops(config.generator.sampling_params.stop_token_ids, vocabulary)
    wanted = trainer.placement.policy_num_gpus_per_node
    if wanted > devices:
        odd.append(
            f"trainer.placement.policy_num_gpus_per_node={wanted}: the policy has "
            f"{devices}, all devices that there are; it is no request for more"
        )
    if platform == "cpu" and trainer.bf16 is True:
        odd.append("trainer.bf16=True on a CPU, which is slower at it than in float32; set False")
    for oddity in odd:
        warnings.warn(oddity, stacklevel=3)


def warn_of_longest_row(config: TrainConfig, positions: int | None) -> None:
    """Warn of prompts and responses that are together longer than the policy was made for."""
    trainer = config.trainer
    warn_of_positions(
        "trainer.max_prompt_length",
        trainer.max_prompt_length,
        "with the response a row may have",
        longest_row(config),
        positions,
        trainer.policy.model.path,
    )


def _odd_correction(config: TrainConfig) -> list[str]:
    algorithm, oddities = config.trainer.algorithm, []
    correction = algorithm.off_policy_correction
    if algorithm.use_tis:
        field = "trainer.algorithm.off_policy_correction.tis_ratio_type"
        oddities.append(f"use_tis=True is deprecated; set {field}='token'")
    if correction.renormalize and not correction_enabled(correction):
        oddities.append("off_policy_correction.renormalize=True: there is no correction")
    if algorithm.loss_reduction == "token_mean_legacy":
        oddities.append(
            "loss_reduction='token_mean_legacy': the gradient depends on "
            "trainer.micro_train_batch_size_per_gpu; 'token_mean' does not"
        )
    return oddities


def _odd_loss(algorithm: AlgorithmConfig) -> list[str]:
    row, reduction = loss_row(algorithm), algorithm.loss_reduction
    if row is None:
        return []
    odd = list(row.odd(algorithm))
    if row.usual_reduction and reduction != row.usual_reduction:
        name = loss_name(algorithm)
        odd.insert(
            0, f"loss_reduction={reduction!r}: {name} is defined with {row.usual_reduction!r}"
        )
    return odd


def _odd_kl(algorithm: AlgorithmConfig) -> list[str]:
    odd, coef = [], algorithm.kl_loss_coef
    if kl_in_loss(algorithm) and algorithm.kl_estimator_type == "k1":
        odd.append(
            "kl_estimator_type='k1': as a loss its gradient is that of log_probs, the same for "
            "every token whatever the reference says; set 'k2'"
        )
    default = AlgorithmConfig.kl_loss_coef
    if kl_in_loss(algorithm) and algorithm.kl_estimator_type == "k3" and coef > default:
        odd.append(
            f"kl_estimator_type='k3' with kl_loss_coef={coef:g}: as a loss its gradient is that of "
            "KL(reference | policy), which spreads the policy over all that the reference does; "
            "that of KL(policy | reference) is k2's"
        )
    if algorithm.kl_ctrl.type == "adaptive" and not algorithm.use_kl_in_reward:
        odd.append("kl_ctrl.type='adaptive' has no effect without use_kl_in_reward")
    estimator = estimator_row(algorithm)
    if kl_in_reward(algorithm) and estimator and not estimator.uses_rewards:
        name = estimator_name(algorithm)
        odd.append(f"use_kl_in_reward=True: {name!r} does not use rewards")
    if algorithm.use_kl_in_reward and algorithm.kl_loss_coef == 0:
        odd.append("kl_loss_coef=0: use_kl_in_reward has no effect")
    if kl_in_reward(algorithm) and algorithm.kl_estimator_type == "k3":
        odd.append(
            "kl_estimator_type='k3': as a reward its gradient is that of KL(policy | reference) - "
            "KL(reference | policy), which does not hold the KL down; set 'k1'"
        )
    return odd


def _odd_rewards(config: TrainConfig) -> list[str]:
    """Name what can give rewards beside 0 and 1 where the estimator is made for these."""
    algorithm, environment = config.trainer.algorithm, config.environment
    beside = {
        "trainer.algorithm.use_kl_in_reward": kl_in_reward(algorithm),
        "trainer.algorithm.overlong_buffer": algorithm.overlong_buffer is not None,
        "environment.reward_functions": bool(environment.reward_functions),
        "environment.reward_weights": bool(environment.reward_weights),
    }
    row = estimator_row(algorithm)
    if row is None or not row.binary_rewards or not any(beside.values()):
        return []
    return [
        f"advantage_estimator={estimator_name(algorithm)!r} divides by the mean reward, made for 0 "
        "and 1; with "
        f"{', '.join(field for field, holds in beside.items() if holds)} rewards can be others: a "
        "group whose mean is not positive gets 0, and one near 0 large advantages"
    ]


def _odd_turns(config: TrainConfig) -> list[str]:
    """Name a discount that lets a turn learn only from its own reward."""
    algorithm, turns = config.trainer.algorithm, config.generator.max_turns
    row = estimator_row(algorithm)
    discounts = row is not None and "gamma" in inspect.signature(row.fn).parameters
    gamma = algorithm.advantage_kwargs.get("gamma", algorithm.gamma)
    if gamma != 0 or turns == 1 or not discounts:
        return []
    return [
        f"gamma=0 with generator.max_turns={turns}: a turn learns nothing from the rewards of "
        "later turns; set 1.0"
    ]


def _odd_updates(config: TrainConfig) -> list[str]:
    """Name what the number of updates on a batch makes useless or wrong."""
    trainer, algorithm = config.trainer, config.trainer.algorithm
    name, anchor, odd = loss_name(algorithm), ratio_anchor(algorithm), []
    row, several = loss_row(algorithm), updates_per_step(trainer) > 1
    if not several and anchor == "old" and row and row.plain_at_one:
        odd.append(
            f"policy_loss_type={name!r} with one update on each batch: its ratio is 1, where its "
            "gradient is that of 'regular'; set trainer.update_epochs_per_batch or a smaller "
            "trainer.policy_mini_batch_size, or 'regular'"
        )
    if not several and row:
        odd += row.odd_alone(algorithm)
    dropout = trainer.policy.model.lora.dropout if trainer.policy.model.lora.rank else 0
    if dropout and (anchor == "rollout" or (several and anchor == "old")):
        odd.append(
            f"policy_loss_type={name!r} and trainer.policy.model.lora.dropout={dropout:g}: the "
            "ratio is against log-probs without dropout, so it is not 1 where the weights are "
            "the same; set 0.0"
        )
    return odd


def _odd_groups(algorithm: AlgorithmConfig, samples: int) -> list[str]:
    name, row, odd = estimator_name(algorithm), estimator_row(algorithm), []
    if algorithm.advantage_batch_normalize and row and row.normalises:
        odd.append(f"advantage_batch_normalize=True: {name!r} normalises over the batch itself")
    if row:
        settings = row.hyperparameters(algorithm.advantage_kwargs)
        odd += row.odd(settings, samples)
        if row.alone and samples < (least := row.least_samples(settings)):
            odd.append(
                f"advantage_estimator={name!r} with generator.n_samples_per_prompt={samples}: in a "
                f"group of {'one' if samples == 1 else samples} the advantage of {name!r} is "
                f"{row.alone}; set {least} or more"
            )
    if samples > 1:
        return odd
    filters = {
        "dynamic_sampling.type": algorithm.dynamic_sampling.type,
        "zero_variance_filter": algorithm.zero_variance_filter,
    }
    fix = "with generator.n_samples_per_prompt=1: a single sample never differs, all are kept"
    return odd + [f"{field}={value!r} {fix}" for field, value in filters.items() if value]


def _odd_models(trainer: TrainerConfig) -> list[str]:
    """Name a critic and a moving reference that nobody looks at."""
    algorithm, odd = trainer.algorithm, []
    if has_critic(trainer) and not takes_values(algorithm):
        odd.append(
            f"trainer.algorithm.advantage_estimator={algorithm.advantage_estimator!r} takes no "
            f"values: the critic of trainer.critic.model.path={trainer.critic.model.path!r} is "
            "trained, and has no effect"
        )
    if trainer.update_ref_every_epoch and not needs_reference(algorithm):
        odd.append(
            "trainer.update_ref_every_epoch=True has no effect: no KL counts, and the loss asks "
            "for no ref_log_probs"
        )
    return odd


def _odd_sampling(config: TrainConfig) -> list[str]:
    """Name where the sampler's distribution is not the trainer's, and samples that are all one."""
    generator, odd = config.generator, []
    sampling_params = generator.sampling_params
    off = {"repetition_penalty": 1.0, "additional_kwargs": None}
    if not sampling_params.keep_sampling_mask:
        off |= {"top_k": -1, "top_p": 1.0, "min_p": 0.0}
    values = {name: getattr(sampling_params, name) for name in off}
    filters = {name: value for name, value in values.items() if value != off[name]}
    if filters:
        fix = (
            "; generator.sampling_params.keep_sampling_mask, with a top_k, e.g. 64, trains what "
            "top_k, top_p, min_p left"
        )
        odd.append(
            f"generator.sampling_params {filters}: tokens come from a filtered distribution and "
            "the loss trains the whole one; policy/rollout_train_logprobs_abs_diff then measures "
            "the filter too" + fix * any(name in filters for name in ("top_k", "top_p", "min_p"))
        )
    sampled_dtype = engine_dtype(generator.inference_engine)
    trained_dtype = compute_dtype(config.trainer, "policy")
    if sampled_dtype != trained_dtype:
        odd.append(
            f"generator.inference_engine.model_dtype={sampled_dtype!r}, and the trainer computes "
            f"in {trained_dtype} (trainer.bf16={config.trainer.bf16}): their log-probs will differ"
        )
    samples, evaluated = generator.eval_n_samples_per_prompt, generator.eval_sampling_params
    if samples > 1 and evaluated is not None and evaluated.temperature == 0:
        odd.append(
            f"generator.eval_n_samples_per_prompt={samples} greedy samples of a prompt are all the "
            "same; set generator.eval_sampling_params.temperature above 0, or take one sample"
        )
    return odd
