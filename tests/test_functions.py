"""Modules that moved: the names that configs and checkpoints of earlier versions hold."""

import importlib

import pytest

from jaxrl import config as cfg
from jaxrl.data.prompts import load_rows
from jaxrl.envs import load
from jaxrl.functions import MOVED, import_function, present_path
from jaxrl.records.resume_identity import changed_fields


@pytest.mark.parametrize("old", MOVED)
def test_the_new_place_is_there_and_the_old_one_is_not(old):
    importlib.import_module(MOVED[old])
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(old)


def test_old_names_resolve_to_the_same_objects():
    from jaxrl.envs.tasks.gsm8k import Gsm8kEnv
    from jaxrl.envs.toys.sort_digits import prompts

    assert import_function("jaxrl.envs.sort_digits:prompts") is prompts
    assert load("jaxrl.envs.gsm8k:Gsm8kEnv") is load("gsm8k") is Gsm8kEnv
    arguments = "prompts(size=4, seed=1)"
    rows = [load_rows(f"jaxrl.envs.{at}sort_digits:{arguments}") for at in ("", "toys.")]
    assert rows[0] == rows[1]
    assert len(rows[0]) == 4


def test_a_run_that_named_its_data_by_the_old_name_is_the_same_run():
    old, new = (cfg.get_config_as_dict(cfg.TrainConfig()) for _ in range(2))
    old["data"]["train_data"] = ["jaxrl.envs.sort_digits:prompts(size=4)"]
    new["data"]["train_data"] = ["jaxrl.envs.toys.sort_digits:prompts(size=4)"]
    assert changed_fields(old, new) == {}
    new["data"]["train_data"] = ["jaxrl.envs.toys.sort_digits:prompts(size=5)"]
    assert list(changed_fields(old, new)) == ["data.train_data"]


def test_a_path_of_ones_own_stays():
    for path in ("my_pkg.my_module:rows(size=3)", "data/train.parquet", "a: b", ""):
        assert present_path(path) == path
