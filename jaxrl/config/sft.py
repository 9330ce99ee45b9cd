"""Config of supervised fine-tuning: `python -m jaxrl.sft`."""

from dataclasses import dataclass

from jaxrl.config.dataclass_config import BaseConfig


@dataclass
class SFTConfig(BaseConfig):
    """Hold the settings of supervised fine-tuning: which tokens of a conversation are imitated."""

    max_length: int | None = None
    """Most tokens of a conversation; None = any."""
    overlong: str = "truncate"
    """What happens to longer ones: "truncate" keeps their beginning, "drop" leaves them out."""
    train_on_what: str = "all_assistant_messages"
    """"all_assistant_messages", or "last_assistant_message" of each conversation."""
