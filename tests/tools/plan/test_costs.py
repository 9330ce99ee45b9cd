"""Seconds of a phase from what its program's text says, else from formulas."""

from dataclasses import replace
from types import SimpleNamespace

import jax.numpy as jnp
import pytest

from jaxrl.models import TransformerConfig
from jaxrl.models.architecture import DeltaNet
from jaxrl.parallel import Placement, make_mesh
from jaxrl.tools.plan import estimate, phases
from jaxrl.tools.plan.costs import Limits, Memory, seconds
from jaxrl.tools.plan.operations import Totals
from jaxrl.tools.plan.phases import Part, Phase
from jaxrl.tools.plan.plan import Line
from jaxrl.tools.plan.work import Work

DEVICE = Limits(flops=10.0, bandwidth=5.0, network=2.0, source="a test's")
MEMORY = Memory(
    arguments=30.0, results=20.0, aliased=0.0, temporaries=0.0, collectives={"all-gather": 8.0}
)
TOTALS = Totals(cycles=0.0, moved=200.0, kernel_moved=40.0, products={"f32 x f32 -> f32": 300.0})


def phase(kind, head_kernel="xla", **fields):
    mesh = SimpleNamespace(mesh=SimpleNamespace(size=4))
    part = SimpleNamespace(placement=mesh, dtype=None, head_kernel=head_kernel)
    work = Work(400.0, recomputed=80.0, attention=24.0, head=60.0)
    return Phase(kind, kind, part, SimpleNamespace(args=()), (1, 1), (), 1, work, **fields)


def test_without_a_readable_program_formulas_count():
    # 480 FLOPs on 4 devices; arguments and results once; 8 bytes sent
    assert seconds(phase("apply"), MEMORY, DEVICE) == {"compute": 12, "memory": 10, "network": 4}


def test_the_program_outranks_the_formulas():
    read = replace(MEMORY, totals=TOTALS)
    # its 300 FLOPs and the kernel's 24 / 4; its 200 bytes and the 40 that kernels are given
    assert seconds(phase("forward"), read, DEVICE) == {"compute": 30.6, "memory": 48, "network": 4}
    # the head's kernel hides 60 / 4 more
    assert seconds(phase("forward", "pallas"), read, DEVICE)["compute"] == (300 + 6 + 15) / 10
    # a kernel of decoding reads the filled part of the cache, not all it is given
    decode = seconds(phase("decode", cache=10.0), read, DEVICE)
    assert decode["memory"] == (200 + 10) / 5
    # without a kernel all is in the text
    plain = replace(MEMORY, totals=replace(TOTALS, kernel_moved=0.0))
    found = seconds(phase("decode", cache=10.0), plain, DEVICE)
    assert (found["compute"], found["memory"]) == (30, 40)


@pytest.mark.parametrize(
    ("host", "bound", "in_turns", "beside"),
    [(1.0, "compute", 13.0, 12.0), (20, "host", 32.0, 20.0)],
)
def test_the_host_adds_to_what_the_device_takes_or_works_beside_it(host, bound, in_turns, beside):
    for ahead, total in ((False, in_turns), (True, beside)):
        one = phase("apply", host=host, ahead=ahead)
        times = seconds(one, MEMORY, DEVICE)
        line = Line(one, MEMORY, beside=0.0, traffic=0.0, times=times)
        assert (line.bound, line.seconds) == (bound, total)


@pytest.mark.parametrize(
    ("kernel", "platform", "logits"),
    [
        ("pallas", "tpu", 0),  # they never leave fast memory
        ("tiles", "gpu", 4096 * 8192),  # a block of tokens, a tile of the vocabulary
        ("xla", "gpu", 512 * 2**17),  # 2^26 at a time
        ("xla", "cpu", 256 * 2**17),  # of no more tokens than these
    ],
)
def test_logits_that_a_head_writes(kernel, platform, logits):
    """Three arrays of float32: themselves, their exponentials, their gradient."""
    placement = SimpleNamespace(mesh=SimpleNamespace(shape={"tensor": 2}), platform=platform)
    model = SimpleNamespace(vocab_size=2**18, hidden_size=64, value_head=None)
    part = SimpleNamespace(placement=placement, model=model, head_kernel=kernel)
    assert estimate._logits(part, tokens=8192) == 3 * 4 * logits
    model.value_head = "value_head"
    assert estimate._logits(part, tokens=8192) == 0


@pytest.mark.parametrize(
    ("vocabulary", "trips"),
    [
        (151_936, 16),  # shared by the eight: a block of 2,048 has 256 of each device's 4,096
        (151_937, 2),  # not: a block has 2,048 of the device's own
    ],
)
def test_trips_of_a_head_whose_vocabulary_is_shared(vocabulary, trips):
    model = TransformerConfig(
        vocab_size=vocabulary,
        hidden_size=1536,
        intermediate_size=8,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=8,
    )
    placement = Placement(make_mesh(fsdp=8))
    part = Part(model, placement, jnp.dtype(jnp.bfloat16), ("parameters",), head_kernel="pallas")
    assert phases._chunks(part, rows=32, length=1025, wanted=1024) == trips


@pytest.mark.parametrize(
    ("kernel", "bytes_of_token"),
    [
        # 32 heads of 5 x 64 of chunks, 7 x 128 of keys, queries, values, 128 x 128 / 64 of states
        ("xla", 4 * 32 * (320 + 896 + 256)),
        # 2 x 128 of q and k for every two heads, 2 x 128 of v and the outputs, and the states:
        # 640 MiB of 8,192 tokens; compiled, 706
        ("pallas", 4 * 32 * (128 + 256 + 256)),
    ],
)
def test_the_kernel_of_the_delta_rule_has_no_products_of_chunks(kernel, bytes_of_token):
    net = DeltaNet(key_heads=16, value_heads=32, key_dim=128, value_dim=128, window=4)
    part = SimpleNamespace(model=SimpleNamespace(delta_net=net), rule_kernel=kernel)
    assert estimate._rule(part) == bytes_of_token
