"""Sorting digits: rewards by token, and data sets that do not meet."""

import pytest

from jaxrl.data.prompts import load_prompts
from jaxrl.data.tokenizer import character_tokenizer
from jaxrl.envs.toys.sort_digits import SortDigitsEnv, prompts


def rewards(tokens, answer="1234"):
    env = SortDigitsEnv(extras={"reward_spec": {"ground_truth": answer}})
    stopped = tokens[-1:] == ["<eos>"]
    text = "".join(tokens[:-1] if stopped else tokens)
    return env, env.step(text, tokens=tokens, stopped=stopped)["reward"]


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        # four digits and the end share the reward: 1/5 each
        (["1", "2", "3", "4", "<eos>"], [0.2, 0.2, 0.2, 0.2, 0.2]),
        (["1", "2", "4", "3", "<eos>"], [0.2, 0.2, 0.0, 0.0, 0.2]),
        (["1", "2", "3", "4", "4", "<eos>"], [0.2, 0.2, 0.2, 0.2, 0.0, 0.0]),
        (["1", "2", "<eos>"], [0.2, 0.2, 0.0]),
        (["<eos>"], [0.0]),
        (["1", "2", "3", "4"], [0.2, 0.2, 0.2, 0.2]),  # cut off
        (["9", "2", "3", "4", "<eos>"], [0.0, 0.2, 0.2, 0.2, 0.2]),
        (["1", "2", "3", "4", "<pad>"], [0.2, 0.2, 0.2, 0.2, 0.0]),
        # tokens of several characters, as other tokenizers make them: 2/5, 1/5 of "39", the end
        (["12", "39", "<eos>"], [0.4, 0.2, 0.2]),
        ([], []),
    ],
)
def test_reward_per_token(response, expected):
    assert rewards(response)[1] == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("length", [1, 2, 4, 7, 10, 13])
def test_total_is_one_exactly_if_all_is_right(length):
    answer = "0123456789999"[:length]
    env, right = rewards([*answer, "<eos>"], answer)
    assert sum(right) == pytest.approx(1.0)
    assert env.get_metrics() == {"exact": 1.0}
    env, unfinished = rewards([*answer], answer)
    assert sum(unfinished) == pytest.approx(length / (length + 1))
    assert env.get_metrics() == {"exact": 0.0}


def test_text_alone_gives_one_number():
    env = SortDigitsEnv(extras={"reward_spec": {"ground_truth": "1234"}})
    assert env.step("1234")["reward"] == pytest.approx(1.0)
    assert env.step("1243")["reward"] == pytest.approx(0.6)
    assert env.step("12")["reward"] == pytest.approx(0.4)


def test_rows():
    rows = list(prompts(size=3, seed=1, length=4))
    assert len(rows) == 3
    for row in rows:
        text = row["prompt"][0]["content"]
        assert len(text) == 4
        assert row == {
            "prompt": [{"role": "user", "content": text}],
            "env_class": "sort_digits",
            "data_source": "sort_digits",
            "reward_spec": {"method": "rule", "ground_truth": "".join(sorted(text))},
        }


def texts(*args, **kwargs):
    return [row["prompt"][0]["content"] for row in prompts(*args, **kwargs)]


@pytest.mark.parametrize("length", [4, 7])
def test_rows_are_distinct_and_fixed_by_the_seed(length):
    first = texts(size=200, seed=1, length=length)
    assert len(set(first)) == 200
    assert first == texts(size=200, seed=1, length=length)
    assert first[:50] == texts(size=50, seed=1, length=length)
    assert first != texts(size=200, seed=2, length=length)


@pytest.mark.parametrize("length", [2, 4, 8])
def test_splits_never_meet(length):
    train = texts(size=80, seed=1, length=length, split="train")
    evaluation = texts(size=8, seed=1, length=length, split="eval")
    assert not set(train) & set(evaluation)
    assert not set(train) & set(texts(size=8, seed=2, length=length, split="eval"))


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"size": 101, "length": 2}, "there are only 100 strings of 2 digits in split None"),
        ({"size": 60_000, "length": 6}, "too large for strings of 6 digits; at most 50000"),
        ({"size": 0}, "must be at least 1, got size=0, length=4"),
        ({"size": 1, "length": 0}, "must be at least 1, got size=1, length=0"),
        ({"size": 1, "split": "test"}, "split must be 'train', 'eval' or None, got 'test'"),
    ],
)
def test_impossible_data_sets(arguments, problem):
    with pytest.raises(ValueError, match=problem):
        list(prompts(**arguments))


def test_works_as_a_data_source():
    loaded, num_filtered = load_prompts(
        ["jaxrl.envs.toys.sort_digits:prompts(size=5, seed=3, length=3)"],
        character_tokenizer("0123456789 +=>"),
        max_prompt_length=4,
        default_env_class="gsm8k",
    )
    assert (len(loaded), num_filtered) == (5, [0])
    # A digit's token is the digit; 13 is ">".
    digits = [int(digit) for digit in loaded[0].messages[0]["content"]]
    assert loaded[0].tokens == (*digits, 13)
    assert loaded[0].env_class == "sort_digits"
