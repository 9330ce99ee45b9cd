"""Modules that moved: the names that configs and checkpoints of earlier versions hold."""

import importlib

import pytest

from jaxrl import config as cfg
from jaxrl.data.prompts import load_rows
from jaxrl.envs import load
from jaxrl.functions import MOVED, import_call, import_function, present_path
from jaxrl.records.resume_identity import changed_fields
from jaxrl.registry import PolicyLossRegistry

pytestmark = pytest.mark.check


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


def test_a_misspelt_function_is_told_those_of_the_module_and_not_what_it_imports(
    tmp_path, monkeypatch
):
    text = "from typing import Optional\nfrom pathlib import Path\n\ndef my_reward(): ...\n"
    (tmp_path / "misspelt_module.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    message = r"it has \['my_reward'\]. Did you mean 'my_reward'\?$"
    with pytest.raises(ValueError, match=message):
        import_function("misspelt_module:my_rewrad")


def test_a_module_beside_the_recipe_is_found_for_the_message(tmp_path):
    text = "from jaxrl.config import default_config as get_config\n"
    (tmp_path / "recipe_beside.py").write_text(text)
    (tmp_path / "reward_beside.py").write_text("")
    cfg.load_config_file(str(tmp_path / "recipe_beside.py"))
    with pytest.raises(ValueError, match=rf"It lies in {tmp_path}: start in that folder"):
        import_function("reward_beside:reward")
    with pytest.raises(ValueError, match=f"PYTHONPATH={tmp_path}"):
        load("reward_beside:MyEnv")


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("my_pkg.rewards.brevity", "my_pkg.rewards:brevity"),
        ("rewards.brevity(weight=0.5)", "rewards:brevity(weight=0.5)"),
    ],
)
def test_a_dot_in_place_of_the_colon_is_named(path, meant):
    with pytest.raises(ValueError) as raised:
        import_call(path, "reward function")
    assert str(raised.value) == (
        f"reward function '{path}': a colon stands before the name; did you mean '{meant}'?"
    )
    with pytest.raises(ValueError, match=r"^Unknown policy loss 'my.l'; did you mean 'my:l'\?$"):
        PolicyLossRegistry.resolve("my.l")


def test_a_path_of_ones_own_stays():
    for path in ("my_pkg.my_module:rows(size=3)", "data/train.parquet", "a: b", ""):
        assert present_path(path) == path
