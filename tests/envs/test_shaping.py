"""Shaping rewards by hand, and how the config names them with their parameters."""

import pytest

from jaxrl.config import TrainConfig, validate
from jaxrl.envs.shaping import (
    cosine_length,
    linear_length,
    matches,
    repetition,
    tags,
    token_repetition,
)
from tests.rollout.test_reward_terms import talk

SHAPING = "jaxrl.envs.shaping"


@pytest.mark.parametrize(
    ("length", "expected"),
    [(0, 0.0), (4, 0.0), (5, -0.5), (6, -1.0), (8, -2.0), (9, -2.0)],  # -2 (L - 4) / (8 - 4)
)
def test_linear_length(length, expected):
    assert linear_length(["a"] * length, max_length=8, free=4, penalty=2.0) == expected


# cos(0) = 1, cos(pi / 3) = 0.5, cos(pi / 2) = 0, cos(pi) = -1
@pytest.mark.parametrize(
    ("length", "reward", "expected"),
    [
        (0, 1.0, 2.0),
        (4, 1.0, 1.75),  # 1 + 1 (1 + 0.5) / 2
        (6, 1.0, 1.5),
        (12, 1.0, 1.0),
        (6, 0.0, -3.0),  # -1 - 4 (1 + 0) / 2
        (6, -1.0, -3.0),
        (6, [0.0, 0.5], 1.5),
        (6, {"correct": 1.0, "format": [0.0, -1.0]}, -3.0),  # their sum is 0
    ],
)
def test_cosine_length(length, reward, expected):
    found = cosine_length(
        ["a"] * length,
        stopped=True,
        done=True,
        reward=reward,
        max_length=12,
        correct=(2.0, 1.0),
        wrong=(-5.0, -1.0),
    )
    assert found == pytest.approx(expected, abs=1e-12)


def test_cosine_length_of_a_response_that_is_cut_off_and_of_earlier_turns():
    given = {"tokens": ["a"] * 3, "reward": 1.0, "max_length": 3, "exceeded": -7.0}
    assert cosine_length(stopped=False, done=True, **given) == -7.0
    assert cosine_length(stopped=True, done=True, **given) == 0.5  # ended by itself, at the last
    assert cosine_length(stopped=False, done=False, **given) == 0.0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>so\nso</think> <answer>4</answer>\n", 1.0),
        ("<think></think><answer></answer>", 1.0),
        ("<think>so</think> so <answer>4</answer>", 0.0),
        ("<answer>4</answer><think>so</think>", 0.0),
        ("<think>so</think><think>so</think><answer>4</answer>", 0.0),
        ("<think>so</think><answer>4", 0.0),
        ("4", 0.0),
    ],
)
def test_tags(text, expected):
    assert tags(text, done=True) == expected
    assert tags(text, done=False) == 0.0
    assert tags("<plan>x</plan>", done=True, names=["plan"]) == 1.0


def test_matches():
    assert matches("so\n#### 42", pattern=r".*#### -?\d+") == 1.0
    assert matches("so #### 42 apples", pattern=r".*#### -?\d+") == 0.0


def test_repetition_is_the_share_of_n_grams_seen_before():
    # ab bc ca ab bc: 3 distinct of 5
    assert repetition(list("abcabc"), ngram=2, penalty=5.0) == pytest.approx(-2.0)
    assert repetition(list("abcdef"), ngram=2) == 0.0
    assert repetition(list("aaaa"), ngram=1) == -0.75  # 1 distinct of 4
    assert repetition(list("abc"), ngram=4) == 0.0


def test_token_repetition_marks_the_later_n_grams():
    # at 3 "ab" for the second time, at 4 "bc"
    found = token_repetition(list("abcabcx"), ngram=2, penalty=0.5)
    assert found == [0.0, 0.0, 0.0, -0.5, -0.5, -0.5, 0.0]
    assert token_repetition(list("ab"), ngram=3) == [0.0, 0.0]


def test_the_config_gives_parameters_in_the_call():
    functions = [f"{SHAPING}:linear_length(max_length=4)", f"{SHAPING}:matches(pattern='[0-9]+')"]
    # "34<end>" and "5<end>"; rewards 1 and 2: 1 - 3/4 + 1, 2 - 2/4 + 1
    output = talk(paths=functions)
    assert output["rewards"] == [[0, 0, 1.25, 0, 0, 0, 0, 2.5]]
    assert output["reward_terms"] == [{"environment": 3.0, "linear_length": -1.25, "matches": 2.0}]


def test_a_function_sees_what_the_environment_gave():
    found = f"{SHAPING}:cosine_length(max_length=4, correct=(1.0, 0.0), exceeded=-3)"
    # the last turn has 2 of 4 tokens and was right: 0 + 1 (1 + 0) / 2
    assert talk(paths=[found])["reward_terms"] == [{"environment": 3.0, "cosine_length": 0.5}]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("linear_length", r"nobody supplies its parameter 'max_length'.*in the call: '\.\.\.\(max"),
        ("linear_length(max_length=4, free=4)", r"free=4 must be in \[0, max_length=4\)"),
        ("linear_length(most=4)", r"unexpected keyword argument 'most'; the signature is linear"),
        ("linear_length(4)", r"write the arguments as name=value"),
        ("linear_length(max_length=2**9)", r"max_length=2 \*\* 9 is not a literal"),
        ("cosine_length(max_length=0)", r"max_length=0 must be at least 1"),
        ("tags(names='think')", r"names='think' must be a list of names"),
        ("matches(pattern='(')", r"pattern='\(' is not a regular expression"),
        ("repetition(ngram=0)", r"ngram=0 must be at least 1"),
        ("token_repetition(ngram=0)", r"ngram=0 must be at least 1"),
        ("cosine_length(max_length='a')", r"reward_functions='jaxrl.*max_length='a'\)': '<' not"),
        ("tags(names=3)", r"tags\(names=3\)': 'int' object is not iterable"),
        ("tags(names={[]: 1})", r"names={\[\]: 1} is not a literal"),
        ("tags(names=['a'], action='x')", r"action='x' is supplied by every turn; leave it out"),
        ("brevity(x=1)", r"'jaxrl.envs.shaping' has no function 'brevity'"),
    ],
)
def test_bad_parameters_are_refused_before_the_run(call, message):
    config = TrainConfig()
    config.environment.reward_functions = [f"{SHAPING}:{call}"]
    with pytest.raises(ValueError, match=message):
        validate(config)
