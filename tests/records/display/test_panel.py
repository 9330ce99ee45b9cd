"""The panel, drawn at fixed sizes, and a real run's on a terminal."""

import io
import math
import sys

import pytest
from rich.console import Console

from jaxrl import activity
from jaxrl.records.display.course import Course
from jaxrl.records.display.panel import Panel, drawn


def panel(columns, rows=24, encoding="utf-8"):
    """A panel on a terminal of fixed size; the time stands still."""
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    console = Console(
        file=file,
        width=columns,
        height=rows,
        force_terminal=True,
        color_system=None,
        legacy_windows=False,
    )
    course = Course("sums", clock=lambda: 0.0)
    course.begin(0, 240)
    return Panel(course, console, clock=lambda: 0.0)


def text_of(shown):
    with shown.console.capture() as capture:
        shown.console.print(shown.panel())
    return capture.get()


def numbers(step):
    return {
        "reward/avg_raw_reward": step / 240,
        "loss/avg_kl": 0.002,
        "policy/policy_entropy": 4 - step / 60,
        "generate/avg_num_tokens": 5.5,
        "trainer/tokens_per_second_per_gpu": 4312.0,
        "timing/step": 0.5,
    }


def test_80_columns(monkeypatch):
    shown = panel(80)
    for step in range(1, 121):
        shown.stepped(step, numbers(step))
    monkeypatch.setattr("time.monotonic", lambda: 12.0)
    with activity.doing("rollouts", 512) as rollouts:
        rollouts.done, rollouts.waiting, rollouts.since = 130, 40, 0.0
        text = text_of(shown)
    # reward 0 to 1/2 over 120 steps, two or three to a column of 56; 120 steps of 0.5 s are left
    assert text == GOLDEN
    assert {len(line) for line in text.splitlines()} == {80}


GOLDEN = """\
╭─ sums ───────────────────────────────────────────────────────────────────────╮
│ ━━━━━━━━━━━━━━━━━━                   step 120 of 240, 0.50 s/step, 1:00 left │
│ reward           0.5 ▁▁▁▁▁▂▂▂▂▂▂▂▃▃▃▃▃▃▃▃▄▄▄▄▄▄▄▄▅▅▅▅▅▅▅▅▆▆▆▆▆▆▆▇▇▇▇▇▇▇▇████ │
│ KL             0.002 ▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁ │
│ entropy            2 ████▇▇▇▇▇▇▇▇▆▆▆▆▆▆▆▆▅▅▅▅▅▅▅▅▄▄▄▄▄▄▄▄▃▃▃▃▃▃▃▂▂▂▂▂▂▂▂▁▁▁▁ │
│ length           5.5 ▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁ │
│ tok/s/device   4,312 ▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁ │
│ rollouts 130 of 512; rewards: 40 waiting                                0:12 │
╰────────────────────────────────────────────────── s: a sample, Ctrl-C: stop ─╯
"""


def test_each_term_of_a_reward_has_a_line():
    shown = panel(80)
    names = ["correct", "a_reward_with_a_very_long_name", "length", "brief", "fifth"]
    for step in (1, 2):
        terms = {f"reward/{name}/mean": step * i for i, name in enumerate(names)}
        spread = {f"reward/{name}/std": 9.0 for name in names}
        shown.stepped(step, numbers(step) | terms | spread)
    lines = text_of(shown).splitlines()
    assert {len(line) for line in lines} == {80}
    assert [line[2:30].rstrip() for line in lines[2:9]] == [
        "reward               0.00833",
        "  correct                  0",
        "  a_reward_with_a_v…       2",
        "  length                   4",
        "  brief                    6",
        "KL                     0.002",
        "entropy                 3.97",
    ]


def test_a_reward_of_one_term_is_that_term():
    shown = panel(80)
    shown.stepped(1, numbers(1) | {"reward/correct/mean": 1.0})
    assert "correct" not in text_of(shown)


def test_what_was_given_is_dim_in_a_sample():
    shown = panel(80)
    shown.sample("--- step 3, reward 1.000\ngiven | 12>\nmodel | given | 1")
    assert [(span.start, span.end, span.style) for span in shown._sample.spans] == [(25, 36, "dim")]


@pytest.mark.parametrize("columns", [20, 40, 60, 200])
def test_other_widths_hold(columns):
    shown = panel(columns)
    for step in range(1, 10):
        shown.stepped(step, numbers(step))
    shown.alarm("ALARM not_finite at step 9: policy/final_loss nan. Try: less")
    with activity.doing("compiling", 18) as compiling:
        compiling.next("update 256 x 12")
        lines = text_of(shown).splitlines()
    assert max(map(len, lines)) <= columns
    assert any("reward" in line for line in lines)


def test_a_terminal_without_the_characters_has_the_numbers():
    shown = panel(80, encoding="ascii")
    shown.stepped(1, numbers(1))
    text = text_of(shown)
    assert text.isascii()
    assert "0.00417" in text  # 1 / 240


def test_what_is_printed_is_no_markup(monkeypatch):
    file = io.StringIO()
    monkeypatch.setattr("sys.stdout", file)
    shown = Panel(Course("sums"))
    shown.console._force_terminal = True  # what is printed goes through the panel
    with shown:
        print("[/INST] :smile: [red]4[/red]", end="", flush=True)
    assert "[/INST] :smile: [red]4[/red]" in file.getvalue()


def test_a_panel_that_cannot_be_drawn_stays_as_it_was(monkeypatch):
    shown = panel(80)
    shown.stepped(1, numbers(1))
    before = text_of(shown)
    monkeypatch.setattr(shown, "_numbers", lambda: 1 / 0)
    shown.stepped(2, numbers(2))
    assert text_of(shown) == before


def test_a_terminal_that_is_gone_ends_no_run(capsys):
    shown = panel(80)
    with shown:
        shown.console.file.close()
    assert "warning: the panel could not be ended: " in capsys.readouterr().err


def test_without_keys_the_terminal_is_given_back(monkeypatch):
    shown, before = panel(80), (sys.stdout, sys.stderr)
    monkeypatch.setattr("jaxrl.records.display.panel.Keys.__enter__", lambda keys: 1 / 0)
    with pytest.raises(ZeroDivisionError), shown:
        pass
    assert (sys.stdout, sys.stderr) == before
    assert not shown._live.is_started


def test_alarms_stay_and_are_said_once_with_what_to_try():
    shown = panel(80)
    with shown.console.capture() as capture:
        for step in range(1, 6):
            shown.alarm(f"ALARM a at step {step}: 2 is above 1. Try: b")
    assert capture.get().count(". Try: b") == 5
    text = text_of(shown)
    assert [f"at step {step}" in text for step in (1, 2, 3, 4, 5)] == [False] * 2 + [True] * 3
    assert "Try" not in text


@pytest.mark.parametrize(
    ("values", "width", "curve"),
    [
        ([0, 1, 2, 3, 4, 5, 6, 7], 8, "▁▂▃▄▅▆▇█"),
        ([0, 0, 7, 7], 2, "▁█"),  # means of pairs
        ([0, 7], 8, "▁█"),
        ([1e308] * 3 + [1.0], 2, "█▅"),  # the sum is no float; (7 + 0) / 2, rounded to even
        ([0.0, 1e-310], 2, "▁█"),  # nor is 7 / 1e-310
        ([-1e308, 1e308], 2, "▁█"),  # nor their distance
        ([0.0, 5e-324], 2, "▁▁"),
        ([3, 3, 3], 3, "▁▁▁"),
        ([0, math.nan, 7], 3, "▁ █"),
        ([math.nan], 3, ""),
        ([], 3, ""),
        ([1, 2], 0, ""),
    ],
)
def test_a_curve_of_one_line(values, width, curve):
    assert drawn(values, width) == curve
