"""Sums of two numbers: exact rewards, rows for both trainers, data sets that do not meet."""

import pytest

from jaxrl.envs.toys.addition import AdditionEnv, prompts


@pytest.mark.parametrize(
    ("response", "reward"), [("72", 1.0), ("72 ", 0.0), ("072", 0.0), ("27", 0.0), ("", 0.0)]
)
def test_reward(response, reward):
    env = AdditionEnv(extras={"reward_spec": {"ground_truth": "72"}})
    assert env.step(response)["reward"] == reward


def test_rows():
    rows = list(prompts(size=500, seed=3, split="train"))
    texts = [row["prompt"][0]["content"] for row in rows]
    assert len(set(texts)) == 500
    for text, row in zip(texts, rows, strict=True):
        a, b = map(int, text.split("+"))
        assert 10 <= a <= 99
        assert 10 <= b <= 99
        assert row["completion"] == [{"role": "assistant", "content": str(a + b)}]
        assert row["reward_spec"]["ground_truth"] == str(a + b)
    held_out = {row["prompt"][0]["content"] for row in prompts(size=500, seed=4, split="eval")}
    assert not held_out & set(texts)


def test_too_many_are_refused():
    with pytest.raises(ValueError, match=r"there are only \d+ sums of 1 digits in split 'eval'"):
        list(prompts(size=81, digits=1, split="eval"))
    with pytest.raises(ValueError, match="digits=4 must be 1, 2 or 3"):
        list(prompts(size=1, digits=4))
