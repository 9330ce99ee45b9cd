"""What stands at a field about its values is checked, in configs of users, too."""

import math
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pytest
import yaml

from jaxrl.config import (
    AlgorithmConfig,
    ServeConfig,
    TinkerConfig,
    TrainConfig,
    apply_overrides,
    check_constraints,
    make_config,
    validate,
)
from jaxrl.config.constraints import (
    between,
    each_of,
    must,
    not_negative,
    one_of,
    positive,
    positive_or,
)
from jaxrl.config.dataclass_config import field_types, is_config, is_union

DATA = Path(__file__).parents[1] / "data"


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


def floats(config, path=""):
    """Every field of a config that may be a float: the config, the field, its dotted name."""
    for name, kind in field_types(type(config)).items():
        value, kinds = getattr(config, name), typing.get_args(kind) if is_union(kind) else (kind,)
        if is_config(value):
            yield from floats(value, f"{path}{name}.")
        elif float in kinds:
            yield config, name, f"{path}{name}"


@pytest.mark.parametrize("kind", [TrainConfig, ServeConfig, TinkerConfig])
def test_no_field_is_infinite(kind):
    config = kind()
    found = list(floats(config))
    assert len(found) > 1
    for group, name, field in found:
        usual = getattr(group, name)
        for value, said in ((math.inf, "finite"), (-math.inf, "finite"), (math.nan, "a number")):
            setattr(group, name, value)
            with pytest.raises(ValueError, match=rf"^{field}={value}: is not {said}; set"):
                check_constraints(config)
        setattr(group, name, usual)
    check_constraints(config)


FOLDER = "names one folder in trainer.log_path, without '/', '\\' or '..'; put the path into that"
EMPTY = "is empty; set a name, or leave it out for the default"
NAMES = {
    "trainer.run_name": {
        "": EMPTY,
        " ": EMPTY,
        **dict.fromkeys(("a/b", "a\\b", "..", "."), FOLDER),
    },
    **dict.fromkeys(
        (
            "trainer.project_name",
            "trainer.log_path",
            "trainer.policy.model.path",
            "trainer.ref.model.path",
            "trainer.critic.model.path",
            "trainer.policy.model.lora.lora_sync_path",
            "generator.inference_engine.served_model_name",
            "generator.inference_engine.weights_folder",
        ),
        {"": EMPTY},
    ),
    **dict.fromkeys(("trainer.ckpt_path", "trainer.export_path", "trainer.resume_path"), {}),
}


@pytest.mark.parametrize("field", NAMES)
def test_a_name_is_one_line_and_one_folder_where_it_names_one(field):
    control = {
        f"a{c}b": f"has the control character {c!r}; leave that out"
        for c in ("\n", "\r", "\t", "\0", "\x1b", "\x7f", "\u2028")
    }
    for value, said in (NAMES[field] | control).items():
        with pytest.raises(ValueError) as error:
            check_constraints(apply_overrides(TrainConfig(), {field: value}))
        assert str(error.value) == f"{field}={value!r}: {said}"
    for value in ("a b", "größe-1.5,α=0.1", "...", ".hidden"):
        check_constraints(apply_overrides(TrainConfig(), {field: value}))


@pytest.mark.parametrize("path", sorted((DATA / "stage1" / "runs").glob("*/config.yaml")), ids=str)
def test_runs_of_earlier_versions_have_names_that_are_still_taken(path):
    check_constraints(TrainConfig.from_dict_config(yaml.safe_load(path.read_text())))


def test_a_group_that_is_off_is_not_checked():
    config = make_config()()
    assert config.trainer.algorithm.overlong_buffer is None
    check_constraints(config)
