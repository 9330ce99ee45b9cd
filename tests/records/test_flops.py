"""Model FLOPs against the sums written out."""

from types import SimpleNamespace

import numpy as np

from jaxrl.models.transformer import TransformerConfig
from jaxrl.records.flops import forward_flops, peak_flops


def test_forward_flops_literal():
    # A layer: q, o 4 x 4, k, v 4 x 2: 48 weights; MLP 3 x 4 x 6 = 72; two layers 240; head 4 x 10 =
    # 40; 280 weights, 2 for each and token: 3 + 1 tokens are 2240. Pairs 6 + 1 = 7, 4 x 2 layers x
    # 2 heads x 2 wide for each: 224
    model = TransformerConfig(
        vocab_size=10,
        hidden_size=4,
        intermediate_size=6,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=2,
    )
    assert forward_flops(model, np.array([3, 1])) == 2240 + 224


def test_the_peak_is_that_of_the_kind():
    kinds = {
        "NVIDIA H200": 989e12,
        "NVIDIA H100 80GB HBM3": 989e12,
        "NVIDIA H100 PCIe": 756e12,
        "NVIDIA A100-SXM4-80GB": 312e12,
        "TPU v5 lite": 197e12,
        "TPU v5p": 459e12,
        "TPU v6 lite": 918e12,
        "cpu": None,
    }
    found = {kind: peak_flops(SimpleNamespace(device_kind=kind)) for kind in kinds}
    assert found == kinds
