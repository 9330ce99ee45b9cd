"""Scores per data source and over all, and the answers on disk."""

import json

import pytest

from jaxrl.data.tokenizer import character_tokenizer
from jaxrl.evaluate import dump_rows, evaluate
from jaxrl.types import Prompt

TOKENIZER = character_tokenizer("0123456789>")
# Prompts a0, a1 of source "a", b0 of "b", x0 of none; two samples each, rewarded as follows.
REWARDS = {"a0": [1.0, 0.0], "a1": [0.0, 0.0], "b0": [[0.5, 0.25], [-1.0, 0.0]], "x0": [0.0, 2.0]}


def prompt(uid):
    extras = {"data_source": uid[0]} if uid != "x0" else {}
    return Prompt(
        uid=uid,
        messages=[{"role": "user", "content": uid[1]}],
        tokens=(int(uid[1]), 10),
        env_class="stub",
        extras=extras,
    )


def generate(prompts, step, samples):
    """Answers "7<n>" with n the number of the sample; the second one is cut off."""
    assert (step, samples) == (3, 2)
    calls.append([p.uid for p in prompts])
    return {
        "response_ids": [[7, n] for _ in prompts for n in range(samples)],
        "rewards": [r for p in prompts for r in REWARDS[p.uid]],
        "stop_reasons": ["stop", "length"] * len(prompts),
    }


calls: list[list[str]] = []


@pytest.fixture(name="result")
def result_fixture():
    calls.clear()
    prompts = [prompt(uid) for uid in REWARDS]
    return evaluate(generate, prompts, 3, samples=2, batch_size=3, tokenizer=TOKENIZER)


def test_prompts_come_in_batches(result):
    assert calls == [["a0", "a1", "b0"], ["x0"]]


def test_metrics_literal(result):
    # a:       scores 1 0 0 0, mean 1/4; one of two prompts passes; positive mean 1/4
    # b:       scores 0.75 -1, mean -1/8; passes; positive 0.75 and 0, mean 0.375
    # unknown: scores 0 2, mean 1; passes; positive mean 1
    # all:     (1 + 0.75 - 1 + 2) / 8 = 0.34375; three of four pass; (1 + 0.75 + 2) / 8 = 0.46875
    metrics, _ = result
    assert metrics == {
        "eval/a/avg_score": 0.25,
        "eval/a/pass_at_2": 0.5,
        "eval/a/mean_positive_reward": 0.25,
        "eval/b/avg_score": -0.125,
        "eval/b/pass_at_2": 1.0,
        "eval/b/mean_positive_reward": 0.375,
        "eval/unknown/avg_score": 1.0,
        "eval/unknown/pass_at_2": 1.0,
        "eval/unknown/mean_positive_reward": 1.0,
        "eval/all/avg_score": 0.34375,
        "eval/all/pass_at_2": 0.75,
        "eval/all/mean_positive_reward": 0.46875,
    }


def test_one_row_per_answer(result):
    _, rows = result
    assert [row["uid"] for row in rows] == ["a0", "a0", "a1", "a1", "b0", "b0", "x0", "x0"]
    assert rows[5] == {
        "uid": "b0",
        "data_source": "b",
        "prompt": [{"role": "user", "content": "0"}],
        "response": "71",
        "reward": [-1.0, 0.0],
        "score": -1.0,
        "stop_reason": "length",
    }


def test_rows_are_written_as_json_lines(tmp_path, result):
    _, rows = result
    dump_rows(tmp_path / "new", 3, rows)
    lines = (tmp_path / "new" / "global_step_3_evals.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == rows
