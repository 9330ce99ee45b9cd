"""The environments of mathematics: math, aime, countdown, multiply, gsm8k in several turns."""

from fractions import Fraction

import pytest

from jaxrl import envs
from jaxrl.envs.tasks import math_checker
from jaxrl.envs.tasks.aime import normalize
from jaxrl.envs.toys import countdown, multiply


def make(env_class, ground_truth, **extras):
    return envs.make(env_class, {"reward_spec": {"ground_truth": ground_truth}, **extras})


# ---- math ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("response", "ground_truth", "reward"),
    [
        (r"So \boxed{\frac{1}{2}}.", "0.5", 1.0),
        (r"So \boxed{0.5}.", r"\frac{1}{2}", 1.0),
        (r"\boxed{2} or rather \boxed{3}", "3", 1.0),
        (r"<think>\boxed{3}</think> It is \boxed{4}", "3", 0.0),
        (r"\boxed{x^2 + 2x + 1}", "(x+1)^2", 1.0),
        (r"\boxed{\{2, 1\}}", r"\{1, 2\}", 1.0),
        (r"\boxed{(2, 1)}", "(1, 2)", 0.0),
        ("the answer is 12", "12", 1.0),
        ("no idea", "12", 0.0),
        ("", "12", 0.0),
    ],
)
def test_answers_are_compared_as_mathematics(response, ground_truth, reward):
    pytest.importorskip("math_verify")
    env = make("math", ground_truth)
    assert env.step(response)["reward"] == reward
    assert env.get_metrics()["correct"] == reward
    assert env.get_metrics()["answered"] == float(any(c.isdigit() for c in response))


@pytest.mark.parametrize(
    ("ground_truth", "right", "wrong"),
    [
        (
            "1080",
            [
                *("1080", "1,080", "1080.0", r"\$1080", r"1080^\circ", r"1080\text{ cm}^2"),
                *(
                    r"1080 \text{ units}",
                    r"\frac{2160}{2}",
                    "2160/2",
                    r"\sqrt{1166400}",
                    "x = 1080",
                ),
                *(r"1.08 \times 10^{3}", r"1.08\cdot10^3", r"10.8 \times 10^2"),
                "1000 + 80 = 1080",
            ],
            ["1000 + 80", r"12 \cdot 90", r"12 \times 90", "12*90", "1100 - 20", "3(300 + 60)"],
        ),
        ("1000", ["10^3", "10^{3}", r"1 \times 10^3"], ["10^2 + 900", r"10 \cdot 100"]),
        ("1024", ["1024"], ["2^{10}", "2^10", r"\sqrt{1000 + 24}^2"]),
        ("120", ["120"], ["5!", r"\frac{6!}{6}"]),
        ("3", ["3", "3.0", r"\boxed{3}", "x_1 = 3"], ["1+1+1", r"\binom{3}{1}", "x_1 = 1+1+1"]),
        ("108", ["108", "108_{10}", r"108\text{ cm}^{2}", "f(2) = 108"], ["f(2) = 100 + 8"]),
        ("108_{10}", ["108", "108_{10}"], ["108_8"]),
        ("-5", ["-5", "- 5", "x=-5"], ["0 - 5", "5 - 10"]),
        ("1/2", ["0.5", r"\frac12", r"\dfrac{1}{2}"], [r"1 - \frac{1}{2}", "2^{-1}"]),
        (r"\frac{1}{2}", ["0.5", "1/2"], [r"\frac14 + \frac14"]),
        (
            "2516_8",
            ["2516_8", "2516_{8}", "2516_{(8)}", r"2516 \text{ (base 8)}"],
            ["2516", "2516_7"],
        ),
        ("2516", ["2516"], ["2516_8"]),
        (r"2^{10}", ["1024", "2^{10}"], []),
        (r"\sqrt{2}", [r"\sqrt{2}", r"2^{1/2}"], []),
        ("x+1", ["x+1", "1+x"], []),
        (r"1+\sqrt{2}", [r"\sqrt{2}+1"], []),
    ],
)
def test_a_number_is_paid_when_it_is_worked_out(ground_truth, right, wrong):
    pytest.importorskip("math_verify")
    found = {
        answer: make("math", ground_truth).step(rf"It is \boxed{{{answer}}}.")["reward"]
        for answer in right + wrong
    }
    assert found == dict.fromkeys(right, 1.0) | dict.fromkeys(wrong, 0.0)


def test_an_answer_that_takes_for_ever_is_wrong():
    pytest.importorskip("math_verify")
    # Time: 10^7 terms. Memory: a number of 10^10 digits.
    for endless in (r"\boxed{(x+y+z+1)^{999}}", r"\boxed{7^{7^{7^{7}}}}"):
        equal, why = math_checker.is_equal(endless, "(1+x+y+z)^{998}", seconds=1.0)
        assert not equal, why
    # And the next comparison has a process again.
    assert math_checker.is_equal(r"\boxed{2}", "2", seconds=10.0) == (True, "2")


def test_math_without_its_package(monkeypatch):
    monkeypatch.setattr(math_checker.importlib.util, "find_spec", lambda name: None)
    math_checker.require.cache_clear()
    with pytest.raises(ImportError, match=r"the environment 'math' needs a package: pip install"):
        make("math", "1")


# ---- aime ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "normal"),
    [
        ("$204$.", "204"),
        ("x = 12,345", "12345"),
        (r"\frac12", r"\frac{1}{2}"),
        (r"\sqrt3", r"\sqrt{3}"),
        (r"\text{even}", "even"),
        (r"90^\circ", "90"),
        ("5 cm", "5"),
        (r"\boxed{7}", "7"),
        ("the sum is $m$ and $n$", "m"),
    ],
)
def test_normalize(answer, normal):
    assert normalize(answer) == normal


def test_aime_reads_the_end_of_a_response():
    env = make("aime", "204")
    assert env.step("Answer: 203\nAnswer: 204")["reward"] == 1.0
    assert env.get_metrics() == {"acc": 1.0, "answered": 1.0}
    assert make("aime", "204").step("Answer: 204" + "." * 300)["reward"] == -1.0
    assert make("aime", "204").step("It is 204.")["metadata"] == {"acc": False, "pred": None}


def test_the_column_of_other_libraries():
    env = envs.make("aime", {"reward_model": {"ground_truth": "204"}})
    assert env.step("Answer: $204$")["reward"] == 1.0
    with pytest.raises(ValueError, match="environment 'aime' needs a column reward_spec"):
        envs.make("aime", {})


# ---- countdown -----------------------------------------------------------------------------------

PUZZLE = {"target": 98, "numbers": [44, 19, 35]}


@pytest.mark.parametrize(
    ("response", "correct", "allowed"),
    [
        ("<think>..</think><answer>44 + 19 + 35</answer>", 1.0, 1.0),
        ("<answer>44 + 19 + 35 = 98</answer>", 1.0, 1.0),
        ("<answer>(35 - -44) + 19</answer>", 1.0, 1.0),
        ("<think>44 + 19</think>44 + 54", 0.0, 0.0),
        ("<answer>44 + 19 - 35</answer>", 0.0, 1.0),
        ("<answer>98</answer>", 0.0, 0.0),
        ("<answer>44 + 19 + 35 + 19 - 19</answer>", 0.0, 0.0),
        ("<answer>44 + 19 + 35 + 0</answer>", 0.0, 0.0),
        ("<answer>44 + 19 + 35.0</answer>", 0.0, 0.0),
        ("<answer>44 / (19 - 19) + 35</answer>", 0.0, 0.0),
        ("<answer>44 ** 19 ** 35</answer>", 0.0, 0.0),
        ("<answer>__import__('os').abort()</answer>", 0.0, 0.0),
        ("<answer>" + "(" * 400 + "</answer>", 0.0, 0.0),
        ("<answer>" + "-" * 499 + "1</answer>", 0.0, 0.0),
        ("", 0.0, 0.0),
    ],
)
def test_countdown(response, correct, allowed):
    env = make("countdown", PUZZLE)
    assert env.step(response)["reward"] == correct
    assert env.get_metrics() == {"correct": correct, "allowed": allowed}


def test_fractions_are_exact():
    # 8 / (3 - 8/3) = 8 / (1/3) = 24
    assert countdown.evaluate("8 / (3 - 8 \u00f7 3)") == (Fraction(24), [8, 3, 8, 3])


def test_countdown_needs_its_numbers():
    with pytest.raises(ValueError, match=r"'countdown' needs reward_spec\['ground_truth'\] = .*98"):
        make("countdown", "98")


def test_rows_of_countdown_can_be_solved():
    rows = list(countdown.prompts(size=50, seed=3, count=3, highest=20))
    assert rows == list(countdown.prompts(size=50, seed=3, count=3, highest=20))
    for row in rows:
        truth = row["reward_spec"]["ground_truth"]
        a, b, c = truth["numbers"]
        orders = [(a, b, c), (b, a, c), (a, c, b), (c, a, b), (b, c, a), (c, b, a)]
        forms = [f"({x} {{}} {y}) {{}} {z}" for x, y, z in orders]
        forms += [f"{x} {{}} ({y} {{}} {z})" for x, y, z in orders]
        found = [countdown.evaluate(f.format(p, q)) for f in forms for p in "+-*/" for q in "+-*/"]
        assert any(value is not None and value[0] == truth["target"] for value in found)
        assert str(truth["target"]) in row["prompt"][0]["content"]


# ---- multiply ------------------------------------------------------------------------------------


def test_multiply_in_attempts():
    env = make("multiply", "56088", max_turns=3)
    first, second = env.step("123 * 456 = 56088"), env.step(r"\boxed{56}")
    assert first["observations"][0]["content"] == r"Write your answer as \boxed{number}."
    assert second["observations"][0]["content"] == "56 is wrong. Try again."
    assert [first["reward"], second["reward"], second["done"]] == [0.0, 0.0, False]
    step = env.step(r"\boxed{ 56088 }")
    assert (step["reward"], step["done"], step["observations"]) == (1.0, True, [])
    assert env.get_metrics() == {"correct": 1.0, "attempts": 3}


@pytest.mark.parametrize(
    ("response", "reward"), [(r"\boxed{1}", 0.5), ("1", 0.0), (r"\boxed{6}", 1.0)]
)
def test_the_last_attempt(response, reward):
    assert make("multiply", 6, max_turns=1).step(response)["reward"] == reward


def test_rows_of_multiply():
    rows = list(multiply.prompts(size=200, seed=1, digits=2, split="train"))
    texts = {row["prompt"][1]["content"] for row in rows}
    assert len(texts) == 200
    for row in rows:
        a, b = map(int, row["prompt"][1]["content"].split(" * "))
        assert 10 <= a <= 99
        assert row["reward_spec"]["ground_truth"] == str(a * b)
    held_out = multiply.prompts(size=200, seed=2, digits=2, split="eval")
    assert not texts & {row["prompt"][1]["content"] for row in held_out}
    with pytest.raises(ValueError, match="found only 81 products of 1 digits in split None"):
        list(multiply.prompts(size=82, digits=1))


# ---- gsm8k in several turns ----------------------------------------------------------------------


def test_gsm8k_in_turns():
    env = make("gsm8k_multi_turn", "72", max_turns=3)
    steps = [env.step(said) for said in ("#### 70", "I think 72", "#### 72")]
    # 0.2 / 3 for a wrong number in the right form
    assert [step["reward"] for step in steps] == [0.2 / 3, 0.0, 1.0]
    assert [step["done"] for step in steps] == [False, False, True]
    assert "step by step" in steps[0]["observations"][0]["content"]
    assert "last turn" in steps[1]["observations"][0]["content"]
    assert env.get_metrics() == {"avg_steps": 3, "correct": 1.0}


def test_where_the_number_of_turns_comes_from():
    assert make("gsm8k_multi_turn", "1").max_turns == 5
    assert make("gsm8k_multi_turn", "1", extra_info={"max_turns": 2}).max_turns == 2
    assert make("gsm8k_multi_turn", "1", extra_info={"max_turns": 2}, max_turns=4).max_turns == 4
