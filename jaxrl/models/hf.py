"""Load Hugging Face model folders (config.json + safetensors), from disk or from the hub.

Each device's part of each leaf is read by itself from the files, and a leaf is on its devices
before the next is read: a host holds at most the slices of one leaf that its own devices need.
"""

import dataclasses
import functools
import json
import os
import re
from collections.abc import Container, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import huggingface_hub
import jax
import jax.numpy as jnp
import numpy as np
from huggingface_hub.errors import HFValidationError
from safetensors import SafetensorError, safe_open

from jaxrl.models.families import config_from_hf
from jaxrl.models.mxfp4 import with_mxfp4
from jaxrl.models.transformer import (
    Params,
    ParamSpec,
    TransformerConfig,
    draw,
    init_params,
    is_spec,
    param_specs,
)
from jaxrl.models.weights import (
    HFWeight,
    hf_shapes,
    read_part,
    tensor_names,
    tensor_shape,
    weight_map,
)
from jaxrl.parallel.processes import put

SINGLE_FILE = "model.safetensors"
FLOATS = ("BF16", "F16", "F32", "F64")
INDEX_FILE = "model.safetensors.index.json"
HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")
# What a model folder needs; subfolders and "consolidated" files repeat the weights in other forms.
HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt"]
HUB_IGNORED = ["*/*", "consolidated*"]
# Where a multimodal model keeps its text model (transformers 4, 5), and the rest of it.
TEXT_PREFIXES = {
    "language_model.model.": "model.",
    "model.language_model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
# The tokens after the next, which "mtp" predicts, are no part of the forward either.
NOT_TEXT = re.compile(r"((model\.)?(vision_tower|multi_modal_projector|visual)|mtp)\.")

# Of files as transformers 5 has experts in memory: what lies one after the other in a tensor.
STACKED_EXPERTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


class ModelError(ValueError):
    """Say what is wrong with the files of a model folder."""


def load_config(
    folder: str | os.PathLike[str], overrides: Mapping[str, Any] | None = None
) -> TransformerConfig:
    """Load the architecture in `folder`/config.json.

    Args:
        folder: a folder, or the id of a model on the Hugging Face hub.
        overrides: entries of config.json to replace, see `config_from_hf`.

    Raises:
        FileNotFoundError: no such folder or model, or no config.json in it.
        ModelError: config.json is not JSON, or describes a model that the forward does not compute.
    """
    path = local_folder(folder) / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing; {folder} is not a Hugging Face model folder")
    try:
        return config_from_hf(read_json(path), overrides)
    except ModelError:
        raise
    except ValueError as error:  # of the content, which the file's folder names
        raise ModelError(f"{folder}/{error}") from error


def local_folder(folder: str | os.PathLike[str]) -> Path:
    """Return the folder itself, or the local copy of a hub model, fetched if it is not there yet.

    Raises:
        FileNotFoundError: neither a folder nor a model that the hub gives.
    """
    path = Path(folder)
    if path.is_dir():
        return path
    if not HUB_ID.fullmatch(str(folder)):
        raise FileNotFoundError(
            f"{path} is not a folder; give a local Hugging Face model folder or the id of a hub "
            "model, OWNER/NAME"
        )
    return _downloaded(str(folder))


@functools.cache
def _downloaded(hub_id: str) -> Path:
    try:
        snapshot = huggingface_hub.snapshot_download(
            hub_id, allow_patterns=HUB_FILES, ignore_patterns=HUB_IGNORED
        )
    except (OSError, HFValidationError) as error:  # the hub's errors are OSErrors
        cause = " ".join(str(error).split()).rstrip(".")
        raise FileNotFoundError(
            f"{hub_id!r} is neither a folder nor a model that the Hugging Face hub gives: {cause}. "
            "Correct the path or the id (how to get a folder that a recipe names, the recipe's "
            "header says); for a gated model log in with `hf auth login`; without a network run "
            f"`hf download {hub_id} --local-dir FOLDER` elsewhere and give FOLDER"
        ) from error
    return Path(snapshot)


def load_params(
    folder: str | os.PathLike[str],
    config: TransformerConfig,
    *,
    shardings: Params | None = None,
    dtype: jnp.dtype = jnp.float32,
) -> Params:
    """Load the weights in `folder`, from model.safetensors or the shards of its index.

    Args:
        config: of the same folder (`load_config`); decides which tensors must be there.
        shardings: tree of `jax.sharding.Sharding` parallel to the params; None: default device.
        dtype: of the result; the file may hold any floating-point dtype.

    Returns:
        Parameters with the structure and shapes of `param_specs(config)`.

    Raises:
        FileNotFoundError: no folder.
        ModelError: no safetensors file, one that is cut, or a shard of the index is missing; lists
            missing tensors, unexpected tensors, or wrong shapes (found and expected).
    """
    specs, treedef = jax.tree.flatten(param_specs(config), is_leaf=is_spec)
    weights = treedef.flatten_up_to(weight_map(config))
    default = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    places = treedef.flatten_up_to(shardings) if shardings is not None else [default] * len(specs)
    with ExitStack() as stack:
        slices: dict[str, Any] = {}
        for path in _weight_files(local_folder(folder)):
            file = stack.enter_context(_open(path))
            names = file.keys()  # not a dict: it does not iterate
            slices |= {_text_name(name): file.get_slice(name) for name in names}
        slices = _by_expert(with_mxfp4(slices), hf_shapes(config))
        _check_tensors(folder, config, slices)
        leaves = [
            _load_leaf(folder, weight, spec, slices, place, np.dtype(dtype))
            for weight, spec, place in zip(weights, specs, places, strict=True)
        ]
    return treedef.unflatten(leaves)


def load_or_init(
    folder: str | os.PathLike[str],
    config: TransformerConfig,
    *,
    overrides: Mapping[str, Any] | None = None,
    random_init: bool,
    seed: int,
    shardings: Any,
) -> Params:
    """Load the folder's parameters, or with `random_init` draw random ones of its architecture.

    The head of a critic is drawn from the seed where the folder has none.

    Raises:
        ModelError: the folder's architecture with its `overrides` is not `config`; equal shapes
            alone are not enough (a reference with another rope_theta would load and be wrong).
    """
    found = dataclasses.asdict(load_config(folder, overrides))
    wanted = dataclasses.asdict(config)
    different = {
        name: (found[name], wanted[name])
        for name in wanted
        if found[name] != wanted[name] and name not in ("initializer_range", "value_head")
    }
    if different:
        raise ModelError(f"{folder} is of another model; (its config, the policy's): {different}")
    if random_init:
        return init_params(config, seed, shardings)
    if config.value_head is None or f"{config.value_head}.weight" in _tensor_names(folder):
        return load_params(folder, config, shardings=shardings)
    trunk = dataclasses.replace(config, value_head=None, tie_embeddings=True)
    head, rest = "value_head", {name: x for name, x in shardings.items() if name != "value_head"}
    drawn = draw(param_specs(config)[head], (seed, 0), config.initializer_range)
    params = load_params(folder, trunk, shardings=rest)
    return params | {head: put(drawn, shardings[head])}


def load_generation_config(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the folder's generation_config.json; empty without one."""
    path = local_folder(folder) / "generation_config.json"
    return read_json(path) if path.is_file() else {}


def max_positions(folder: str | os.PathLike[str]) -> int | None:
    """Return the positions that a model was made for; None where config.json does not say.

    Of longrope, those that its short factors are for, see `RopeScaling`.
    """
    found = read_json(local_folder(folder) / "config.json")
    rope = found.get("rope_scaling") or found.get("rope_parameters") or {}
    if "short_factor" in rope:
        name = "original_max_position_embeddings"
        return rope.get(name, found.get(name))
    return found.get("max_position_embeddings")


def eos_token_ids(folder: str | os.PathLike[str]) -> list[int]:
    """List every end-of-sequence id that generation_config.json or config.json names."""
    return sorted(eos_sources(folder))


def eos_sources(folder: str | os.PathLike[str]) -> dict[int, str]:
    """Return every end-of-sequence id of a model folder, with the path of the file that names it.

    Of an id that both files name it is generation_config.json.
    """
    found: dict[int, str] = {}
    for name in ("config.json", "generation_config.json"):
        path = local_folder(folder) / name
        ids = read_json(path).get("eos_token_id") if path.is_file() else None
        for token in ids if isinstance(ids, list) else [ids]:
            if token is not None:
                found[token] = str(path)
    return found


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file; the error names it if it is none."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ModelError(f"{path} is not valid JSON ({error}); copy the file again") from error


@dataclasses.dataclass(frozen=True)
class _ExpertSlice:
    """Stand for the tensor of one expert, of a file that has those of all in one [E, out, in]."""

    whole: Any
    expert: int
    rows: slice

    def get_shape(self) -> list[int]:
        return [self.rows.stop - self.rows.start, self.whole.get_shape()[2]]

    def get_dtype(self) -> str:
        return self.whole.get_dtype()

    def __getitem__(self, index: tuple[slice, slice]) -> np.ndarray:
        start, stop, _ = index[0].indices(self.get_shape()[0])
        rows = slice(self.rows.start + start, self.rows.start + stop)
        return self.whole[self.expert : self.expert + 1, rows, index[1]][0]


def _by_expert(slices: dict[str, Any], needed: Container[str]) -> dict[str, Any]:
    """Return tensors by name, those that hold all experts of a layer cut into theirs.

    Args:
        needed: names of tensors that are read as they are.
    """
    found: dict[str, Any] = {}
    for name, whole in slices.items():
        experts, _, matrix = name.rpartition(".")
        stacked = experts.endswith(".mlp.experts") and matrix in STACKED_EXPERTS
        if name in needed or not stacked:
            found[name] = whole
            continue
        count, rows, _ = whole.get_shape()
        parts = STACKED_EXPERTS[matrix]
        each = rows // len(parts)
        for i, part in enumerate(parts):
            here = slice(i * each, (i + 1) * each)
            for e in range(count):
                found[f"{experts}.{e}.{part}.weight"] = _ExpertSlice(whole, e, here)
    return found


def _text_name(name: str) -> str:
    for prefix, ours in TEXT_PREFIXES.items():
        if name.startswith(prefix):
            return ours + name.removeprefix(prefix)
    return name


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="numpy")
    except SafetensorError as error:
        raise ModelError(
            f"{path} is not a whole safetensors file ({error}); download it again"
        ) from error


def _weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a folder, all of them there."""
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE]
    if not (folder / INDEX_FILE).is_file():
        raise ModelError(
            f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}; other formats (.bin, .gguf) are "
            "not read: save the model with transformers' save_pretrained first"
        )
    index = read_json(folder / INDEX_FILE)
    if not isinstance(index.get("weight_map"), dict):
        raise ModelError(f"{folder / INDEX_FILE} has no weight_map; copy the file again")
    names = sorted(set(index["weight_map"].values()))
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ModelError(
            f"{folder} lacks {', '.join(missing)}, named in {INDEX_FILE}; download the folder again"
        )
    return [folder / name for name in names]


def _tensor_names(folder: str | os.PathLike[str]) -> set[str]:
    names: set[str] = set()
    for path in _weight_files(local_folder(folder)):
        with _open(path) as file:
            names |= set(file.keys())
    return names


def _check_tensors(
    folder: str | os.PathLike[str], config: TransformerConfig, slices: dict[str, Any]
) -> None:
    """Compare names and shapes with the config before anything is read."""
    expected = hf_shapes(config)
    missing = [name for name in expected if name not in slices]
    if missing:
        raise ModelError(f"{folder} lacks the tensors: {_listed(missing)}; copy it again")
    unread = config.tie_embeddings or config.value_head is not None
    ignored = {"lm_head.weight"} if unread else set()
    extra = [
        name
        for name in slices
        if name not in expected
        and name not in ignored
        and not name.endswith("rotary_emb.inv_freq")
        and not NOT_TEXT.match(name)
        and not (config.names in ("glm4_moe", "latent") and _behind(config, name))
    ]
    if extra:
        raise ModelError(f"{folder} has tensors that the config does not explain: {_listed(extra)}")
    found = {name: tuple(slices[name].get_shape()) for name in expected}
    wrong = [
        f"{name} has shape {found[name]}, expected {shape}"
        for name, shape in expected.items()
        if found[name] != shape
    ]
    if wrong:
        raise ModelError(f"{folder} does not match its config: {_listed(wrong)}")
    quantised = [
        f"{name} is of {slices[name].get_dtype()}"
        for name in expected
        if slices[name].get_dtype() not in FLOATS
    ]
    if quantised:
        raise ModelError(
            f"{folder} holds quantised weights, which are not read ({_listed(quantised, 3)}); take "
            "the model in bfloat16, float16 or float32"
        )


def _behind(config: TransformerConfig, name: str) -> bool:
    """Return whether a tensor is of a layer behind the last: one that predicts further tokens."""
    found = re.match(r"model\.layers\.(\d+)\.", name)
    return found is not None and int(found[1]) >= config.num_layers


def _listed(items: list[str], most: int = 10) -> str:
    more = f", and {len(items) - most} more" if len(items) > most else ""
    return ", ".join(items[:most]) + more


def _load_leaf(
    folder: str | os.PathLike[str],
    weight: HFWeight,
    spec: ParamSpec,
    slices: dict[str, Any],
    sharding: jax.sharding.Sharding,
    dtype: np.dtype,
) -> jax.Array:
    """Load one leaf of the parameters onto its devices."""
    names, shape = np.reshape(tensor_names(weight), weight.stack), tensor_shape(weight, spec)
    stacked = len(weight.stack)
    parts: dict[str, np.ndarray] = {}  # devices that hold the same part share it

    def read(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None  # only of PRNG keys
        key = str(index)
        if key not in parts:
            whole = np.empty(_part_shape(spec.shape, index), dtype)
            targets = whole.reshape(-1, *whole.shape[stacked:])
            for target, name in zip(targets, np.ravel(names[index[:stacked]]), strict=True):
                target[...] = read_part(weight, slices[name], shape, index[stacked:])
                if not _is_finite(target):
                    raise ModelError(
                        f"{folder}: the tensor '{name}' holds values that are not finite; copy the "
                        "model again, or take an earlier checkpoint of it"
                    )
            parts[key] = whole
        return parts[key]

    leaf = jax.make_array_from_callback(spec.shape, sharding, read)
    # Blocking keeps the copies in flight from piling up on the host.
    return jax.block_until_ready(leaf)


def _part_shape(shape: tuple[int, ...], index: tuple[slice, ...]) -> tuple[int, ...]:
    return tuple(len(range(*i.indices(size))) for i, size in zip(index, shape, strict=True))


def _is_finite(array: np.ndarray) -> bool:
    if array.dtype == jnp.bfloat16:  # numpy compares these one by one; the exponent says it
        return not ((array.view(np.uint16) & 0x7F80) == 0x7F80).any()
    return bool(np.isfinite(array.min()) and np.isfinite(array.max()))  # NaN is both
