"""Work of the phases against the sums written out."""

from jaxrl.models.remat import REMAT_POLICIES
from jaxrl.models.transformer import TransformerConfig
from jaxrl.parallel.chips import chip_named
from jaxrl.tools.plan.work import RECOMPUTED, forward_work, gradient_work

TOY = TransformerConfig(
    vocab_size=10,
    hidden_size=4,
    intermediate_size=6,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=2,
)
# 240 weights of the layers (test_benchmarks.py): 2 x 240 x 3 tokens; 4 x 2 layers x 2 heads x 2
# wide x 6 pairs; a row scores 2 tokens: 2 x 4 x 10 x 2
PRODUCTS, ATTENTION, HEAD = 1440, 192, 160


def test_forward():
    assert forward_work(TOY, rows=5, length=3, wanted=2).flops == 5 * (1440 + 192 + 160)


def test_gradient_counts_what_is_computed_again_by_itself():
    again = {"none": 0, "dots": ATTENTION, "attention": PRODUCTS, "full": PRODUCTS + ATTENTION}
    for policy, layers in again.items():
        work = gradient_work(TOY, rows=5, length=3, wanted=2, remat=policy, frozen=False)
        assert work.flops == 3 * 5 * (PRODUCTS + ATTENTION + HEAD)
        assert work.recomputed == 5 * (layers + HEAD), policy


def test_frozen_weights_have_no_gradients_to_compute():
    work = gradient_work(TOY, rows=5, length=3, wanted=2, remat="none", frozen=True)
    assert work.flops == 2 * 5 * (PRODUCTS + ATTENTION + HEAD)


def test_every_remat_policy_is_counted():
    assert set(RECOMPUTED) == set(REMAT_POLICIES)


def test_a_ring_has_two_of_the_links_of_a_chip():
    """v5e: 200 GB/s over four links, so 100 in a ring; v5p: 600 over six, 200; NVLink: all."""
    rings = {name: chip_named(name).ring for name in ("v5e", "v5p", "h100")}
    assert rings == {"v5e": 100e9, "v5p": 200e9, "h100": 450e9}
