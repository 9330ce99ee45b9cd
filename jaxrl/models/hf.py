"""Load Hugging Face model folders (config.json + safetensors), from disk or from the hub.

Each device's part of each leaf is read by itself from the files, and a leaf is on its devices
before the next is read: a host holds at most the slices of one leaf that its own devices need.
"""

import dataclasses
import itertools
import json
import math
import os
import re
from collections.abc import Collection, Container, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from jaxrl.files import FolderError
from jaxrl.hub import local_folder, unfetched
from jaxrl.models.architecture import NOT_OF_WEIGHTS, Origin, OriginTensors
from jaxrl.models.families import TIED, config_from_hf, text_config, with_entries
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
HEAD, EMBEDDINGS = "lm_head.weight", "model.embed_tokens.weight"
TIE_ROWS = 8192  # that are compared at a time
# Where a multimodal model keeps its text model (transformers 4, 5), and the rest of it.
TEXT_PREFIXES = {
    "language_model.model.": "model.",
    "model.language_model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
VISION = r"(model\.)?(vision_tower|multi_modal_projector|visual)\."
# The tokens after the next, which "mtp" predicts, are no part of the forward either.
NOT_TEXT = re.compile(rf"({VISION}|mtp\.)")

STACKED_EXPERTS = ".mlp.experts.gate_up_proj"  # in files as transformers 5 has them in memory


class ModelError(ValueError):
    """Say what is wrong with the files of a model folder."""


def load_config(
    folder: str | os.PathLike[str],
    overrides: Mapping[str, Any] | None = None,
    *,
    random_init: bool = False,
) -> TransformerConfig:
    """Load the architecture in `folder`/config.json.

    Args:
        folder: a folder, or the id of a model on the Hugging Face hub.
        overrides: entries of config.json to replace, see `config_from_hf`.
        random_init: its weights will be drawn, so that an export keeps none of the folder's.

    Raises:
        FileNotFoundError: no such folder or model, or no config.json in it.
        ModelError: config.json is not JSON, or describes a model that the forward does not compute.
    """
    path = local_folder(folder) / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing; {folder} is not a Hugging Face model folder")
    hf_config, changes = _tied_or_not(path.parent, read_json(path)), dict(overrides or {})
    try:
        config = config_from_hf(hf_config, changes)
    except ValueError as error:  # of the content, which the file's folder names
        raise ModelError(f"{folder}/{error}") from error
    rope = ("rope_scaling", "rope_theta")  # of several forms, which an export writes
    entries = {k: x for k, x in changes.items() if k not in rope}
    tensors = None
    if not random_init and _has_weights(path.parent):
        with suppress(ModelError):  # which loading them says
            tensors = _origin_tensors(folder, config)
    generation = load_generation_config(folder)
    origin = Origin(str(folder), with_entries(hf_config, entries), generation, tensors)
    return dataclasses.replace(config, origin=origin)


def _tied_or_not(folder: Path, hf_config: dict[str, Any]) -> dict[str, Any]:
    """Say of a Mistral 3 whether its head is tied, where its config.json does not.

    Those published have a head of their own, and the default of transformers is one that is tied:
    there the tensors decide.
    """
    text = hf_config.get("text_config") or {}
    if hf_config.get("model_type") != "mistral3" or TIED in hf_config or TIED in text:
        return hf_config
    names = _tensor_names(folder) if _has_weights(folder) else set()
    return hf_config | {TIED: HEAD not in map(text_name, names)}


def _has_weights(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (SINGLE_FILE, INDEX_FILE))


def load_params(
    folder: str | os.PathLike[str],
    config: TransformerConfig,
    *,
    shardings: Params | None = None,
    dtype: jnp.dtype = jnp.float32,
    unread: Container[str] = (),
) -> Params:
    """Load the weights in `folder`, from model.safetensors or the shards of its index.

    Args:
        config: of the same folder (`load_config`); decides which tensors must be there.
        shardings: tree of `jax.sharding.Sharding` parallel to the params; None: default device.
        dtype: of the result; the file may hold any floating-point dtype.
        unread: names of tensors that may be there although the config has none of that name.

    Returns:
        Parameters with the structure and shapes of `param_specs(config)`.

    Raises:
        FileNotFoundError: no folder.
        ModelError: no safetensors file, one that is cut, or a shard of the index is missing; lists
            missing tensors, unexpected tensors, or wrong shapes (found and expected); or a head
            that should be tied to the embeddings, and is another matrix.
    """
    specs, treedef = jax.tree.flatten(param_specs(config), is_leaf=is_spec)
    default = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    places = treedef.flatten_up_to(shardings) if shardings is not None else [default] * len(specs)
    with _open_tensors(folder) as tensors:
        slices = _of_text(tensors)
        stacked = _stacks_experts(slices, config)
        _check_tensors(folder, config, slices, hf_shapes(config, stacked), unread)
        if config.tie_embeddings and not config.value_head and HEAD in slices.keys() - set(unread):
            _check_tie(folder, slices[HEAD], slices[EMBEDDINGS])
        weights = treedef.flatten_up_to(weight_map(config, stacked))
        leaves = [
            _load_leaf(folder, weight, spec, slices, place, np.dtype(dtype))
            for weight, spec, place in zip(weights, specs, places, strict=True)
        ]
    return treedef.unflatten(leaves)


@contextmanager
def _open_tensors(folder: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """Hold a slice of every tensor, by its name in the files, while the block runs."""
    slices: dict[str, Any] = {}
    with ExitStack() as stack:
        for path in _weight_files(local_folder(folder)):
            file = stack.enter_context(open_file(path))
            names = file.keys()  # not a dict: it does not iterate
            slices |= {name: file.get_slice(name) for name in names}
        yield slices


def _of_text(tensors: dict[str, Any]) -> dict[str, Any]:
    """Return the tensors by the names that they have in a model of text alone."""
    return with_mxfp4({text_name(name): x for name, x in tensors.items()})


def _stacks_experts(slices: dict[str, Any], config: TransformerConfig) -> bool:
    """Return whether a tensor has all experts of a layer, in a family where most files do not."""
    if config.experts is None or config.names == "gpt_oss":  # which always does
        return False
    return any(n.startswith("model.layers.") and n.endswith(STACKED_EXPERTS) for n in slices)


def _origin_tensors(folder: str | os.PathLike[str], config: TransformerConfig) -> OriginTensors:
    """Return how the tensors of a folder lie there."""
    with _open_tensors(folder) as tensors:
        found = _of_text(tensors)
        stacked = _stacks_experts(found, config)
        prefix = {
            ours: theirs
            for theirs, ours in TEXT_PREFIXES.items()
            if any(name.startswith(theirs) for name in tensors)
        }
        if "language_model.model." in prefix.values():  # transformers 4 has the head there, too
            prefix["lm_head."] = "language_model.lm_head."
        names = [name for name in hf_shapes(config, stacked) if name in found]
        dtypes = {name: found[name].get_dtype() for name in names}
        beside = [name for name in tensors if _is_beside(config, text_name(name))]
        return OriginTensors(dtypes, stacked, prefix, {n: _bytes(tensors[n]) for n in beside})


def _bytes(x: Any) -> int:
    """Return the bytes of a tensor in a file, whose dtype is named as "BF16" is, or "BOOL"."""
    bits = re.search(r"\d+", x.get_dtype())
    return math.prod(x.get_shape()) * (int(bits[0]) if bits else 8) // 8


@contextmanager
def tensors_beside(origin: Origin, names: Collection[str]) -> Iterator[Iterator[np.ndarray]]:
    """Hold tensors of a model's origin that it does not have, one after the other.

    Raises:
        FolderError: they are not there any more.
    """
    if not names:
        yield iter(())
        return
    with ExitStack() as stack:
        try:
            tensors = stack.enter_context(_open_tensors(origin.folder))
            found = [tensors[name] for name in names]
        except (FileNotFoundError, ModelError, KeyError) as error:
            raise FolderError(
                f"{origin.folder}, which training began from, has tensors that an export copies "
                f"({', '.join(itertools.islice(names, 2))}, ...), and they cannot be read any more "
                f"({error}); put it back, then start again: a run goes on from its newest "
                "checkpoint"
            ) from error
        yield (x[:] for x in found)


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
    found, wanted = load_config(folder, overrides).described(), config.described()
    different = {
        name: (found[name], wanted[name])
        for name in wanted
        if found[name] != wanted[name]
        and name not in ("initializer_range", "value_head", *NOT_OF_WEIGHTS)
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
    params = load_params(folder, trunk, shardings=rest, unread=(HEAD,))
    return params | {head: put(drawn, shardings[head])}


def load_generation_config(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the folder's generation_config.json; empty without one."""
    path = local_folder(folder) / "generation_config.json"
    return read_json(path) if path.is_file() else {}


def max_positions(folder: str | os.PathLike[str]) -> int | None:
    """Return the positions that a model was made for; None where config.json does not say.

    Of longrope, those that its short factors are for, see `RopeScaling`.
    """
    found = text_config(read_json(local_folder(folder) / "config.json"))
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
    """Read the object in a JSON file; the error names the file if it holds none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8-sig"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        problem = unfetched(path) or f"is not valid JSON in UTF-8 ({error}); copy the file again"
        raise ModelError(f"{path} {problem}") from error
    if not isinstance(found, dict):
        raise ModelError(
            f"{path} holds a {type(found).__name__}, not an object {{...}}; copy the file again"
        )
    return found


def text_name(name: str) -> str:
    """Return the name that a tensor has in a model of text alone."""
    for prefix, ours in TEXT_PREFIXES.items():
        if name.startswith(prefix):
            return ours + name.removeprefix(prefix)
    return name


def open_file(path: Path) -> Any:
    """Open a safetensors file; the error names it if it is none, or not whole."""
    try:
        return safe_open(path, framework="numpy")
    except SafetensorError as error:
        problem = unfetched(path) or f"is not a whole safetensors file ({error}); download it again"
        raise ModelError(f"{path} {problem}") from error


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
        with open_file(path) as file:
            names |= set(file.keys())
    return names


def _check_tie(folder: str | os.PathLike[str], head: Any, table: Any) -> None:
    """Refuse a head that is not the embeddings, to which the config ties it."""
    rows, same = table.get_shape()[0], head.get_shape() == table.get_shape()
    for start in range(0, rows if same else 0, TIE_ROWS):
        part = slice(start, min(start + TIE_ROWS, rows))
        same &= np.array_equal(head[part].astype(np.float32), table[part].astype(np.float32))
    if not same:
        raise ModelError(
            f"{folder}: config.json says {TIED}=true, or leaves it at that, and {HEAD} is another "
            f"matrix than {EMBEDDINGS}. If the head is one of its own, set trainer.policy."
            f"model_config_kwargs={{'{TIED}': False}} (or say so in config.json); if the "
            f"embeddings are the head, take {HEAD} out of the files"
        )


def _check_tensors(
    folder: str | os.PathLike[str],
    config: TransformerConfig,
    slices: dict[str, Any],
    expected: dict[str, tuple[int, ...]],
    unread: Container[str],
) -> None:
    """Compare names and shapes with the config before anything is read."""
    missing = [name for name in expected if name not in slices]
    if missing:
        raise ModelError(f"{folder} lacks the tensors: {_listed(missing)}; copy it again")
    no_head = config.tie_embeddings or config.value_head is not None
    extra = [
        name
        for name in slices
        if name not in expected
        and not (name in unread or (no_head and name == HEAD))
        and not name.endswith("rotary_emb.inv_freq")
        and not _is_beside(config, name)
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


def _is_beside(config: TransformerConfig, name: str) -> bool:
    """Return whether a tensor is of pictures, or predicts further tokens, behind the last layer."""
    if NOT_TEXT.match(name):
        return True
    found = re.match(r"model\.layers\.(\d+)\.", name)
    behind = found is not None and int(found[1]) >= config.num_layers
    return behind and config.names in ("glm4_moe", "latent")


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
