"""The benchmark of the report makes its run and measures it."""

import pytest

from benchmarks import report


@pytest.mark.slow
def test_a_small_run_is_made_and_measured(tmp_path, capsys):
    assert report.main([str(tmp_path / "run"), "--steps=2", "--prompts=1"]) == 0
    printed = dict(line.split(": ") for line in capsys.readouterr().out.splitlines())
    assert float(printed["static page, MB"]) < 0.3
    assert float(printed["live page, MB of a step"]) > 0
    assert len(list((tmp_path / "run" / "rollouts").iterdir())) == 2
