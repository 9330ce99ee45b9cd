"""Checks of asynchronous runs."""

from typing import Any, NoReturn

from jaxrl.config.anchor_checks import check_anchor
from jaxrl.config.errors import check_choice, fail
from jaxrl.config.objective_requirements import has_critic
from jaxrl.config.rollouts import in_process, overlaps
from jaxrl.config.train_config import TrainConfig

SCHEDULES = ("free", "lockstep")
_GROUP = "trainer.fully_async"


def check_async(config: TrainConfig, num_devices: int) -> None:
    """Refuse what cannot be sampled ahead.

    Args:
        config: resolved.
        num_devices: of the engine.

    Raises:
        ValueError: names the field, the value and the fix.
    """
    trainer, settings = config.trainer, config.trainer.fully_async
    check_choice(f"{_GROUP}.schedule", settings.schedule, SCHEDULES)
    if settings.max_staleness_steps < 0:
        fix = "must not be negative; set it to 0 (nothing overlaps) or more"
        _fail("max_staleness_steps", settings.max_staleness_steps, fix)
    if not settings.enabled:
        return
    size = trainer.train_batch_size
    for role in ("policy", "critic") if has_critic(trainer) else ("policy",):
        name, mini = f"{role}_mini_batch_size", getattr(trainer, f"{role}_mini_batch_size")
        if mini != size:
            fix = (
                f"an asynchronous run counts its staleness in updates, one a batch: set it to "
                f"trainer.train_batch_size={size}"
            )
            fail(f"trainer.{name}", mini, fix)
    if (kind := trainer.algorithm.dynamic_sampling.type) is not None:
        fix = "an asynchronous run takes every prompt once, in no fixed batches; set it to None"
        fail("trainer.algorithm.dynamic_sampling.type", kind, fix)
    check_anchor(trainer.algorithm, settings.max_staleness_steps)
    if settings.schedule == "free":
        _check_free(config)
    elif overlaps(config) and config.generator.inference_engine.enable_prefix_caching:
        fix = (
            "what is reused depends on the clock, and schedule='lockstep' promises the same bits; "
            "set it to False, or trainer.fully_async.schedule='free'"
        )
        fail("generator.inference_engine.enable_prefix_caching", True, fix)
    _check_devices(config, num_devices)


def _check_free(config: TrainConfig) -> None:
    if config.generator.batched:
        fix = "needs prompts that are sampled one by one; set it to False"
        fail("generator.batched", True, f"{_GROUP}.schedule='free' {fix}")
    settings, size = config.trainer.fully_async, config.trainer.train_batch_size
    workers, most = (
        settings.num_parallel_generation_workers,
        size * (settings.max_staleness_steps + 1),
    )
    if not size <= workers <= most:
        fix = (
            f"must be between trainer.train_batch_size={size} and {most}, which is that times "
            f"max_staleness_steps + 1 and the most that may be in flight; set it to {most}"
        )
        _fail("num_parallel_generation_workers", workers, fix)


def _check_devices(config: TrainConfig, num_devices: int) -> None:
    """Refuse two programs with collectives on the same devices: they could wait for ever."""
    tensor = config.generator.inference_engine.tensor_parallel_size
    shared = in_process(config) and config.trainer.placement.colocate_all
    if shared and num_devices > 1 and tensor > 1 and config.trainer.fully_async.max_staleness_steps:
        fix = (
            "an engine that samples beside training on the same devices must not be split over "
            "them; set it to 1, or trainer.placement.colocate_all=False"
        )
        fail("generator.inference_engine.tensor_parallel_size", tensor, fix)


def _fail(name: str, value: Any, problem: str) -> NoReturn:
    fail(f"{_GROUP}.{name}", value, problem)
