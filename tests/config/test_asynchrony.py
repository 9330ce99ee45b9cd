"""What cannot be sampled ahead is refused, and the default number of workers fits itself."""

import pytest

from jaxrl.config import TrainConfig, check_constraints, resolve
from jaxrl.config.validation import check_async

ON = [
    "trainer.fully_async.enabled=true",
    "trainer.train_batch_size=8",
    "trainer.policy_mini_batch_size=8",
    "trainer.algorithm.policy_loss_type=rollout_is",
]


def check(*overrides, devices=1):
    config = resolve(TrainConfig.from_cli_overrides([*ON, *overrides]))
    check_constraints(config)
    check_async(config, devices)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["schedule=eager"], r"trainer.fully_async.schedule='eager'.*free.*lockstep"),
        (["max_staleness_steps=-1"], r"max_staleness_steps=-1: must not be negative"),
        (
            ["num_parallel_generation_workers=7"],
            r"num_parallel_generation_workers=7: must be between trainer.train_batch_size=8 and 40",
        ),
        (
            ["num_parallel_generation_workers=17", "max_staleness_steps=1"],
            r"num_parallel_generation_workers=17: .*train_batch_size=8 and 16.*set it to 16",
        ),
    ],
)
def test_fields_out_of_range(overrides, message):
    with pytest.raises(ValueError, match=message):
        check(*(f"trainer.fully_async.{x}" for x in overrides))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["trainer.policy_mini_batch_size=4"],
            r"trainer.policy_mini_batch_size=4: .*set it to trainer.train_batch_size=8",
        ),
        (
            ["trainer.critic.model.path=x", "trainer.critic_mini_batch_size=2"],
            r"trainer.critic_mini_batch_size=2: .*set it to trainer.train_batch_size=8",
        ),
        (
            ["trainer.algorithm.dynamic_sampling.type=filter"],
            r"dynamic_sampling.type='filter': .*set it to None",
        ),
        (["generator.batched=true"], r"generator.batched=True: .*'free'.*set it to False"),
        (
            ["generator.inference_engine.tensor_parallel_size=2"],
            r"tensor_parallel_size=2: .*set it to 1, or trainer.placement.colocate_all=False",
        ),
    ],
)
def test_what_excludes_sampling_ahead(overrides, message):
    with pytest.raises(ValueError, match=message):
        check(*overrides, devices=2)
    off = TrainConfig.from_cli_overrides([*ON, *overrides, "trainer.fully_async.enabled=false"])
    check_async(resolve(off), 2)


def test_what_the_schedules_and_placements_allow():
    check()
    check("trainer.update_epochs_per_batch=3")
    check("trainer.fully_async.schedule=lockstep", "generator.batched=true")
    split = "generator.inference_engine.tensor_parallel_size=2"
    check(split, devices=1)
    check(split, "trainer.placement.colocate_all=false", devices=2)
    check(split, "trainer.fully_async.max_staleness_steps=0", devices=2)
    prefixes = "generator.inference_engine.enable_prefix_caching=true"
    check(prefixes)
    with pytest.raises(ValueError, match="enable_prefix_caching=True: what is reused depends on"):
        check(prefixes, "trainer.fully_async.schedule=lockstep")


@pytest.mark.parametrize(
    ("size", "ahead", "workers"), [(8, 4, 40), (8, 0, 8), (200, 4, 768), (1024, 1, 1024)]
)
def test_the_default_number_of_workers_fits_the_batch(size, ahead, workers):
    config = TrainConfig.from_cli_overrides(
        [
            "trainer.fully_async.enabled=true",
            f"trainer.fully_async.max_staleness_steps={ahead}",
            f"trainer.train_batch_size={size}",
        ]
    )
    resolved = resolve(config)
    assert resolved.trainer.fully_async.num_parallel_generation_workers == workers
    assert resolve(resolved) == resolved
