"""Say how much a proof measures: shapes of models, lengths, slots, steps."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


def hf_config(
    model_type: str,
    layers: int,
    hidden: int,
    mlp: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    vocab: int,
    *,
    tied: bool = True,
) -> dict[str, Any]:
    """Return what a config.json of Hugging Face says of such a model."""
    return {
        "architectures": [f"{model_type.capitalize()}ForCausalLM"],
        "model_type": model_type,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocab,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 4096,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "initializer_range": 0.02,
        "dtype": "float32",
    }


SMALL = {"small": hf_config("qwen2", 2, 64, 256, 4, 2, 16, 512)}
QWEN = {  # Qwen2.5's, arXiv:2412.15115
    "qwen2.5-0.5b": hf_config("qwen2", 24, 896, 4864, 14, 2, 64, 151_936),
    "qwen2.5-1.5b": hf_config("qwen2", 28, 1536, 8960, 12, 2, 128, 151_936),
}


@dataclass(frozen=True)
class Work:
    """Say how much a proof measures.

    Attributes:
        shapes: of the models with random weights, by name: what their config.json says.
        doctor: checks of the doctor, or families of them; none = all.
        row_lengths: tokens of a packed row in an update.
        tokens: of a microbatch on one device; none is smaller than a row.
        slots: rows that are decoded together.
        prompt, new_tokens: of a decoded row.
        repeats: of a measurement, after those that compile; the median counts.
        steps, reward: of the quickstart, and the mean reward of its held-out prompts that it has to
            reach.
        budget: seconds of a call after the machine was looked at; what is not done by then is left
            out. None = no end.
    """

    shapes: Mapping[str, Mapping[str, Any]]
    doctor: tuple[str, ...]
    row_lengths: tuple[int, ...]
    tokens: int
    slots: tuple[int, ...]
    prompt: int
    new_tokens: int
    repeats: int
    steps: int
    reward: float
    budget: float | None = None


WHOLE = Work(
    shapes=QWEN,
    doctor=(),
    row_lengths=(2048, 8192),
    tokens=16_384,
    slots=(64, 256),
    prompt=128,
    new_tokens=256,
    repeats=5,
    steps=160,
    reward=0.95,
)
WORK = {
    "whole": WHOLE,
    "quick": Work(
        **vars(WHOLE)
        | {
            "shapes": {"qwen2.5-0.5b": QWEN["qwen2.5-0.5b"]},
            "doctor": ("versions", "devices", "mask", "gradients", "sampler", "weights"),
            "repeats": 3,
            "budget": 900,
        }
    ),
    "small": Work(
        shapes=SMALL,
        doctor=("versions", "devices", "gradients.packing", "sampler.first", "weights.first"),
        row_lengths=(64, 128),
        tokens=256,
        slots=(4, 8),
        prompt=8,
        new_tokens=64,
        repeats=2,
        steps=60,
        reward=0.6,
    ),
}
