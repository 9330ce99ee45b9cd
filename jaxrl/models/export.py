"""Write Hugging Face model folders that transformers, vLLM and JetStream load.

Weights go from the devices to the files leaf by leaf: the host holds one leaf (all layers of one
matrix) and the tensors of the file that is being filled.
"""

import contextlib
import dataclasses
import json
import math
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from jaxrl.files import FolderError
from jaxrl.models.families import config_to_hf
from jaxrl.models.hf import INDEX_FILE, SINGLE_FILE, read_json
from jaxrl.models.transformer import Params, TransformerConfig
from jaxrl.models.weights import hf_shapes, params_to_hf

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

UNLIMITED = 1_000_000  # transformers writes model_max_length=1e30 for "no limit"
MAX_SHARD_BYTES = 5 * 10**9
ITEM_BYTES = 4  # weights are written in float32


def untied(config: TransformerConfig, params: Params) -> tuple[TransformerConfig, Params]:
    """Give the model a vocabulary head of its own.

    For engines that reload tied ones wrong, and for adapters of the head alone.
    """
    if not config.tie_embeddings:
        return config, params
    config = dataclasses.replace(config, tie_embeddings=False)
    return config, params | {"unembed": params["embed"].T}


def save_pretrained(
    folder: str | os.PathLike[str],
    config: TransformerConfig,
    params: Params,
    tokenizer: "PreTrainedTokenizerBase | None" = None,
    *,
    generation_config: dict[str, Any] | None = None,
    overwrite: bool = False,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write a folder that `AutoModelForCausalLM.from_pretrained` loads; weights in float32.

    A critic's has `<value_head>.weight` in place of a vocabulary head: `AutoModel` loads the rest.

    The folder appears under its name only once it is complete. With a tokenizer, its files, chat
    template and bos/eos/pad ids are part of it, and its `model_max_length` becomes
    `max_position_embeddings`.

    Args:
        params: device or host arrays. Where they span hosts every process must call this; the first
            one writes.
        generation_config: of the model that was trained, see `load_generation_config`; its list of
            end-of-sequence ids outranks the tokenizer's one.
        overwrite: replace `folder`, with everything in it.
        max_shard_bytes: larger weights are split into files of at most this size (a single tensor
            may be larger) with an index, as transformers does.

    Raises:
        FileExistsError: `folder` exists and `overwrite` is False.
        ValueError: no Hugging Face family has this config, see `config_to_hf`.
    """
    trunk = dataclasses.replace(config, value_head=None)
    hf_config = config_to_hf(trunk, **_context_length(tokenizer))
    target = Path(folder)
    if jax.process_index() != 0:
        for _ in params_to_hf(config, params):  # takes part in gathering them
            pass
        return
    ids = {f"{kind}_token_id": _token_id(tokenizer, kind) for kind in ("bos", "eos", "pad")}
    with whole_folder(target, overwrite=overwrite) as new:
        write_json(new / "config.json", hf_config | ids)
        known = {k: v for k, v in ids.items() if v is not None}
        write_json(new / "generation_config.json", known | (generation_config or {}))
        _write_weights(new, config, params, max_shard_bytes)
        if tokenizer is not None:
            save_tokenizer(tokenizer, new)


@contextlib.contextmanager
def whole_folder(target: Path, *, overwrite: bool) -> Iterator[Path]:
    """Hold an empty folder while the block runs; it becomes `target` once everything is in it.

    Raises:
        FileExistsError: `target` exists and `overwrite` is False.
        FolderError: something in it could not be written, as on a full disk; `target` is as it was.
    """
    if target.exists() and not overwrite:
        raise FileExistsError(
            f"{target} exists; pass overwrite=True to replace it, or another name"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        # Same file system as the target, so that the renames are atomic.
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as scratch:
            new = Path(scratch, "new")
            new.mkdir()
            yield new
            if target.exists():
                os.replace(target, Path(scratch, "old"))
            os.replace(new, target)
    except (OSError, SafetensorError) as error:
        raise FolderError(
            f"could not write the model folder {target} ({error}); free space there or write "
            "elsewhere, then start again: a run goes on from its newest checkpoint"
        ) from error


def write_tensors(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """Write a safetensors file that everyone may read (safetensors itself lets only the owner)."""
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)


def save_tokenizer(tokenizer: "PreTrainedTokenizerBase", folder: str | os.PathLike[str]) -> None:
    """Write tokenizer.json and tokenizer_config.json (with the chat template) into a folder."""
    tokenizer.save_pretrained(str(folder), save_jinja_files=False)
    path = Path(folder) / "tokenizer_config.json"
    settings = read_json(path)
    # transformers 5 writes a class name that transformers 4 (vLLM, JetStream) does not know; both
    # read this one.
    if settings.get("tokenizer_class") == "TokenizersBackend":
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    write_json(path, settings)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write JSON that is readable, in the order of the keys."""
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _write_weights(
    folder: Path, config: TransformerConfig, params: Params, max_shard_bytes: int
) -> None:
    sizes = {name: ITEM_BYTES * math.prod(shape) for name, shape in hf_shapes(config).items()}
    shards = _plan(sizes, max_shard_bytes)
    tensors = params_to_hf(config, params)  # in the order of the plan
    for file, names in shards.items():
        # names come first: zip takes no tensor that belongs to the next file
        held = {name: x.astype(np.float32) for name, (_, x) in zip(names, tensors, strict=False)}
        write_tensors(folder / file, held)
    if len(shards) > 1:
        index = {name: file for file, names in shards.items() for name in names}
        total = {"total_size": sum(sizes.values())}
        write_json(folder / INDEX_FILE, {"metadata": total, "weight_map": index})


def _plan(sizes: dict[str, int], limit: int) -> dict[str, list[str]]:
    """Plan which tensors each file holds, filled in order."""
    shards: list[list[str]] = []
    room = 0
    for name, size in sizes.items():
        if not shards or size > room:
            shards.append([])
            room = limit
        shards[-1].append(name)
        room -= size
    if len(shards) == 1:
        return {SINGLE_FILE: shards[0]}
    count = len(shards)
    return {f"model-{i:05d}-of-{count:05d}.safetensors": s for i, s in enumerate(shards, 1)}


def _token_id(tokenizer: "PreTrainedTokenizerBase | None", kind: str) -> int | None:
    return None if tokenizer is None else getattr(tokenizer, f"{kind}_token_id")


def _context_length(tokenizer: "PreTrainedTokenizerBase | None") -> dict[str, int]:
    if tokenizer is None or tokenizer.model_max_length > UNLIMITED:
        return {}
    return {"max_position_embeddings": tokenizer.model_max_length}
