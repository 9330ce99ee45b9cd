"""What goes on, and what there is to say, without anybody who shows it."""

import pytest

from jaxrl import activity


def test_what_goes_on_is_there_while_it_does_and_counts():
    assert activity.going_on() == []
    with activity.doing("evaluating", 200) as evaluation:
        evaluation.done = 30
        with activity.doing("rollouts", 512) as rollouts:
            rollouts.done, rollouts.waiting = 130, 40
            text = activity.described(activity.going_on())
        assert activity.described(activity.going_on()) == "evaluating 30 of 200"
    assert text == "evaluating 30 of 200; rollouts 130 of 512; rewards: 40 waiting"
    assert activity.going_on() == []


def test_the_part_that_goes_on_has_its_number():
    with activity.doing("compiling", 18) as compiling:
        for number in range(7):
            compiling.next(f"update 256 x {number + 6}")
        assert activity.described(activity.going_on()) == "compiling update 256 x 12, 7 of 18"
    with activity.doing("saving step 20"):
        assert activity.described(activity.going_on()) == "saving step 20"


def test_the_innermost_phase_is_where_a_run_is():
    seen = [activity.progress()]
    activity.begin_step(3)
    seen.append(activity.progress())
    assert activity.place() == "between phases of step 3"
    with activity.phase("eval"), activity.phase("callbacks"):
        assert activity.place() == "callbacks of step 3"
        seen.append(activity.progress())
    seen.append(activity.progress())
    activity.begin_step(0)
    assert activity.place() == "between phases"
    assert len(set(seen)) == 4  # each time something was done


def test_what_goes_on_side_by_side_under_one_name_is_one():
    with activity.doing("rollouts", 8) as first, activity.doing("rollouts", 8) as second:
        first.done, second.done, second.waiting = 5, 2, 3
        (one,) = activity.going_on()
    assert (one.done, one.total, one.waiting) == (7, 16, 3)  # 5 + 2 of 8 + 8


def test_what_raises_goes_on_no_more():
    with pytest.raises(KeyboardInterrupt), activity.doing("rollouts", 8):
        raise KeyboardInterrupt
    assert activity.going_on() == []


@pytest.mark.parametrize(
    ("level", "out"),
    [
        (activity.FULL, "said\ndetail\n"),
        (activity.TIDY, "said\n"),
        (activity.QUIET, ""),
    ],
)
def test_warnings_are_printed_at_every_level(level, out, capsys):
    activity.show(level)
    activity.say("said")
    activity.detail("detail")
    activity.warn("the disk is full")
    assert capsys.readouterr() == (out, "warning: the disk is full\n")
