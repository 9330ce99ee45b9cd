"""What a run makes of the fields that its config leaves "auto": the one place that decides it.

A value that the checkpoint recorded with which the run goes on outranks the platform's: a run that
began on a CPU stays what it is where it goes on. What is settled is what is recorded and compared.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from jaxrl import config as cfg
from jaxrl.config.dataclass_config import flatten
from jaxrl.config.platform import AUTO
from jaxrl.config_error import fail

ACCELERATORS = "tpu", "gpu", "cuda"
# What a flax module of the user's may not be able to do.
OF_OUR_MODELS = "trainer.flash_attn", "trainer.use_sample_packing"


class Settled(NamedTuple):
    """Hold a config without "auto", and for the objective card why its fields are so."""

    config: cfg.TrainConfig
    lines: list[str]


def settle_ids(
    config: cfg.TrainConfig,
    of_tokenizer: int,
    of_model: int,
    recorded: tuple[Mapping[str, Any], str] = ({}, ""),
) -> Settled:
    """Choose the ids that a run samples and scores, where its config leaves them None.

    Those that the tokenizer has, of a model with more, where jaxrl's own engine samples: another
    one draws of all, and what it draws is scored as it was drawn.

    Args:
        config: is not changed.
        of_tokenizer, of_model: numbers of ids.
        recorded: see `settle`; a run goes on with what it began with, if that is all ids, too.

    Raises:
        ConfigError: another engine samples, and ids would be left out.
    """
    fields, source = recorded
    if config.trainer.policy.known_ids is not None:
        _check_known(config, config.trainer.policy.known_ids, of_model)
        return Settled(config, [])
    if source:
        chosen, why = fields.get(cfg.KNOWN_IDS, "auto"), f"as in {source}"
        chosen = None if chosen == "auto" else chosen  # of a version that had no such field
    else:
        chosen = of_tokenizer if cfg.leaves_out_ids(config) and of_tokenizer < of_model else None
        why = f"those of the tokenizer, of {of_model} of the model"
    if chosen is None:
        return Settled(config, [])
    _check_known(config, chosen, of_model)
    line = f"known_ids={chosen}: {why}"
    return Settled(cfg.apply_overrides(config, {cfg.KNOWN_IDS: chosen}), [line])


def settle_evaluation(
    config: cfg.TrainConfig, prompts: int, recorded: tuple[Mapping[str, Any], str] = ({}, "")
) -> Settled:
    """Choose for how many evaluation prompts the engine has rows, where the config leaves it None.

    The number of rows may change the last bit of a number. So a run keeps those that it began with,
    whatever is evaluated now; that of a version without this field had room for a whole batch.

    Args:
        config: is not changed.
        prompts: to be evaluated.
        recorded: see `settle`.
    """
    if config.generator.inference_engine.eval_prompts_at_once is not None:
        return Settled(config, [])
    fields, source = recorded
    batch = config.trainer.eval_batch_size
    chosen = min(prompts, batch)
    if source:
        recorded_room = fields.get(cfg.EVAL_PROMPTS, AUTO), fields["trainer.eval_batch_size"], batch
        chosen = next(room for room in recorded_room if room not in (AUTO, None))
    return Settled(cfg.apply_overrides(config, {cfg.EVAL_PROMPTS: chosen}), [])


def _check_known(config: cfg.TrainConfig, known: int, of_model: int) -> None:
    if known < of_model and not cfg.leaves_out_ids(config):
        backend = config.generator.inference_engine.backend
        fix = (
            f"an engine of generator.inference_engine.backend={backend!r} draws of all {of_model} "
            "ids of the model, and those left out would be scored as impossible; sample with "
            "jaxrl's own engine, or begin a new run without it"
        )
        fail(cfg.KNOWN_IDS, known, fix)


def settle(
    config: cfg.TrainConfig,
    platform: str | None = None,
    *,
    own_model: bool = False,
    recorded: tuple[Mapping[str, Any], str] = ({}, ""),
) -> Settled:
    """Choose a value for every field that is "auto".

    Args:
        config: resolved; is not changed.
        platform: of the devices that the run will use, as JAX calls it; None = of this process.
        own_model: the policy is not that of its folder, but the user's own module: of it nothing
            is known, and what it would have to support stays off.
        recorded: fields by dotted name of the checkpoint that the run goes on from, and its path.
    """
    left = cfg.auto_fields(config)
    if not left:
        return Settled(config, [])
    fields, source = recorded
    known = {name: fields[name] for name in left if fields.get(name, "auto") != "auto"}
    config = cfg.apply_overrides(config, known)
    platform = platform or jax.default_backend()
    values, reasons = dict(cfg.ON_CPU), {}
    if platform in ACCELERATORS:
        values["trainer.few_shapes"] = True
        values |= dict.fromkeys(OF_OUR_MODELS, not own_model)
        if config.trainer.bf16 == "auto":  # the others depend on it
            config = cfg.apply_overrides(config, {"trainer.bf16": True})
        dtype = cfg.compute_dtype(config.trainer, "policy")
        values["generator.inference_engine.model_dtype"] = dtype
        if own_model:
            reasons = dict.fromkeys(OF_OUR_MODELS, "automatic, the model is your own")
    reasons |= dict.fromkeys(known, f"as in {source}")
    config = cfg.with_settled(config, values)
    lines: dict[str, list[str]] = {}
    for name in left:
        choice = f"{name.rpartition('.')[2]}={flatten(config)[name]}"
        lines.setdefault(reasons.get(name, f"automatic, on a {platform}"), []).append(choice)
    return Settled(config, [f"{', '.join(choices)}: {why}" for why, choices in lines.items()])
