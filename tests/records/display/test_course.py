"""How far a run is, by literal arithmetic and a clock of its own."""

import pytest

from jaxrl.records.display.course import Course, clock_time, number


def test_pace_and_time_left_leave_compilation_out():
    clock = [100.0]
    course = Course("run", clock=lambda: clock[0])
    course.begin(0, 10)
    course.add(0, {"eval/all/avg_score": 0.5})  # before the first step: no time of a step
    assert (course.pace, course.left) == (None, None)
    clock[0] = 220.0  # a warm-up that compiles for 112 s, and the first step
    course.add(1, {"timing/step": 8.0, "compile/seconds": 112.0})
    assert course.standing() == ["step 1 of 10"]
    clock[0] = 223.0  # a step of 2, a save of 1
    course.add(2, {"timing/step": 2.0, "compile/seconds": 0.0})
    assert course.pace == 2.0
    assert course.left == 24.0  # 8 steps x (2 + 1 of what is beside one step)
    clock[0] = 273.0  # 10 beside a step of 40: neither counts
    course.add(3, {"timing/step": 40.0, "compile/seconds": 30.0})
    assert (course.pace, course.left) == (2.0, 21.0)  # 7 x (2 + 1)
    clock[0] = 282.0  # a step of 4, an evaluation of 5
    course.add(4, {"timing/step": 4.0})
    assert course.pace == 3.0  # (2 + 4) / 2
    assert course.left == 36.0  # 6 x (3 + (1 + 5) / 2)
    assert course.standing() == ["step 4 of 10", "3.00 s/step", "0:36 left"]


def test_the_pace_is_that_of_the_last_steps():
    course = Course("run", clock=lambda: 0.0)
    course.begin(0, 100)
    for step in range(1, 31):
        course.add(step, {"timing/step": 9.0 if step <= 10 else 1.0})
    assert course.pace == 1.0  # of steps 11 to 30


def test_a_resumed_run_has_its_earlier_numbers_and_no_time_of_them():
    course = Course("run", clock=lambda: 0.0)
    course.begin(2, 4)
    for step in (1, 2):
        course.read(step, {"reward/avg_raw_reward": step / 4, "timing/step": 7.0})
    assert course.watched() == {"reward": [(1, 0.25), (2, 0.5)]}
    assert course.standing() == ["step 2 of 4"]


def test_what_is_watched_comes_in_one_order_and_by_the_first_name_there_is():
    course = Course("run")
    course.add(1, {"loss/avg_kl": 0.5, "eval/loss": 3.0, "reward/avg_raw_reward": 1.0})
    course.add(2, {"policy/policy_kl": 0.25, "loss/avg_kl": 0.5})
    assert list(course.watched()) == ["reward", "eval", "KL"]
    assert course.watched()["KL"] == [(1, 0.5), (2, 0.25)]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0123456, "0.0123"),
        (3.849, "3.85"),
        (0, "0"),
        (999.4, "999"),
        (4312.3, "4,312"),
        (99_999, "99,999"),
        (123456, "1.2e+05"),
        (float("nan"), "nan"),
        (float("-inf"), "-inf"),
    ],
)
def test_numbers_have_at_most_seven_characters(value, text):
    assert number(value) == text
    assert len(text) <= 7


def test_seconds_as_a_clock_writes_them():
    assert [clock_time(x) for x in (7.4, 750, 11_100)] == ["0:07", "12:30", "3:05:00"]
