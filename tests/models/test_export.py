"""Exported folders: what transformers loads, shards, tokenizer, atomicity."""

import json
import resource
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors.numpy import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from jaxrl.files import FolderError
from jaxrl.models import TransformerConfig, export, init_params, load_params, save_pretrained
from jaxrl.models.hf import INDEX_FILE, SINGLE_FILE

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
