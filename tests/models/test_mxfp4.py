"""Numbers of four bits, and a checkpoint of gpt-oss that holds them."""

import jax.numpy as jnp
import numpy as np
import torch
from safetensors.numpy import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from jaxrl.models import load_config, load_params, save_pretrained
from jaxrl.models.export import write_json
from jaxrl.models.hf import SINGLE_FILE, read_json
from jaxrl.models.mxfp4 import dequantise
from tests.models.tiny import MODELS, random_hf_model


def test_numbers_of_four_bits():
    # 0x21: 1 = 0.5 first, 2 = 1; 0xF9: 9 = -0.5, 15 = -6; scales 2^(128 - 127) and 2^(126 - 127)
    blocks = np.array([[[0x21], [0xF9]]], np.uint8)
    found = dequantise(blocks, np.array([[128, 126]], np.uint8))
    np.testing.assert_array_equal(found, [[1.0, 2.0, -0.25, -3.0]])


def test_a_checkpoint_in_mxfp4_loads_as_transformers_reads_it(tmp_path):
    """Experts of width 64: a block has 32 numbers along the input."""
    fields = MODELS["gpt-oss"][1] | {"intermediate_size": 64}
    random_hf_model("gpt_oss", **fields).save_pretrained(tmp_path)
    config = read_json(tmp_path / "config.json")
    write_json(
        tmp_path / "config.json", config | {"quantization_config": {"quant_method": "mxfp4"}}
    )
    tensors, rng, wanted = load_file(tmp_path / SINGLE_FILE), np.random.default_rng(0), {}
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "experts.down_proj"))]:
        experts, inputs, rows = tensors.pop(name).shape
        blocks = rng.integers(0, 256, (experts, rows, inputs // 32, 16), np.uint8)
        scales = rng.integers(120, 130, (experts, rows, inputs // 32), np.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        both = torch.from_numpy(blocks), torch.from_numpy(scales)
        wanted[name] = convert_moe_packed_tensors(*both, dtype=torch.float32).numpy()
    save_file(tensors, tmp_path / SINGLE_FILE)
    whole = load_params(tmp_path, load_config(tmp_path))
    params = whole["layers"]
    for i in range(3):
        layer = f"model.layers.{i}.mlp.experts"
        gate_up = wanted[f"{layer}.gate_up_proj"]
        np.testing.assert_array_equal(params["experts_gate"][i], gate_up[..., ::2])
        np.testing.assert_array_equal(params["experts_up"][i], gate_up[..., 1::2])
        np.testing.assert_array_equal(params["experts_down"][i], wanted[f"{layer}.down_proj"])

    # an export holds the same numbers in bfloat16, and is not quantised any more
    save_pretrained(tmp_path / "out", load_config(tmp_path), whole)
    config.pop("quantization_config", None)
    assert read_json(tmp_path / "out" / "config.json") == config
    found = load_file(tmp_path / "out" / SINGLE_FILE)
    assert found.keys() == {
        *(name for name in tensors if "proj_" not in name or "bias" in name),
        *wanted,
    }
    for name, x in wanted.items():
        assert found[name].dtype == jnp.bfloat16
        np.testing.assert_array_equal(found[name].astype(np.float32), x)
