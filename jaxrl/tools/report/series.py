"""Pack the curves of a run: metrics, the time of its phases, and its alarms."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxrl.records.alarms import REWARD, RULES, Alarms
from jaxrl.records.phases import PHASES
from jaxrl.tools.report.blob import finite, pack
from jaxrl.tools.report.run_files import RunFiles

POINTS = 4000  # of a metric at most
COLUMNS = 2000  # of the timeline at most
OTHER = "other"


def series(run: RunFiles) -> str:
    """Pack all metrics and the timeline as one blob.

    Its header has `names`, of the metrics; `phases`; `columns`, the first step of each column of
    the timeline. Its arrays: `steps<i>` and `values<i>` of metric i; `seconds` [phases, columns].
    """
    arrays: dict[str, np.ndarray] = {}
    names = sorted({name for line in run.lines.values() for name in line})
    for i, name in enumerate(names):
        points = [(step, line[name]) for step, line in run.lines.items() if name in line]
        chosen = thinned(len(points), POINTS)
        arrays[f"steps{i}"] = np.array([points[k][0] for k in chosen], np.uint32)
        with np.errstate(over="ignore"):  # beyond single precision is infinite on a curve
            arrays[f"values{i}"] = np.array([points[k][1] for k in chosen]).astype(np.float32)
    phases, columns, seconds = timeline(run.lines)
    arrays["seconds"] = seconds.astype(np.float32).ravel()
    return pack({"names": names, "phases": phases, "columns": columns}, arrays)


def thinned(count: int, most: int) -> list[int]:
    """Return at most `most` of `count` numbers from 0, evenly spaced, with first and last."""
    if count <= most:
        return list(range(count))
    return np.unique(np.linspace(0, count - 1, most).round().astype(int)).tolist()


def timeline(lines: Mapping[int, Mapping[str, float]]) -> tuple[list[str], list[int], np.ndarray]:
    """Return where the time went: phases, first steps of columns, seconds a step [phases, columns].

    A column is a step, or the mean of several neighbours. Phases without time are left out.
    """
    rows = {step: line for step, line in lines.items() if "timing/wall" in line}
    steps, every = list(rows), max(1, math.ceil(len(rows) / COLUMNS))
    names = [*PHASES, OTHER]
    table = np.array(
        [[line.get(f"timing/{name}", 0.0) for name in names] for line in rows.values()]
    ).reshape(len(rows), len(names))
    table = np.nan_to_num(table, posinf=0.0, neginf=0.0).clip(min=0.0)
    columns = steps[::every]
    means = [table[i : i + every].mean(0) for i in range(0, len(rows), every)]
    seconds = np.array(means).reshape(len(columns), len(names)).T
    used = [i for i in range(len(names)) if seconds[i].any()]
    return [names[i] for i in used], columns, seconds[used]


def alarms(run: RunFiles) -> list[dict[str, Any]]:
    """Return the alarms that went off, as the run said them: the rules over its lines."""
    rules = Alarms(run.group("trainer", "watching", "thresholds"))
    found = run.note_of(
        "alarms", lambda: [a for step, x in run.lines.items() for a in rules.update(step, x)], []
    )
    return [
        {
            "name": alarm.name,
            "step": alarm.step,
            "value": finite(alarm.value),
            "threshold": finite(alarm.threshold),
            "below": RULES[alarm.name].below,
            "says": RULES[alarm.name].says,
            "advice": RULES[alarm.name].advice,
            "beyond": _beyond(run.lines, alarm.name, alarm.step),
        }
        for alarm in found
    ]


def _beyond(lines: Mapping[int, Mapping[str, float]], name: str, first: int) -> int:
    """Return the last of the steps from `first` on at which the alarm was beyond its threshold."""
    last = first
    for step, line in lines.items():
        if step > first and REWARD in line:  # a training step
            if not line.get(f"alarm/{name}"):
                break
            last = step
    return last
