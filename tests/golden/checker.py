"""Checks the cases of golden files, and knows which differences are deliberate."""

import fnmatch
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxrl.losses import LOSSES
from tests.golden import FOLDER, Case, batches, cases, losses
from tests.golden.arrays import Outputs, Tolerance

NOT_SKYRL = {
    *("gmpo", "decoupled_ppo", "ce_gppo", "vespo", "luspo", "topr", "gpg", "dro", "m2po", "aspo"),
    *("dcpo", "bapo", "ipo", "luffy", "chord"),
}
CHECKS: dict[str, Callable[[Case, int], Outputs]] = {
    **{
        f"policy_{name}": losses.policy_loss
        for name in (*LOSSES, "edge_cases")
        if name not in NOT_SKYRL
    },
    "policy_gmpo_DERIVED": losses.gmpo,
    "seed_policy_reduced": losses.seed_policy_reduced,
    "advantages": batches.advantages,
    "kl_estimators": losses.kl_estimators,
    "kl_controller": losses.kl_controller,
    "off_policy_correction": losses.off_policy,
    "reductions": losses.reductions,
    "value_loss": losses.value,
    "logprobs_entropy": batches.logprobs_entropy,
    "worker_total_loss": losses.worker_total_loss,
    "trainer_advantages": batches.trainer_advantages,
    "batch_tensors": batches.batch_tensors,
    "python_utils": batches.python_utils,
    "config_defaults_seed": batches.config_defaults,
    "config_defaults_head": batches.config_defaults,
}
ONCE = {"batch_tensors", "python_utils", "config_defaults_seed", "config_defaults_head"}
"""Files whose numbers have one precision."""
DIFFERENCES = FOLDER.parent / "golden_differences.toml"


@dataclass(frozen=True)
class Difference:
    """A deliberate difference from SkyRL: of these outputs of these cases, no others.

    Attributes:
        file, ids: name of the file and of cases; `*`, `?` and `[...]` match as in file names.
        outputs: names of outputs, with the bits: "loss64", "metric32:clip_ratio";
            "raises:ValueError"
            where ours raises that type, "no error" where only SkyRL raises.
        reason: what SkyRL does and why it is not done here.
        ours: what is done here.
        test: the test that shows ours, "tests/file.py::test_name".
    """

    file: str
    ids: tuple[str, ...]
    outputs: tuple[str, ...]
    reason: str
    ours: str
    test: str

    def covers(self, file: str, case: str, output: str) -> bool:
        return (
            fnmatch.fnmatchcase(file, self.file)
            and any(fnmatch.fnmatchcase(case, pattern) for pattern in self.ids)
            and any(fnmatch.fnmatchcase(output, pattern) for pattern in self.outputs)
        )


@dataclass
class Report:
    """What became of a file's cases."""

    passed: list[str] = field(default_factory=list)
    listed: dict[str, list[Difference]] = field(default_factory=dict)
    failed: dict[str, list[str]] = field(default_factory=dict)


def load_differences(path: Path = DIFFERENCES) -> list[Difference]:
    entries = tomllib.loads(path.read_text())["difference"]
    lists = ("ids", "outputs")
    return [Difference(**entry | {k: tuple(entry[k]) for k in lists}) for entry in entries]


def mismatches(file: str, case: Case) -> dict[str, str]:
    """Outputs of a case that differ from SkyRL's, each with what was found."""
    found, compared = {}, 0
    theirs = case.get("raises")  # "ValueError: its message"
    for bits in (64,) if file in ONCE else (32, 64):
        outputs, error = outputs_or_error(file, case, bits)
        compared += len(outputs)
        ours = error and type(error).__name__
        if ours != (theirs and theirs.partition(":")[0]):
            found[f"raises:{ours}" if ours else "no error"] = f"{ours}: {error}, SkyRL {theirs}"
        for name, values in outputs.items():
            problem = difference(*values)
            if problem:
                head, colon, tail = name.partition(":")
                found[name if file in ONCE else f"{head}{bits}{colon}{tail}"] = problem
    if not compared and not theirs and not found:
        found["nothing"] = "no output was compared"
    return found


def outputs_or_error(file: str, case: Case, bits: int) -> tuple[Outputs, Exception | None]:
    """What the file's check makes of the case; whatever it raises, a mistake in it too, counts."""
    with jax.enable_x64(bits == 64):
        try:
            return CHECKS[file](case, bits), None
        except Exception as error:
            return {}, error


def difference(ours: Any, expected: Any, tolerance: Tolerance) -> str | None:
    """What is wrong with ours; None if it is within the tolerance."""
    if not tolerance.relative and not isinstance(expected, np.ndarray):
        equal = np.array_equal(ours, expected) if hasattr(ours, "shape") else ours == expected
        return None if equal else f"{ours!r}, SkyRL {expected!r}"
    if isinstance(ours, str):
        return f"{ours}, SkyRL {expected}"
    ours, expected = np.asarray(ours, float), np.asarray(expected, float)
    if ours.shape != expected.shape:
        return f"shape {ours.shape}, SkyRL {expected.shape}"
    allowed = tolerance.absolute * tolerance.scale
    wrong = ~np.isclose(ours, expected, rtol=tolerance.relative, atol=allowed, equal_nan=True)
    if not wrong.any():
        return None
    at = tuple(np.argwhere(wrong)[0])
    number = f"{wrong.sum()} of {wrong.size} differ"
    return f"{number}, first {ours[at]:.12g}, SkyRL {expected[at]:.12g}"


def check_file(file: str, folder: Path, differences: list[Difference], every: int = 1) -> Report:
    """The cases of one file, or every n-th of them."""
    report = Report()
    for case in cases(file, folder)[::every]:
        wrong = mismatches(file, case)
        covering = {o: [d for d in differences if d.covers(file, case["id"], o)] for o in wrong}
        unlisted = [f"{output}: {wrong[output]}" for output, found in covering.items() if not found]
        if unlisted:
            report.failed[case["id"]] = unlisted
        elif wrong:
            report.listed[case["id"]] = [d for found in covering.values() for d in found]
        else:
            report.passed.append(case["id"])
    return report
