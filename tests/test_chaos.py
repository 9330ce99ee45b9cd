"""Runs of every kind are killed at random instants; nothing is lost."""

import json
import shutil

import pytest

from benchmarks import chaos, chaos_jobs


@pytest.mark.slow
def test_forty_kills_lose_nothing(tmp_path):
    output = tmp_path / "chaos.json"
    words = ["--kills=40", "--kinds=sync,turns,lockstep,free", f"--json={output}"]
    assert chaos.main([*words, f"--folder={tmp_path / 'runs'}"]) == 0
    rows = {row["kind"]: row for row in json.loads(output.read_text())["rows"]}
    assert {kind: row["kills"] for kind, row in rows.items()} == {
        "sync": 10,
        "turns": 10,
        "lockstep": 10,
        "free": 10,
    }
    for kind, row in rows.items():
        assert not row["failures"]
        assert sum(row["hits"].values()) == row["kills"]
        assert row["hits"]["writing a checkpoint"] >= 1
        assert row["equal"] or kind == "free"
    if shutil.which("strace"):
        assert sum(row["hits"].get("writing the ledger", 0) for row in rows.values()) >= 3


@pytest.mark.slow
def test_kills_of_jobs_lose_nothing(tmp_path):
    """Of two processes, with engines of their own and on servers that come and go."""
    output, kinds = tmp_path / "chaos.json", ("engines-2", "servers-2")
    words = ["--kills=4", f"--kinds={','.join(kinds)}", f"--json={output}"]
    assert chaos_jobs.main([*words, f"--folder={tmp_path / 'runs'}"]) == 0
    rows = json.loads(output.read_text())["rows"]
    assert tuple(row["kind"] for row in rows) == kinds
    for row in rows:
        assert row["equal"]
        assert sum(row["victims"].values()) == 2
