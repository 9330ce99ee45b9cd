"""GSM8K's two ways to read an answer."""

import pytest

from jaxrl.envs.tasks.gsm8k import Gsm8kEnv


def step(response, method="rule", ground_truth="72"):
    spec = {"method": method, "ground_truth": ground_truth}
    env = Gsm8kEnv(extras={"reward_spec": spec})
    return env, env.step(response)


@pytest.mark.parametrize("method", ["rule", "strict", None])
@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("48 + 24 = 72\n#### 72", 1.0),
        ("#### 7,2", 1.0),  # commas do not count
        ("#### 72 and then #### 73", 1.0),  # the first one counts
        ("#### 73 and then #### 72", 0.0),
        ("#### 72.", 0.0),  # compared as a string
        ("#### 72.0", 0.0),
        ("#### $72", 0.0),
        ("####72", 0.0),  # the blank belongs to the format
        ("#### -72", 0.0),
        ("72", 0.0),
        ("", 0.0),
    ],
)
def test_strict(response, reward, method):
    assert step(response, method)[1]["reward"] == reward


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("48 + 24 = 72.", 1.0),
        ("#### 72 is wrong, it is 73", 0.0),
        ("#### 73 is wrong, it is $72", 1.0),
        ("no number", 0.0),
    ],
)
def test_flexible(response, reward):
    assert step(response, "flexible")[1]["reward"] == reward


def test_negative_and_large_answers():
    assert step("#### -1,234", ground_truth="-1234")[1]["reward"] == 1.0
    assert step("it is 1,234,567", "flexible", "1234567")[1]["reward"] == 1.0


def test_ground_truth_may_be_a_number():
    assert step("#### 72", ground_truth=72)[1]["reward"] == 1.0


def test_step_ends_the_conversation_and_says_what_it_read():
    env, output = step("#### 7,3")
    assert output == {
        "observations": [],
        "reward": 0.0,
        "done": True,
        "metadata": {"answer": "73", "ground_truth": "72"},
    }
    assert env.get_metrics() == {"correct": 0.0, "answered": 1.0}
    assert step("what?")[0].get_metrics() == {"correct": 0.0, "answered": 0.0}


def test_unknown_method():
    message = r"reward_spec\['method'\] must be one of rule, strict, flexible, got 'judge'"
    with pytest.raises(ValueError, match=message):
        step("#### 72", "judge")
