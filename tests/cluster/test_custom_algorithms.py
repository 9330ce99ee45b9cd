"""The examples of docs/custom_algorithms.md, in this process and in a Ray task."""

import re
from pathlib import Path

import numpy as np
import pytest
import ray
from ray.actor import ActorMethod
from ray.remote_function import RemoteFunction

from jaxrl.config import AlgorithmConfig, load_config_file
from jaxrl.config.dataclass_config import flatten
from jaxrl.registry import PolicyLossRegistry, bind_estimator
from tests.test_train import QUICKSTART, metric_lines, small

PAGE = Path(__file__).parents[2] / "docs" / "custom_algorithms.md"
SHORT = {
    "trainer.max_training_steps": 2,
    "trainer.ckpt_interval": -1,
    "trainer.hf_save_interval": -1,
    "trainer.eval_interval": -1,
    "trainer.policy_mini_batch_size": 4,
    "trainer.micro_train_batch_size_per_gpu": 2,
    "trainer.algorithm.use_kl_loss": False,
    "trainer.algorithm.policy_loss_type": "reinforce",
    "trainer.algorithm.advantage_estimator": "simple_baseline",
}
REMOTE_CALLS = [(ray, name) for name in ("get", "put", "wait", "get_actor")]
REMOTE_CALLS += [(ActorMethod, "_remote"), (RemoteFunction, "_remote")]


@pytest.fixture(name="page", scope="module")
def page_fixture(cluster):
    """What the blocks of the page define, executed from top to bottom."""
    namespace = {"__name__": "custom_algorithms_page"}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        exec(block, namespace)
    return namespace


def command_line(config):
    """The arguments that make `config` of the quickstart."""
    quickstart = flatten(load_config_file(QUICKSTART))
    changed = {k: v for k, v in flatten(config).items() if v != quickstart[k]}
    values = {k: v if isinstance(v, str) else repr(v) for k, v in changed.items()}
    return [f"--config={QUICKSTART}", *(f"--config.{k}={v}" for k, v in values.items())]


@pytest.mark.slow
def test_what_the_page_registers_is_found_on_workers(page):
    available = ray.get(page["available_on_a_worker"].remote())
    assert {"my_function", "simple_baseline", "direct_registration"} <= set(available)


def counting(trainer_class):
    """The trainer; each step's metrics say how often Ray was asked for something."""

    class CountingTrainer(trainer_class):
        def train(self):
            self.calls = []
            for owner, name in REMOTE_CALLS:
                self.count(owner, name)
            super().train()
            PolicyLossRegistry.list_available()
            assert self.calls, "the counter does not count"

        def count(self, owner, name):
            original = getattr(owner, name)
            setattr(owner, name, lambda *a, **k: self.calls.append(name) or original(*a, **k))

        def train_step(self, step):
            return super().train_step(step) | {"remote_calls": len(self.calls)}

    return CountingTrainer


@pytest.mark.slow
def test_the_page_trains_the_same_here_and_on_ray(page, tmp_path, monkeypatch):
    local, remote = tmp_path / "local", tmp_path / "remote"
    page["CustomExp"](small(local, **SHORT)).run()
    monkeypatch.setitem(page, "CustomTrainer", counting(page["CustomTrainer"]))
    page["main"](command_line(small(remote, **SHORT)))
    # no step waits for another process; the functions were fetched before the first
    assert [line.pop("remote_calls") for line in metric_lines(remote)] == [0, 0]
    here, there = metric_lines(local), metric_lines(remote)
    assert here == [{k: v for k, v in line.items() if k != "remote_calls"} for line in there]
    assert here[0]["policy/grad_norm"] > 0
    assert here[0]["policy/loss_metrics/clip_ratio"] == 0
    rewards = here[0]["reward/avg_raw_reward"]
    assert here[0]["loss/avg_final_rewards"] == pytest.approx(rewards)


@pytest.mark.slow
def test_the_losses_of_the_page(page):
    log_probs = np.array([[-1.0, -2.0, -3.0, -4.0]], np.float32)
    advantages = np.array([[1.0, -2.0, 0.5, 9.0]], np.float32)
    mask = np.array([[1.0, 1.0, 1.0, 0.0]], np.float32)
    # median of |1|, |-2|, |0.5| is 1
    top_half = PolicyLossRegistry.get("top_half")
    loss, _ = top_half(log_probs, log_probs, advantages, None, loss_mask=mask)
    np.testing.assert_array_equal(loss, [[1.0, -4.0, 0.0, 0.0]])
    assert PolicyLossRegistry.has_batch_statistics("top_half")
    # ratio 1: tanh(0) = 0
    loss, _ = page["soft_clip"](log_probs, log_probs, advantages, None, width=0.1)
    np.testing.assert_array_equal(loss, -advantages)


def test_the_other_estimator_of_the_page(page):
    estimate = bind_estimator(AlgorithmConfig(advantage_estimator="direct_registration"))
    ones = np.ones((1, 2), np.float32)
    _, advantages, _ = estimate(token_level_rewards=ones, response_mask=ones, index=np.zeros(1))
    np.testing.assert_array_equal(advantages, [[1.5, 1.5]])  # 1 + 1 - 0.5
