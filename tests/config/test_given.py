"""Functions, classes and rows in a config, in place of their names."""

import copy
import json
from functools import partial

import numpy as np
import pytest

from jaxrl import config as cfg
from jaxrl.data.prompts import load_rows
from jaxrl.envs import Env
from jaxrl.functions import import_function, path_of
from jaxrl.losses.gspo import gspo
from jaxrl.records.callbacks import TrainingCallback

HERE = __name__


def reward(action, extras):
    return float(action == extras["answer"])


def loss(log_probs, old_log_probs, advantages, config, loss_mask=None):
    return -advantages * log_probs, {}


class MyEnv(Env):
    def step(self, action):
        return {"observations": [], "reward": 1.0, "done": True, "metadata": {}}


class MyCallback(TrainingCallback):
    pass


unnamed = lambda action: 0.0  # noqa: E731
half = partial(loss, loss_mask=None)
scaled = partial(gspo, loss_mask=None)
ROWS = [{"prompt": "21", "answer": "12"}, {"prompt": "3 é", "answer": [1, 2]}]


def with_objects(config):
    config.data.train_data, config.data.val_data = ROWS, []
    config.environment.reward_functions = [reward, "jaxrl.envs.shaping:format_reward", unnamed]
    config.environment.env_class = MyEnv
    config.trainer.algorithm.policy_loss_type = loss
    config.trainer.algorithm.advantage_estimator = half
    config.trainer.watching.callbacks = [MyCallback]
    return config


def as_dict():
    made = with_objects(cfg.TrainConfig())
    algorithm = made.trainer.algorithm
    return {
        "data": {"train_data": ROWS, "val_data": []},
        "environment": {
            "reward_functions": made.environment.reward_functions,
            "env_class": MyEnv,
        },
        "trainer": {
            "algorithm": {
                "policy_loss_type": algorithm.policy_loss_type,
                "advantage_estimator": algorithm.advantage_estimator,
            },
            "watching": {"callbacks": [MyCallback]},
        },
    }


@pytest.mark.parametrize(
    "config",
    [
        lambda: with_objects(cfg.default_config()),
        lambda: with_objects(cfg.TrainConfig()),
        as_dict,
    ],
    ids=["ConfigDict", "TrainConfig", "dict"],
)
def test_every_kind_of_config_takes_objects(config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = cfg.to_train_config(config())
    assert found.environment.reward_functions == [
        f"{HERE}:reward",
        "jaxrl.envs.shaping:format_reward",
        f"{HERE}:unnamed",
    ]
    assert found.environment.env_class == f"{HERE}:MyEnv"
    assert found.trainer.algorithm.policy_loss_type == f"{HERE}:loss"
    assert found.trainer.algorithm.advantage_estimator == f"{HERE}:half"
    assert found.trainer.watching.callbacks == [f"{HERE}:MyCallback"]
    (file,) = found.data.train_data
    lines = (tmp_path / file).read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == ROWS
    assert [row["answer"] for row in load_rows(file)] == ["12", [1, 2]]
    assert cfg.to_train_config(found) == found  # names stay


def test_rows_of_a_script_may_name_code_and_the_config_says_so(tmp_path):
    def made(rows, **overrides):
        fields = {"trainer.log_path": str(tmp_path), "data.train_data": rows, "data.val_data": []}
        return cfg.to_train_config(cfg.apply_overrides(cfg.TrainConfig(), fields | overrides))

    found = made([{"prompt": "21", "env_class": MyEnv}, *ROWS])
    first, *rest = load_rows(found.data.train_data[0])
    assert (first["env_class"], len(rest)) == (f"{HERE}:MyEnv", len(ROWS))
    assert found.environment.rows_may_name_code  # for whoever reads the file
    assert not made(ROWS).environment.rows_may_name_code
    assert not made([{"prompt": "21", "env_class": "gsm8k"}]).environment.rows_may_name_code
    lake = {"environment.env_class": "gymnasium:FrozenLake-v1"}
    seen = [{"prompt": "", "observe": f"{HERE}:shown"}]  # of the environment of the config
    assert made(seen, **lake).environment.rows_may_name_code
    own = {"environment.env_class": f"{HERE}:MyEnv"}  # which the config names, not the rows
    assert not made([{"prompt": "21", "env_class": MyEnv}], **own).environment.rows_may_name_code
    # a file of someone else's among them: the script does not speak for it
    mixed = made([{"prompt": "21", "env_class": MyEnv}, "theirs.jsonl"])
    assert not mixed.environment.rows_may_name_code


def test_the_file_of_the_rows_is_named_by_what_they_hold(tmp_path):
    def file(rows, **fields):
        config = cfg.TrainConfig()
        config.trainer.log_path, config.data.train_data = str(tmp_path), rows
        return cfg.to_train_config(config).data.train_data

    (first,) = file(ROWS)
    assert first.startswith(str(tmp_path / "test_run" / "data" / "rows-"))
    assert file(copy.deepcopy(ROWS)) == [first] == file(iter(ROWS))
    assert file(ROWS[::-1]) != [first]
    # rows among files are one source, where the first of them stands
    assert file(["a.jsonl", ROWS[0], "b.jsonl", ROWS[1]]) == ["a.jsonl", first, "b.jsonl"]
    arrays = [{"prompt": "21", "answer": np.str_("12")}, {**ROWS[1], "answer": np.array([1, 2])}]
    assert file(arrays) == [first]
    assert len(list((tmp_path / "test_run" / "data").iterdir())) == 2


def test_rows_of_a_recipe_are_written_by_the_run_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.py").write_text(
        "def get_config():\n    return {'data': {'train_data': [{'prompt': '21'}]}}\n"
    )
    config = cfg.read_command_line(["--config=recipe.py", "--config.trainer.run_name=mine"])
    assert not (tmp_path / "runs").exists()
    (file,) = cfg.to_train_config(config).data.train_data
    assert file.startswith("runs/mine/data/rows-")
    assert cfg.objective_card(config) == cfg.objective_card(cfg.TrainConfig())


def test_a_built_in_loss_given_as_a_function_is_the_built_in():
    config = cfg.TrainConfig()
    config.trainer.algorithm.policy_loss_type = gspo
    assert cfg.resolve(cfg.to_train_config(config)).trainer.algorithm.policy_loss_type == "gspo"


@pytest.mark.parametrize("obj", [reward, MyEnv, unnamed, half])
def test_a_path_leads_back_to_the_object(obj):
    assert import_function(path_of(obj)) is obj


def made_in_a_call():
    return lambda action: 0.0


WRONG = [
    (
        "environment.reward_functions",
        [reward, made_in_a_call()],
        r"environment.reward_functions\[1\]=.*: .*made_in_a_call.<locals>.<lambda> has no name by "
        "which another start of the run could find it: define it at the top of a script",
    ),
    (
        "environment.reward_functions",
        reward,
        r"reward_functions=<function reward .*: is one function or class: write a list",
    ),
    (
        "environment.reward_functions",
        [3],
        r"reward_functions\[0\]=3: 3 is of type int; give a name",
    ),
    ("environment.env_class", MyEnv({}, {}), "env_class=.* is of type MyEnv; give a name, or a"),
    (
        "trainer.algorithm.policy_loss_type",
        partial(loss),
        "policy_loss_type=functools.partial.* has no name by which",
    ),
    ("trainer.algorithm.advantage_estimator", 0.5, "advantage_estimator=0.5: 0.5 is of type float"),
    ("trainer.run_name", reward, "trainer.run_name=<function reward .*: expected str"),
    ("data.train_data", ROWS[0], r"data.train_data=\{.*: is one row: write a list of rows, \[\{"),
    ("data.train_data", [1, 2], r"data.train_data\[0\]=1: expected str"),
    ("data.train_data", [{"prompt": object}], "row 0 cannot be written as JSON .*is a type"),
    ("data.train_data", [{"prompt": "1", (1, 2): 3}], "row 0 cannot be written as JSON"),
]


@pytest.mark.parametrize(("field", "value", "text"), WRONG)
def test_what_is_no_name_is_one_clear_line(field, value, text):
    nested = value
    for name in reversed(field.split(".")):
        nested = {name: nested}
    with pytest.raises(ValueError, match=text) as error:
        cfg.to_train_config(nested)
    assert "\n" not in str(error.value)


def test_an_edited_function_is_told_from_the_earlier_one(monkeypatch):
    monkeypatch.setattr(f"{HERE}.reward", unnamed)
    with pytest.raises(ValueError, match="reward is an earlier one: another has its name by now"):
        path_of(WRONG[0][1][0])


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (float("nan"), "not JSON compliant"),
        (np.float32("inf"), "not JSON compliant"),
        ("\ud800", "surrogates not allowed"),
        ({1: "one"}, "key 1 is a int"),
        ([{"deep": {None: 0}}], "key None is a NoneType"),
    ],
)
def test_what_json_would_change_is_refused_by_field_and_row(value, told):
    config = cfg.TrainConfig()
    config.data.train_data = [ROWS[0], {"prompt": "1", "answer": value}]
    with pytest.raises(ValueError, match=rf"data.train_data: row 1 cannot .*{told}") as raised:
        cfg.to_train_config(config)
    assert "\n" not in str(raised.value)


def _private(action):
    return 0.0


def test_private_functions_and_partials_of_other_modules_have_a_path():
    assert path_of(_private) == f"{HERE}:_private"
    assert import_function(path_of(_private)) is _private
    assert path_of(scaled) == f"{HERE}:scaled"  # its function is of another module
    with pytest.raises(ValueError, match="has no name by which another start"):
        path_of(partial(gspo))
