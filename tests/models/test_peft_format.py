"""PEFT folders: names, shapes and config; the same logits in peft where it is installed."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForCausalLM

from jaxrl.models import init_params, save_pretrained
from jaxrl.models.lora import attach
from jaxrl.models.peft_format import load_adapter, save_adapter
from tests.models.test_lora import MODEL, TOKENS, logits, lora_of, moved


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
    peft = pytest.importorskip("peft")
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
