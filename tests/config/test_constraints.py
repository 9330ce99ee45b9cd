"""What stands at a field about its values is checked, in configs of users, too."""

from dataclasses import dataclass
from typing import Annotated

import pytest

from jaxrl.config import AlgorithmConfig, check_constraints, make_config, validate
from jaxrl.config.constraints import (
    between,
    each_of,
    must,
    not_negative,
    one_of,
    positive,
    positive_or,
)


@dataclass
class MyConfig(AlgorithmConfig):
    my_steps: Annotated[int, positive] = 1
    my_share: Annotated[float, between("(0, 1]", "1.0 is all")] = 1.0
    my_colours: Annotated[str | list[str], each_of("red", "green", later=("blue",))] = "red"
    my_limit: Annotated[int | None, positive_or(None, "any")] = None
    my_interval: Annotated[int, positive_or(-1, "off")] = -1
    my_delay: Annotated[float, not_negative] = 0.0
    my_colour: Annotated[str, one_of("red", "green")] = "red"
    my_number: Annotated[int, int] = 0  # whatever else an annotation may say
    eps_clip_low: float = 0.3  # another default, the same constraint
    my_even: Annotated[int, must(lambda n: n % 2 == 0, "must be even"), positive] = 2


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("my_steps", 0, "must be positive; set it to 1 or more"),
        ("my_share", 0.0, "must be in (0, 1]; 1.0 is all"),
        ("my_share", 1.5, "must be in (0, 1]; 1.0 is all"),
        ("my_limit", 0, "must be positive, or None (any)"),
        ("my_interval", 0, "must be positive, or -1 (off)"),
        ("my_delay", -0.5, "must not be negative; set it to 0 or more"),
        ("my_even", 3, "must be even"),
        ("my_even", 0, "must be positive; set it to 1 or more"),
        ("my_steps", None, "must be positive"),
        ("my_colour", ["red"], "must be 'red' or 'green'; did you mean 'red'?"),
        ("eps_clip_low", -0.1, "must not be negative; set it to 0 or more"),
        ("my_colours", "gren", "must be 'red' or 'green'; did you mean 'green'?"),
        ("my_colours", "blue", "not available yet, must be 'red' or 'green'"),
    ],
)
def test_the_error_names_the_dotted_field_the_value_and_the_fix(field, value, problem):
    config = make_config(algorithm_cls=MyConfig)()
    setattr(config.trainer.algorithm, field, value)
    with pytest.raises(ValueError) as error:
        validate(config)
    assert str(error.value) == f"trainer.algorithm.{field}={value!r}: {problem}"


def test_each_entry_of_a_list_is_a_choice():
    check_constraints(MyConfig(my_colours=["red", "green"], my_share=1.0, my_limit=3))
    with pytest.raises(ValueError, match=r"my_colours='pink': must be 'red' or 'green'"):
        check_constraints(MyConfig(my_colours=["red", "pink"]))


def test_a_group_that_is_off_is_not_checked():
    config = make_config()()
    assert config.trainer.algorithm.overlong_buffer is None
    check_constraints(config)
