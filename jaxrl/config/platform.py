"""The fields whose default is "auto": what suits the platform that a run finds itself on.

What nobody has settled yet counts as on a CPU, wherever it is read.
"""

from typing import Any

from jaxrl.config.dataclass_config import Config, flatten
from jaxrl.config.overrides import apply_overrides

AUTO = "auto"
ON_CPU = {
    "trainer.bf16": False,
    "trainer.flash_attn": False,
    "trainer.use_sample_packing": False,
    "trainer.few_shapes": False,
    "generator.inference_engine.model_dtype": "float32",
}
# Chosen by the memory of the devices where they are None; what nobody has chosen counts as 1.
ENGINE_SIZES = (
    "generator.inference_engine.hosts_per_engine",
    "generator.inference_engine.tensor_parallel_size",
)


# Chosen by the tokenizer where it is None; a run that has no other number has all ids.
KNOWN_IDS = "trainer.policy.known_ids"
# Chosen by the data where it is None.
EVAL_PROMPTS = "generator.inference_engine.eval_prompts_at_once"


def auto_fields(config: Any) -> list[str]:
    """Return the fields that are still "auto", by dotted name."""
    values = flatten(config)
    return [name for name in ON_CPU if values[name] == AUTO]


def with_settled(config: Config, values: dict[str, Any]) -> Config:
    """Return a copy with a value for each field that is still "auto"; what is set stays."""
    return apply_overrides(config, {name: values[name] for name in auto_fields(config)})
