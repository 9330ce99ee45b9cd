"""Generate docs/models.md from the families and what `benchmarks/families.py` measured of them."""

import json
from pathlib import Path
from typing import NamedTuple

from jaxrl.models.families import FAMILIES, MULTIMODAL
from jaxrl.models.peft_format import JOINED_EXPERTS

_DOCS = Path(__file__).parents[2] / "docs"
PAGE, RESULTS = _DOCS / "models.md", _DOCS / "families.json"


class Published(NamedTuple):
    """Say what models of a family are called, and their sizes."""

    name: str
    sizes: str


# By model_type of config.json.
PUBLISHED = {
    "llama": Published("Llama 2, 3, 3.1, 3.2; SmolLM2", "135M to 405B"),
    "qwen2": Published("Qwen2, Qwen2.5", "0.5B to 72B"),
    "qwen3": Published("Qwen3", "0.6B to 32B"),
    "mistral": Published("Mistral, Mistral Nemo, Mistral Small 3", "7B to 24B"),
    "gemma2": Published("Gemma 2", "2B, 9B, 27B"),
    "gemma3_text": Published("Gemma 3", "270M to 27B"),
    "qwen3_moe": Published("Qwen3-MoE", "30B-A3B, 235B-A22B"),
    "qwen2_moe": Published("Qwen1.5-MoE, Qwen2-MoE", "14B-A2.7B, 57B-A14B"),
    "mixtral": Published("Mixtral", "8x7B, 8x22B"),
    "olmoe": Published("OLMoE", "7B-A1B"),
    "olmo2": Published("OLMo 2", "1B, 7B, 13B, 32B"),
    "olmo3": Published("OLMo 3", "7B, 32B"),
    "smollm3": Published("SmolLM3", "3B"),
    "granite": Published("Granite 3", "2B, 8B"),
    "phi3": Published("Phi-3, Phi-3.5, Phi-4, Phi-4-mini", "3.8B, 14B"),
    "glm": Published("GLM-4, GLM-Edge", "1.5B to 9B"),
    "glm4": Published("GLM-4-0414, GLM-Z1", "9B, 32B"),
    "glm4_moe": Published("GLM-4.5, GLM-4.5-Air, GLM-4.6", "106B-A12B, 355B-A32B"),
    "gpt_oss": Published("gpt-oss", "20B-A3.6B, 120B-A5.1B"),
    "ministral": Published("Ministral", "8B"),
    "ministral3": Published("Ministral 3", "3B, 8B, 14B"),
    "exaone4": Published("EXAONE 4", "1.2B, 32B"),
    "nemotron": Published("Minitron, Nemotron-Mini", "4B, 8B"),
    "arcee": Published("AFM", "4.5B"),
    "seed_oss": Published("Seed-OSS", "36B"),
    "granitemoehybrid": Published("Granite 4 micro", "0.35B to 3B"),
    "youtu": Published("Youtu-LLM", "2B"),
    "deepseek_v3": Published("DeepSeek-V3, R1", "671B-A37B"),
    "deepseek_v2": Published("DeepSeek-V2-Lite", "16B-A2.4B"),
    "glm4_moe_lite": Published("GLM-4.7-Flash", "30B-A3B"),
    "helium": Published("Helium 1", "2B"),
    "qwen3_next": Published("Qwen3-Next", "80B-A3B"),
    "qwen3_5_text": Published("Qwen3.5", "0.8B to 27B"),
    "qwen3_5_moe_text": Published("Qwen3.5-MoE", "35B-A3B, 122B-A10B, 397B-A17B"),
    "lfm2": Published("LFM2", "350M to 2.6B"),
}
CHECKS = ("logits", "gradients", "decoding", "packing", "adapters", "export")
LEFT_OUT = {
    "Gemma 4": "its full layers have another head width and number of key/value heads than those "
    "that slide, keys that are values, and norms of values; small ones have an embedding for each "
    "layer, and layers that reuse the keys of others. Stacks of layers and pages have one shape.",
    "Llama 4": "its layers attend in chunks of fixed places, whose masks no kernel here has, and "
    "its experts scale the token before they compute.",
    "Granite 4": "its hybrids, whose layers are of Mamba 2; `granitemoehybrid` is read where all "
    "layers have attention and there are no experts.",
    "DeepSeek": "V2 with groups of experts, chosen by their best; the 8-bit weights in which V3 "
    "and R1 are published: take a conversion to bfloat16; V3.2's sparse attention. No kernel of "
    "the cache takes latents: decoding is plain XLA on TPUs and GPUs.",
    "pictures and sound": "of a model with a text part, that is read, of "
    + ", ".join(f"`{name}`" for name in MULTIMODAL)
    + "; the rest is not, and an export has it as it was.",
    "longrope's long factors": "in transformers a whole row has them once it is longer than the "
    "original context, so that a token's keys depend on the tokens behind it. Here the short ones "
    "hold; a run whose rows may be longer warns before it starts.",
    "layers that predict further tokens": "checkpoints of GLM-4.5 and DeepSeek-V3 have one; it is "
    "not read and not trained, and an export has it as it was.",
    "gpt-oss": "no context parallelism; adapters for attention alone, as its experts are one "
    "parameter; on TPUs and GPUs its attention is plain XLA, as no kernel there takes its sinks. "
    "MXFP4 is read; exports are bfloat16 in its place.",
    "adapters of tensors that hold several matrices": "Phi-3's `qkv_proj` and `gate_up_proj`, "
    "GLM-4's `gate_up_proj`: each matrix has its own adapter, and a PEFT folder one of their ranks "
    "together, by `rank_pattern` and `alpha_pattern`; servers that read neither cannot load it.",
    "adapters of experts": "PEFT folders are of all matrices of all experts, of "
    + ", ".join(f"`{name}`" for name in JOINED_EXPERTS)
    + "; others are refused, and can be exported merged. Read they are one by one, as jaxrl writes "
    "them.",
}

_INTRODUCTION = """# Models

<!-- Written by `python -m docs.generate` from jaxrl/models/families.py and docs/families.json. -->

After this page you know which models load, and how near they are to transformers.

A model is a Hugging Face folder or hub id whose config.json names one of the families below as its
`model_type`. A family is a row of data in `jaxrl/models/families.py` and, where its tensors have
other names, in `jaxrl/models/weights.py`: all share one forward, one engine and one export. A
folder with a field that the forward does not compute is refused, with the field and its value.

| model_type | models | sizes |
|---|---|---|
"""
_MEASURED = """
## Differences

Tiny random models in float32 on a CPU, three layers with wide matrices, norms and biases that are
not 1 and 0 ({models} of them, transformers {transformers}, `python -m benchmarks.families`). The
greatest difference of

- logits from those of transformers, for 2 rows of 48 tokens; they are of order 1;
- gradients of the mean log-prob, over the greatest of the tensor;
- log-probs that the engine sampled by, decoding behind a prompt, from those of the forward;
- logits of two rows packed into one, from those of the rows alone;
- W + alpha / r B A of a PEFT folder with adapters of all matrices, from the merged parameters;
- logits of an export that transformers loads, from the original's.

The tests assert 1e-4 for the first two and 2e-5 or less for the others
(`tests/models/test_parity.py`).

| model | """
_LEFT_OUT = "\n## What is left out\n\n"


def _differences(found: dict[str, dict[str, float]]) -> str:
    head = " | ".join(CHECKS) + " |\n|---" + "|---" * len(CHECKS) + "|\n"
    rows = [
        f"| {name} | " + " | ".join(f"{x[check]:.0e}" if x[check] else "0" for check in CHECKS)
        for name, x in found.items()
    ]
    return head + "".join(f"{row} |\n" for row in rows)


def page() -> str:
    """Return the text of the page."""
    measured = json.loads(RESULTS.read_text())
    models = "".join(f"| `{x}` | {PUBLISHED[x].name} | {PUBLISHED[x].sizes} |\n" for x in FAMILIES)
    how = {"models": len(measured["models"]), "transformers": measured["transformers"]}
    left_out = "".join(f"- **{name}**: {why}\n" for name, why in LEFT_OUT.items())
    return (
        _INTRODUCTION
        + models
        + _MEASURED.format(**how)
        + _differences(measured["models"])
        + _LEFT_OUT
        + left_out
    )
