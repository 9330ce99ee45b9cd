"""How a config cuts its batches: the same for the trainer, the checks and the objective card."""

import dataclasses

from jaxrl.config.train_config import TrainConfig
from jaxrl.config.trainer import TrainerConfig
from jaxrl.config_error import fail
from jaxrl.data.microbatches import Microbatching
from jaxrl.data.packing import length_bucket, round_up
from jaxrl.parallel.context import row_length


def update_microbatching(
    config: TrainConfig,
    groups: int,
    role: str = "policy",
    longest: int | None = None,
    context: int = 1,
) -> Microbatching:
    """Cut a minibatch of policy or critic for `groups` data-parallel groups of devices.

    Args:
        context: devices over which each row is spread.
        longest: tokens of the longest trajectory; None = as the config allows.
    """
    trainer = config.trainer
    prompts = getattr(trainer, f"{role}_mini_batch_size")
    rows = trainer.micro_train_batch_size_per_gpu
    cut = _microbatching(config, groups, prompts, rows, context, longest)
    if role != "policy" or trainer.exact != "full":
        return cut
    # a tree over rows of one length: all microbatches have 2^k rows, the last one some of zeros
    widths = few_widths(longest or longest_trajectory(config), packed=True)
    return dataclasses.replace(cut, total=round_up(cut.total, cut.rows), widths=widths)


def forward_microbatching(config: TrainConfig, groups: int, context: int = 1) -> Microbatching:
    """Cut the whole batch of a step, for its gradient-free passes."""
    trainer = config.trainer
    prompts, rows = trainer.train_batch_size, trainer.micro_forward_batch_size_per_gpu
    return _microbatching(config, groups, prompts, rows, context)


def hindsight_microbatching(config: TrainConfig, groups: int, context: int = 1) -> Microbatching:
    """Cut the whole batch of a step with a hint in every prompt, see `longest_in_hindsight`."""
    trainer, longest = config.trainer, longest_in_hindsight(config)
    prompts, rows = trainer.train_batch_size, trainer.micro_forward_batch_size_per_gpu
    cut = _microbatching(config, groups, prompts, rows, context, longest)
    if cut.packed_length is None:
        return cut
    return dataclasses.replace(cut, packed_length=max(cut.packed_length, longest))


def _microbatching(
    config: TrainConfig,
    groups: int,
    prompts: int,
    rows_per_group: int,
    context: int,
    longest: int | None = None,
) -> Microbatching:
    trainer, generator = config.trainer, config.generator
    # tiles of padding cost the exact mode nothing, so that packing would save nothing
    packed = trainer.use_sample_packing is True and trainer.exact == "off"
    few = trainer.few_shapes is True
    budget = trainer.max_tokens_per_microbatch
    steps = generator.max_turns if generator.step_wise_trajectories else 1
    return Microbatching(
        rows=rows_per_group * groups,
        total=round_up(prompts * generator.n_samples_per_prompt * steps, groups),
        groups=groups,
        max_tokens=None if budget == -1 else budget,
        packed=packed,
        packed_length=trainer.packed_length if packed else None,
        widths=few_widths(longest or longest_trajectory(config), packed) if few else (),
        context=context,
    )


def few_widths(longest: int, packed: bool) -> tuple[int, ...]:
    """Return the T of the losses' arrays where few programs are compiled.

    See `Microbatching.widths`. That of the longest trajectory alone if rows are packed, as no row
    is shorter; else its halves, quarters and eighths too, so that a row has at most twice the
    tokens of its longest trajectory, or an eighth of what the longest has.
    """
    shares = (1,) if packed else (8, 4, 2, 1)
    return tuple(sorted({length_bucket(-(-length_bucket(longest) // share)) for share in shares}))


def longest_trajectory(config: TrainConfig) -> int:
    """Return the most tokens of a trajectory: input and response of its last turn.

    The config is resolved.
    """
    generator = config.generator
    assert generator.max_input_length is not None  # resolved
    sampling = generator.sampling_params
    # an end-of-sequence token may be appended to a stop string
    return generator.max_input_length + sampling.max_generate_length + bool(sampling.stop)


def longest_in_hindsight(config: TrainConfig) -> int:
    """Return the most tokens of a trajectory with the hint that its teacher reads."""
    return longest_trajectory(config) + config.trainer.algorithm.distillation.max_hint_tokens


def check_microbatches(config: TrainConfig, num_devices: int) -> None:
    """Call `check_rows` for the longest trajectory that a config allows."""
    trainer, generator = config.trainer, config.generator
    check_rows(
        trainer,
        num_devices,
        longest_trajectory(config),
        f"a trajectory of generator.max_input_length={generator.max_input_length} "
        f"(trainer.max_prompt_length={trainer.max_prompt_length}) + max_generate_length="
        f"{generator.sampling_params.max_generate_length} tokens",
    )


def check_hindsight(config: TrainConfig, num_devices: int) -> None:
    """Call `check_rows` for the longest trajectory with its hint."""
    trainer, longest = config.trainer, longest_in_hindsight(config)
    if trainer.packed_length is not None:  # rows with hints have room for them
        length = max(trainer.packed_length, longest)
        trainer = dataclasses.replace(trainer, packed_length=length)
    hint = trainer.algorithm.distillation.max_hint_tokens
    described = f"a trajectory and distillation.max_hint_tokens={hint}, {longest} tokens"
    check_rows(trainer, num_devices, longest, described)


def check_rows(trainer: TrainerConfig, num_devices: int, longest: int, described: str) -> None:
    """Refuse rows that cannot hold every trajectory, and a budget without a row per device.

    Args:
        longest: tokens of the longest trajectory.
        described: it, in words.
    """
    length, budget = trainer.packed_length, trainer.max_tokens_per_microbatch
    if length is not None and trainer.use_sample_packing is not True:
        fail(
            "trainer.packed_length",
            length,
            "has no effect without trainer.use_sample_packing=True; set that, or leave it None",
        )
    if length is not None and length < longest:
        fix = f"shorter than {described}; set it to {longest} or more, or leave it None"
        fail("trainer.packed_length", length, fix)
    row = row_length(length or length_bucket(longest), trainer.policy.mesh.context)
    needed = num_devices * row
    if budget != -1 and budget < needed:
        fail(
            "trainer.max_tokens_per_microbatch",
            budget,
            f"less than one row of {needed // num_devices} tokens on each of {num_devices} "
            f"devices; set it to {needed} or more (it counts all devices), or to -1 (row counts)",
        )
