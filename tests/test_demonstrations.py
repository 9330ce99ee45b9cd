"""Runs in which some samples of a prompt are answers that the data gives."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl import config as cfg
from jaxrl.advantages import ROWS
from jaxrl.audit import main as audit
from jaxrl.data.packing import empty_batch
from jaxrl.data.recorded import read_rollouts, rollouts_path
from jaxrl.envs.toys.sort_digits import prompts
from jaxrl.replay import main as replay
from jaxrl.train import BasePPOExp, exit_status, train
from jaxrl.training.critic import Critic
from jaxrl.training.rewards import advantages_of, make_estimate
from jaxrl.types import TrainBatch
from tests.test_resume import resumed_as_whole
from tests.test_train import metric_lines, small
from tests.training.test_critic import TINY

ONE = {"generator.demonstrations": True, "trainer.algorithm.use_kl_loss": False}


def demonstrated(folder, loss="luffy", length=4, **settings):
    """A small run; the rows of odd numbers have an answer, as a text or as a message."""
    folder.mkdir(exist_ok=True)
    rows = []
    for number, row in enumerate(prompts(64, length=length, seed=0)):
        answer = row["reward_spec"]["ground_truth"]
        message = [{"role": "assistant", "content": answer}]
        rows.append({**row, "completion": (None, answer, None, message)[number % 4]})
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    fields = {"data.train_data": [str(data)], "trainer.algorithm.policy_loss_type": loss}
    if loss == "chord":
        fields["trainer.algorithm.loss_reduction"] = "token_mean"
    return small(folder, **{**ONE, **fields, **settings})


@pytest.mark.some(1)
@pytest.mark.parametrize("loss", ["luffy", "chord"])
def test_the_last_sample_is_the_rows_answer_and_the_run_is_resumed_and_replayed(tmp_path, loss):
    # with 3 tokens of a prompt all rows are of one width
    given = {"length": 2, "generator.sampling_params.max_generate_length": 5}
    whole, other = resumed_as_whole(tmp_path, lambda folder: demonstrated(folder, loss, **given))
    run = cfg.run_folder(other.config.trainer)
    seen = 0
    for step in range(1, 5):
        output, uids = read_rollouts(rollouts_path(run, step))[:2]
        answers = {p.uid: p.extras for p in other.train_prompts}
        for row, uid in enumerate(uids):
            known = answers[uid].get("completion")
            given = row % 4 == 3 and known is not None
            assert output["demonstrated"][row] == given
            if given:
                truth = answers[uid]["reward_spec"]["ground_truth"]
                ids = output["response_ids"][row]
                assert other.tokenizer.decode(ids, skip_special_tokens=True) == truth
                assert ids[-1] == other.tokenizer.eos_token_id
                assert np.sum(output["rewards"][row]) == pytest.approx(1)
                seen += 1
    assert seen
    lines = [line for line in metric_lines(whole) if "reward/avg_raw_reward" in line]
    known = [line["reward/demonstrated"] for line in lines if "reward/demonstrated" in line]
    assert known == pytest.approx([1] * len(known))
    assert len(known) > 1
    for name in ("reward/avg_raw_reward", "environment/exact"):
        assert all(line[name] < 0.24 for line in lines)  # of what was sampled
    # where nobody sampled, sampler and trainer are not compared
    name = "policy/rollout_train_logprobs_abs_diff_max"
    assert all(line[name] < 1e-4 for line in lines)
    assert audit([str(run)]) == 0
    assert replay([str(run)]) == 0


def test_samples_are_compared_with_demonstrations_or_not():
    """Rewards 0, 1 and a demonstration's 2: mean 1, or of the samples alone 0.5."""
    algorithm = cfg.AlgorithmConfig(advantage_estimator="grpo", grpo_norm_by_std=False)
    ones = np.ones((6, 1), np.float32)
    batch = TrainBatch(
        tokens=ones.astype(np.int32),
        lengths=np.ones(6, np.int32),
        response_mask=ones,
        loss_mask=ones,
        rewards=np.array([[0], [1], [2], [0], [4], [5]], np.float32),
        rollout_log_probs=-ones,
        index=np.array([0, 0, 0, 1, 1, 1], np.int32),
        policy_versions=np.zeros(6, np.int32),
        row_ids=np.arange(6, dtype=np.int32),
        demonstrated=np.array([False, False, True] * 2),
    )
    estimate = make_estimate(algorithm)
    _, advantages, _ = advantages_of(estimate, batch)
    np.testing.assert_allclose(advantages[:, 0], [-1, 0, 1, -3, 1, 2])
    _, advantages, _ = advantages_of(estimate, batch, apart=True)
    np.testing.assert_allclose(advantages[~batch.demonstrated, 0], [-0.5, 0.5, -2, 2])


def whitened(token_level_rewards, response_mask, index, **_):
    """A user's estimator that has never heard of demonstrations."""
    tokens = response_mask.sum()
    scores = token_level_rewards.sum(-1, keepdims=True) * response_mask
    centred = (scores - scores.sum() / tokens) * response_mask
    advantages = centred / jnp.sqrt(jnp.square(centred).sum() / tokens + 1e-6)
    return advantages, advantages


SETTINGS = {"pass_at_k": {"k": 1}, "gfpo": {"keep": 2}}
CASES = [(name, False) for name in ROWS] + [("grpo", True), (f"{__name__}:whitened", False)]


@pytest.mark.parametrize(("name", "normalize"), CASES)
def test_apart_samples_have_the_advantages_that_they_have_alone(name, normalize):
    """Two prompts of three samples, one of which failed, and a demonstration each.

    The demonstrations are right and long: where an estimator looks at the batch, with their score
    on every token, they would push all samples down.
    """
    row = ROWS.get(name)
    given, per_turn = np.arange(8) % 4 == 3, row is not None and row.per_turn
    lengths, scores = np.where(given, 12, [2, 3, 4, 0, 4, 2, 3, 0]), np.array([0, 1, 0, 1] * 2)
    valid = np.arange(8) != 5
    scores = (scores * valid).astype(np.float32)
    place = np.arange(12)
    mask = (place < lengths[:, None]).astype(np.float32)
    numbers = np.random.default_rng(0).normal(size=(3, 8, 12)).astype(np.float32)
    whole = empty_batch(8, 12).replace(
        tokens=np.tile(place.astype(np.int32), (8, 1)),
        lengths=lengths.astype(np.int32),
        response_mask=mask,
        loss_mask=mask * valid[:, None],
        rewards=scores[:, None] * (place == lengths[:, None] - 1),
        index=np.repeat(np.arange(2, dtype=np.int32), 4),
        valid_mask=valid,
        demonstrated=given,
        values=numbers[0],
        old_log_probs=numbers[1],
        ref_log_probs=numbers[2],
        reward_terms=np.stack([scores, 1 - scores], 1),
        greedy_rewards=np.repeat(np.float32([0.5, 0.25]), 4),
        turn_rewards=scores,
        is_last_step=np.ones(8, bool) if per_turn else None,
    )
    alone = jax.tree.map(lambda x: x[~given], whole).replace(demonstrated=None)
    estimate = make_estimate(
        cfg.AlgorithmConfig(
            advantage_estimator=name,
            advantage_kwargs=SETTINGS.get(name, {}),
            advantage_batch_normalize=normalize,
        )
    )
    (_, apart, returns), (_, expected, expected_returns) = (
        advantages_of(estimate, batch, per_turn=per_turn, apart=True) for batch in (whole, alone)
    )
    np.testing.assert_allclose(apart[~given], expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(returns[~given], expected_returns, rtol=1e-5, atol=1e-6)
    assert expected[alone.loss_mask != 0].any()
    assert not apart[given].any()


def test_the_critic_does_not_learn_from_demonstrations_apart(tmp_path, monkeypatch):
    seen = []
    update = Critic.update

    def watched(self, state, batch, step):
        seen.append(batch)
        return update(self, state, batch, step)

    monkeypatch.setattr(Critic, "update", watched)
    settings = {
        "trainer.critic.model.path": TINY,
        "trainer.critic.model.random_init": True,
        "trainer.critic_mini_batch_size": 4,
        "trainer.algorithm.advantage_estimator": "gae",
        "generator.sampling_params.max_generate_length": 5,
        "trainer.max_training_steps": 1,
        **dict.fromkeys(("trainer.eval_interval", "trainer.ckpt_interval"), -1),
        "trainer.hf_save_interval": -1,
    }
    train(demonstrated(tmp_path, "chord", length=2, **settings))
    (batch,) = seen
    given = np.asarray(batch.demonstrated)
    assert given.any() and not np.asarray(batch.loss_mask)[given].any()
    assert np.asarray(batch.loss_mask)[~given].any(-1).all()


def test_an_answer_is_cut_where_sampling_would_end_it(tmp_path):
    """Four digits and their end are five tokens; three are the most."""
    settings = {
        "generator.sampling_params.max_generate_length": 3,
        "trainer.max_training_steps": 1,
        **dict.fromkeys(("trainer.eval_interval", "trainer.ckpt_interval"), -1),
        "trainer.hf_save_interval": -1,
    }
    config = demonstrated(tmp_path, **settings)
    train(config)
    output, _ = read_rollouts(rollouts_path(cfg.run_folder(config.trainer), 1))
    given = np.array(output["demonstrated"])
    assert given.any()
    for row in np.flatnonzero(given):
        assert len(output["response_ids"][row]) == 3
        assert output["stop_reasons"][row] == "length"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"generator.demonstrations": False},
            "policy_loss_type='luffy': learns from demonstrations",
        ),
        (
            {"generator.n_samples_per_prompt": 1},
            "demonstrations=True: with generator.n_samples_per_prompt=1",
        ),
        (
            {"trainer.algorithm.policy_loss_type": "regular"},
            "=True: policy_loss_type='regular' takes them for sampled",
        ),
        ({"generator.max_turns": 2}, "=True: is for generator.max_turns=1"),
        ({"trainer.exact": "log_probs"}, "=True: is for trainer.exact='off'"),
        (
            {
                "trainer.fully_async.enabled": True,
                "trainer.fully_async.max_staleness_steps": 0,
                "trainer.policy_mini_batch_size": 4,
            },
            "=True: is for trainer.fully_async.enabled=False",
        ),
        (
            {"trainer.algorithm.old_log_probs": "rollout"},
            "=True: is for trainer.algorithm.old_log_probs='trainer'",
        ),
        (
            {"trainer.algorithm.policy_loss_kwargs": {"gamma": 0.0}},
            "policy_loss_kwargs.gamma.*must be positive",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(tmp_path, settings, said):
    with pytest.raises(ValueError, match=said):
        cfg.validate(cfg.resolve(demonstrated(tmp_path, **settings)))


@pytest.mark.parametrize(
    ("column", "said"),
    [(None, "has a column 'completion' with an answer"), (7, "rows.jsonl.*one message .*not 7")],
)
def test_data_without_answers_or_with_other_things_is_refused(tmp_path, capsys, column, said):
    config = demonstrated(tmp_path)
    data = tmp_path / "rows.jsonl"
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    data.write_text("".join(json.dumps({**row, "completion": column}) + "\n" for row in rows))
    assert exit_status(BasePPOExp, config) == 2
    assert re.search(said, capsys.readouterr().err)
