"""Kinds of layers, and what their products cost."""

import dataclasses
import math

import jax
import pytest

from jaxrl.models.architecture import (
    LATER_FIELDS,
    Experts,
    TransformerConfig,
    layer_params,
    layer_runs,
)
from jaxrl.models.transformer import abstract_params, describe

DENSE = TransformerConfig(
    vocab_size=31,
    hidden_size=8,
    intermediate_size=12,
    num_layers=5,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
)
MIXED = dataclasses.replace(
    DENSE, experts=Experts(count=6, per_token=2, width=10, dense_layers=(0, 3))
)
QWEN3_30B = TransformerConfig(
    vocab_size=151_936,
    hidden_size=2048,
    intermediate_size=6144,
    num_layers=48,
    num_heads=32,
    num_kv_heads=4,
    head_dim=128,
    qk_norm=True,
    tie_embeddings=False,
    experts=Experts(count=128, per_token=8, width=768, normalise=True),
)


def test_runs_are_neighbours_of_one_kind_and_know_their_place_in_the_stack():
    found = [
        (run.kind, (run.in_stack.start, run.in_stack.stop), (run.in_model.start, run.in_model.stop))
        for run in layer_runs(MIXED)
    ]
    assert found == [
        ("dense", (0, 1), (0, 1)),
        ("experts", (0, 2), (1, 3)),
        ("dense", (1, 2), (3, 4)),
        ("experts", (2, 3), (4, 5)),
    ]
    assert [tuple(run)[1:3] for run in layer_runs(DENSE)] == [(slice(0, 5), slice(0, 5))]


def test_a_model_of_one_kind_has_its_arrays_in_layers_and_others_a_stack_of_each():
    assert abstract_params(DENSE)["layers"]["w_gate"].shape == (5, 8, 12)
    layers = abstract_params(MIXED)["layers"]
    assert layers["dense"]["w_gate"].shape == (2, 8, 12)
    assert layers["experts"]["experts_gate"].shape == (3, 6, 8, 10)
    assert layers["experts"]["wq"].shape == (3, 8, 2, 4)
    alone = dataclasses.replace(DENSE, experts=Experts(count=6, per_token=2, width=10))
    assert abstract_params(alone)["layers"]["router"].shape == (5, 8, 6)


def test_a_dense_model_is_described_as_before_there_were_experts():
    assert "experts" not in describe(DENSE)
    assert describe(MIXED)["experts"]["dense_layers"] == (0, 3)


def test_later_fields_are_in_no_description_of_models_that_do_not_use_them():
    known = {"sliding_window", "value_head", "final_softcap"}  # the last of those before
    assert known <= describe(DENSE).keys()
    assert not set(LATER_FIELDS) & describe(DENSE).keys()
    assert "linear_bias" not in describe(MIXED)["experts"]
    granite = dataclasses.replace(DENSE, logits_scaling=8.0, pre_norms=False)
    assert {"logits_scaling": 8.0, "pre_norms": False}.items() <= describe(granite).items()


def test_an_mlp_without_a_gate_has_two_matrices():
    # 5 layers: q and o 8 x 8 each, k and v 8 x 4; MLPs 2 x 8 x 12 in place of 3 x 8 x 12
    alone = dataclasses.replace(DENSE, gated_mlp=False)
    assert layer_params(alone) == 5 * (2 * 64 + 2 * 32 + 2 * 96)
    assert layer_params(DENSE) - layer_params(alone) == 5 * 96
    stored = abstract_params(alone)["layers"]
    assert "w_gate" not in stored
    assert sum(math.prod(stored[name].shape) for name in ("w_up", "w_down")) == 5 * 2 * 96


def test_parameters_of_qwen3_30b_a3b_and_those_of_a_token():
    # a layer: q and o 2048 x 4096 each, k and v 2048 x 512; router 2048 x 128; 8 of 128 experts
    attention, router, expert = 2048 * 128 * (2 * 32 + 2 * 4), 2048 * 128, 3 * 2048 * 768
    assert layer_params(QWEN3_30B) == 48 * (attention + router + 8 * expert) == 2_730_491_904
    everything = 48 * (attention + router + 128 * expert)
    assert layer_params(QWEN3_30B, math.inf) == everything == 29_909_581_824
    vectors = 48 * (2 * 2048 + 2 * 128) + 2048  # norms
    stored = sum(math.prod(x.shape) for x in jax.tree.leaves(abstract_params(QWEN3_30B)))
    assert stored == everything + 2 * 151_936 * 2048 + vectors == 30_532_122_624
    # two tokens that choose evenly: 128 (1 - (1 - 1/16)^2) = 15.5 experts
    both = 48 * (attention + router + 15.5 * expert)
    assert layer_params(QWEN3_30B, 2) == pytest.approx(both)
