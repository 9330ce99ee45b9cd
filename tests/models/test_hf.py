"""Folders: parity of the logits with transformers both ways, formats, errors, atomicity."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from jaxrl.models import (
    TransformerConfig,
    forward,
    hf,
    init_params,
    load_config,
    load_params,
    param_specs,
    save_pretrained,
    unembed,
)
from jaxrl.models.transformer import is_spec

TOLERANCE = 1e-4
LENGTH = 24
SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "rms_norm_eps": 1e-5,
}
CASES = [
    pytest.param(model_type, tied, kv_heads, id=f"{model_type}-{'tied' if tied else 'untied'}-{kv}")
    for model_type in ("llama", "qwen2", "qwen3")
    for tied in (True, False)
    for kv_heads, kv in ((2, "gqa"), (4, "mha"))
]
CONFIG = TransformerConfig(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
)


def random_hf_model(model_type="llama", tied=True, kv_heads=2, head_dim=16):
    """A transformers model whose every weight matters: wide matrices, random norms and biases."""
    config = AutoConfig.for_model(
        model_type,
        **SIZES,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        tie_word_embeddings=tied,
        rope_parameters={"rope_type": "default", "rope_theta": 5e4},
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name:
                p.uniform_(0.5, 1.5)
            else:
                p.normal_(0.0, 0.5 if name.endswith("bias") else 0.25)
    return model


def random_tokens() -> np.ndarray:
    return np.random.default_rng(0).integers(0, SIZES["vocab_size"], (2, LENGTH))


def hf_logits(model) -> np.ndarray:
    with torch.no_grad():
        return model(torch.from_numpy(random_tokens())).logits.numpy()


@partial(jax.jit, static_argnums=0)
def our_logits(config, params):
    tokens = jnp.asarray(random_tokens())
    positions = jnp.tile(jnp.arange(LENGTH), (2, 1))
    hidden = forward(config, params, tokens, positions, jnp.ones_like(tokens))
    return unembed(config, params, hidden)


def assert_same_logits(ours, theirs):
    assert np.std(theirs) > 1  # else the tolerance would mean little
    assert np.max(np.abs(np.asarray(ours) - theirs)) < TOLERANCE


def assert_same_params(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.fixture(name="folder")
def folder_fixture(tmp_path) -> Path:
    """A small tied Llama export that tests may damage."""
    folder = tmp_path / "model"
    save_pretrained(folder, CONFIG, init_params(CONFIG, 0))
    return folder


@pytest.mark.parametrize("model_type, tied, kv_heads", CASES)
def test_logits_agree_in_both_directions_and_the_round_trip_is_exact(
    model_type, tied, kv_heads, tmp_path
):
    model = random_hf_model(model_type, tied, kv_heads)
    theirs = hf_logits(model)
    model.save_pretrained(tmp_path / "theirs")
    config = load_config(tmp_path / "theirs")
    params = load_params(tmp_path / "theirs", config)
    assert ("unembed" in params) is not tied
    assert_same_logits(our_logits(config, params), theirs)

    save_pretrained(tmp_path / "ours", config, params)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.float32).eval()
    np.testing.assert_array_equal(hf_logits(again), theirs)
    assert load_config(tmp_path / "ours") == config
    assert_same_params(load_params(tmp_path / "ours", config), params)


@pytest.mark.parametrize("features", [{}, {"attention_bias": True}, {"qk_norm": True}])
def test_our_initialisation_runs_in_transformers(features, tmp_path):
    config = replace(CONFIG, initializer_range=0.3, tie_embeddings=False, **features)
    params = init_params(config, 1)
    save_pretrained(tmp_path / "ours", config, params)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.float32).eval()
    assert_same_logits(our_logits(config, params), hf_logits(model))


def test_right_padding_agrees_with_an_attention_mask(tmp_path):
    model = random_hf_model("qwen3")
    model.save_pretrained(tmp_path)
    config = load_config(tmp_path)
    params = load_params(tmp_path, config)
    tokens = random_tokens()
    mask = np.ones_like(tokens)
    mask[1, 15:] = 0
    with torch.no_grad():
        theirs = model(torch.from_numpy(tokens), attention_mask=torch.from_numpy(mask)).logits
    positions = jnp.tile(jnp.arange(LENGTH), (2, 1))
    hidden = forward(config, params, jnp.asarray(tokens), positions, jnp.asarray(mask))
    ours = np.asarray(unembed(config, params, hidden))
    valid = mask.astype(bool)
    assert_same_logits(ours[valid], theirs.numpy()[valid])


def test_bfloat16_files_load_in_either_dtype(tmp_path):
    random_hf_model().to(torch.bfloat16).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    config = load_config(tmp_path)
    assert_same_logits(our_logits(config, load_params(tmp_path, config)), hf_logits(model))
    low = load_params(tmp_path, config, dtype=jnp.bfloat16)
    assert {x.dtype for x in jax.tree.leaves(low)} == {jnp.dtype(jnp.bfloat16)}
    wide = load_params(tmp_path, config)
    assert_same_params(jax.tree.map(lambda x: x.astype(jnp.float32), low), wide)


def test_sharded_files_load(tmp_path):
    model = random_hf_model(tied=False)
    model.save_pretrained(tmp_path, max_shard_size="50KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    config = load_config(tmp_path)
    assert_same_logits(our_logits(config, load_params(tmp_path, config)), hf_logits(model))


def test_load_puts_each_leaf_on_its_sharding(folder):
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("fsdp", "model"))
    axes = {"embed": "fsdp", "mlp": "model", "heads": "model"}
    shardings = jax.tree.map(
        lambda s: NamedSharding(mesh, PartitionSpec(*(axes.get(axis) for axis in s.axes))),
        param_specs(CONFIG),
        is_leaf=is_spec,
    )
    params = load_params(folder, CONFIG, shardings=shardings)
    assert jax.tree.map(lambda x: x.sharding, params) == shardings
    # [L, D, H, h] = [3, 32, 4, 8] over fsdp=2 and model=4.
    assert {s.data.shape for s in params["layers"]["wq"].addressable_shards} == {(3, 16, 1, 8)}
    assert_same_params(params, load_params(folder, CONFIG))
    assert_same_params(params, init_params(CONFIG, 0))


def test_export_of_sharded_bfloat16_parameters_is_float32(folder, tmp_path):
    mesh = Mesh(np.array(jax.devices()), ("fsdp",))
    place = NamedSharding(mesh, PartitionSpec(None, "fsdp"))  # dim 1 of the stacked matrices
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), load_params(folder, CONFIG))
    params["layers"]["w_up"] = jax.device_put(params["layers"]["w_up"], place)
    save_pretrained(tmp_path / "bf16", CONFIG, params)
    loaded = load_params(tmp_path / "bf16", CONFIG)
    assert_same_params(loaded, jax.tree.map(lambda x: x.astype(jnp.float32), params))
    assert load_file(tmp_path / "bf16" / hf.SINGLE_FILE)["model.norm.weight"].dtype == np.float32


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


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_failing_export_leaves_nothing_and_keeps_the_old_one(
    overwrite, folder, tmp_path, monkeypatch
):
    def half_written(tensors, path, metadata):
        Path(path).write_bytes(b"half")
        raise OSError("disk full")

    before = load_params(folder, CONFIG)
    monkeypatch.setattr(hf, "save_file", half_written)
    target = folder if overwrite else tmp_path / "new"
    with pytest.raises(OSError, match="disk full"):
        save_pretrained(target, CONFIG, before, overwrite=overwrite)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert_same_params(load_params(folder, CONFIG), before)


def test_missing_folders_and_files_are_named(folder, tmp_path):
    for load in (load_config, partial(load_params, config=CONFIG)):
        with pytest.raises(FileNotFoundError, match=r"nowhere is not a folder.*hf download"):
            load(tmp_path / "nowhere")
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is not valid JSON"):
        load_config(folder)
    (folder / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"config\.json is missing"):
        load_config(folder)
    (folder / hf.SINGLE_FILE).unlink()
    with pytest.raises(FileNotFoundError, match=r"neither model\.safetensors nor"):
        load_params(folder, CONFIG)
    index = {"weight_map": {"model.norm.weight": "part-1.safetensors"}}
    (folder / hf.INDEX_FILE).write_text(json.dumps(index))
    with pytest.raises(FileNotFoundError, match=r"lacks part-1\.safetensors"):
        load_params(folder, CONFIG)


def damage(folder: Path, change) -> None:
    """Rewrite the weights after `change(tensors)`."""
    tensors = load_file(folder / hf.SINGLE_FILE)
    change(tensors)
    save_file(tensors, folder / hf.SINGLE_FILE)


def test_missing_tensors_are_named(folder):
    damage(folder, lambda t: t.pop("model.layers.2.mlp.up_proj.weight"))
    with pytest.raises(ValueError, match=r"lacks the tensors: model\.layers\.2\.mlp\.up_proj"):
        load_params(folder, CONFIG)


def test_wrong_shapes_are_named_with_what_was_expected(folder):
    name = "model.layers.1.self_attn.k_proj.weight"
    damage(folder, lambda t: t.update({name: np.zeros((8, 32), np.float32)}))
    # K * h = 2 * 8 = 16 rows.
    with pytest.raises(ValueError, match=rf"{name} has shape \(8, 32\), expected \(16, 32\)"):
        load_params(folder, CONFIG)


def test_unexplained_tensors_are_listed(folder):
    extra = {f"model.layers.{i}.self_attn.q_proj.bias": np.zeros(32, np.float32) for i in range(12)}
    damage(folder, lambda t: t.update(extra))
    with pytest.raises(ValueError, match=r"does not explain: .*q_proj\.bias.* and 2 more"):
        load_params(folder, CONFIG)


def test_tied_head_and_rotary_buffers_are_ignored(folder):
    extra = {
        "lm_head.weight": np.zeros((61, 32), np.float32),
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(4, np.float32),
    }
    damage(folder, lambda t: t.update(extra))
    assert_same_params(load_params(folder, CONFIG), init_params(CONFIG, 0))


def test_an_untied_config_needs_its_head(folder):
    untied = replace(CONFIG, tie_embeddings=False)
    with pytest.raises(ValueError, match=r"lacks the tensors: lm_head\.weight"):
        load_params(folder, untied)
