"""One gradient on any arrangement of devices, packed or not, of all weights or of adapters.

Twelve meshes, packed and unpacked rows, one, two and four microbatches, all weights or adapters:
every pair of these choices occurs in the default run, the full product is marked slow.
"""

import dataclasses
import itertools

import jax
import numpy as np
import pytest

from jaxrl.models.architecture import Experts
from jaxrl.models.lora import LoraConfig, select_modules
from jaxrl.models.transformer import abstract_params
from tests.training.test_update import (
    LENGTHS as UNEQUAL,
    MODEL,
    ROWS,
    algorithm_with,
    gradient,
    make_batch,
)

MESHES = (  # data, fsdp, tensor; 4 query heads, 2 key/value heads, vocabulary 32, MLP width 32
    (2, 1, 1),
    (1, 2, 1),
    (1, 1, 2),
    (8, 1, 1),
    (1, 8, 1),
    (2, 4, 1),
    (4, 1, 2),
    (1, 4, 2),
    (2, 2, 2),
    (1, 1, 4),  # more devices than key/value heads
    (2, 1, 4),
    (1, 2, 4),
)
PACKED, MICROBATCHES = (False, True), (1, 2, 4)
MODULES = ["q_proj", "o_proj", "down_proj", "model.layers.1.self_attn.v_proj"]
DEEP = dataclasses.replace(MODEL, num_layers=5)  # deep enough to be scanned over
LORA = LoraConfig(DEEP, select_modules(DEEP, MODULES), rank=4, alpha=8)
WEIGHTS = {"full": None, "lora": LORA}
PRODUCT = list(itertools.product(MESHES, PACKED, MICROBATCHES, WEIGHTS))
ALGORITHM = algorithm_with()  # with KL and entropy terms
# Packed, rows of 16 hold up to two of the first; the second are all padded to 16, so that every
# microbatch of a case has one shape to compile. Cuts of several shapes are in test_update.py.
LENGTHS = {True: UNEQUAL, False: (16, 13, 14, 16, 13, 15, 16, 14)}


def pairs_of(case):
    return {(i, j, case[i], case[j]) for i, j in itertools.combinations(range(4), 2)}


def pairwise(cases):
    """The cases that bring a new pair of choices, greedily: most new pairs first."""
    open_pairs, chosen = set().union(*map(pairs_of, cases)), []
    while open_pairs:
        chosen.append(max(cases, key=lambda case: len(pairs_of(case) & open_pairs)))
        open_pairs -= pairs_of(chosen[-1])
    return chosen


CHOSEN = pairwise(PRODUCT)
REST = [case for case in PRODUCT if case not in CHOSEN]


def name(case):
    mesh, packed, microbatches, weights = case
    sizes = "x".join(map(str, mesh))
    return f"{sizes}-{'packed' if packed else 'padded'}-{microbatches}-{weights}"


def spread_gradient(mesh, packed, microbatches, lora, batch):
    data, fsdp, tensor = mesh
    groups = data * fsdp
    return gradient(
        ALGORITHM,
        batch,
        model=DEEP,
        microbatch_rows=max(ROWS // microbatches, groups),  # a row for every group
        devices=groups * tensor,
        sizes=(("data", data), ("fsdp", fsdp), ("tensor", tensor)),
        packed=packed,
        lora=lora,
    )


def check(mesh, packed, microbatches, weights):
    lora, batch = WEIGHTS[weights], make_batch(lengths=LENGTHS[packed])
    expected, expected_metrics = gradient(
        ALGORITHM, batch, model=DEEP, microbatch_rows=ROWS, lora=lora
    )
    found, metrics = spread_gradient(mesh, packed, microbatches, lora, batch)
    difference = np.linalg.norm(found - expected) / np.linalg.norm(expected)
    assert np.linalg.norm(expected) > 1e-2
    assert difference <= 2e-5
    for key in ("policy_loss", "final_loss", "policy_kl", "policy_entropy"):
        assert metrics[key] == pytest.approx(expected_metrics[key], rel=2e-5, abs=1e-6), key


@pytest.mark.some(1)
@pytest.mark.parametrize(("case", "packed"), [((1, 4, 2), False), ((2, 2, 2), True)], ids=str)
def test_gradients_over_kept_ids_too(case, packed):
    batch = make_batch(lengths=LENGTHS[packed])
    kept = np.random.default_rng(5).integers(-1, 32, (*batch.tokens.shape, 6)).astype(np.int32)
    kept[..., 0] = batch.tokens
    kept[2] = -1  # nothing was filtered in this row
    batch = batch.replace(kept=kept)
    expected, _ = gradient(ALGORITHM, batch, model=DEEP, microbatch_rows=ROWS)
    found, _ = spread_gradient(case, packed, 2, None, batch)
    assert np.linalg.norm(found - expected) <= 2e-5 * np.linalg.norm(expected)
    unfiltered, _ = gradient(ALGORITHM, batch.replace(kept=None), model=DEEP, microbatch_rows=ROWS)
    assert np.linalg.norm(unfiltered - expected) > 1e-2 * np.linalg.norm(expected)


def test_the_cover_is_small_and_complete():
    assert len(CHOSEN) <= 40
    assert set().union(*map(pairs_of, CHOSEN)) == set().union(*map(pairs_of, PRODUCT))


@pytest.mark.some(8)
@pytest.mark.parametrize("case", CHOSEN, ids=name)
def test_loss_and_gradient_are_those_of_one_device(case):
    check(*case)


MIXED = dataclasses.replace(
    DEEP, experts=Experts(count=8, per_token=2, width=16, normalise=True, dense_layers=(0,))
)


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("sizes", "packed", "exchange"),
    [
        pytest.param({"expert": 8}, True, "gather", marks=pytest.mark.slow),
        pytest.param({"expert": 8}, False, "all_to_all", marks=pytest.mark.slow),
        pytest.param({"expert": 4, "fsdp": 2}, False, "gather", marks=pytest.mark.slow),
        pytest.param({"expert": 4, "fsdp": 2}, True, "all_to_all", marks=pytest.mark.slow),
        ({"expert": 2, "fsdp": 2, "tensor": 2}, True, "gather"),
        ({"expert": 2, "fsdp": 2, "tensor": 2}, False, "all_to_all"),
        pytest.param({"expert": 4, "context": 2}, True, "all_to_all", marks=pytest.mark.slow),
        ({"fsdp": 8}, False, "auto"),
    ],
    ids=str,
)
def test_experts_over_a_mesh_have_the_gradient_of_one_device(sizes, packed, exchange):
    batch = make_batch(lengths=LENGTHS[packed])
    cut = {"model": MIXED, "microbatch_rows": ROWS}
    expected, expected_metrics = gradient(ALGORITHM, batch, **cut)
    over = {"devices": 8, "sizes": tuple(sizes.items()), "exchange": exchange}
    found, metrics = gradient(ALGORITHM, batch, packed=packed, **over, **cut)
    ends = np.cumsum([x.size for x in jax.tree.leaves(abstract_params(MIXED))])[:-1]
    for mine, whole in zip(np.split(found, ends), np.split(expected, ends), strict=True):
        assert np.abs(mine - whole).max() <= 1e-5 * np.abs(whole).max()
    assert metrics["final_loss"] == pytest.approx(expected_metrics["final_loss"], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("case", REST, ids=name)
def test_loss_and_gradient_are_those_of_one_device_all(case):
    check(*case)
