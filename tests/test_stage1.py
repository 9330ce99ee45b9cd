"""The files of the first stage, tests/data/stage1: audited, replayed, resumed by this version."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxrl.data.recorded import read_rollouts, rollouts_path
from tests.data.stage1.make import ENVIRONMENT, KILLED, KINDS, SAVED, STEPS

FILES = Path(__file__).parent / "data" / "stage1"
MADE_WITH = "0.10.2"  # of jax; another version may round otherwise, as may another CPU
# The sampler's log-probs are sums of a program of its own: with the known arithmetic, too, their
# order is that of the processor that the compiler sees (an EPYC of family 25 has other last bits
# than the one of the files, and all else alike). They are compared by value.
SUMMED = "batch.rollout_log_probs"
# What is computed before any floating-point arithmetic of the model.
SAMPLED = {"batch.tokens", "batch.rewards", "batch.loss_mask", "batch.response_mask"}

DO = """
import sys
from jaxrl.audit import audit
from jaxrl.replay import Compared, replay
from tests.data.stage1 import make

kind = sys.argv[1]
print("ARITHMETIC", make.arithmetic())

def say(what, results):
    for result in results:
        if isinstance(result, Compared):
            print("FOUND", what, result.step, *result.different)

def audited(what):
    for check in audit(f"runs/{kind}"):
        print("CHECK", what, check.result, check.name, *check.failures)

audited("killed")
say("killed", replay(f"runs/{kind}", checkpoint="start"))
make.run(kind, killed=False)
audited("resumed")
say("resumed", replay(f"runs/{kind}"))
"""


def words(text, first):
    return [line.split()[1:] for line in text.splitlines() if line.startswith(first)]


@pytest.mark.some(1)
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_of_the_first_stage_is_audited_replayed_and_resumed(tmp_path, kind):
    shutil.copytree(FILES / "model", tmp_path / "model")
    shutil.copytree(FILES / "runs" / kind, tmp_path / "runs" / kind)
    root = str(FILES.parents[2])
    done = subprocess.run(
        [sys.executable, "-c", DO, kind],
        cwd=tmp_path,
        env={**os.environ, **ENVIRONMENT, "PYTHONPATH": root},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "is of an earlier version: its metadata has no checksum" in done.stdout
    checks = words(done.stdout, "CHECK")
    assert {result for _, result, *_ in checks} <= {"passed", "unknown"}, checks
    found = {(what, int(step)): names for what, step, *names in words(done.stdout, "FOUND")}
    finished = KILLED - 1
    steps = [("killed", n) for n in range(1, finished + 1)]
    steps += [("resumed", n) for n in range(SAVED, STEPS + 1)]
    # what this machine has sampled and trained, from the old checkpoint on
    assert all(found[step] == [] for step in steps if step > ("resumed", SAVED))
    expected = json.loads((FILES / "expected.json").read_text())
    same_arithmetic = words(done.stdout, "ARITHMETIC") == [[str(expected["arithmetic"])]]
    if same_arithmetic and jax.__version__ == MADE_WITH:
        assert found == {step: [] for step in steps}
        again = recorded(tmp_path / "runs" / kind)
        for number, checksums in expected.get(kind, {}).items():
            # of every array that there was; batches have columns since then
            now = again[int(number)]
            assert {n for n in checksums if now.get(n) != checksums[n]} <= {SUMMED}
    else:
        assert not any(SAMPLED & set(names) for names in found.values()), found
    if kind != "free":  # a free run goes by the clock
        assert_sampled_again(FILES / "runs" / kind, tmp_path / "runs" / kind)


def assert_sampled_again(before, after):
    """The step that was lost with the process: the same tokens, log-probs up to rounding."""
    lost, again = (
        read_rollouts(rollouts_path(folder, KILLED - 1))[0] for folder in (before, after)
    )
    assert again["response_ids"] == lost["response_ids"]
    for ours, theirs in zip(again["rollout_logprobs"], lost["rollout_logprobs"], strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)


def recorded(folder):
    """Step -> checksums of the lineage that survived."""
    from jaxrl.tools.audit.lineage import open_run

    with open_run(folder) as run:
        rows = run.rows("SELECT step, checksums FROM live_steps")
        return {step: dict(json.loads(numbers)) for step, numbers in rows}
