"""The config's microbatches: their sizes, what is refused, what the objective card says."""

import pytest

from jaxrl.config import TrainConfig, apply_overrides, objective_card, validate
from jaxrl.config.microbatching import forward_microbatching, update_microbatching
from jaxrl.data.microbatches import Microbatching


def config_of(**trainer):
    """6 prompts x 5 samples per step in two minibatches; at most 512 + 1024 = 1536 tokens."""
    settings = {"train_batch_size": 6, "policy_mini_batch_size": 3, **trainer}
    return apply_overrides(TrainConfig(), {f"trainer.{name}": x for name, x in settings.items()})


def test_sizes():
    config = config_of(micro_train_batch_size_per_gpu=2, micro_forward_batch_size_per_gpu=3)
    # 3 x 5 = 15 and 6 x 5 = 30 rows, rounded up to a multiple of 4
    assert update_microbatching(config, 4) == Microbatching(rows=8, total=16, groups=4)
    assert forward_microbatching(config, 4) == Microbatching(rows=12, total=32, groups=4)
    packed = config_of(
        use_sample_packing=True, packed_length=2048, max_tokens_per_microbatch=10_000
    )
    assert update_microbatching(packed, 1) == Microbatching(
        rows=1, total=15, max_tokens=10_000, packed=True, packed_length=2048
    )


@pytest.mark.parametrize(
    ("trainer", "message"),
    [
        (
            {"packed_length": 2048},
            r"trainer.packed_length=2048: has no effect without trainer.use_sample_packing=True; "
            r"set that, or leave it None",
        ),
        (
            {"packed_length": 1535, "use_sample_packing": True},
            r"trainer.packed_length=1535: shorter than a trajectory of "
            r"generator.max_input_length=512 \(trainer.max_prompt_length=512\) \+ "
            r"max_generate_length=1024 tokens; set it to 1536 or more, or leave it None",
        ),
        (
            {"max_tokens_per_microbatch": 0},
            r"trainer.max_tokens_per_microbatch=0: must be positive, or -1 \(off\)",
        ),
        (
            {"max_tokens_per_microbatch": 3000},
            r"trainer.max_tokens_per_microbatch=3000: less than one row of 1536 tokens on each of "
            r"2 devices; set it to 3072 or more \(it counts all devices\), or to -1",
        ),
        (  # enough for the policy's one group, not for the two of the reference
            {
                "max_tokens_per_microbatch": 1536,
                "policy.mesh.tensor": 2,
                "ref.mesh": {"fsdp": 2},
            },
            r"trainer.max_tokens_per_microbatch=1536: .* 1536 tokens on each of 2 devices",
        ),
        (
            {
                "max_tokens_per_microbatch": 3072,
                "use_sample_packing": True,
                "packed_length": 2000,
            },
            r"trainer.max_tokens_per_microbatch=3072: less than one row of 2000 tokens on each of "
            r"2 devices; set it to 4000 or more",
        ),
    ],
)
def test_what_cannot_be_is_refused(trainer, message):
    config = config_of(**trainer)
    with pytest.raises(ValueError, match=message):
        validate(config, num_devices=2)


@pytest.mark.parametrize(
    ("trainer", "line"),
    [
        (
            {"use_sample_packing": True, "micro_train_batch_size_per_gpu": 4},
            "-> packed into microbatches of at most 8 rows of 1536 tokens = 12288 tokens, 4 rows "
            "on each of 2 devices; at most 16 trajectories per row",
        ),
        (
            {"use_sample_packing": True, "max_tokens_per_microbatch": 9000, "packed_length": 2000},
            "-> packed into microbatches of at most 4 rows of 2000 tokens = 8000 tokens, 2 rows "
            "on each of 2 devices; at most 16 trajectories per row",
        ),
        (
            {"max_tokens_per_microbatch": 9000},  # 9000 // 1536 = 5, an even number
            "-> microbatches of at most 9000 tokens: 2 rows of 1536 tokens on each of 2 devices, "
            "more where they are shorter",
        ),
    ],
)
def test_the_card_says_what_runs_at_once(trainer, line):
    config = config_of(**trainer)
    validate(config, num_devices=2)
    assert line in " ".join(objective_card(config, num_devices=2).split())
