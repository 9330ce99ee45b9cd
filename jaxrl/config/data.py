"""Config of the data of a run."""

import math
import os
from dataclasses import dataclass, field

from jaxrl.config.dataclass_config import BaseConfig
from jaxrl.config.errors import fail


@dataclass
class DataConfig(BaseConfig):
    """Hold the settings of the prompts."""

    train_data: list[str] = field(
        default_factory=lambda: [os.path.expanduser("~/data/gsm8k/train.parquet")]
    )
    """Training prompts: .parquet, .jsonl or .json files, or "module:function" generators."""
    val_data: list[str] = field(
        default_factory=lambda: [os.path.expanduser("~/data/gsm8k/validation.parquet")]
    )
    """Evaluation prompts, likewise; an empty list = no evaluation."""
    train_data_weights: list[float] = field(default_factory=list)
    """Shares of the sources of train_data in every batch, on any scale, whatever their sizes: a
    source that is used up begins anew. Empty = the rows of all sources in one pool."""
    shuffle: bool = True
    """Visit training rows in random order, another one every epoch. false = in the order of the
    sources, as a curriculum asks for."""


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
