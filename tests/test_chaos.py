"""Runs of every kind are killed at random instants; nothing is lost."""

import json
import shutil

import pytest

from benchmarks import chaos


@pytest.mark.slow
def test_forty_kills_lose_nothing(tmp_path):
    output = tmp_path / "chaos.json"
    assert chaos.main(["--kills=40", f"--json={output}", f"--folder={tmp_path / 'runs'}"]) == 0
    rows = {row["kind"]: row for row in json.loads(output.read_text())["rows"]}
    assert {kind: row["kills"] for kind, row in rows.items()} == {
        "sync": 14,
        "lockstep": 13,
        "free": 13,
    }
    for kind, row in rows.items():
        assert not row["failures"]
        assert sum(row["hits"].values()) == row["kills"]
        assert row["hits"]["writing a checkpoint"] >= 1
        assert row["equal"] or kind == "free"
    if shutil.which("strace"):
        assert sum(row["hits"].get("writing the ledger", 0) for row in rows.values()) >= 3
