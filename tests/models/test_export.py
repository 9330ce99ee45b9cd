"""Exported folders: what transformers loads, shards, tokenizer, atomicity."""

import copy
import dataclasses
import json
import os
import re
import resource
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)

from jaxrl.files import FolderError
from jaxrl.models import (
    TransformerConfig,
    export,
    init_params,
    load_config,
    load_params,
    save_pretrained,
)
from jaxrl.models.hf import INDEX_FILE, SINGLE_FILE
from tests.models.tiny import (
    MODELS,
    SIZES,
    hf_logits,
    multimodal_folder,
    our_logits,
    random_hf_model,
)

CONFIG = TransformerConfig(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
)


def assert_same_params(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.fixture(name="folder")
def folder_fixture(tmp_path) -> Path:
    """A small tied Llama export."""
    folder = tmp_path / "model"
    save_pretrained(folder, CONFIG, init_params(CONFIG, 0))
    return folder


def test_export_of_sharded_bfloat16_parameters_is_float32(folder, tmp_path):
    mesh = Mesh(np.array(jax.devices()), ("fsdp",))
    place = NamedSharding(mesh, PartitionSpec(None, "fsdp"))  # dim 1 of the stacked matrices
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), load_params(folder, CONFIG))
    params["layers"]["w_up"] = jax.device_put(params["layers"]["w_up"], place)
    save_pretrained(tmp_path / "bf16", CONFIG, params)
    loaded = load_params(tmp_path / "bf16", CONFIG)
    assert_same_params(loaded, jax.tree.map(lambda x: x.astype(jnp.float32), params))
    assert load_file(tmp_path / "bf16" / SINGLE_FILE)["model.norm.weight"].dtype == np.float32


def small_tokenizer() -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.WordLevel({"<pad>": 0, "<s>": 1, "<end>": 2, "a": 3, "b": 4}, "a"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="<end>",
        model_max_length=640,
        chat_template="{% for m in messages %}{{ m['content'] }} <end>{% endfor %}",
    )


def test_export_with_a_tokenizer_serves_chat(tmp_path):
    folder = tmp_path / "chat"
    save_pretrained(folder, CONFIG, init_params(CONFIG, 0), small_tokenizer())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    chat = [{"role": "user", "content": "b a"}]
    assert tokenizer.apply_chat_template(chat, return_dict=False) == [4, 3, 2]
    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    assert json.loads((folder / "generation_config.json").read_text()) == ids
    for name, value in ids.items():
        assert getattr(model.config, name) == getattr(model.generation_config, name) == value
    assert model.config.max_position_embeddings == 640


def test_export_refuses_an_existing_folder_unless_told(folder):
    (folder / "notes.txt").write_text("mine")
    params = init_params(CONFIG, 7)
    with pytest.raises(FileExistsError, match=r"model exists; pass overwrite=True"):
        save_pretrained(folder, CONFIG, params)
    assert (folder / "notes.txt").exists()
    save_pretrained(folder, CONFIG, params, overwrite=True)
    assert_same_params(load_params(folder, CONFIG), params)
    assert not (folder / "notes.txt").exists()
    assert [path.name for path in folder.parent.iterdir()] == ["model"]


def test_a_full_disk_is_named(tmp_path):
    """No file may grow beyond 20 kB; the weights are some 100 kB."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(FolderError, match="could not write the model folder .*free space"):
            save_pretrained(tmp_path / "new", CONFIG, init_params(CONFIG, 0))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_failing_export_leaves_nothing_and_keeps_the_old_one(
    overwrite, folder, tmp_path, monkeypatch
):
    def half_written(tensors, path, metadata):
        Path(path).write_bytes(b"half")
        raise OSError("disk full")

    before = load_params(folder, CONFIG)
    monkeypatch.setattr(export, "save_file", half_written)
    target = folder if overwrite else tmp_path / "new"
    with pytest.raises(FolderError, match=f"could not write the model folder {target} .disk full"):
        save_pretrained(target, CONFIG, before, overwrite=overwrite)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert_same_params(load_params(folder, CONFIG), before)


def test_a_large_export_is_sharded_with_an_index(folder, tmp_path):
    params = init_params(CONFIG, 0)
    save_pretrained(tmp_path / "sharded", CONFIG, params, max_shard_bytes=20_000)
    index = json.loads((tmp_path / "sharded" / INDEX_FILE).read_text())
    files = sorted(path.name for path in (tmp_path / "sharded").glob("*.safetensors"))
    assert files == sorted(set(index["weight_map"].values()))
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    whole = load_file(folder / SINGLE_FILE)
    sharded = {}
    for file in files:
        tensors = load_file(tmp_path / "sharded" / file)
        assert sum(x.nbytes for x in tensors.values()) <= 20_000
        assert {name for name, f in index["weight_map"].items() if f == file} == tensors.keys()
        sharded |= tensors
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in whole.values())
    assert sharded.keys() == whole.keys()
    assert all(sharded[name].tobytes() == x.tobytes() for name, x in whole.items())
    assert_same_params(load_params(tmp_path / "sharded", CONFIG), params)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "sharded", dtype=torch.float32)
    for name, x in theirs.state_dict().items():
        if name in whole:
            np.testing.assert_array_equal(x.numpy(), whole[name])


def test_a_tensor_larger_than_the_limit_has_a_file_of_its_own():
    # 4, then 9 > 5 alone, then 2 + 3.
    plan = export._plan({"a": 4, "b": 9, "c": 2, "d": 3}, 5)
    assert list(plan.values()) == [["a"], ["b"], ["c", "d"]]
    assert export._plan({"a": 4, "b": 1}, 5) == {SINGLE_FILE: ["a", "b"]}


# ---------------------------------------------------------------- of a folder that was read


def written(folder, name="config.json"):
    return json.loads((folder / name).read_text())


def write_config(folder, content, name="config.json"):
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(json.dumps(content))


def exported(folder, out, **options):
    """The architecture in a folder with random weights, exported; what config.json says."""
    config = load_config(folder)
    save_pretrained(out, config, init_params(config, 0), **options)
    return written(out)


@pytest.mark.parametrize("name", MODELS)
def test_every_key_of_config_json_is_that_of_the_base(name, tmp_path):
    model_type, fields = MODELS[name]
    more = {"max_position_embeddings": 777, "bos_token_id": 1, "eos_token_id": [2, 3]}
    AutoConfig.for_model(model_type, **more | copy.deepcopy(SIZES | fields)).save_pretrained(
        tmp_path / "base"
    )
    base = written(tmp_path / "base") | {"of_the_base_alone": [1], "torch_dtype": "bfloat16"}
    write_config(tmp_path / "base", base)
    found = exported(tmp_path / "base", tmp_path / "out", tokenizer=small_tokenizer())
    named = {k: "float32" for k in ("dtype", "torch_dtype") if k in base}  # of random weights
    assert found == base | named
    ends = {"bos_token_id": 1, "eos_token_id": [2, 3], "pad_token_id": 0}  # the tokenizer has one
    assert written(tmp_path / "out", "generation_config.json") == ends
    # what training changes, and nothing else
    config = load_config(tmp_path / "base")
    save_pretrained(tmp_path / "untied", *export.untied(config, init_params(config, 0)))
    assert written(tmp_path / "untied") == found | {"tie_word_embeddings": False}
    assert load_config(tmp_path / "untied") == dataclasses.replace(config, tie_embeddings=False)


QWEN2 = {  # as transformers 4 wrote it
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "auto_map": {"AutoConfig": "configuration_qwen2.Qwen2Config"},
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rope_theta": 1e6,
    "rope_scaling": {"type": "linear", "factor": 4.0},
    "max_position_embeddings": 131_072,
    "sliding_window": 131_072,
    "use_sliding_window": False,
    "torch_dtype": "bfloat16",
    "eos_token_id": 5,
}


def test_the_form_of_an_older_config_json_stays(tmp_path):
    write_config(tmp_path / "base", QWEN2)
    wanted = QWEN2 | {"torch_dtype": "float32"}
    del wanted["auto_map"]  # whose code is not exported
    assert exported(tmp_path / "base", tmp_path / "out") == wanted
    # of other rotary positions both forms are written, and the context length that goes with them
    changes = {"max_position_embeddings": 512, "rope_scaling": {"rope_type": "linear", "factor": 2}}
    config = load_config(tmp_path / "base", changes)
    save_pretrained(tmp_path / "other", config, init_params(config, 0))
    scaling = {"rope_type": "linear", "factor": 2.0}
    assert written(tmp_path / "other") == wanted | {
        "max_position_embeddings": 512,
        "rope_scaling": scaling,
        "rope_parameters": scaling | {"rope_theta": 1e6},
    }
    assert load_config(tmp_path / "other") == config


def test_generation_config_json_is_that_of_the_base(tmp_path):
    write_config(tmp_path / "base", QWEN2)
    settings = {"temperature": 0.6, "eos_token_id": [5, 7], "transformers_version": "4.51.0"}
    write_config(tmp_path / "base", settings, "generation_config.json")
    exported(tmp_path / "base", tmp_path / "out", tokenizer=small_tokenizer())
    assert written(tmp_path / "out", "generation_config.json") == settings


def test_tensors_keep_their_dtypes_and_a_float32_export_is_whole(tmp_path):
    """A checkpoint in bfloat16 with a bias of the router in float32, as DeepSeek-V3's is."""
    model_type, fields = MODELS["deepseek-v3"]
    model = random_hf_model(model_type, **fields).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "base")
    path = tmp_path / "base" / SINGLE_FILE
    tensors = load_file(path)
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    tensors[bias] = np.linspace(0.1, 0.2, 6, dtype=np.float32)
    save_file(tensors, path, metadata={"format": "pt"})
    config = load_config(tmp_path / "base")
    params = load_params(tmp_path / "base", config)
    save_pretrained(tmp_path / "out", config, params)
    found = load_file(tmp_path / "out" / SINGLE_FILE)
    assert found.keys() == tensors.keys()
    for name, x in found.items():
        assert (x.dtype, x.tobytes()) == (tensors[name].dtype, tensors[name].tobytes())
    assert written(tmp_path / "out") == written(tmp_path / "base")
    assert (
        "bfloat16, of which a number has 8 significant bits"
        in (tmp_path / "out" / "README.md").read_text()
    )

    # bfloat16 has 8 bits: beside 1 the next is 1 + 2**-7, and 1 + 2**-9 is rounded to 1
    params["final_norm"] = jnp.full_like(params["final_norm"], 1 + 2**-9)
    for dtype, value in ((None, 1.0), ("float32", 1 + 2**-9)):
        save_pretrained(tmp_path / "trained", config, params, dtype=dtype, overwrite=True)
        again = load_params(tmp_path / "trained", config)["final_norm"]
        np.testing.assert_array_equal(again, np.full(32, value, np.float32))
        named = {"dtype": dtype} if dtype else {}
        assert written(tmp_path / "trained") == written(tmp_path / "base") | named
    assert_same_params(load_params(tmp_path / "trained", config), params)


@pytest.mark.parametrize(
    "model_type",
    ["gemma3", *(pytest.param(n, marks=pytest.mark.slow) for n in ("mistral3", "qwen3_5"))],
)
def test_a_model_that_sees_pictures_is_written_whole(model_type, tmp_path):
    base, out = tmp_path / "base", tmp_path / "out"
    model = multimodal_folder(model_type, base)
    (base / "preprocessor_config.json").write_text('{"size": 28}')
    config = load_config(base)
    params = load_params(base, config)
    save_pretrained(out, config, params, max_shard_bytes=20_000)
    assert written(out) == written(base)
    assert written(out, "preprocessor_config.json") == {"size": 28}
    wanted, found = load_file(base / SINGLE_FILE), {}
    for path in out.glob("*.safetensors"):
        found |= load_file(path)
    assert found.keys() == wanted.keys() == written(out, INDEX_FILE)["weight_map"].keys()
    assert all(x.tobytes() == wanted[name].tobytes() for name, x in found.items())
    params["final_norm"] *= 2
    save_pretrained(out, config, params, overwrite=True)
    again = AutoModelForImageTextToText.from_pretrained(out).eval()
    np.testing.assert_allclose(hf_logits(again), our_logits(config, params), atol=1e-4)
    assert np.abs(hf_logits(again) - hf_logits(model)).max() > 0.1

    # as transformers 4 named the tensors
    starts = {
        "model.language_model.": "language_model.model.",
        "lm_head.": "language_model.lm_head.",
    }
    named = {
        re.sub(f"^({'|'.join(starts)})", lambda m: starts[m[0]], k): x for k, x in wanted.items()
    }
    save_file(named, base / SINGLE_FILE, metadata={"format": "pt"})
    later = load_config(base)
    save_pretrained(out, later, params, overwrite=True)
    assert load_file(out / SINGLE_FILE).keys() == named.keys()
    save_pretrained(tmp_path / "without", later, params, with_others=False)
    assert not [k for k in load_file(tmp_path / "without" / SINGLE_FILE) if "vision" in k]
    os.rename(base / SINGLE_FILE, tmp_path / "away")
    with pytest.raises(FolderError, match=r"base, which training began from, .*put it back"):
        save_pretrained(out, later, params, overwrite=True)
    assert load_file(out / SINGLE_FILE).keys() == named.keys()
    os.rename(tmp_path / "away", base / SINGLE_FILE)

    # random weights have no tower: a model of text alone
    (base / SINGLE_FILE).unlink()
    alone = written(base)["text_config"]["model_type"]
    assert exported(base, tmp_path / "text")["model_type"] == alone
    assert load_config(tmp_path / "text") == config
    AutoModelForCausalLM.from_pretrained(tmp_path / "text")


def test_an_export_of_text_needs_nothing_of_its_base_any_more(folder, tmp_path):
    config = load_config(folder)
    params = load_params(folder, config)
    save_pretrained(tmp_path / "before", config, params)
    os.rename(folder, tmp_path / "away")
    save_pretrained(tmp_path / "after", config, params)
    for name in ("config.json", SINGLE_FILE):
        before, after = (tmp_path / side / name for side in ("before", "after"))
        assert before.read_bytes() == after.read_bytes()


def test_a_value_head_that_was_drawn_is_written_in_float32(folder, tmp_path):
    in_bfloat16 = dataclasses.replace(load_config(folder))
    save_pretrained(
        tmp_path / "base", in_bfloat16, load_params(folder, in_bfloat16), dtype="bfloat16"
    )
    critic = dataclasses.replace(load_config(tmp_path / "base"), value_head="score")
    save_pretrained(tmp_path / "critic", critic, init_params(critic, 0))
    found = load_file(tmp_path / "critic" / SINGLE_FILE)
    assert found["score.weight"].dtype == np.float32
    assert {str(x.dtype) for name, x in found.items() if name != "score.weight"} == {"bfloat16"}


def test_experts_that_lie_in_one_tensor_do_so_in_the_export(tmp_path):
    model_type, fields = MODELS["qwen3-moe-dense-first"]
    random_hf_model(model_type, **fields).save_pretrained(tmp_path / "base")
    path = tmp_path / "base" / SINGLE_FILE
    tensors = load_file(path)
    apart = load_params(tmp_path / "base", load_config(tmp_path / "base"))
    for layer in (1, 2):
        name = f"model.layers.{layer}.mlp.experts"
        gate, up, down = (
            [tensors.pop(f"{name}.{e}.{part}_proj.weight") for e in range(6)]
            for part in ("gate", "up", "down")
        )
        both = [np.concatenate(pair) for pair in zip(gate, up, strict=True)]
        tensors[f"{name}.gate_up_proj"] = np.stack(both)  # [6, 2 * 24, 32]
        tensors[f"{name}.down_proj"] = np.stack(down)
    save_file(tensors, path, metadata={"format": "pt"})
    config = load_config(tmp_path / "base")
    params = load_params(tmp_path / "base", config)
    assert_same_params(params, apart)
    save_pretrained(tmp_path / "out", config, params)
    found = load_file(tmp_path / "out" / SINGLE_FILE)
    assert found.keys() == tensors.keys()
    assert all(x.tobytes() == tensors[name].tobytes() for name, x in found.items())
