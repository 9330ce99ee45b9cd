"""What stands between tags: as the regular expressions find it, at once in any text."""

import random
import re

import pytest

from jaxrl import envs
from jaxrl.envs.adapters.verifiers import _calls
from jaxrl.envs.answers import tagged_answer
from jaxrl.envs.tags import every_tagged, first_tagged, last_tagged
from jaxrl.envs.tasks.llm_as_a_judge import read_score

PIECES = ("<a>", "</a>", "<b>", "</b>", "x", "\n", "<a", ">")


def test_they_are_what_regular_expressions_find():
    rng = random.Random(0)
    for _ in range(3000):
        text = "".join(rng.choices(PIECES, k=rng.randrange(12)))
        expected = re.findall("<a>(.*?)</a>", text, re.DOTALL)
        assert [found.content for found in every_tagged(text, "a")] == expected
        assert last_tagged(text, "a") == (expected[-1] if expected else None)
        match = re.search("<a>(.*?)</a>|<b>(.*?)</b>", text, re.DOTALL)
        found = first_tagged(text, "a", "b")
        assert (found is None) == (match is None)
        if match:
            tag = "b" if match[1] is None else "a"
            assert found == (tag, match[1] or match[2] or "", match.start(), match.end())


def test_tool_calls_and_what_is_said_beside_them():
    text = "one <tool_call>\n{1}\n</tool_call> two<tool_call>{2}</tool_call>"
    assert _calls(text) == (["{1}", "{2}"], "one  two")
    assert _calls("<tool_call>{1}") == ([], "<tool_call>{1}")


@pytest.mark.parametrize(
    ("env_class", "tags"),
    [("search", ("answer", "search")), ("calculator", ("answer", "calc"))],
)
def test_a_loop_of_open_tags_is_judged_at_once(env_class, tags):
    """A search from every one of them would take minutes."""
    for tag in tags:
        loop = f"</{tag}>" + f"<{tag}>" * 200_000
        row = {"reward_spec": {"ground_truth": "1"}, "max_turns": 1}
        step = envs.make(env_class, row, {"search": {}}).step(loop)
        assert (step["reward"], step["done"]) == (0.0, True)
        step = envs.make(env_class, {**row, "max_turns": 5}, {"search": {}}).step(loop[9:])
        assert step["reward"] == 0.0
    assert tagged_answer(loop) == loop


def test_blanks_of_a_judge_are_read_at_once():
    with pytest.raises(ValueError, match="float"):
        read_score("### Final Score:" + " " * 300_000 + "none")
