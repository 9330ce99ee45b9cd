"""Load and export Hugging Face model folders (config.json + safetensors).

Loading reads tensor by tensor and puts each stacked leaf on its devices before it reads the next,
so the host holds at most one leaf (all layers of one matrix) beside what the devices hold.
"""

import dataclasses
import json
import os
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from jaxrl.models.families import (
    HFWeight,
    config_from_hf,
    config_to_hf,
    from_hf,
    hf_shapes,
    layer_names,
    layer_shape,
    params_to_hf,
    weight_map,
)
from jaxrl.models.transformer import (
    Params,
    ParamSpec,
    TransformerConfig,
    init_params,
    is_spec,
    param_specs,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
UNLIMITED = 1_000_000  # transformers writes model_max_length=1e30 for "no limit"


def load_config(folder: str | os.PathLike[str]) -> TransformerConfig:
    """The architecture in `folder`/config.json.

    Raises:
        FileNotFoundError: no such folder, or no config.json in it.
        ValueError: config.json is not JSON, or describes a model that the forward does not compute.
    """
    path = _existing_folder(folder) / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing; {folder} is not a Hugging Face model folder")
    return config_from_hf(_read_json(path))


def load_params(
    folder: str | os.PathLike[str],
    config: TransformerConfig,
    *,
    shardings: Params | None = None,
    dtype: jnp.dtype = jnp.float32,
) -> Params:
    """The weights in `folder`, from model.safetensors or the shards of its index.

    Args:
        config: of the same folder (`load_config`); decides which tensors must be there.
        shardings: tree of `jax.sharding.Sharding` parallel to the params; None: default device.
        dtype: of the result; the file may hold any floating-point dtype.

    Returns:
        Parameters with the structure and shapes of `param_specs(config)`.

    Raises:
        FileNotFoundError: no folder, no safetensors file, or a shard of the index is missing.
        ValueError: lists missing tensors, unexpected tensors, or wrong shapes (found and expected).
    """
    specs, treedef = jax.tree.flatten(param_specs(config), is_leaf=is_spec)
    weights = treedef.flatten_up_to(weight_map(config))
    places = [None] * len(specs) if shardings is None else treedef.flatten_up_to(shardings)
    paths = _weight_files(_existing_folder(folder))
    with ExitStack() as stack:
        files = [stack.enter_context(safe_open(path, framework="numpy")) for path in paths]
        file_of = {name: file for file in files for name in file.keys()}  # noqa: SIM118
        _check_tensors(folder, config, file_of)

        def read(name: str) -> np.ndarray:
            return file_of[name].get_tensor(name)

        leaves = []
        for weight, spec, place in zip(weights, specs, places, strict=True):
            host = _read_leaf(weight, spec, config.num_layers, read, np.dtype(dtype))
            # Blocking keeps the copies in flight from piling up on the host.
            leaves.append(jax.block_until_ready(jax.device_put(host, place)))
    return treedef.unflatten(leaves)


def load_or_init(
    folder: str | os.PathLike[str],
    config: TransformerConfig,
    *,
    random_init: bool,
    seed: int,
    shardings: Any,
) -> Params:
    """The folder's parameters, or with `random_init` random ones of its architecture.

    Raises:
        ValueError: the folder's architecture is not `config`; equal shapes alone are not enough (a
            reference with another rope_theta would load and be wrong).
    """
    found, wanted = dataclasses.asdict(load_config(folder)), dataclasses.asdict(config)
    different = {
        name: (found[name], wanted[name])
        for name in wanted
        if found[name] != wanted[name] and name != "initializer_range"
    }
    if different:
        raise ValueError(f"{folder} is of another model; (its config, the policy's): {different}")
    if random_init:
        return init_params(config, seed, shardings)
    return load_params(folder, config, shardings=shardings)


def save_pretrained(
    folder: str | os.PathLike[str],
    config: TransformerConfig,
    params: Params,
    tokenizer: "PreTrainedTokenizerBase | None" = None,
    *,
    generation_config: dict[str, Any] | None = None,
    overwrite: bool = False,
) -> None:
    """Write a folder that `AutoModelForCausalLM.from_pretrained` loads; weights in float32.

    The folder appears under its name only once it is complete. With a tokenizer, its files, chat
    template and bos/eos/pad ids are part of it, and its `model_max_length` becomes
    `max_position_embeddings`.

    Args:
        params: arrays that this process can read in full (all shards addressable), or numpy arrays.
        generation_config: of the model that was trained, see `load_generation_config`; its list of
            end-of-sequence ids outranks the tokenizer's one.
        overwrite: replace `folder`, with everything in it.

    Raises:
        FileExistsError: `folder` exists and `overwrite` is False.
        ValueError: no Hugging Face family has this config, see `config_to_hf`.
    """
    target = Path(folder)
    if target.exists() and not overwrite:
        raise FileExistsError(
            f"{target} exists; pass overwrite=True to replace it, or another name"
        )
    hf_config = config_to_hf(config, **_context_length(tokenizer))
    ids = {f"{kind}_token_id": _token_id(tokenizer, kind) for kind in ("bos", "eos", "pad")}
    target.parent.mkdir(parents=True, exist_ok=True)
    # Same file system as the target, so that the renames are atomic.
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as scratch:
        new = Path(scratch, "new")
        new.mkdir()
        _write_json(new / "config.json", hf_config | ids)
        known = {k: v for k, v in ids.items() if v is not None}
        _write_json(new / "generation_config.json", known | (generation_config or {}))
        _write_weights(new / SINGLE_FILE, config, params)
        if tokenizer is not None:
            save_tokenizer(tokenizer, new)
        if target.exists():
            os.replace(target, Path(scratch, "old"))
        os.replace(new, target)


def save_tokenizer(tokenizer: "PreTrainedTokenizerBase", folder: str | os.PathLike[str]) -> None:
    """Writes tokenizer.json and tokenizer_config.json (with the chat template) into a folder."""
    tokenizer.save_pretrained(str(folder), save_jinja_files=False)
    path = Path(folder) / "tokenizer_config.json"
    settings = _read_json(path)
    # transformers 5 writes a class name that transformers 4 (vLLM, JetStream) does not know; both
    # read this one.
    if settings.get("tokenizer_class") == "TokenizersBackend":
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    _write_json(path, settings)


def load_generation_config(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """The folder's generation_config.json; empty without one."""
    path = Path(folder) / "generation_config.json"
    return _read_json(path) if path.is_file() else {}


def eos_token_ids(folder: str | os.PathLike[str]) -> list[int]:
    """Every end-of-sequence id that generation_config.json or config.json names."""
    configs = [load_generation_config(folder), _read_json(_existing_folder(folder) / "config.json")]
    found = [config.get("eos_token_id") for config in configs]
    return sorted(
        {i for ids in found for i in (ids if isinstance(ids, list) else [ids]) if i is not None}
    )


def _existing_folder(folder: str | os.PathLike[str]) -> Path:
    path = Path(folder)
    if not path.is_dir():
        raise FileNotFoundError(
            f"{path} is not a folder; give a local Hugging Face model folder (a hub model: "
            "`hf download OWNER/NAME --local-dir FOLDER` first)"
        )
    return path


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not valid JSON ({error}); copy the file again") from error


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _write_weights(path: Path, config: TransformerConfig, params: Params) -> None:
    tensors = {name: x.astype(np.float32, copy=False) for name, x in params_to_hf(config, params)}
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)  # safetensors lets only the owner read it


def _weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder, all of them there."""
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE]
    if not (folder / INDEX_FILE).is_file():
        raise FileNotFoundError(
            f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}; other formats (.bin, .gguf) are "
            "not read: save the model with transformers' save_pretrained first"
        )
    names = sorted(set(_read_json(folder / INDEX_FILE)["weight_map"].values()))
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise FileNotFoundError(
            f"{folder} lacks {', '.join(missing)}, named in {INDEX_FILE}; download the folder again"
        )
    return [folder / name for name in names]


def _check_tensors(
    folder: str | os.PathLike[str], config: TransformerConfig, file_of: dict[str, Any]
) -> None:
    """Compare names and shapes with the config before anything is read."""
    expected = hf_shapes(config)
    missing = [name for name in expected if name not in file_of]
    if missing:
        raise ValueError(f"{folder} lacks the tensors: {_listed(missing)}")
    ignored = {"lm_head.weight"} if config.tie_embeddings else set()
    extra = [
        name
        for name in file_of
        if name not in expected and name not in ignored and not name.endswith("rotary_emb.inv_freq")
    ]
    if extra:
        raise ValueError(f"{folder} has tensors that the config does not explain: {_listed(extra)}")
    found = {name: tuple(file_of[name].get_slice(name).get_shape()) for name in expected}
    wrong = [
        f"{name} has shape {found[name]}, expected {shape}"
        for name, shape in expected.items()
        if found[name] != shape
    ]
    if wrong:
        raise ValueError(f"{folder} does not match its config: {_listed(wrong)}")


def _listed(items: list[str], most: int = 10) -> str:
    more = f", and {len(items) - most} more" if len(items) > most else ""
    return ", ".join(items[:most]) + more


def _read_leaf(
    weight: HFWeight,
    spec: ParamSpec,
    num_layers: int,
    read: Callable[[str], np.ndarray],
    dtype: np.dtype,
) -> np.ndarray:
    """One leaf of the parameters, filled layer by layer."""
    names = layer_names(weight, num_layers)
    shape = layer_shape(weight, spec)
    leaf = np.empty((len(names), *shape), dtype)
    for i, name in enumerate(names):
        leaf[i] = from_hf(weight, read(name), shape)
    return leaf.reshape(spec.shape)


def _token_id(tokenizer: "PreTrainedTokenizerBase | None", kind: str) -> int | None:
    return None if tokenizer is None else getattr(tokenizer, f"{kind}_token_id")


def _context_length(tokenizer: "PreTrainedTokenizerBase | None") -> dict[str, int]:
    if tokenizer is None or tokenizer.model_max_length > UNLIMITED:
        return {}
    return {"max_position_embeddings": tokenizer.model_max_length}
