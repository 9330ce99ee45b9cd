"""Model shapes of the benchmarks, and model folders with random weights and a tokenizer.

    python -m benchmarks.shapes qwen2.5-7b FOLDER       # config.json and a tokenizer, no weights

The weights play no part in the seconds, so every benchmark but `decode.py` on SmolLM2 draws them at
random (`random_init`).
"""

import json
import sys
from pathlib import Path

from jaxrl.data.tokenizer import character_tokenizer
from jaxrl.models.export import save_tokenizer
from jaxrl.models.families import config_from_hf
from jaxrl.models.transformer import TransformerConfig
from jaxrl.tools.prove.work import QWEN, hf_config

SHAPES = {  # as in the config.json of Hugging Face
    "smoke": hf_config("qwen3", 1, 16, 32, 2, 1, 8, 64),
    "3m": hf_config("qwen3", 2, 256, 1024, 8, 4, 32, 4096),
    "smollm2-135m": hf_config("llama", 30, 576, 1536, 9, 3, 64, 49_152),
    "qwen3-0.6b": hf_config("qwen3", 28, 1024, 3072, 16, 8, 128, 151_936),
    "qwen3-1.7b": hf_config("qwen3", 28, 2048, 6144, 16, 8, 128, 151_936),
    "qwen3-4b": hf_config("qwen3", 36, 2560, 9728, 32, 8, 128, 151_936),
    **QWEN,
    "qwen2.5-3b": hf_config("qwen2", 36, 2048, 11_008, 16, 2, 128, 151_936),
    "qwen2.5-7b": hf_config("qwen2", 28, 3584, 18_944, 28, 4, 128, 152_064, tied=False),
    "qwen3-30b-a3b": hf_config("qwen3_moe", 48, 2048, 6144, 32, 4, 128, 151_936, tied=False)
    | {
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
    },
    "qwen3.5-0.8b": hf_config("qwen3_5_text", 24, 1024, 3584, 8, 2, 256, 248_320)
    | {
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
    },
    "qwen2.5-32b": hf_config("qwen2", 64, 5120, 27_648, 40, 8, 128, 152_064, tied=False),
}

GENERATION_PROMPT = ">"
_FIRST_CHARACTER = 0x10000  # from here on every number is a character, enough for any vocabulary


def transformer_config(shape: str) -> TransformerConfig:
    """The architecture of a shape."""
    return config_from_hf(SHAPES[shape])


def characters(shape: str) -> str:
    """The ordinary tokens of a shape, one character each."""
    return "".join(chr(_FIRST_CHARACTER + i) for i in range(SHAPES[shape]["vocab_size"] - 4))


def write_model_folder(folder: Path, shape: str) -> None:
    """A folder with config.json and a tokenizer of one token per character; no weights."""
    tokenizer = character_tokenizer(
        GENERATION_PROMPT + characters(shape), generation_prompt=GENERATION_PROMPT
    )
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SHAPES[shape] | {"bos_token_id": None} | ids))
    save_tokenizer(tokenizer, folder)


if __name__ == "__main__":  # python -m benchmarks.shapes qwen2.5-7b FOLDER
    write_model_folder(Path(sys.argv[2]), sys.argv[1])
