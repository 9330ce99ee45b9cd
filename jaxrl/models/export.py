"""Write Hugging Face model folders that transformers, vLLM and JetStream load.

A folder is that which the model was read from, but for what training changed: config.json and
generation_config.json, names and data types of tensors, and tensors that the forward does not read,
such as those of a vision tower. Weights go from the devices to the files leaf by leaf: the host
holds one leaf (all layers of one matrix) and the tensors of the file that is being filled.
"""

import contextlib
import dataclasses
import itertools
import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from jaxrl.files import FolderError
from jaxrl.models.architecture import Origin, OriginTensors
from jaxrl.models.families import changed_config, config_to_hf, text_alone, with_dtype
from jaxrl.models.hf import (
    EMBEDDINGS,
    INDEX_FILE,
    SINGLE_FILE,
    local_folder,
    read_json,
    tensors_beside,
)
from jaxrl.models.transformer import Params, TransformerConfig
from jaxrl.models.weights import hf_shapes, params_to_hf

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

UNLIMITED = 1_000_000  # transformers writes model_max_length=1e30 for "no limit"
MAX_SHARD_BYTES = 5 * 10**9
# of safetensors -> of config.json and of numpy
DTYPES = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}
SIGNIFICANT_BITS = {"bfloat16": 8, "float16": 11}  # of 24 in float32
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
PROCESSORS = "*processor_config.json"  # how a model that sees pictures gets them


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
    dtype: str | None = None,
    with_others: bool = True,
    overwrite: bool = False,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write a folder that `AutoModelForCausalLM.from_pretrained` loads.

    A critic's has `<value_head>.weight` in place of a vocabulary head: `AutoModel` loads the rest.

    The folder appears under its name only once it is complete. With a tokenizer its files and chat
    template are part of it. Of a model that `load_config` has read, config.json is the one that was
    read, with what is different now, generation_config.json the one beside it, and tensors that the
    forward does not read (of pictures, of further tokens) are copied. Of another, bos/eos/pad ids
    and the context length, `model_max_length`, are the tokenizer's.

    Args:
        params: device or host arrays. Where they span hosts every process must call this; the first
            one writes.
        dtype: of all weights, a name such as "bfloat16"; None: each tensor has that of its origin,
            or float32 where there is none, as where weights are random. Quantised weights, which
            are not written, become bfloat16.
        with_others: copy what the origin has and the forward does not read.
        overwrite: replace `folder`, with everything in it.
        max_shard_bytes: larger weights are split into files of at most this size (a single tensor
            may be larger) with an index, as transformers does.

    Raises:
        FileExistsError: `folder` exists and `overwrite` is False.
        FolderError: the origin, of which tensors are to be copied, is gone.
        ValueError: see `exported_configs`.
    """
    hf_config, generation = exported_configs(config, tokenizer)
    origin = config.origin or Origin("", {}, {}, None)
    there = origin.tensors or OriginTensors({}, False, {}, {})
    if not with_others:
        there = there._replace(others={})
    if jax.process_index() != 0:
        for _ in params_to_hf(config, params, there.stacked_experts):  # takes part in gathering
            pass
        return
    with (
        tensors_beside(origin, there.others) as others,
        whole_folder(Path(folder), overwrite=overwrite) as new,
    ):
        named = dtype or DTYPES[there.dtypes.get(EMBEDDINGS, "F32")]
        write_json(new / "config.json", with_dtype(hf_config, named))
        write_json(new / "generation_config.json", generation)
        (new / "README.md").write_text(_card(config, named), encoding="utf-8")
        _write_weights(new, config, params, dtype, there, others, max_shard_bytes)
        if there.others:
            for path in local_folder(origin.folder).glob(PROCESSORS):
                shutil.copyfile(path, new / path.name)
        if tokenizer is not None:
            save_tokenizer(tokenizer, new)


def exported_configs(
    config: TransformerConfig, tokenizer: "PreTrainedTokenizerBase | None"
) -> tuple[dict[str, Any], Mapping[str, Any]]:
    """Return config.json, but for the dtype of the weights, and generation_config.json.

    Raises:
        ValueError: no Hugging Face family has this config, see `config_to_hf`, `changed_config`.
    """
    config = dataclasses.replace(config, value_head=None, known_ids=None)
    ids = {kind: None if tokenizer is None else getattr(tokenizer, kind) for kind in TOKENS}
    origin = config.origin
    if origin is None:
        hf_config = config_to_hf(config, **_context_length(tokenizer)) | ids
    else:
        base = origin.config if origin.tensors else text_alone(origin.config)
        hf_config = changed_config(config, base)
    if origin is not None and origin.generation:
        return hf_config, origin.generation
    named = {kind: hf_config.get(kind) for kind in TOKENS}
    known = {kind: ids[kind] if named[kind] is None else named[kind] for kind in TOKENS}
    return hf_config, {kind: token for kind, token in known.items() if token is not None}


def _card(config: TransformerConfig, dtype: str) -> str:
    """Return the folder's model card: what was trained, and what of it is rounded away."""
    origin = config.origin
    start = "random weights" if origin is None or not origin.tensors else origin.folder
    if dtype not in SIGNIFICANT_BITS:
        rounded = "as training held them; nothing is rounded."
    else:
        rounded = (
            f"of which a number has {SIGNIFICANT_BITS[dtype]} significant bits. Training held them "
            "in float32, with 24: an update that is smaller than half of the last bit is rounded "
            "away. `trainer.export_dtype=float32` writes all of them."
        )
    return f"# A model trained by jaxrl\n\nFrom {start}. Weights are in {dtype}, {rounded}\n"


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
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
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


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write JSON that is readable, in the order of the keys."""
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _write_weights(
    folder: Path,
    config: TransformerConfig,
    params: Params,
    dtype: str | None,
    there: OriginTensors,
    others: Iterator[np.ndarray],
    max_shard_bytes: int,
) -> None:
    """Write the tensors of the parameters, as they lie in the origin, and the others there."""
    default, stacked = there.dtypes.get(EMBEDDINGS, "F32"), there.stacked_experts
    known = {f"{config.value_head}.weight": "F32", **there.dtypes}  # one that was drawn is float32
    dtypes = {
        name: jnp.dtype(dtype or DTYPES[known.get(name, default)])
        for name in hf_shapes(config, stacked)
    }
    sizes = {
        there.renamed(name): dtypes[name].itemsize * math.prod(shape)
        for name, shape in hf_shapes(config, stacked).items()
    }
    sizes |= there.others
    shards = _plan(sizes, max_shard_bytes)
    ours = (x.astype(dtypes[name]) for name, x in params_to_hf(config, params, stacked))
    tensors = itertools.chain(ours, others)  # in the order of the plan
    for file, names in shards.items():
        # names come first: zip takes no tensor that belongs to the next file
        write_tensors(folder / file, dict(zip(names, tensors, strict=False)))
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


def _context_length(tokenizer: "PreTrainedTokenizerBase | None") -> dict[str, int]:
    if tokenizer is None or tokenizer.model_max_length > UNLIMITED:
        return {}
    return {"max_position_embeddings": tokenizer.model_max_length}
