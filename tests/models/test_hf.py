"""Loading folders: formats, shards, shardings, the hub, and what is wrong with a folder."""

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import huggingface_hub
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors.numpy import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
)

from jaxrl import hub as hub_module
from jaxrl.models import (
    TransformerConfig,
    config_from_hf,
    forward,
    hf,
    init_params,
    load_config,
    load_params,
    param_specs,
    save_pretrained,
    unembed,
)
from jaxrl.models.hf import ModelError
from jaxrl.models.transformer import is_spec
from jaxrl.models.weights import params_to_hf, read_part

TOLERANCE = 1e-4
LENGTH = 24
SMOLLM2 = Path(__file__).parents[2] / "models" / "smollm2-135m-instruct"
SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "rms_norm_eps": 1e-5,
}
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


def test_a_multimodal_gemma3_loads_as_its_text_model(tmp_path):
    text = SIZES | {"num_key_value_heads": 2, "head_dim": 16, "query_pre_attn_scalar": 16}
    vision = {"hidden_size": 16, "intermediate_size": 16, "image_size": 28, "patch_size": 14}
    config = Gemma3Config(
        text_config=text | {"sliding_window": 8, "initializer_range": 0.25},
        vision_config=vision | {"num_hidden_layers": 1, "num_attention_heads": 2},
        image_token_index=60,
    )
    model = Gemma3ForConditionalGeneration(config).eval()
    model.save_pretrained(tmp_path)
    assert any("vision_tower" in name for name in load_file(tmp_path / hf.SINGLE_FILE))
    config = load_config(tmp_path)
    assert config.sliding_layers == (True, True, True)
    assert_same_logits(our_logits(config, load_params(tmp_path, config)), hf_logits(model))


@pytest.mark.slow
@pytest.mark.skipif(not SMOLLM2.is_dir(), reason="made by examples/smollm2_to_hf.py")
@pytest.mark.parametrize(
    "text",
    [
        "What is the capital of France? The capital of France is Paris, and it lies on the Seine.",
        "def f(x):\n    return x + 1\n" * 6,
    ],
    ids=["prose", "code"],
)
def test_real_weights_give_the_logits_of_transformers(text):
    ids = np.array([AutoTokenizer.from_pretrained(SMOLLM2)(text)["input_ids"]])
    model = AutoModelForCausalLM.from_pretrained(SMOLLM2, dtype=torch.float32).eval()
    with torch.no_grad():
        theirs = model(torch.from_numpy(ids)).logits.numpy()
    config = load_config(SMOLLM2)
    params, positions = load_params(SMOLLM2, config), np.arange(ids.shape[1])[None]
    hidden = jax.jit(forward, static_argnums=0)(
        config, params, ids, positions, np.ones_like(positions)
    )
    ours = jax.jit(unembed, static_argnums=0)(config, params, hidden)
    assert_same_logits(ours, theirs)  # logits up to 41
    np.testing.assert_array_equal(np.argmax(ours, -1), theirs.argmax(-1))


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


def test_a_part_that_several_devices_hold_is_read_once(folder, monkeypatch):
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "fsdp"))
    shardings = jax.tree.map(
        lambda s: (
            NamedSharding(mesh, PartitionSpec(*[None] * (len(s.shape) - 1), "fsdp"))
            if s.shape[-1] % 4 == 0
            else NamedSharding(mesh, PartitionSpec())
        ),
        param_specs(CONFIG),
        is_leaf=is_spec,
    )
    read = []
    monkeypatch.setattr(
        hf, "read_part", lambda weight, *args: read.append(weight.name) or read_part(weight, *args)
    )
    assert_same_params(load_params(folder, CONFIG, shardings=shardings), init_params(CONFIG, 0))
    # final_norm [32]: four parts; w_up [3, 32, 48]: four parts of three layers.
    assert read.count("model.norm.weight") == 4
    assert read.count("model.layers.{i}.mlp.up_proj.weight") == 12


def test_missing_folders_and_files_are_named(folder, tmp_path):
    for load in (load_config, partial(load_params, config=CONFIG)):
        with pytest.raises(FileNotFoundError, match=r"nowhere is not a folder; .*OWNER/NAME"):
            load(tmp_path / "nowhere")
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json is not valid JSON"):
        load_config(folder)
    (folder / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"config\.json is missing"):
        load_config(folder)
    (folder / hf.SINGLE_FILE).unlink()
    with pytest.raises(ModelError, match=r"neither model\.safetensors nor"):
        load_params(folder, CONFIG)
    index = {"weight_map": {"model.norm.weight": "part-1.safetensors"}}
    (folder / hf.INDEX_FILE).write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"lacks part-1\.safetensors"):
        load_params(folder, CONFIG)


@pytest.fixture(name="hub")
def hub_fixture(folder, tmp_path, monkeypatch) -> Path:
    """A hub cache that holds the folder as "some/model"; the hub itself is out of reach."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    repo = tmp_path / "cache" / "models--some--model"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text("abc")
    shutil.copytree(folder, repo / "snapshots" / "abc")
    hub_module._downloaded.cache_clear()
    yield repo
    hub_module._downloaded.cache_clear()


def test_a_hub_id_stands_for_a_folder(hub):
    assert load_config("some/model") == CONFIG
    assert_same_params(load_params("some/model", CONFIG), init_params(CONFIG, 0))
    assert hf.eos_token_ids("some/model") == []


def test_a_hub_model_that_cannot_be_had_is_named_with_cause_and_fix(hub):
    with pytest.raises(FileNotFoundError, match="'other/model' is neither a folder nor") as caught:
        load_config("other/model")
    for part in ("offline", "hf auth login", "hf download other/model --local-dir"):
        assert part in str(caught.value).lower()


def test_truncated_weights_are_named(folder):
    path = folder / hf.SINGLE_FILE
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelError, match=r"model\.safetensors is not a whole safetensors file"):
        load_params(folder, CONFIG)


def damage(folder: Path, change) -> None:
    """Rewrite the weights after `change(tensors)`."""
    tensors = load_file(folder / hf.SINGLE_FILE)
    change(tensors)
    save_file(tensors, folder / hf.SINGLE_FILE)


def test_missing_tensors_are_named(folder):
    damage(folder, lambda t: t.pop("model.layers.2.mlp.up_proj.weight"))
    with pytest.raises(ModelError, match=r"lacks the tensors: model\.layers\.2\.mlp\.up_proj"):
        load_params(folder, CONFIG)


def test_quantised_weights_are_refused(folder):
    name = "model.layers.1.self_attn.k_proj.weight"
    damage(folder, lambda t: t.update({name: np.zeros((16, 32), np.int8)}))
    with pytest.raises(ModelError, match=rf"holds quantised weights.*{name} is of I8"):
        load_params(folder, CONFIG)


def test_an_index_without_a_map_is_named(folder):
    (folder / hf.SINGLE_FILE).unlink()
    (folder / hf.INDEX_FILE).write_text("{}")
    with pytest.raises(ModelError, match=r"index\.json has no weight_map; copy the file again"):
        load_params(folder, CONFIG)


def test_wrong_shapes_are_named_with_what_was_expected(folder):
    name = "model.layers.1.self_attn.k_proj.weight"
    damage(folder, lambda t: t.update({name: np.zeros((8, 32), np.float32)}))
    # K * h = 2 * 8 = 16 rows.
    with pytest.raises(ModelError, match=rf"{name} has shape \(8, 32\), expected \(16, 32\)"):
        load_params(folder, CONFIG)


def test_unexplained_tensors_are_listed(folder):
    extra = {f"model.layers.{i}.self_attn.q_proj.bias": np.zeros(32, np.float32) for i in range(12)}
    damage(folder, lambda t: t.update(extra))
    with pytest.raises(ValueError, match=r"does not explain: .*q_proj\.bias.* and 2 more"):
        load_params(folder, CONFIG)


def test_rotary_buffers_are_ignored(folder):
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(4, np.float32)}
    damage(folder, lambda t: t.update(extra))
    assert_same_params(load_params(folder, CONFIG), init_params(CONFIG, 0))


def test_random_weights_need_the_same_architecture(folder):
    options = {"random_init": True, "seed": 0, "shardings": None}
    assert_same_params(hf.load_or_init(folder, CONFIG, **options), init_params(CONFIG, 0))
    with pytest.raises(ValueError, match=r"of another model; .*'rope_theta': \(10000.0, 5.0\)"):
        hf.load_or_init(folder, replace(CONFIG, rope_theta=5.0), **options)
    other = replace(CONFIG, rope_theta=5.0)
    hf.load_or_init(folder, other, overrides={"rope_theta": 5.0}, **options)


def test_an_untied_config_needs_its_head(folder):
    untied = replace(CONFIG, tie_embeddings=False)
    with pytest.raises(ModelError, match=r"lacks the tensors: lm_head\.weight"):
        load_params(folder, untied)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_weight_that_is_not_finite_is_refused_by_name(folder, value):
    name, file = "model.layers.1.self_attn.q_proj.weight", folder / "model.safetensors"
    tensors = load_file(file)
    broken = tensors[name].copy()
    broken[0, 0] = value
    save_file(tensors | {name: broken}, file)
    with pytest.raises(ModelError, match=f"the tensor '{name}' holds values that are not finite"):
        load_params(folder, CONFIG)


def test_a_multimodal_qwen3_5_with_stacked_experts_loads_as_its_text_model(tmp_path):
    """As published: other names, all experts of a layer in one tensor, images and a next token."""
    text = {
        "num_hidden_layers": 2,
        "hidden_size": 16,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "vocab_size": 31,
        "full_attention_interval": 2,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 4,
        "linear_value_head_dim": 6,
        "num_experts": 3,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 10,
        "shared_expert_intermediate_size": 12,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.5,
            "mrope_section": [1, 1, 0],
            "mrope_interleaved": True,
        },
    }
    whole = {"model_type": "qwen3_5_moe", "text_config": text | {"model_type": "qwen3_5_moe_text"}}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    config = load_config(tmp_path)
    assert config.mixers == ("delta", "attention") and config.rotary_dim == 4
    params = init_params(config, 0)
    apart = dict(params_to_hf(config, params))
    tensors = {k: x for k, x in apart.items() if ".experts." not in k}
    for layer in range(2):
        experts = f"model.layers.{layer}.mlp.experts"
        of_all = [
            [apart[f"{experts}.{e}.{part}_proj.weight"] for part in ("gate", "up", "down")]
            for e in range(3)
        ]
        both = np.stack([np.concatenate([gate, up]) for gate, up, _ in of_all])
        tensors[f"{experts}.gate_up_proj"] = both  # [3, 2 * 10, 16]
        tensors[f"{experts}.down_proj"] = np.stack([down for _, _, down in of_all])
    renamed = {k.replace("model.", "model.language_model.", 1): x for k, x in tensors.items()}
    others = {"model.visual.patch.weight": np.zeros(3), "mtp.fc.weight": np.zeros(3)}
    save_file(renamed | others, tmp_path / "model.safetensors")
    loaded = load_params(tmp_path, config)
    jax.tree.map(np.testing.assert_array_equal, loaded, params)


def test_a_head_beside_tied_embeddings_must_be_them(folder):
    """transformers 5 takes the head of such files for what it is, others tie it all the same."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    table = tensors["model.embed_tokens.weight"]
    save_file(tensors | {"lm_head.weight": table.astype(np.float32)}, file)
    assert_same_params(load_params(folder, load_config(folder)), init_params(CONFIG, 0))
    other = table.copy()
    other[60, 31] += 1  # the last
    save_file(tensors | {"lm_head.weight": other}, file)
    message = (
        r"tie_word_embeddings=true, .* lm_head.weight is another matrix than model.embed_tokens.*"
        r"model_config_kwargs={'tie_word_embeddings': False} .*; .* take lm_head.weight out"
    )
    with pytest.raises(ModelError, match=message):
        load_params(folder, load_config(folder))
    config = load_config(folder, {"tie_word_embeddings": False})  # the first way out
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    np.testing.assert_array_equal(load_params(folder, config)["unembed"], other.T)
    assert_same_logits(our_logits(config, load_params(folder, config)) * 50, hf_logits(model) * 50)


@pytest.mark.parametrize("tied", [True, False])
def test_a_mistral3_that_does_not_say_so_is_tied_where_it_has_no_head(tied, tmp_path):
    text = SIZES | {"model_type": "mistral", "num_key_value_heads": 2, "head_dim": 8}
    whole = {"model_type": "mistral3", "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    assert load_config(tmp_path).tie_embeddings  # the default of Mistral3Config
    made = config_from_hf(text | {"tie_word_embeddings": tied, "sliding_window": None})
    params = init_params(made, 0)
    names = {"model.": "language_model.model.", "lm_head.": "language_model.lm_head."}
    tensors = {
        names[first] + name.removeprefix(first): x
        for name, x in params_to_hf(made, params)
        for first in names
        if name.startswith(first)
    }
    save_file(tensors, tmp_path / "model.safetensors")
    config = load_config(tmp_path)
    assert config.tie_embeddings == tied
    assert_same_params(load_params(tmp_path, config), params)
