"""Scores, length statistics and the loggers."""

import json

import numpy as np
import pytest

from jaxrl.config import SamplingParams
from jaxrl.data.packing import empty_batch
from jaxrl.metrics import (
    RunLogger,
    check_surprise,
    generate_metrics,
    mismatch_metrics,
    outcome,
    read_lines,
    score_metrics,
)


def test_outcome_sums_rewards_per_token():
    assert outcome(0.5) == 0.5
    assert outcome([0.25, -1.0, 0.5]) == -0.25


def test_score_metrics_literal():
    # a passes by its second sample, b does not (0 is no pass), c by its only; scores 0 1 0 -1 2
    #   mean 2/5; two of three prompts pass; positive parts 0 1 0 0 2, mean 3/5
    metrics = score_metrics([0.0, 1.0, 0.0, -1.0, 2.0], ["a", "a", "b", "b", "c"], samples=2)
    assert metrics == {
        "avg_score": 0.4,
        "pass_at_2": pytest.approx(2 / 3),
        "mean_positive_reward": 0.6,
    }


def test_the_samples_of_a_prompt_need_not_be_neighbours():
    assert score_metrics([1.0, 0.0, 0.0], ["a", "b", "a"], samples=2)["pass_at_2"] == 0.5


def test_score_metrics_of_rewards_per_token():
    # sums 1 - 2 = -1 and 0.5; no pass and a pass; positive tokens 1 and 0.5
    metrics = score_metrics([[1.0, -2.0], [0.25, 0.25]], ["a", "b"], samples=1)
    assert metrics == {"avg_score": -0.25, "pass_at_1": 0.5, "mean_positive_reward": 0.75}


def columns(**changes):
    return {
        "response_ids": [[1] * 2, [1] * 4, [1] * 6],
        "rewards": [1.0, [0.0] * 4, [0.5] * 6],
        "stop_reasons": ["stop", "length", "stop"],
        "rollout_metrics": {"environment/exact": 0.5},
        **changes,
    }


def test_generate_metrics_literal():
    # 12 tokens [1, 1, ...] as little-endian int32: crc32(b"\x01\0\0\0" * 12) = 2329099562
    # lengths 2 4 6: mean 4, deviation sqrt((4 + 0 + 4) / 3) = 1.6329932; rewarded are 2 and 6
    metrics = generate_metrics(columns())
    assert metrics.pop("generate/std_num_tokens") == pytest.approx(1.6329932)
    assert metrics.pop("generate/stop_ratio") == pytest.approx(2 / 3)
    assert metrics == {
        "generate/batch_num_seq": 3,
        "generate/min_num_tokens": 2,
        "generate/max_num_tokens": 6,
        "generate/avg_num_tokens": 4.0,
        "generate/avg_tokens_non_zero_rewards": 4.0,
        "generate/avg_tokens_zero_rewards": 4.0,
        "generate/tokens_crc32": 2329099562,
        "environment/exact": 0.5,
    }


def test_generate_metrics_when_nothing_is_rewarded():
    metrics = generate_metrics(columns(rewards=[0.0, 0.0, 0.0]))
    assert metrics["generate/avg_tokens_non_zero_rewards"] == 0.0
    assert metrics["generate/avg_tokens_zero_rewards"] == 4.0


# ------------------------------------------------------------------ RunLogger


def write_run(folder, steps, *, finished=0, loggers=(), plot=False, offset=0.0):
    logger = RunLogger(folder, loggers, finished)
    for step in steps:
        logger.log(step, {"reward/avg_raw_reward": np.float32(step + offset)})
    if plot:
        logger.plot()
    logger.close()


def surprise(noise):
    """Of 64 x 63 tokens of a policy, to one whose logits have so much noise."""
    rng = np.random.default_rng(0)
    shape = 64, 64
    logits = rng.normal(size=(*shape, 16))
    tokens = (logits + rng.gumbel(size=logits.shape)).argmax(-1)
    logits = logits + noise * rng.normal(size=logits.shape)
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    said = np.take_along_axis(log_p, tokens[..., None], -1)[..., 0]
    mask = np.ones(shape, np.float32)
    mask[:, 0] = 0
    batch = empty_batch(*shape).replace(loss_mask=mask, old_log_probs=said, rollout_log_probs=None)
    return mismatch_metrics(batch, -(np.exp(log_p) * log_p).sum(-1))


def test_the_surprise_of_the_policys_own_tokens_is_standard_normal():
    metrics = surprise(0.0)
    assert abs(metrics["policy/rollout_surprise_z"]) < 3
    check_surprise(metrics, SamplingParams())


def test_tokens_of_stale_weights_surprise():
    metrics = surprise(0.5)
    check_surprise(metrics, SamplingParams(top_p=0.9))  # they are not meant to be the policy's
    with pytest.raises(RuntimeError, match=r"rollout_surprise_z=\d.*stale or wrong weights"):
        check_surprise(metrics, SamplingParams())


def test_a_line_per_step(tmp_path):
    write_run(tmp_path / "new" / "run", [1, 2])
    text = (tmp_path / "new" / "run" / "metrics.jsonl").read_text()
    assert [json.loads(line) for line in text.splitlines()] == [
        {"step": 1, "reward/avg_raw_reward": 1.0},
        {"step": 2, "reward/avg_raw_reward": 2.0},
    ]


def test_a_line_is_on_disk_as_soon_as_it_is_logged(tmp_path):
    logger = RunLogger(tmp_path, [], 0)
    logger.log(1, {"x": 1})
    assert read_lines(tmp_path / "metrics.jsonl") == [{"step": 1, "x": 1.0}]
    logger.close()


def test_resuming_cuts_the_steps_of_the_earlier_attempt(tmp_path):
    write_run(tmp_path, [1, 2, 3, 4])
    write_run(tmp_path, [3], finished=2, offset=0.5)
    lines = read_lines(tmp_path / "metrics.jsonl")
    assert [(x["step"], x["reward/avg_raw_reward"]) for x in lines] == [(1, 1), (2, 2), (3, 3.5)]


def test_a_fresh_start_cuts_everything(tmp_path):
    write_run(tmp_path, [0, 1, 2])
    write_run(tmp_path, [], finished=0)
    assert read_lines(tmp_path / "metrics.jsonl") == []


def test_a_last_line_cut_off_by_a_crash_is_left_out(tmp_path):
    write_run(tmp_path, [1, 2, 3])
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text()[:-10])
    assert [line["step"] for line in read_lines(path)] == [1, 2]
    write_run(tmp_path, [3], finished=2)  # the new line does not continue the broken one
    assert [line["step"] for line in read_lines(path)] == [1, 2, 3]


def test_a_resumed_run_that_cannot_write_leaves_the_lines_as_they_were(tmp_path, monkeypatch):
    """The new file takes the name of the old one in one step, or not at all."""
    write_run(tmp_path, [1, 2, 3])
    before = (tmp_path / "metrics.jsonl").read_bytes()

    def killed(source, target):
        raise KeyboardInterrupt

    monkeypatch.setattr("jaxrl.files.os.replace", killed)
    with pytest.raises(KeyboardInterrupt):
        RunLogger(tmp_path, [], 1)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_the_config_is_written_as_yaml(tmp_path):
    logger = RunLogger(tmp_path, [], 0)
    logger.write_config({"trainer": {"seed": 1, "betas": (0.9, 0.99), "path": None}})
    logger.close()
    text = (tmp_path / "config.yaml").read_text()
    assert text == "trainer:\n  seed: 1\n  betas:\n  - 0.9\n  - 0.99\n  path: null\n"


def test_read_lines_of_no_file(tmp_path):
    assert read_lines(tmp_path / "metrics.jsonl") == []


def test_plot_writes_a_png(tmp_path):
    write_run(tmp_path, [1, 2, 3], plot=True)
    data = (tmp_path / "curve.png").read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    assert len(data) > 5000


def read_events(folder):
    from tensorboardX.proto.event_pb2 import Event

    (path,) = folder.iterdir()
    data = path.read_bytes()
    while data:  # length, its checksum, record, its checksum
        length = int.from_bytes(data[:8], "little")
        yield Event.FromString(data[12 : 12 + length])
        data = data[16 + length :]


def test_tensorboard_hides_the_steps_that_a_resumed_run_repeats(tmp_path):
    from tensorboardX.proto.event_pb2 import SessionLog

    RunLogger(tmp_path, ["tensorboard"], 7).close()
    version, start = read_events(tmp_path / "tensorboard")
    assert version.file_version == "brain.Event:2"
    assert (start.step, start.session_log.status) == (8, SessionLog.START)


def test_tensorboard_gets_the_same_numbers(tmp_path):
    logger = RunLogger(tmp_path, ["console", "tensorboard"], 0)
    for step in (1, 2):
        logger.log(step, {"reward/avg_raw_reward": step})
    logger.flush()  # a kill from here on loses nothing
    found = [
        (event.step, value.tag, value.simple_value)
        for event in read_events(tmp_path / "tensorboard")
        for value in event.summary.value
    ]
    assert found == [(1, "reward/avg_raw_reward", 1.0), (2, "reward/avg_raw_reward", 2.0)]
    logger.close()


def test_no_tensorboard_unless_asked(tmp_path):
    write_run(tmp_path, [1], loggers=["console"])
    assert not (tmp_path / "tensorboard").exists()
