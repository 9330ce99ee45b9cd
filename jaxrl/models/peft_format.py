"""Adapters as folders of the PEFT library: adapter_config.json, adapter_model.safetensors.

https://huggingface.co/docs/peft/developer_guides/checkpoint. A matrix "model.layers.0.mlp.up_proj"
has lora_A.weight [r, in] and lora_B.weight [out, r]; an embedding lora_embedding_A [r, V] and
lora_embedding_B [D, r]. Float32.

A tensor that several of our matrices share, such as the "qkv_proj" of a Phi-3, has one adapter of
their ranks together, whose A has theirs one below the other and whose B is of blocks. One of the
plain rank, as PEFT trains it, is read as well: all of them get its A.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
from safetensors.numpy import load_file

from jaxrl.models.export import save_tokenizer, whole_folder, write_json, write_tensors
from jaxrl.models.hf import read_json
from jaxrl.models.lora import (
    OF_EXPERT,
    LoraConfig,
    adapter_specs,
    matrices,
    select_modules,
    weights_by_name,
)
from jaxrl.models.transformer import Params, TransformerConfig, abstract_params
from jaxrl.models.weights import HFWeight, from_hf, hf_shape, to_hf
from jaxrl.parallel.processes import fetch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CONFIG_FILE = "adapter_config.json"
TENSOR_FILE = "adapter_model.safetensors"


class Tensor(NamedTuple):
    """Name one tensor of a PEFT file and the part of our adapters that it is."""

    name: str
    leaf: str
    part: str  # "a" or "b"
    index: Any  # in its stack
    layout: HFWeight
    shape: tuple[int, ...]  # ours
    number: int  # of the matrices that share a tensor
    sharing: int  # how many these are
    rows: slice  # of the shared tensor, that are this matrix'
    all_rows: int

    def whole_shape(self, joined: bool) -> tuple[int, ...]:
        """Return the shape in the file, of an adapter of all ranks together if `joined`."""
        rows, columns = hf_shape(self.layout, self.shape)
        times = self.sharing if joined else 1
        return (times * rows, columns) if self.part == "a" else (self.all_rows, times * columns)

    def place(self, joined: bool) -> tuple[slice, slice]:
        """Return where in the file's tensor this one is."""
        rows, columns = hf_shape(self.layout, self.shape)
        number = self.number if joined else 0
        if self.part == "a":
            return slice(number * rows, (number + 1) * rows), slice(None)
        return self.rows, slice(number * columns, (number + 1) * columns)


def save_adapter(
    folder: str | os.PathLike[str],
    lora: LoraConfig,
    adapters: Params,
    tokenizer: "PreTrainedTokenizerBase | None" = None,
    *,
    base: str,
    overwrite: bool = False,
) -> None:
    """Write a folder that `peft.PeftModel.from_pretrained(base_model, folder)` loads.

    The folder appears under its name only once it is complete.

    Args:
        adapters: device or host arrays. Where they span hosts every process must call this; the
            first one writes.
        base: folder or hub id of the base model, for those who load the adapters.
        overwrite: replace `folder`, with everything in it.

    Raises:
        FileExistsError: `folder` exists and `overwrite` is False.
    """
    host = fetch(adapters)
    found: dict[str, np.ndarray] = {}
    for t in _tensors(lora):
        whole = found.setdefault(t.name, np.zeros(t.whole_shape(True), np.float32))
        whole[t.place(True)] = to_hf(t.layout, host[t.leaf][t.part][t.index])
    if jax.process_index() != 0:
        return
    with whole_folder(Path(folder), overwrite=overwrite) as new:
        write_json(new / CONFIG_FILE, peft_config(lora, base))
        write_tensors(new / TENSOR_FILE, found)
        if tokenizer is not None:
            save_tokenizer(tokenizer, new)


def load_adapter(
    folder: str | os.PathLike[str], model: TransformerConfig
) -> tuple[LoraConfig, Params]:
    """Load the adapters of a PEFT folder, as host arrays for `attach`.

    Args:
        model: of the base model.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: adapters of another kind, or not those that its config and the model call for.
    """
    path = Path(folder)
    settings = read_json(path / CONFIG_FILE)
    lora = LoraConfig(
        model,
        select_modules(model, settings["target_modules"], settings.get("exclude_modules")),
        rank=settings["r"],
        alpha=settings["lora_alpha"],
        dropout=settings.get("lora_dropout", 0.0),
    )
    _refuse_other_kinds(path, settings, lora)
    found, joined = load_file(path / TENSOR_FILE), bool(settings.get("rank_pattern"))
    _check_shapes(path / TENSOR_FILE, lora, found, joined)
    adapters = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), abstract_params(lora))
    for t in _tensors(lora):
        x = found[t.name][t.place(joined)]
        adapters[t.leaf][t.part][t.index] = from_hf(t.layout, x, t.shape)
    return lora, adapters


def base_of_adapter(folder: str | os.PathLike[str]) -> str:
    """Return the path or hub id of the model that the adapters of a PEFT folder belong to."""
    return read_json(Path(folder) / CONFIG_FILE)["base_model_name_or_path"]


def peft_config(lora: LoraConfig, base: str) -> dict[str, Any]:
    """Return the content of adapter_config.json."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": _shortest_names(lora),
        "init_lora_weights": True,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "modules_to_save": None,
        "use_rslora": False,
        "use_dora": False,
    } | _patterns(lora)


def _patterns(lora: LoraConfig) -> dict[str, Any]:
    """Return the ranks and alphas of adapters that matrices of one tensor share, if there are."""
    times = {
        t.name.removeprefix("base_model.model.").removesuffix(".lora_A.weight"): t.sharing
        for t in _tensors(lora)
        if t.part == "a" and t.sharing > 1
    }
    if not times:
        return {}
    return {
        "rank_pattern": {name: n * lora.rank for name, n in times.items()},
        "alpha_pattern": {name: n * lora.alpha for name, n in times.items()},
    }


def _shortest_names(lora: LoraConfig) -> list[str]:
    """Return the end of a name where every layer has the adapter, else full names."""
    chosen = set(lora.modules)
    everywhere: dict[str, list[str]] = {}
    for name in {name: 0 for modules in matrices(lora.model).values() for name in modules}:
        end = name.rpartition(OF_EXPERT)[2] if OF_EXPERT in name else name.rpartition(".")[2]
        everywhere.setdefault(f"experts.{end}" if OF_EXPERT in name else end, []).append(name)
    names = set()
    for last, modules in everywhere.items():
        left = [name for name in modules if name in chosen]
        names |= {last} if left == modules else set(left)
    return sorted(names)


def _tensors(lora: LoraConfig) -> Iterator[Tensor]:
    names, chosen, weights = matrices(lora.model), set(lora.modules), weights_by_name(lora.model)
    leaves: dict[tuple, list[str]] = {}
    for leaf, weight in weights.items():
        leaves.setdefault((weight.name, weight.layers), []).append(leaf)
    for leaf, parts in adapter_specs(lora).items():
        kind = "lora_embedding_{}" if leaf == "embed" else "lora_{}.weight"
        for part, spec in parts.items():
            stack = weights[leaf].stack
            shape = spec.shape[len(stack) :]
            weight = weights[leaf]
            sharing = leaves[weight.name, weight.layers]
            for number, module in enumerate(names[leaf]):
                if module in chosen:
                    name = f"base_model.model.{module}.{kind.format(part.upper())}"
                    index = tuple(map(int, np.unravel_index(number, stack))) if stack else ...
                    layout = _layout(name, part, len(shape))
                    own = hf_shape(layout, shape)[0]
                    start, size = (weight.part.start, weight.part.size) if weight.part else (0, own)
                    place = sharing.index(leaf), len(sharing), slice(start, start + own), size
                    yield Tensor(name, leaf, part, index, layout, shape, *place)


def _layout(name: str, part: str, dims: int) -> HFWeight:
    """Return the layout [in..., r] -> [r, in] of a, or [r, out...] -> [out, r] of b."""
    if part == "a":
        return HFWeight(name, ((dims - 1,), tuple(range(dims - 1))))
    return HFWeight(name, (tuple(range(1, dims)), (0,)))


def _check_shapes(path: Path, lora: LoraConfig, found: dict[str, np.ndarray], joined: bool) -> None:
    shapes = {name: x.shape for name, x in found.items()}
    wanted = {t.name: t.whole_shape(joined) for t in _tensors(lora)}
    names = {*shapes, *wanted}
    different = sorted(name for name in names if shapes.get(name) != wanted.get(name))
    if different:
        wrong = [f"{n} {shapes.get(n)}, expected {wanted.get(n)}" for n in different[:5]]
        raise ValueError(f"{path} does not match its config: {'; '.join(wrong)}")


def _refuse_other_kinds(path: Path, settings: dict[str, Any], lora: LoraConfig) -> None:
    plain = {"peft_type": "LORA", "bias": "none", "use_rslora": False, "use_dora": False}
    patterns = dict.fromkeys(("rank_pattern", "alpha_pattern")) | _patterns(lora)
    plain |= {"modules_to_save": None, **patterns}
    one_alone = bool(settings.get("rank_pattern")) != bool(settings.get("alpha_pattern"))
    if one_alone:  # it would be another scale
        patterns = dict.fromkeys(patterns)
        plain |= patterns
    other = {k: settings[k] for k, v in plain.items() if settings.get(k) and settings[k] != v}
    if other:
        raise ValueError(f"{path / CONFIG_FILE}: {other} is not supported, only plain LoRA")
