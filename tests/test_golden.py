"""Every golden file against jaxrl, and the list of deliberate differences itself."""

import ast
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from jaxrl.config import TrainConfig
from jaxrl.data.packing import row_slices
from tests.golden import FOLDER, Case, __main__ as checks, cases
from tests.golden.arrays import Tolerance
from tests.golden.checker import CHECKS, check_file, difference, load_differences, mismatches

ROOT = Path(__file__).parents[1]
DIFFERENCES = load_differences()
EVERY = {
    "advantages": 20,
    "kl_controller": 3,
    "kl_estimators": 4,
    "logprobs_entropy": 3,
    "off_policy_correction": 3,
    "reductions": 6,
    "seed_policy_reduced": 20,
    "worker_total_loss": 8,
}


@pytest.mark.some(3)  # `.ci/run` checks all cases of all files
@pytest.mark.parametrize("file", sorted(CHECKS))
def test_a_sample_of_cases_equals_skyrl_or_is_listed(file):
    if not (FOLDER / f"{file}.json").exists():
        pytest.skip("no such file among the numbers that were given")
    report = check_file(file, FOLDER, DIFFERENCES, EVERY.get(file, 10 if "policy" in file else 1))
    assert not report.failed


@pytest.mark.parametrize("file", ["config_defaults_head", "config_defaults_seed"])
def test_every_default_equals_skyrls_or_is_listed(file):  # quick, and often changed
    assert not check_file(file, FOLDER, DIFFERENCES).failed


def test_corrections_equal_skyrls_or_are_listed():  # few cases of a config that has grown
    report = check_file("off_policy_correction", FOLDER, DIFFERENCES, 3)
    assert report.passed and not report.failed


@pytest.mark.slow
def test_every_case_equals_skyrl_or_is_listed():
    assert checks.main([str(FOLDER)]) == 0


def test_every_golden_file_has_a_check():
    assert {path.stem for path in FOLDER.glob("*.json")} <= set(CHECKS)


@pytest.mark.parametrize("entry", DIFFERENCES, ids=lambda d: f"{d.file}-{d.ids[0]}-{d.outputs[0]}")
def test_every_difference_has_a_reason_and_a_test_of_ours(entry):
    assert entry.reason and entry.ours
    path, name = entry.test.split("::")
    names = {n.name for n in ast.parse((ROOT / path).read_text()).body if hasattr(n, "name")}
    assert name in names


def test_the_checker_reports_failures_and_unknown_files(tmp_path, capsys, monkeypatch):
    """In a thread: a process, as `.ci/run` and the slow test have, imports for seconds."""
    # token_mean of one row with the masks 1 1: weights 1/2, so 1, 3 become 0.5, 1.5 and not 0.5, 2
    case = {
        "id": "token_mean.mb1.s0",
        "loss_reduction": "token_mean",
        "prompt_boundaries": [[0, 1]],
        "inputs": ["advantages", "loss_mask"],
        "outputs": ["scaled64"],
    }
    (tmp_path / "reductions.json").write_text(json.dumps({"cases": [case]}))
    (tmp_path / "something_new.json").write_text("{}")
    arrays = {
        "in/advantages": [[1.0, 3.0]],
        "in/loss_mask": [[1.0, 1.0]],
        "out/scaled64": [[0.5, 2]],
    }
    np.savez(
        tmp_path / "reductions.npz",
        **{f"{case['id']}/{k}": np.array(v, float) for k, v in arrays.items()},
    )
    monkeypatch.setattr(checks, "ProcessPoolExecutor", lambda jobs, _: ThreadPoolExecutor(jobs))
    assert checks.main([str(tmp_path), "--jobs", "1"]) == 1
    printed = capsys.readouterr().out
    assert "something_new                 unknown file, not checked" in printed
    assert "token_mean.mb1.s0  scaled64: 1 of 2 differ, first 1.5, SkyRL 2" in printed


def raising(error):
    def check(case, bits):
        raise error

    return check


@pytest.mark.parametrize(
    ("raises", "check", "found"),
    [
        (None, raising(ValueError("bad")), {"raises:ValueError"}),
        ("ValueError: bad", raising(ValueError("worse")), set()),
        ("ValueError: bad", raising(KeyError("log_probs")), {"raises:KeyError"}),
        ("ValueError: bad", lambda case, bits: {}, {"no error"}),
        (None, lambda case, bits: {}, {"nothing"}),
    ],
)
def test_errors_are_compared_by_type_and_comparing_nothing_is_a_failure(
    raises, check, found, monkeypatch
):
    monkeypatch.setitem(CHECKS, "reductions", check)
    assert set(mismatches("reductions", Case(id="a", raises=raises))) == found


def test_a_tolerance_is_relative_and_absolute_to_the_largest_number():
    tolerance = Tolerance(1e-4, 1e-6).scaled(np.array([1e6]))
    assert difference(np.array([1.5]), np.array([1.0]), tolerance) is None  # 1e-6 * 1e6 = 1
    assert difference(np.array([2.5]), np.array([1.0]), tolerance)
    assert difference(np.array([np.nan]), np.array([1.0]), tolerance)


def test_minibatches_are_whole_prompts():
    # 2 prompts with 2 samples each, minibatches of 1 prompt: rows 0-1 and 2-3
    index = np.array([0, 0, 1, 1])
    assert [part.tolist() for part in row_slices(index, 2)] == [[0, 0], [1, 1]]


def test_a_later_field_is_an_error():
    with pytest.raises(ValueError, match="use_expandable_segments"):
        TrainConfig.from_cli_overrides({"trainer.use_expandable_segments": True})


def test_every_case_has_a_name_of_its_own():
    for file in CHECKS:
        if (FOLDER / f"{file}.json").exists():
            names = [case["id"] for case in cases(file)]
            assert len(names) == len(set(names))
