"""The weight table: layouts, names and shapes, and reading a part of a tensor."""

import dataclasses
import math

import numpy as np
import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from jaxrl.models import TransformerConfig, config_to_hf, params_to_hf
from jaxrl.models.transformer import init_params
from jaxrl.models.weights import WEIGHTS, from_hf, hf_shape, hf_shapes, read_part, to_hf

OURS = TransformerConfig(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
)
GEMMA = {
    "post_norms": True,
    "unit_offset_norm": True,
    "scale_embeddings": True,
    "query_pre_attn_scalar": 16,
    "activation": "gelu_pytorch_tanh",
}
FEATURES = {
    "llama": {},
    "llama-bias": {"attention_bias": True, "attention_output_bias": True},
    "qwen2": {"attention_bias": True},
    "qwen3": {"qk_norm": True},
    "gemma2": GEMMA,
    "gemma3_text": {**GEMMA, "qk_norm": True},
}


@pytest.mark.parametrize(
    "leaf, shape, theirs",
    [
        ("embed", (5, 3), (5, 3)),
        ("wq", (6, 2, 4), (8, 6)),
        ("wo", (2, 4, 6), (6, 8)),
        ("bq", (2, 4), (8,)),
        ("w_down", (7, 3), (3, 7)),
        ("q_norm", (4,), (4,)),
    ],
)
def test_layouts_are_inverse_of_each_other(leaf, shape, theirs):
    weight = WEIGHTS[leaf]
    x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    assert hf_shape(weight, shape) == theirs == to_hf(weight, x).shape
    assert to_hf(weight, x).flags.c_contiguous
    np.testing.assert_array_equal(from_hf(weight, to_hf(weight, x), shape), x)


def test_head_layout_literal():
    # D=1, H=2, h=2: row n * h + j of q_proj is head n, component j.
    np.testing.assert_array_equal(
        to_hf(WEIGHTS["wq"], np.array([[[1, 2], [3, 4]]])), [[1], [2], [3], [4]]
    )
    np.testing.assert_array_equal(
        to_hf(WEIGHTS["wo"], np.array([[[1], [2]], [[3], [4]]])), [[1, 2, 3, 4]]
    )


@pytest.mark.parametrize("model_type", FEATURES)
@pytest.mark.parametrize("tied", [True, False])
def test_names_and_shapes_are_those_of_transformers(model_type, tied):
    config = dataclasses.replace(OURS, tie_embeddings=tied, **FEATURES[model_type])
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config_to_hf(config)))
    theirs = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert hf_shapes(config) == theirs
    ours = dict(params_to_hf(config, init_params(config, 0)))
    assert {name: x.shape for name, x in ours.items()} == theirs


SLICES = [slice(None), slice(0, 1), slice(1, 3)]


@pytest.mark.parametrize("leaf", ["wq", "wo", "w_up", "bq"])
@pytest.mark.parametrize("first", SLICES)
@pytest.mark.parametrize("last", SLICES)
def test_a_part_is_read_as_if_from_the_whole(leaf, first, last):
    weight = WEIGHTS[leaf]
    shape = (4, 3, 6)[: sum(len(group) for group in weight.dims)]
    x = np.arange(math.prod(shape)).reshape(shape)
    index = (first, *[slice(None)] * (len(shape) - 2), last)
    part = read_part(weight, to_hf(weight, x), shape, index)
    np.testing.assert_array_equal(part, x[index])


def test_only_the_needed_rows_of_a_file_are_read():
    asked = []

    class Stored:
        def __getitem__(self, rows):
            asked.append(rows)
            return np.zeros([r.stop - r.start for r in rows])

    # wq [D=4, H=3, h=2], q_proj [H h=6, D=4]: heads 1 and 2 are rows 2 to 5.
    part = (slice(0, 2), slice(1, 3), slice(None))
    assert read_part(WEIGHTS["wq"], Stored(), (4, 3, 2), part).shape == (2, 2, 2)
    assert asked == [(slice(2, 6), slice(0, 2))]
