"""PEFT folders: names, shapes and config; and what PEFT itself makes of them."""

import copy
import dataclasses
import json
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import peft
import pytest
import torch
from safetensors.numpy import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from jaxrl.models import init_params, load_config, load_params, save_pretrained
from jaxrl.models.linear import merge
from jaxrl.models.lora import attach
from jaxrl.models.peft_format import (
    JOINED_EXPERTS,
    ONE_OF,
    READ,
    SAID_BY_TENSORS,
    SAYS_NOTHING,
    load_adapter,
    save_adapter,
)
from tests.models import tiny
from tests.models.test_lora import MODEL, TOKENS, logits, lora_of, moved
from tests.models.tiny import MODELS, SIZES


def test_names_shapes_and_config(tmp_path):
    lora = lora_of(
        ["q_proj", "o_proj", "embed_tokens", r"model\.layers\.1\..*up_proj"], dropout=0.1
    )
    adapters = moved(lora)
    save_adapter(tmp_path / "adapter", lora, adapters, base="models/tiny")
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    layers = "base_model.model.model.layers"
    assert {name.removeprefix(layers): x.shape for name, x in tensors.items()} == {
        "base_model.model.model.embed_tokens.lora_embedding_A": (4, 32),  # [r, V]
        "base_model.model.model.embed_tokens.lora_embedding_B": (16, 4),  # [D, r]
        ".0.self_attn.q_proj.lora_A.weight": (4, 16),  # [r, D]
        ".1.self_attn.q_proj.lora_A.weight": (4, 16),
        ".0.self_attn.q_proj.lora_B.weight": (32, 4),  # [H h, r]
        ".1.self_attn.q_proj.lora_B.weight": (32, 4),
        ".0.self_attn.o_proj.lora_A.weight": (4, 32),  # [r, H h]
        ".1.self_attn.o_proj.lora_A.weight": (4, 32),
        ".0.self_attn.o_proj.lora_B.weight": (16, 4),  # [D, r]
        ".1.self_attn.o_proj.lora_B.weight": (16, 4),
        ".1.mlp.up_proj.lora_A.weight": (4, 16),
        ".1.mlp.up_proj.lora_B.weight": (32, 4),
    }
    q_b = np.asarray(adapters["wq"]["b"])  # [L, r, H, h]; head 2, element 5 is row 2 * 8 + 5
    np.testing.assert_array_equal(
        tensors[f"{layers}.1.self_attn.q_proj.lora_B.weight"][21], q_b[1, :, 2, 5]
    )
    o_a = np.asarray(adapters["wo"]["a"])  # [L, H, h, r]
    np.testing.assert_array_equal(
        tensors[f"{layers}.0.self_attn.o_proj.lora_A.weight"][:, 21], o_a[0, 2, 5]
    )
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text()) == {
        "base_model_name_or_path": "models/tiny",
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": 8,
        "lora_dropout": 0.1,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": 4,
        "target_modules": ["embed_tokens", "model.layers.1.mlp.up_proj", "o_proj", "q_proj"],
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": False,
    }
    with pytest.raises(FileExistsError, match="adapter exists"):
        save_adapter(tmp_path / "adapter", lora, adapters, base="models/tiny")

    again, loaded = load_adapter(tmp_path / "adapter", MODEL)
    assert again == lora
    unused = {"w_up": {part: x.at[0].set(0) for part, x in adapters["w_up"].items()}}
    jax.tree.map(np.testing.assert_array_equal, loaded, adapters | unused)


def test_folders_that_are_refused(tmp_path):
    lora = lora_of("v_proj")
    save_adapter(tmp_path, lora, moved(lora), base="", overwrite=True)
    path = tmp_path / "adapter_model.safetensors"
    tensors = load_file(path)
    name = "base_model.model.model.layers.0.self_attn.v_proj.lora_A.weight"
    save_file({**tensors, name: tensors[name][:, :3].copy()}, path)
    with pytest.raises(ValueError, match=rf"{name} \(4, 3\), expected \(4, 16\)"):
        load_adapter(tmp_path, MODEL)
    settings = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings | {"use_dora": True}))
    with pytest.raises(ValueError, match="{'use_dora': True} is not supported, only plain LoRA"):
        load_adapter(tmp_path, MODEL)


def test_the_same_logits_in_peft_and_back(tmp_path):
    lora, base = lora_of([".*"]), init_params(MODEL, 0)
    adapters = moved(lora)
    save_pretrained(tmp_path / "base", MODEL, base)
    save_adapter(tmp_path / "adapter", lora, adapters, base=str(tmp_path / "base"))
    theirs = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")
    with torch.no_grad():
        expected = theirs(torch.tensor(np.asarray(TOKENS))).logits.numpy()
    np.testing.assert_allclose(logits(attach(lora, base, adapters)), expected, atol=1e-4)

    settings = peft.LoraConfig(
        task_type="CAUSAL_LM", r=3, lora_alpha=5, target_modules="all-linear", bias="none"
    )
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    model = peft.get_peft_model(model, settings)
    torch.manual_seed(0)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1)
    model.save_pretrained(tmp_path / "theirs")
    with torch.no_grad():
        expected = model.eval()(torch.tensor(np.asarray(TOKENS))).logits.numpy()
    again, loaded = load_adapter(tmp_path / "theirs", MODEL)
    assert (again.rank, again.alpha, len(again.modules)) == (3, 5, 14)  # 7 matrices x 2 layers
    ours = logits(attach(again, base, jax.tree.map(jnp.asarray, loaded)))
    np.testing.assert_allclose(ours, expected, atol=1e-4)
    print("largest difference", np.abs(np.asarray(ours) - expected).max())


# ---------------------------------------------------------------- by PEFT itself

FIRST = {model_type: name for name, (model_type, _) in reversed(MODELS.items())}
# Kinds of names and layers; the slow run has a model of every family.
QUICK = ("llama", "phi3", "qwen2-moe", "qwen3-moe-dense-first", "deepseek-v3", "qwen3.5")
KINDS = [
    name if name in QUICK else pytest.param(name, marks=pytest.mark.slow)
    for name in sorted({*QUICK, *FIRST.values()})
]


def made_of(folder, target="all-linear"):
    """The model in a folder, and adapters of it as after some training."""
    config = load_config(folder)
    lora = lora_of(target, config)
    adapters = jax.tree.map(np.asarray, moved(lora))
    params = load_params(folder, config)
    return lora, adapters, params, merge(attach(lora, params, adapters))


def assert_same_in_peft(folder, model, lora, adapters, merged, base, **options):
    """PEFT's model of a folder that we write, whose logits are ours."""
    save_adapter(folder / "adapter", lora, adapters, base=str(base), **options)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*(missing|unexpected) adapter keys")
        theirs = peft.PeftModel.from_pretrained(model, folder / "adapter").eval()
    ours = tiny.our_logits(lora.model, merged)
    with theirs.disable_adapter():
        without = tiny.hf_logits(theirs)
    assert np.abs(ours - without).max() > 0.5
    np.testing.assert_allclose(tiny.hf_logits(theirs), ours, atol=1e-4)
    return theirs


def assert_comes_back(folder, theirs, lora, adapters, merged):
    theirs.save_pretrained(folder / "again")
    again, found = load_adapter(folder / "again", lora.model)
    assert again == lora
    jax.tree.map(np.testing.assert_array_equal, found, adapters)
    theirs.merge_and_unload().save_pretrained(folder / "merged")
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6),
        load_params(folder / "merged", load_config(folder / "merged")),
        merged,
    )


@pytest.mark.parametrize("name", KINDS)
def test_adapters_of_all_matrices_go_to_peft_and_come_back(name, tmp_path):
    model_type, fields = MODELS[name]
    model = tiny.random_hf_model(model_type, **fields)
    model.save_pretrained(tmp_path / "base")
    lora, adapters, _, merged = made_of(tmp_path / "base")
    theirs = assert_same_in_peft(tmp_path, model, lora, adapters, merged, tmp_path / "base")
    assert_comes_back(tmp_path, theirs, lora, adapters, merged)


# Of JOINED_EXPERTS; the quick run has the one with a dense layer, whose names are like experts'.
@pytest.mark.parametrize(
    "name",
    [
        "qwen3-moe-dense-first",
        *(
            pytest.param(FIRST[model_type], marks=pytest.mark.slow)
            for model_type in JOINED_EXPERTS
            if model_type != "qwen3_moe"
        ),
    ],
)
def test_adapters_of_all_experts_go_to_peft(name, tmp_path):
    model_type, fields = MODELS[name]
    model = tiny.random_hf_model(model_type, **fields)
    model.save_pretrained(tmp_path / "base")
    made = made_of(tmp_path / "base", ["all-linear", ".*experts.*"])
    lora, adapters, _, merged = made
    theirs = assert_same_in_peft(tmp_path, model, lora, adapters, merged, tmp_path / "base")
    theirs.save_pretrained(tmp_path / "again")
    with pytest.raises(ValueError, match="is a parameter of all experts, .* one by one; merge"):
        load_adapter(tmp_path / "again", lora.model)


def test_adapters_of_experts_that_peft_does_not_read_are_refused(tmp_path):
    for name, target, message in (
        ("qwen2-moe", ".*experts.*", "PEFT reads no adapters of the experts of qwen2_moe; choose"),
        ("qwen3-moe", ".*experts.*down_proj", "and not .*gate_proj': PEFT reads adapters of all"),
    ):
        model_type, fields = MODELS[name]
        made = AutoConfig.for_model(model_type, **SIZES, **fields)
        made.save_pretrained(tmp_path / name)
        lora = lora_of(target, load_config(tmp_path / name))
        with pytest.raises(ValueError, match=f"{message}.*lora.merge_exports=true"):
            save_adapter(tmp_path / "adapter", lora, moved(lora), base=name)


# The others have other classes and names; gemma3's are as published models have them.
@pytest.mark.parametrize(
    "model_type",
    ["gemma3", *(pytest.param(n, marks=pytest.mark.slow) for n in ("mistral3", "qwen3_5"))],
)
def test_adapters_of_the_text_of_a_model_that_sees_pictures(model_type, tmp_path):
    base = tmp_path / "base"
    model = tiny.multimodal_folder(model_type, base)
    seen = {k: x.clone() for k, x in model.named_parameters() if "vision" in k or "visual" in k}
    lora, adapters, _, merged = made_of(base)
    served = model_type == "qwen3_5"  # of which PEFT has the text alone, see below
    theirs = assert_same_in_peft(tmp_path, model, lora, adapters, merged, base, served=served)
    adapted = [name for name, _ in theirs.named_parameters() if "lora" in name]
    assert adapted and all(".language_model." in name for name in adapted)
    theirs.save_pretrained(tmp_path / "again")
    again, found = load_adapter(tmp_path / "again", lora.model)
    assert again == lora
    jax.tree.map(np.testing.assert_array_equal, found, adapters)
    whole = dict(theirs.merge_and_unload().named_parameters())
    assert seen and all(torch.equal(whole[k], x) for k, x in seen.items())
    if model_type != "mistral3":  # which is no causal model in transformers
        save_adapter(tmp_path / "causal", lora, adapters, base=str(base))
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*missing adapter keys")
            causal = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "causal").eval()
        ours = tiny.our_logits(lora.model, merged)
        np.testing.assert_allclose(tiny.hf_logits(causal), ours, atol=1e-4)


def test_one_layer_of_the_text_of_a_model_that_sees_pictures(tmp_path):
    """Its tower has a layer 0 with a q_proj, too."""
    model = tiny.multimodal_folder("gemma3", tmp_path / "base")
    made = made_of(tmp_path / "base", r"model\.layers\.0\..*q_proj")
    lora, adapters, _, merged = made
    theirs = assert_same_in_peft(tmp_path, model, lora, adapters, merged, tmp_path / "base")
    names = {k.split(".lora_")[0] for k, _ in theirs.named_parameters() if "lora" in k}
    assert names == {"base_model.model.model.language_model.layers.0.self_attn.q_proj"}


def test_every_field_of_peft_is_read_or_refused_where_it_is_set():
    """What is unset is false, empty or none, but for fields that are known here."""
    made = peft.LoraConfig()
    defaults = {f.name: getattr(made, f.name) for f in dataclasses.fields(made)}
    known = {*SAID_BY_TENSORS, *SAYS_NOTHING, *READ, *ONE_OF}
    assert known <= defaults.keys()
    assert not {k: x for k, x in defaults.items() if x and k not in known}
    assert all(defaults[k] in may for k, may in ONE_OF.items())


@pytest.fixture(name="llama", scope="module")
def llama_fixture(tmp_path_factory):
    """A folder with a model, and a function that has PEFT write adapters of it."""
    folder = tmp_path_factory.mktemp("llama")
    model = tiny.random_hf_model(*MODELS["llama-mha"][:1], **MODELS["llama-mha"][1])
    model.save_pretrained(folder / "base")

    def write(name, target=("q_proj", "down_proj"), **settings):
        made = peft.LoraConfig(
            r=4, lora_alpha=16, target_modules=list(target), task_type="CAUSAL_LM", **settings
        )
        theirs = peft.get_peft_model(copy.deepcopy(model), made).eval()
        with torch.no_grad():
            for key, x in theirs.named_parameters():
                if "lora_B" in key:
                    x.normal_(0.0, 0.1)
        theirs.save_pretrained(folder / name)
        return theirs, folder / name

    return folder / "base", write


@pytest.mark.parametrize(
    "settings",
    [{}, {"init_lora_weights": "gaussian"}, {"layers_to_transform": [1]}, {"lora_dropout": 0.2}],
    ids=["plain", "gaussian", "one-layer", "dropout"],
)
def test_plain_adapters_of_peft_are_read(llama, settings):
    base, write = llama
    theirs, folder = write("-".join(settings) or "plain", **settings)
    config = load_config(base)
    lora, adapters = load_adapter(folder, config)
    ours = tiny.our_logits(config, merge(attach(lora, load_params(base, config), adapters)))
    np.testing.assert_allclose(ours, tiny.hf_logits(theirs), atol=1e-4)
    assert len(lora.modules) == (2 if "layers_to_transform" in settings else 6)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"init_lora_weights": "pissa"}, "{'init_lora_weights': 'pissa'} is not supported"),
        ({"init_lora_weights": "olora"}, "{'init_lora_weights': 'olora'} is not supported"),
        ({"alora_invocation_tokens": [3]}, r"{'alora_invocation_tokens': \[3\]} is not supported"),
        ({"use_rslora": True}, "{'use_rslora': True} is not supported"),
        ({"use_dora": True}, "{'use_dora': True} is not supported"),
        ({"lora_bias": True}, "{'lora_bias': True} is not supported"),
        ({"rank_pattern": {"q_proj": 2}}, "'rank_pattern': {'q_proj': 2}.* is not supported"),
        ({"modules_to_save": ["lm_head"]}, r"{'modules_to_save': \['lm_head'\]} is not supported"),
        ({"target": ["embed_tokens"]}, "embed_tokens.base_layer.weight.*save_embedding_layers=F"),
        ({"target": ["lm_head"]}, "lm_head.base_layer.weight, .*save_embedding_layers=False"),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)
def test_adapters_that_are_not_plain_are_refused_in_words(llama, settings, message):
    base, write = llama
    _, folder = write("-".join(map(str, settings.values())).replace("/", ""), **settings)
    with pytest.raises(ValueError, match=message):
        load_adapter(folder, load_config(base))
