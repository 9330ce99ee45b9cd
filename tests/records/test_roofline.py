"""Least seconds of phases against the sums written out."""

from types import SimpleNamespace

import numpy as np
import pytest

from jaxrl.models.transformer import TransformerConfig
from jaxrl.records import roofline
from jaxrl.records.roofline import Limits, least_seconds, limits, shares

MODEL = TransformerConfig(
    vocab_size=10,
    hidden_size=4,
    intermediate_size=6,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=2,
)
# Rows of 3 and 2 tokens, of which 2 and 1 are sampled.
BATCH = SimpleNamespace(lengths=np.array([3, 2]), loss_mask=np.array([[0, 1, 1], [0, 1, 0]]))


def test_least_seconds_literal():
    # See test_flops: 240 weights in layers, 40 in the head. 5 tokens x 2 x 240 + 3 sampled x 2 x 40
    # + pairs (6 + 3) x 4 x 2 layers x 4 of heads = 2400 + 240 + 288 FLOPs of a pass
    options = {"passes": 3, "scored": 2, "copies": 2, "element": 2}
    found = least_seconds(BATCH, MODEL, Limits(flops=2928.0, bandwidth=1.0), **options)
    # Two steps of decoding, in which each of two copies reads 280 weights. The tokens of the first
    # row are drawn from 1 and 2 positions, that of the second from 1: 4 x 8 numbers (2 layers, keys
    # and values, 1 head of 2). 2 bytes each
    assert found == {
        "fwd_logprobs_values_reward": 2.0,
        "policy_train": 3.0,
        "generate": 2 * (2 * 2 * 280 + 4 * 8),
    }
    # with memory without limit sampling takes the FLOPs of its products: 3 tokens x 2 x 280
    fast = least_seconds(BATCH, MODEL, Limits(flops=1.0, bandwidth=1e30), **options)
    assert fast["generate"] == 3 * 2 * 280


def test_phases_without_work_here_are_left_out():
    options = {"passes": 3, "scored": 0, "copies": 0, "element": 4}
    assert set(least_seconds(BATCH, MODEL, Limits(1.0, 1.0), **options)) == {"policy_train"}


def test_shares_are_of_what_was_timed():
    seconds = {"timing/policy_train": 8.0, "timing/other": 1.0}
    assert shares({"policy_train": 2.0, "generate": 1.0}, seconds) == {
        "roofline/policy_train": 0.25
    }


def test_limits_are_of_all_devices_and_measured_of_processors_alone(monkeypatch):
    chips = [SimpleNamespace(device_kind="NVIDIA H200", platform="gpu")] * 4
    assert limits(chips) == Limits(4 * 989e12, 4 * 4800e9)
    assert limits([SimpleNamespace(device_kind="other", platform="gpu")]) is None
    processor = [SimpleNamespace(device_kind="cpu", platform="cpu")]
    assert min(limits(processor)) > 0
    assert limits(processor * 8) == limits(processor)  # eight devices of one machine
    monkeypatch.setattr(roofline.jax, "process_count", lambda: 2)
    assert limits(processor) is None


@pytest.mark.parametrize("tensor", [1, 2])
def test_the_bound_of_sampling_falls_with_fewer_copies(tensor):
    options = {"passes": 3, "scored": 0, "element": 2}
    found = least_seconds(BATCH, MODEL, Limits(1e9, 1.0), copies=2 // tensor, **options)
    assert found["generate"] == 2 * (2 * 2 // tensor * 280 + 4 * 8)
