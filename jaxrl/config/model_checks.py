"""Checks of what a config says of its models: precision, overrides, adapters of the reference."""

from jaxrl.config.backend import PRECISIONS
from jaxrl.config.errors import check_choice, fail
from jaxrl.config.trainer import TrainerConfig


def check_models(trainer: TrainerConfig) -> None:
    """Refuse precisions that jaxrl does not have, and what cannot be put together.

    Raises:
        ValueError: names the field, its value and the fix.
    """
    for name in ("policy", "ref", "critic"):
        role = getattr(trainer, name)
        field, precision = f"trainer.{name}.fsdp_config.mixed_precision", role.fsdp_config
        if (own := precision.mixed_precision) is not None:
            check_choice(f"{field}.param_dtype", own.param_dtype, PRECISIONS)
            for part in ("reduce_dtype", "buffer_dtype"):
                check_choice(f"{field}.{part}", getattr(own, part), ("fp32", "float32"))
    for name, role in (("policy", trainer.policy), ("ref", trainer.ref)):
        theirs, ours = role.megatron_config.model_config_kwargs, role.model_config_kwargs
        for key in theirs.keys() & ours.keys():
            if theirs[key] != ours[key]:
                field = f"trainer.{name}.megatron_config.model_config_kwargs[{key!r}]"
                fix = f"trainer.{name}.model_config_kwargs says {ours[key]!r}; set one of them"
                fail(field, theirs[key], fix)
    if trainer.ref.model.lora.rank and trainer.ref.model.path == trainer.policy.model.path:
        fix = "needs trainer.ref.model.path, the PEFT folder of these adapters; set it, or 0"
        fail("trainer.ref.model.lora.rank", trainer.ref.model.lora.rank, fix)
