"""The functions that a config names: found, or named as what is not there."""

import importlib.metadata
from types import SimpleNamespace

from jaxrl import config as cfg
from jaxrl.tools.doctor import surroundings

CALLBACK = "jaxrl.records.callbacks:TrainingCallback"


def found(rewards=(), callbacks=()):
    config = cfg.TrainConfig()
    config.environment.reward_functions = list(rewards)
    config.trainer.watching.callbacks = list(callbacks)
    return surroundings.functions(
        SimpleNamespace(full_config=config, trainer=SimpleNamespace(train_prompts=[]))
    )


def test_rewards_take_arguments_and_callbacks_none():
    reward = "jaxrl.envs.shaping:linear_length(max_length=8)"
    right = found([reward], [CALLBACK])
    assert right.passed, right.cause
    assert "2 functions" in right.about and f"jaxrl.envs.shaping:linear_length, {CALLBACK}" in (
        right.about
    )
    assert "no function 'brief'" in found(["jaxrl.envs.shaping:brief"]).cause
    wrong = found(callbacks=[f"{CALLBACK}(interval=1)"])
    assert wrong.passed is False
    assert "callback 'jaxrl.records.callbacks:TrainingCallback(interval=1)'" in wrong.cause


def test_a_jaxrl_that_is_not_installed_declares_no_versions(monkeypatch):
    def requires(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", requires)
    ((cause, fix),) = surroundings.undeclared()
    assert "jaxrl is not installed" in cause
    assert fix.startswith("pip install -e .")
