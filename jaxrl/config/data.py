"""Config of the data of a run: prompts, and conversations of supervised fine-tuning."""

import math
import os
from dataclasses import dataclass, field
from typing import Annotated

from jaxrl.config import given
from jaxrl.config.constraints import one_in, positive_or
from jaxrl.config.dataclass_config import BaseConfig
from jaxrl.config.status import new
from jaxrl.config_error import fail


@dataclass
class DataConfig(BaseConfig):
    """Hold the settings of the prompts."""

    train_data: Annotated[list[str], given.rows] = field(
        default_factory=lambda: [os.path.expanduser("~/data/gsm8k/train.parquet")]
    )
    """Training prompts: .parquet, .jsonl or .json files, or "module:function" generators."""
    val_data: Annotated[list[str], given.rows] = field(
        default_factory=lambda: [os.path.expanduser("~/data/gsm8k/validation.parquet")]
    )
    """Evaluation prompts, likewise; an empty list = no evaluation."""
    train_data_weights: Annotated[list[float], new()] = field(default_factory=list)
    """Shares of the sources of train_data in every batch, on any scale, whatever their sizes: a
    source that is used up begins anew. Empty = the rows of all sources in one pool."""
    shuffle: Annotated[bool, new()] = True
    """Visit training rows in random order, another one every epoch. false = in the order of the
    sources, as a curriculum asks for."""


@dataclass
class SFTConfig(BaseConfig):
    """Hold the settings of supervised fine-tuning: which tokens of a conversation are imitated."""

    max_length: Annotated[int | None, positive_or(None, "any")] = None
    """Most tokens of a conversation; None = any."""
    overlong: Annotated[str, one_in("jaxrl.data.conversations:OVERLONG")] = "truncate"
    """What happens to longer ones: "truncate" keeps their beginning, "drop" leaves them out."""
    train_on_what: Annotated[str, one_in("jaxrl.data.conversations:TRAIN_ON_WHAT")] = (
        "all_assistant_messages"
    )
    """"all_assistant_messages", or "last_assistant_message" of each conversation."""


def check_data(data: DataConfig) -> None:
    """Refuse data that cannot be drawn.

    Raises:
        ValueError: names the field, the value and the fix.
    """
    weights, sources = data.train_data_weights, len(data.train_data)
    if not sources:
        fail("data.train_data", [], "set at least one Parquet or JSONL file")
    field = "data.train_data_weights"
    if weights and len(weights) != sources:
        fail(field, weights, f"give one for each of the {sources} sources of data.train_data")
    if wrong := [w for w in weights if not (math.isfinite(w) and w > 0)]:
        fail(field, wrong[0], "must be a number above 0; leave a source out of data.train_data")
