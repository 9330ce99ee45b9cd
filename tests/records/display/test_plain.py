"""The lines of a log, by a clock of its own; nothing of it with "quiet"."""

import io
import sys

import pytest

from jaxrl import activity
from jaxrl.records.display.choose import display_of
from jaxrl.records.display.course import Course
from jaxrl.records.display.plain import Display, Plain, is_terminal


def test_a_line_every_few_seconds_and_one_at_the_end(capsys):
    clock = [0.0]
    shown = Plain(Course("run", clock=lambda: clock[0]), clock=lambda: clock[0])
    shown.course.begin(0, 12)
    with shown:
        for step in range(1, 13):
            clock[0] += 2.0
            shown.stepped(step, {"reward/avg_raw_reward": step / 4, "timing/step": 1.5})
    lines = capsys.readouterr().out.splitlines()
    # of 5 s and more: at 2, 8, 14, 20 s, and the last; a step and what is beside it take 2 s
    assert lines == [
        "step 1 of 12: reward 0.25; 1.50 s/step, 0:16 left",  # 11 x 1.5 = 16.5, rounded to even
        "step 4 of 12: reward 1; 1.50 s/step, 0:16 left",  # 8 x (1.5 + 0.5)
        "step 7 of 12: reward 1.75; 1.50 s/step, 0:10 left",
        "step 10 of 12: reward 2.5; 1.50 s/step, 0:04 left",
        "step 12 of 12: reward 3; 1.50 s/step",
    ]


def test_a_step_without_numbers_has_no_line(capsys):
    clock = [0.0]
    shown = Plain(Course("run", clock=lambda: clock[0]), clock=lambda: clock[0])
    shown.course.begin(0, 3)
    with shown:
        shown.stepped(0, {})  # an evaluation of no prompts
        clock[0] += 100.0
        shown.stepped(1, {"reward/avg_raw_reward": 0.5})
    assert capsys.readouterr().out == "step 1 of 3: reward 0.5\n"


def test_what_takes_long_says_what_it_is(capsys):
    clock = [0.0]
    shown = Plain(Course("run"), clock=lambda: clock[0])
    shown.course.begin(0, 240)
    with activity.doing("compiling", 18) as compiling:
        for _ in range(7):
            compiling.next("update 256 x 12")
        for second in range(70):
            clock[0] = float(second)
            shown.tick()
    clock[0] = 500.0
    shown.tick()  # nothing goes on
    assert (
        capsys.readouterr().out.splitlines()
        == [  # the display was made at 0 s
            "after step 0 of 240: compiling update 256 x 12, 7 of 18",  # at 25 and 55 s
        ]
        * 2
    )


def test_quiet_shows_alarms_and_warnings_alone(capsys):
    shown = display_of("run", "quiet")
    assert type(shown) is Display
    with shown:
        shown.card("whole", str)
        activity.say("compiled in 3 s")
        shown.stepped(1, {"reward/avg_raw_reward": 1.0})
        shown.sample("2+2=4")
        shown.alarm("ALARM a")
        activity.warn("b")
    assert capsys.readouterr() == ("ALARM a\n", "warning: b\n")


def test_the_processes_beside_the_first_show_nothing(capsys):
    with display_of("run", "plain", shown=False) as shown:
        shown.stepped(1, {"reward/avg_raw_reward": 1.0})
    assert capsys.readouterr().out == ""


class Terminal:
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("term", "name"), [("xterm", "Panel"), ("dumb", "Plain"), ("", "Plain"), (None, "Plain")]
)
def test_a_terminal_that_can_has_a_panel(term, name, monkeypatch):
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.delenv("TERM", raising=False)
    if term is not None:
        monkeypatch.setenv("TERM", term)
    assert type(display_of("run", "auto")).__name__ == name


def test_what_is_no_terminal_has_lines():
    assert type(display_of("run", "auto")) is Plain


def test_a_sample_does_not_steer_the_terminal(capsys):
    Plain(Course("run")).sample("2+2=\x1b[31m4\x9b2J\x07\r\n\tdone\x7f \u00e9")
    assert capsys.readouterr().out == "2+2=\\x1b[31m4\\x9b2J\\x07\\x0d\n\tdone\\x7f \u00e9\n"


def test_no_stdout_and_a_closed_one_are_no_terminal(monkeypatch):
    closed = io.StringIO()
    closed.close()
    assert not is_terminal(closed)
    monkeypatch.setattr("sys.stdout", None)
    assert type(display_of("run", "auto")) is Plain
