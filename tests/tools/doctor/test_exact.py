"""The doctor's proof that sampler and trainer compute the same numbers, and where they do not."""

import contextlib

import jax
import numpy as np
import pytest

from jaxrl.rollout.native.programs import Programs
from jaxrl.tools.doctor import exact, report
from jaxrl.tools.doctor.exact import Depth, Line
from jaxrl.tools.doctor.examination import CHECKS, run_check
from jaxrl.tools.doctor.examined_run import ExaminedRun
from jaxrl.train import BasePPOExp
from tests.test_train import small

BFLOAT16 = {"trainer.bf16": True, "generator.inference_engine.model_dtype": "bfloat16"}
TENSOR = {
    "trainer.policy.mesh.tensor": 2,
    "generator.inference_engine.tensor_parallel_size": 2,
}
KINDS = "chunked", "reused", "preempted", "turns"


class ScaledExp(BasePPOExp):
    """Its engine has other weights in the second of two layers."""

    def get_engine(self, model, mesh):
        engine = super().get_engine(model, mesh)
        take = engine.update_weights

        def update_weights(params, version):
            layers = params["layers"]
            scaled = {"w_down": layers["w_down"].at[1].multiply(1 + 2**-7)}
            take(params | {"layers": layers | scaled}, version)

        engine.update_weights = update_weights
        return engine


@pytest.fixture
def one_device(monkeypatch):
    """Programs over eight devices take longer to compile."""
    first = jax.devices()[:1]
    for name in ("devices", "local_devices"):
        monkeypatch.setattr(jax, name, lambda *platform: first)
    for name in ("device_count", "local_device_count"):
        monkeypatch.setattr(jax, name, lambda *platform: 1)


def checked(folder, experiment=BasePPOExp, **overrides):
    run = ExaminedRun(small(folder / "own", **overrides), folder, experiment)
    with contextlib.closing(run):
        return run_check("exact", CHECKS["exact"], run)


def of(finding):
    """What is compared -> its rows of the table."""
    rows = {}
    for row in finding.table[1:]:
        rows.setdefault(row[0], []).append(row)
    return rows


def largest(rows):
    return max(row[4] for row in rows)


@pytest.mark.slow
def test_other_weights_of_the_engine_are_found_by_depth_and_layer(
    tmp_path, one_device, monkeypatch
):
    for name in ("_conversations", "_of_samples"):  # whose programs take as long to compile
        monkeypatch.setattr(exact, name, lambda *given: [])
    found = checked(tmp_path, ScaledExp, **BFLOAT16, **{"trainer.exact": "full"})
    assert found.passed is False and found.figure > found.bound == 0
    rows = of(found)
    # each with itself computes the same, to the bit
    assert largest(rows["prefill, decode"]) == largest(rows["score, train"]) == 0
    for name in ("prefill, train", "decode, train"):
        assert [row[1] for row in rows[name]] == ["0-48", "48-96", "96-144", "144-192"]
        assert all(row[4] >= row[5] > 0 and row[6] == "layer 1" for row in rows[name])
    assert [row[2] for row in rows["prefill, train"]] == [96] * 4  # two rows of 192 tokens
    assert "train: up to" in found.cause and "first layer: layer 1; 7 more lines" in found.cause
    assert "trainer.exact='off'" in found.fix
    shown = report.text([found])
    assert "\n  what             depth    tokens  of      max " in shown


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [{}, BFLOAT16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("mesh", [{}, TENSOR], ids=["rows", "tensor"])
def test_nothing_differs_in_the_exact_mode(tmp_path, dtype, mesh):
    found = checked(tmp_path, **dtype, **mesh, **{"trainer.exact": "full"})
    assert found.passed and found.figure == 0
    names = of(found)
    assert {name.partition(":")[0] for name in names if ":" in name} == {*KINDS}
    assert largest(found.table[1:]) == 0
    rows = 4 if mesh else 8  # one on each group of devices, of 192 tokens
    assert found.about.startswith(f"largest difference, {192 * rows} tokens by all 48 ids and ")


@pytest.mark.slow
def test_the_ordinary_mode_has_figures_and_no_failure(tmp_path, one_device):
    found = checked(tmp_path, **BFLOAT16)
    assert found.passed and 0.1 > found.figure > 0 and found.bound == ""
    assert largest(of(found)["prefill, train"]) > 0
    assert "trainer.exact='off', which promises none" in found.about


@pytest.mark.slow
def test_pages_that_come_back_otherwise_are_found(tmp_path, one_device, monkeypatch):
    put = Programs.put

    def rounded(self, part, pages, of_pages, *state):
        put(self, part, pages, jax.tree.map(lambda x: x * np.float32(1.01), of_pages), *state)

    monkeypatch.setattr(Programs, "put", rounded)
    found = checked(tmp_path, **{"trainer.exact": "full"})
    assert found.passed is False and found.cause.startswith("preempted: engine, score")
    rows = of(found)
    assert {name for name in rows if largest(rows[name])} == {"preempted: engine, score"}
    assert rows["preempted: engine, score"][0][6] == "unseen"  # layers are looked at without pages


def test_a_line_counts_differences():
    line = Line(("prefill", "train"), Depth(0, 1_024))
    a = np.zeros((2, 2_000), np.float32)
    b = a.copy()
    b[1, :8] = 1.0  # 0.2 % of all
    line.add(a, b, np.array([3, 5]))
    assert (line.tokens, line.largest, line.worst, line.percentile) == (2, 1.0, 5, 1.0)
    line.add(a, a, np.array([3, 5]))
    line.add(a, a, np.array([3, 5]))
    assert line.percentile == 0  # of 0.07 %
    line.add(a, np.full_like(a, np.nan), np.array([0, 1]))
    assert (line.largest, line.worst) == (np.inf, 0)
