"""Adapters as folders of the PEFT library: adapter_config.json, adapter_model.safetensors.

https://huggingface.co/docs/peft/developer_guides/checkpoint. A matrix "model.layers.0.mlp.up_proj"
has lora_A.weight [r, in] and lora_B.weight [out, r]; an embedding lora_embedding_A [r, V] and
lora_embedding_B [D, r]. Float32.

The file has the names that modules have when transformers 5 loads the base as a causal model: of
one that sees pictures "model.language_model.layers.0.mlp.up_proj", but of Qwen3.5, which is then a
model of its text alone. Servers get the names of the base's own files. In a model with experts PEFT
(0.21) takes the modules "gate_proj", "up_proj" and "down_proj" for those of experts, by the ends of
their names; those of dense layers and of shared experts are named as parameters,
"....up_proj.weight", whose adapters lie in the file as those of modules do.

A tensor that several of our matrices share, such as the "qkv_proj" of a Phi-3, has one adapter of
their ranks together, whose A has theirs one below the other and whose B is of blocks. One of the
plain rank, as PEFT trains it, is read as well: all of them get its A.
"""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from jaxrl.models.export import save_tokenizer, whole_folder, write_json, write_tensors
from jaxrl.models.families import MULTIMODAL
from jaxrl.models.hf import VISION, open_file, read_json, text_name
from jaxrl.models.lora import (
    OF_EXPERT,
    LoraConfig,
    adapter_specs,
    matrices,
    weights_by_name,
)
from jaxrl.models.transformer import Params, TransformerConfig, abstract_params
from jaxrl.models.weights import HFWeight, from_hf, hf_shape, to_hf
from jaxrl.parallel.processes import fetch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CONFIG_FILE = "adapter_config.json"
TENSOR_FILE = "adapter_model.safetensors"
PREFIX = "base_model.model."
TAKEN_FOR_EXPERTS = ("gate_proj", "up_proj", "down_proj")
# Of which AutoModelForCausalLM reads the text alone.
WITHOUT_PICTURES = ("qwen3_5", "qwen3_5_moe")
# Whose experts transformers 5 joins, and PEFT their adapters.
JOINED_EXPERTS = (
    *("deepseek_v2", "deepseek_v3", "glm4_moe", "glm4_moe_lite", "mixtral", "olmoe"),
    *("qwen3_moe", "qwen3_next"),
)
MERGE_EXPORTS = (
    "or have whole models written: trainer.policy.model.lora.merge_exports=true for exports, "
    "lora_sync_path=None for servers"
)
# Which matrices have adapters the tensors say; some fields say something beside others alone.
SAID_BY_TENSORS = (
    *("target_modules", "exclude_modules", "target_parameters"),
    *("layers_to_transform", "layers_pattern"),
)
SAYS_NOTHING = (
    *("base_model_name_or_path", "revision", "task_type", "inference_mode", "auto_mapping"),
    *("peft_version", "runtime_config", "megatron_core", "qalora_group_size", "loftq_config"),
)
READ = ("r", "lora_alpha", "lora_dropout", "rank_pattern", "alpha_pattern")
ONE_OF: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    # those that leave the base as it is; others are adapters of another base
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva"),
}
MERGE = (
    "merge the adapters into their base with PEFT (merge_and_unload, then save_pretrained) and "
    "give that folder as a model, or train plain LoRA"
)


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
    served: bool = False,
    overwrite: bool = False,
) -> None:
    """Write a folder that `peft.PeftModel.from_pretrained(base_model, folder)` loads.

    The folder appears under its name only once it is complete.

    Args:
        adapters: device or host arrays. Where they span hosts every process must call this; the
            first one writes.
        base: folder or hub id of the base model, for those who load the adapters.
        served: to servers that read the base themselves.
        overwrite: replace `folder`, with everything in it.

    Raises:
        FileExistsError: `folder` exists and `overwrite` is False.
        ValueError: PEFT would not read them, see `check_adapter`.
    """
    check_adapter(lora)
    host = fetch(adapters)
    found: dict[str, np.ndarray] = {}
    for t in _tensors(lora):
        name = _in_base(lora, t.name, served)
        whole = found.setdefault(name, np.zeros(t.whole_shape(True), np.float32))
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
    _refuse_other_kinds(path / CONFIG_FILE, settings)
    with open_file(path / TENSOR_FILE) as file:
        names = {PREFIX + text_name(name.removeprefix(PREFIX)): name for name in [*file.keys()]}
        found = {ours: file.get_tensor(name) for ours, name in names.items()}
    lora = LoraConfig(
        model,
        _modules(path / TENSOR_FILE, model, found),
        rank=settings["r"],
        alpha=settings["lora_alpha"],
        dropout=settings.get("lora_dropout", 0.0),
    )
    joined = _is_joined(path / CONFIG_FILE, settings, lora)
    _check_shapes(path / TENSOR_FILE, lora, found, joined)
    adapters = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), abstract_params(lora))
    for t in _tensors(lora):
        x = found[t.name][t.place(joined)]
        adapters[t.leaf][t.part][t.index] = from_hf(t.layout, x, t.shape)
    return lora, adapters


def check_adapter(lora: LoraConfig) -> None:
    """Refuse adapters that PEFT would not read as they were trained.

    Of a base that is no folder it is not known.

    Raises:
        ValueError: they are of some experts alone, or of experts of a family in which PEFT joins
            no adapters; says what to set.
    """
    origin, every = lora.model.origin, [n for names in matrices(lora.model).values() for n in names]
    chosen = [name for name in lora.modules if OF_EXPERT in name]
    if origin is None or not chosen:
        return
    model_type, most = origin.config["model_type"], [name for name in every if OF_EXPERT in name]
    if model_type not in JOINED_EXPERTS:
        raise ValueError(
            f"lora.target_modules chooses {chosen[0]!r}: PEFT reads no adapters of the experts of "
            f"{model_type}; choose none, {MERGE_EXPORTS}"
        )
    if left := sorted({*most} - {*chosen}):
        raise ValueError(
            f"lora.target_modules chooses {chosen[0]!r} and not {left[0]!r}: PEFT reads adapters "
            f"of all matrices of all experts, or of none; choose so, {MERGE_EXPORTS}"
        )


def base_of_adapter(folder: str | os.PathLike[str]) -> str:
    """Return the path or hub id of the model that the adapters of a PEFT folder belong to."""
    return read_json(Path(folder) / CONFIG_FILE)["base_model_name_or_path"]


def peft_config(lora: LoraConfig, base: str) -> dict[str, Any]:
    """Return the content of adapter_config.json."""
    modules, parameters = _targets(lora)
    # PEFT drops nothing of what it finds as a parameter, and refuses to load what asks for it
    dropout = 0.0 if parameters else lora.dropout
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": dropout,
        "target_modules": modules,
        "init_lora_weights": True,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "modules_to_save": None,
        "use_rslora": False,
        "use_dora": False,
    } | _patterns(lora)
    if parameters:
        settings["target_parameters"] = parameters
    if _sees_pictures(lora):
        settings["exclude_modules"] = f"{VISION}.*"
    return settings


def _patterns(lora: LoraConfig) -> dict[str, Any]:
    """Return the ranks and alphas of adapters that matrices of one tensor share, if there are."""
    times = {
        t.name.removeprefix(PREFIX).removesuffix(".lora_A.weight"): t.sharing
        for t in _tensors(lora)
        if t.part == "a" and t.sharing > 1
    }
    if not times:
        return {}
    return {
        "rank_pattern": {name: n * lora.rank for name, n in times.items()},
        "alpha_pattern": {name: n * lora.alpha for name, n in times.items()},
    }


def _sees_pictures(lora: LoraConfig) -> bool:
    """Return whether the base has a part for pictures, and the text model is inside of it."""
    origin = lora.model.origin
    return bool(origin and origin.tensors) and origin.config["model_type"] in MULTIMODAL


def _in_base(lora: LoraConfig, name: str, served: bool) -> str:
    """Return the name of a tensor as its module is named in the base."""
    ours, origin = f"{PREFIX}model.", lora.model.origin
    if origin is None or not _sees_pictures(lora) or not name.startswith(ours):
        return name
    if origin.config["model_type"] in WITHOUT_PICTURES and not served:
        return name
    return f"{ours}language_model.{name.removeprefix(ours)}"


def _targets(lora: LoraConfig) -> tuple[list[str], list[str]]:
    """Return target_modules and target_parameters.

    A module is the end of a name where every layer has the adapter, else a full name. Inside of a
    model that sees pictures that is one from "layers" on, which all its classes have.
    """
    every = dict.fromkeys(name for modules in matrices(lora.model).values() for name in modules)
    parameters = {
        name
        for name in every
        if lora.model.experts is not None
        and OF_EXPERT not in name
        and name.rpartition(".")[2] in TAKEN_FOR_EXPERTS
    }
    chosen, start = set(lora.modules), "model." if _sees_pictures(lora) else ""
    everywhere: dict[str, list[str]] = {}
    for name in (name for name in every if name not in parameters):
        end = name.rpartition(OF_EXPERT)[2] if OF_EXPERT in name else name.rpartition(".")[2]
        everywhere.setdefault(f"experts.{end}" if OF_EXPERT in name else end, []).append(name)
    names = set()
    for last, modules in everywhere.items():
        left = [name for name in modules if name in chosen]
        names |= {last} if left == modules else {name.removeprefix(start) for name in left}
    named = [f"{name.removeprefix(start)}.weight" for name in parameters & chosen]
    return sorted(names), sorted(named)


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
                    name = f"{PREFIX}{module}.{kind.format(part.upper())}"
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


def _modules(
    path: Path, model: TransformerConfig, found: Mapping[str, np.ndarray]
) -> tuple[str, ...]:
    """Return the matrices that have an adapter in a file.

    Raises:
        ValueError: a tensor is no adapter of one of the model's matrices; says what to do.
    """
    every = dict.fromkeys(name for modules in matrices(model).values() for name in modules)
    chosen = {name: name.removeprefix(PREFIX).rpartition(".lora_")[0] for name in found}
    for name, module in chosen.items():
        if name.endswith(".base_layer.weight"):
            raise ValueError(
                f"{path} has {name}, a matrix of the base, which PEFT saves beside an adapter of "
                "it; save the folder with save_embedding_layers=False"
            )
        if module not in every:
            tied = model.tie_embeddings and module.endswith(("embed_tokens", "lm_head"))
            why = "is tied to another" if tied else "is none of the text model's matrices"
            if OF_EXPERT in f"{module}.":
                why = "is a parameter of all experts, whose adapters are read one by one"
            raise ValueError(f"{path} has {name}, and {module or name} {why}; {MERGE}")
    if not chosen:
        raise ValueError(f"{path} has no adapters; copy the folder again")
    return tuple(name for name in every if name in chosen.values())


def _check_shapes(
    path: Path, lora: LoraConfig, found: Mapping[str, np.ndarray], joined: bool
) -> None:
    shapes = {name: x.shape for name, x in found.items()}
    wanted = {t.name: t.whole_shape(joined) for t in _tensors(lora)}
    names = {*shapes, *wanted}
    different = sorted(name for name in names if shapes.get(name) != wanted.get(name))
    if different:
        wrong = [f"{n} {shapes.get(n)}, expected {wanted.get(n)}" for n in different[:5]]
        raise ValueError(f"{path} does not match its config: {'; '.join(wrong)}")


def _refuse_other_kinds(path: Path, settings: dict[str, Any]) -> None:
    """Refuse what is set in adapter_config.json and is not read."""
    known = {*SAID_BY_TENSORS, *SAYS_NOTHING, *READ}
    other = {k: x for k, x in settings.items() if k not in known and x and k not in ONE_OF}
    other |= {k: settings[k] for k, may in ONE_OF.items() if settings.get(k, may[0]) not in may}
    if other:
        raise ValueError(f"{path}: {other} is not supported, only plain LoRA; {MERGE}")


def _is_joined(path: Path, settings: dict[str, Any], lora: LoraConfig) -> bool:
    """Return whether an adapter that several matrices share has the ranks of all of them."""
    patterns = {k: settings.get(k) or {} for k in ("rank_pattern", "alpha_pattern")}
    if not any(patterns.values()):
        return False
    if patterns != _patterns(lora):
        raise ValueError(f"{path}: {patterns} is not supported, only plain LoRA; {MERGE}")
    return True
