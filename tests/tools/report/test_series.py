"""Curves, the timeline and the alarms of a run's lines."""

import math

import numpy as np

from jaxrl.tools.report.run_files import RunFiles
from jaxrl.tools.report.series import COLUMNS, POINTS, alarms, series, thinned, timeline
from tests.tools.report.unpack import unpack


def test_metrics_have_the_steps_at_which_they_were_logged(tmp_path):
    lines = {0: {"eval/x": 0.5}, 1: {"a": 1.0}, 2: {"a": math.nan, "eval/x": 0.25}, 3: {"a": 1e300}}
    header, arrays = unpack(series(RunFiles(tmp_path, lines=lines)))
    assert header["names"] == ["a", "eval/x"]
    assert arrays["steps0"].tolist() == [1, 2, 3]
    np.testing.assert_array_equal(arrays["values0"], [1, np.nan, np.inf])
    assert arrays["steps1"].tolist() == [0, 2]
    assert arrays["values1"].tolist() == [0.5, 0.25]
    assert header["columns"] == []


def test_a_long_curve_is_thinned_evenly(tmp_path):
    chosen = thinned(10_001, 5)
    assert chosen == [0, 2500, 5000, 7500, 10_000]
    assert thinned(5, 5) == [0, 1, 2, 3, 4]
    lines = {step: {"a": float(step)} for step in range(1, 2 * POINTS + 1)}
    _, arrays = unpack(series(RunFiles(tmp_path, lines=lines)))
    assert len(arrays["steps0"]) == POINTS
    assert arrays["values0"][[0, -1]].tolist() == [1, 2 * POINTS]


def test_phases_are_seconds_a_step():
    lines = {
        1: {"timing/wall": 3.0, "timing/generate": 2.0, "timing/other": 1.0, "timing/step": 2.5},
        2: {"timing/wall": 1.0, "timing/generate": 1.5, "timing/other": -0.5},  # clocks: not < 0
        3: {"reward": 1.0},
    }
    phases, columns, seconds = timeline(lines)
    assert phases == ["generate", "other"]
    assert columns == [1, 2]
    assert seconds.tolist() == [[2.0, 1.5], [1.0, 0.0]]


def test_a_column_of_a_long_timeline_is_the_mean_of_neighbours():
    lines = {
        step: {"timing/wall": 1.0, "timing/generate": float(step % 2)}
        for step in range(2 * COLUMNS)
    }
    phases, columns, seconds = timeline(lines)
    assert columns[:3] == [0, 2, 4]
    assert (seconds == 0.5).all()


def test_alarms_are_what_the_run_said(tmp_path):
    """Rewards that never differ: off at the fifth step, beyond to the last but one."""
    same = {"reward/zero_variance_ratio": 1.0, "reward/avg_raw_reward": 0.0}
    lines = {step: {**same, "alarm/vanishing_reward_variance": 1.0} for step in range(1, 8)}
    lines[0] = {"eval/all/avg_score": 0.0}
    lines[8] = {**same, "alarm/vanishing_reward_variance": 0.0}
    run = RunFiles(tmp_path, lines=dict(sorted(lines.items())))
    (alarm,) = alarms(run)
    assert (alarm["name"], alarm["step"], alarm["beyond"]) == ("vanishing_reward_variance", 5, 7)
    assert (alarm["value"], alarm["threshold"]) == (1.0, 0.95)
    off = {"trainer": {"watching": {"thresholds": {"vanishing_reward_variance": None}}}}
    assert not alarms(RunFiles(tmp_path, lines=lines, settings=off))
