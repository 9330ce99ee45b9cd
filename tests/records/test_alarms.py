"""The rules of the alarms on made-up histories, and runs that are broken on purpose."""

import math
from contextlib import nullcontext
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jaxrl.envs import Env
from jaxrl.records.alarms import RULES, WINDOW, Alarms
from jaxrl.records.json_lines import read_lines
from jaxrl.train import BasePPOExp
from jaxrl.trainer import NothingLearnt, Trainer
from tests.test_train import QUICKSTART, cfg, small

HEALTHY = {
    "reward/avg_raw_reward": 0.4,
    "reward/max_raw_reward": 1.0,
    "reward/min_raw_reward": 0.0,
    "reward/zero_variance_ratio": 0.3,
    "policy/policy_entropy": 1.0,
    "policy/final_loss": -0.1,
    "policy/grad_norm": 0.5,
    "policy/skipped_updates": 0.0,
    "policy/rollout_train_logprobs_abs_diff_mean": 0.01,
    "generate/avg_num_tokens": 100.0,
    "generate/stop_ratio": 0.9,
    "loss/avg_raw_advantages_abs": 0.8,
}


def raised(steps, thresholds=None, first=1):
    """(step, name) of each alarm; `steps` are what differs from a healthy step."""
    alarms = Alarms(thresholds or {})
    return [
        (step, alarm.name)
        for step, changes in enumerate(steps, start=first)
        for alarm in alarms.update(step, HEALTHY | changes)
    ]


def test_a_healthy_history_raises_none():
    assert raised([{}] * 30) == []


def test_entropy_that_falls_without_rewards_is_a_collapse():
    # the mean of three is (1 + 0.02 + 0.02) / 3 = 0.35, then 0.02 of 1: below 0.05
    steps = [{}] * 5 + [{"policy/policy_entropy": 0.02}] * 3
    assert raised(steps) == [(8, "entropy_collapse")]


def test_a_policy_that_is_sure_of_what_earns_has_not_collapsed():
    sure = {"policy/policy_entropy": 0.01, "reward/zero_variance_ratio": 1.0}
    assert raised([{}] * 5 + [{**sure, "reward/avg_raw_reward": 0.9}] * 10) == []
    names = {name for _, name in raised([{}] * 5 + [sure] * 10)}
    assert names == {"entropy_collapse", "vanishing_reward_variance"}


def test_the_best_and_the_worst_reward_are_those_of_the_whole_run():
    # 0.4 of 0 to 1, as step 1 had it, is not solved; of the 0.1 to 0.4 of later steps it would be
    sure = {"policy/policy_entropy": 0.01, "reward/zero_variance_ratio": 1.0}
    narrow = {"reward/max_raw_reward": 0.4, "reward/min_raw_reward": 0.1}
    names = {name for _, name in raised([{}] + [narrow] * 4 + [sure | narrow] * 10)}
    assert names == {"entropy_collapse", "vanishing_reward_variance"}


def test_lengths_that_grow_until_they_are_cut_off_explode():
    # the median of the first five is 100, the mean of 100, 200, 200 is 167; 0.37 of these end
    long = {"generate/avg_num_tokens": 200.0, "generate/stop_ratio": 0.1}
    assert raised([{}] * 6 + [long] * 3) == [(8, "length_explosion")]
    assert (
        raised([{}] * 6 + [{"generate/avg_num_tokens": 200.0}] * 3) == []
    )  # they end by themselves
    assert raised([{**long}] * 12) == []  # they were as long from the start


def test_a_tenth_of_a_batch_may_be_lost_to_its_environments():
    ratio = "generate/env_error_ratio"
    assert raised([{ratio: 0.0}, {ratio: 51 / 512}]) == []
    assert raised([{ratio: 0.0}, {ratio: 311 / 512}]) == [(2, "environments_fail")]
    assert raised([{ratio: 311 / 512}], {"environments_fail": 0.7}) == []


def test_mismatch_and_variance():
    name = "policy/rollout_train_logprobs_abs_diff_mean"
    assert raised([{name: 0.2}] * 4) == [(3, "mismatch_growth")]
    # what an older policy sampled differs by what was learnt since
    assert raised([{name: 0.2, "async/staleness_max": 2}] * 4) == []
    assert raised([{name: 0.2, "async/staleness_max": 0}] * 4) == [(3, "mismatch_growth")]
    nothing = {"reward/avg_raw_reward": 0.0, "reward/max_raw_reward": 0.0}
    assert raised([{**nothing, "reward/zero_variance_ratio": 1.0}] * 6) == [
        (5, "vanishing_reward_variance")
    ]


@pytest.mark.parametrize("name", ["policy/grad_norm", "policy/final_loss"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_number_that_is_not_finite_is_told_at_once(name, value):
    assert raised([{}, {name: value}]) == [(2, "not_finite")]


def test_a_reward_that_is_not_deterministic_is_told_at_once():
    twice = {"reward/rejudged": 3.0, "reward/rejudged_differently": 1.0}
    assert raised([{}, twice]) == [(2, "reward_not_deterministic")]
    assert raised([{**twice, "reward/rejudged_differently": 0.0}]) == []


def test_an_alarm_is_silent_while_it_lasts_and_repeats_after_a_pause():
    bad = {"policy/skipped_updates": 1.0}
    assert raised([bad] * 30) == [(1, "not_finite")]
    steps = [bad] + [{}] * (WINDOW - 1) + [bad]
    assert raised(steps) == [(1, "not_finite"), (1 + WINDOW, "not_finite")]


def test_thresholds_can_be_set_and_rules_switched_off():
    bad = {"policy/skipped_updates": 1.0}
    assert raised([bad], {"not_finite": None}) == []
    assert raised([bad], {"not_finite": 1}) == []
    assert raised([{}] * 3, {"mismatch_growth": 0.001}) == [(3, "mismatch_growth")]


def test_a_resumed_run_raises_what_an_uninterrupted_one_would():
    steps = [{}] * 5 + [{"policy/policy_entropy": 0.02}] * 10
    lines = [{"step": i, **HEALTHY, **x} for i, x in enumerate(steps, start=1)]
    whole, resumed = Alarms(), Alarms()
    expected = [whole.update(int(line["step"]), line) for line in lines]
    for line in lines[:7]:
        resumed.update(int(line["step"]), line)
    assert [resumed.update(int(line["step"]), line) for line in lines[7:]] == expected[7:]
    assert sum(map(len, expected)) == 1


def test_metrics_that_a_run_does_not_have_raise_nothing():
    alarms = Alarms()
    for step in range(30):
        assert alarms.update(step, {"reward/avg_raw_reward": 0.0}) == []
    assert alarms.update(0, {"eval/all/avg_score": math.nan}) == []  # before the first step


def test_an_alarm_says_what_it_saw_and_what_to_try():
    alarms = Alarms()
    wrong = {"policy/skipped_updates": 2.0, "policy/grad_norm": math.inf}
    (alarm,) = alarms.update(4, HEALTHY | wrong)
    assert str(alarm).startswith(
        "ALARM not_finite at step 4: 3 is above 0 (metrics that are NaN or infinite, and updates "
        "skipped for it: policy/grad_norm inf, policy/skipped_updates 2). Try: another "
        "run from an export before it; "
    )


# ------------------------------------------------------------------ runs that break


class LengthEnv(Env):
    """Pays for every character."""

    def step(self, action):
        return {"observations": [], "reward": len(action) / 64, "done": True, "metadata": {}}


class SilentEnv(Env):
    """Never rewards."""

    def step(self, action):
        return {"observations": [], "reward": 0.0, "done": True, "metadata": {}}


def wrong_sign(log_probs, old_log_probs, advantages, config, *, entropy):
    """An entropy bonus that is a penalty, and nothing else."""
    return entropy, {}


def log_of_zero(log_probs, old_log_probs, advantages, config):
    """Of one on the 16 rows of 12 tokens that a loss is tried on."""
    number = 1.0 if log_probs.shape == (16, 12) else 0.0
    return -log_probs * advantages * (1.0 + jnp.log(number)), {}


class StaleTrainer(Trainer):
    """The sampler gets the weights that it began with, again and again."""

    def sync_weights(self, step):
        if step == 0:
            self.first = jax.device_get(self.params)
        shardings = jax.tree.map(lambda x: x.sharding, self.params)
        self.engine.update_weights(jax.device_put(self.first, shardings), step)


class StaleExp(BasePPOExp):
    def get_trainer(self, *args, **kwargs):
        return StaleTrainer(*args, **kwargs)


BROKEN = {
    "reward_not_deterministic": {
        "environment.reward_functions": ["tests.rollout.test_rejudge:counting"],
        "environment.rejudge_fraction": 0.05,
    },
    "entropy_collapse": {
        "trainer.algorithm.policy_loss_type": "tests.records.test_alarms:wrong_sign"
    },
    "length_explosion": {
        "environment.env_class": "tests.records.test_alarms:LengthEnv",
        "generator.sampling_params.max_generate_length": 128,  # three times its first lengths
    },
    "mismatch_growth": {},
    "vanishing_reward_variance": {"environment.env_class": "tests.records.test_alarms:SilentEnv"},
    "not_finite": {"trainer.algorithm.policy_loss_type": "tests.records.test_alarms:log_of_zero"},
}


def alarms_of(folder):
    """(step, name) of the lines in which an alarm was beyond its threshold."""
    lines = read_lines(folder / "quickstart" / "metrics.jsonl")
    return {(line["step"], n) for line in lines for n in RULES if line.get(f"alarm/{n}")}


@pytest.mark.slow
@pytest.mark.parametrize("name", list(BROKEN))
def test_a_broken_run_raises_its_alarm_within_20_steps(tmp_path, name):
    settings = {
        "data.train_data": ["tests.test_train:plain_prompts(size=64)"]
        if "environment.env_class" in BROKEN[name]
        else ["jaxrl.envs.toys.sort_digits:prompts(size=64, seed=0)"],
        "data.val_data": [],
        "trainer.epochs": 3,
        "trainer.max_training_steps": 20,
        "trainer.train_batch_size": 8,
        "trainer.policy_mini_batch_size": 4,
        "trainer.algorithm.advantage_estimator": "grpo",
        "trainer.algorithm.use_kl_loss": False,
        "trainer.policy.optimizer_config.lr": 1e-2,
        "trainer.ckpt_interval": -1,
        "trainer.eval_interval": -1,
        "trainer.hf_save_interval": -1,
        "generator.n_samples_per_prompt": 8,
        **BROKEN[name],
    }
    experiment = StaleExp if name == "mismatch_growth" else BasePPOExp
    ends = pytest.raises(NothingLearnt) if name == "not_finite" else nullcontext()
    with ends:
        experiment(small(tmp_path, **settings)).run()
    assert name in {alarm for _, alarm in alarms_of(tmp_path)}


@pytest.mark.slow
def test_a_healthy_run_raises_none_in_300_steps(tmp_path):
    settings = {
        "trainer.epochs": 13,
        "trainer.max_training_steps": 300,
        "trainer.log_path": str(tmp_path),
        "trainer.ckpt_path": str(tmp_path / "checkpoints"),
        "trainer.export_path": str(tmp_path / "exports"),
    }
    BasePPOExp(cfg.apply_overrides(cfg.load_config_file(QUICKSTART), settings)).run()
    assert len(read_lines(tmp_path / "quickstart" / "metrics.jsonl")) == 301
    assert alarms_of(tmp_path) == set()


def test_the_documentation_has_every_rule_and_its_threshold():
    page = (Path(__file__).parents[2] / "docs" / "watching.md").read_text()
    rows = {line.split("`")[1]: line for line in page.splitlines() if line.startswith("| `")}
    for name, rule in RULES.items():
        assert f" {rule.threshold:g} " in rows[name], name
        assert ("below" if rule.below else "above") in rows[name], name
