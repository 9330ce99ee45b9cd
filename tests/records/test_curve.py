"""What a run keeps of its steps in memory does not grow with them."""

import gc
import json
import types

import pytest

from jaxrl.records import curve
from jaxrl.records.alarms import READ, Alarms
from jaxrl.records.curve import Curve
from jaxrl.records.display.course import Course
from jaxrl.records.run_logger import RunLogger

NUMBERS = dict.fromkeys((*READ, "policy/policy_kl", "reward/x/mean", "timing/step"), 0.5)


def test_a_long_curve_has_evenly_spaced_points_and_the_last(monkeypatch):
    monkeypatch.setattr(curve, "MOST", 4)
    line, found = Curve(), []
    for step in range(1, 12):
        line.add(step, float(step))
        found.append([at for at, _ in line.points])
    assert found == [
        [1],
        [1, 2],
        [1, 2, 3],
        [1, 2, 3, 4],
        [1, 3, 5],
        [1, 3, 5, 6],
        [1, 3, 5, 7],
        [1, 5, 8],
        [1, 5, 9],
        [1, 5, 9, 10],
        [1, 5, 9, 11],
    ]
    assert line.points[-1] == (11, 11.0)


def reachable(*roots):
    """How many objects hang on these, but for modules, types and code."""
    known, waiting = {}, list(roots)
    while waiting:
        one = waiting.pop()
        if id(one) in known or isinstance(one, types.ModuleType | type | types.FunctionType):
            continue
        known[id(one)] = one
        waiting += gc.get_referents(one)
    return len(known)


@pytest.mark.parametrize("resumed", [False, True])
def test_what_a_run_keeps_of_its_steps_is_bounded(tmp_path, monkeypatch, resumed):
    """20,000 lines of a run, read whole for every picture, made a gigabyte (LOG.md)."""
    monkeypatch.setattr(curve, "MOST", 10)

    def kept(steps):
        folder = tmp_path / str(steps)
        folder.mkdir()
        alarms, course = Alarms(), Course("run", total=steps)

        def read(line):
            alarms.update(int(line["step"]), line)
            course.add(int(line["step"]), line)

        lines = [{"step": i, **{k: i + x for k, x in NUMBERS.items()}} for i in range(1, steps + 1)]
        if resumed:
            text = "".join(json.dumps(line) + "\n" for line in lines)
            (folder / "metrics.jsonl").write_text(text)
        logger = RunLogger(folder, [], steps if resumed else 0, read=read)
        for line in lines if not resumed else ():
            logger.log(line["step"], {k: x for k, x in line.items() if k != "step"})
            read(line)
        logger.close()
        size = reachable(logger, alarms, course)
        assert course.watched()["reward"][-1] == (steps, steps + 0.5)
        return size

    # a float of each step would be 160 more; curves have the same number of points at both
    assert kept(320) <= kept(160) + 20


def test_a_picture_needs_no_line_of_the_file(tmp_path):
    """Reading them all grew with the run, in time and in memory."""
    pictures = []
    for gone in (False, True):
        logger = RunLogger(tmp_path / str(gone) / "run", [], 0)
        for step in range(1, 4):
            logger.log(step, {"reward/avg_raw_reward": 0.25 * step})
        if gone:
            logger.lines.path.unlink()
        pictures.append(logger.plot().read_bytes())
        logger.close()
    assert pictures[0] == pictures[1]
