"""The environments whose answers are programs: python_code and lcb, and the groups of tools."""

import json
import re
from dataclasses import asdict
from pathlib import Path

import pytest

from jaxrl import envs
from jaxrl.config.dataclass_config import get_config_as_dict
from jaxrl.config.environment import SandboxConfig, SkyRLGymConfig
from jaxrl.data.tokenizer import character_tokenizer
from jaxrl.envs.answers import same_answer
from jaxrl.envs.protocol import Env
from jaxrl.envs.sandbox import sandbox
from jaxrl.envs.tools import ToolGroup, tool
from tests.envs.test_sandbox import needs_sandbox
from tests.rollout.scripted import converse, make_prompt

# ---- tools ---------------------------------------------------------------------------------------


class Calculator(ToolGroup):
    def __init__(self):
        super().__init__("calculator")
        self.count = 0

    @tool
    def add(self, a, b):
        self.count += 1
        return a + b

    @tool
    def negate(self, a):
        return -a

    def no_tool(self):
        raise AssertionError


def test_a_group_knows_its_tools():
    group = Calculator()
    assert group.get_tool_names() == ["add", "negate"]
    assert (group.execute_tool("add", 3, b=4), group.count) == (7, 1)
    assert group.get_tool("negate")(3) == -3
    assert group.get_tool("no_tool") is None
    assert group.get_tool_to_group_mapping() == {"add": "calculator", "negate": "calculator"}
    with pytest.raises(
        ValueError, match="'no_tool' not found in group 'calculator', which has add"
    ):
        group.execute_tool("no_tool")


def test_an_environment_finds_the_group_of_a_tool():
    env = Env()
    assert (env.tool_groups, env.tool_to_toolgroup) == ([], {})
    env.init_tool_groups([Calculator()])
    assert env._execute_tool(env.tool_to_toolgroup["add"], "add", [3, 4]) == 7
    with pytest.raises(ValueError, match="tool group 'clock' not found; there are calculator"):
        env._execute_tool("clock", "now", [])
    with pytest.raises(ValueError, match="tool 'add' is in group 'calculator' and in 'calculator'"):
        env.init_tool_groups([Calculator(), Calculator()])


# ---- python_code ---------------------------------------------------------------------------------


def python_env(ground_truth="42", **extras):
    gym = SkyRLGymConfig()
    gym.sandbox = SandboxConfig(cpu_seconds=1.0, memory_mb=200, output_bytes=10_000)
    return envs.make(
        *("python_code", {"reward_spec": {"ground_truth": ground_truth}, **extras}),
        get_config_as_dict(gym),
    )


@needs_sandbox
def test_a_conversation_with_python():
    env = python_env()
    step = env.step("Let me see. <python>print(6 * 7)</python> It prints 43.")
    assert step == {
        "observations": [{"role": "user", "content": "<output>\n42\n</output>"}],
        "reward": 0.0,
        "done": False,
        "metadata": {"reason": "ok"},
        "postprocessed_action": "Let me see. <python>print(6 * 7)</python>",
    }
    said = env.step("<python>print('seen')\n1 / 0</python>")["observations"][0]["content"]
    assert said.startswith("<output>\nseen\nTraceback")
    assert said.endswith("ZeroDivisionError: division by zero\nError: exit code 1\n</output>")
    step = env.step("<answer>42.0</answer>")
    assert (step["reward"], step["done"], step["observations"]) == (1.0, True, [])
    assert env.get_metrics() == {
        **{"correct": 1.0, "answered": 1.0},
        **{"programs": 2, "program_errors": 1},
    }


@needs_sandbox
def test_python_in_the_conversation_of_a_run():
    """What the model made up after its code is not in the row; what the code printed is, masked."""
    tokenizer = character_tokenizer("".join(map(chr, range(32, 127))) + "\n")
    turns = ["<python>print(6*7)</python> 43", "<answer>42</answer>"]

    def reply(tokens, key):
        said = turns["<output>" in tokenizer.decode(tokens)]
        return [*tokenizer.encode(said), tokenizer.eos_token_id]

    spec = {"reward_spec": {"ground_truth": "42"}}
    prompt = make_prompt(tokenizer, "6*7?", env_class="python_code", **spec)
    output = converse(reply, [prompt], tokenizer, max_turns=3)
    row = list(zip(output["response_ids"][0], output["loss_masks"][0], strict=True))
    sampled = tokenizer.decode([token for token, mask in row if mask])
    seen = tokenizer.decode([token for token, mask in row if not mask])
    assert sampled.startswith("<python>print(6*7)</python><answer>42</answer>")
    assert "<output>\n42\n</output>" in seen
    assert sum(output["rewards"][0]) == 1.0
    assert output["rollout_metrics"]["environment/programs"] == 1.0


@needs_sandbox
@pytest.mark.parametrize(
    ("code", "said", "reason"),
    [
        ("while True: pass", "Error: no end within 10 s, or 1 s of CPU", "timeout"),
        ("x = 'x' * 10**9", "Error: more than 200 MB of memory", "memory"),
        ("while True: print('x' * 99)", "Error: too much output", "output"),
        ("import os; os.abort()", "Error: ended by signal 6", "killed"),
        ("x = 1", "(no output)", "ok"),
    ],
)
def test_what_the_model_is_told(code, said, reason):
    step = python_env().step(f"<python>{code}</python>")
    content = step["observations"][0]["content"]
    assert content.endswith(f"{said}\n</output>")
    assert len(content) < 4200
    assert (step["reward"], step["metadata"]["reason"]) == (0.0, reason)


@needs_sandbox
def test_what_comes_first_counts():
    step = python_env().step("<python>print(1)</python><answer>42</answer>")
    assert (step["reward"], step["done"]) == (0.0, False)
    step = python_env().step("<answer>42</answer><python>print(1)</python>")
    assert (step["reward"], step["done"]) == (1.0, True)


@needs_sandbox
def test_turns_are_counted():
    env = python_env(max_turns=2)
    assert "in <answer>" in env.step("hm")["observations"][0]["content"]
    step = env.step("<python>print(1)</python>")
    assert (step["reward"], step["done"], step["observations"]) == (0.0, True, [])
    assert env.get_metrics()["programs"] == 0


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("42", True),
        (" 42.00 ", True),
        ("4.2e1", True),
        ("42,000", False),
        ("Forty-Two", False),
        ("", False),
        ("sNaN", False),
    ],
)
def test_same_answer(answer, right):
    assert same_answer(answer, "42") is right


def test_same_text():
    assert same_answer("New  York", "new york")
    assert same_answer("1,234,567", "1234567")


# ---- lcb -----------------------------------------------------------------------------------------


def lcb(code, tests=None, settings=None):
    tests = tests or [
        {"input": "3\n4", "output": "7\n", "testtype": "stdin"},
        {"input": "5\n6", "output": "11", "testtype": "stdin"},
    ]
    extras = {"reward_spec": {"ground_truth": json.dumps(tests)}}
    env = envs.make("lcb", extras, {"sandbox": settings or {}})
    step = env.step(code)
    assert step["done"] and step["observations"] == []
    return env, step


@needs_sandbox
@pytest.mark.parametrize(
    ("code", "passed", "reason"),
    [
        ("print(int(input()) + int(input()))", 2, "ok"),
        ("if __name__ == '__main__':\n    print(sum(map(int, sys.stdin)))", 2, "ok"),
        ("print(7)", 1, "wrong answer"),
        ("print(int(input()))", 0, "wrong answer"),
        ("1 / 0", 0, "error"),
        ("print(7", 0, "error"),
        ("print(open('/etc/passwd').read())", 0, "error"),
        ("import os\nwhile True: os.fork()", 0, "error"),
    ],
)
def test_programs_that_read_stdin(code, passed, reason):
    env, step = lcb(f"Here:\n```python\n{code}\n```\nDone.")
    assert step["reward"] == float(passed == 2)
    assert env.get_metrics() == {"correct": float(passed == 2), "passed": passed / 2}
    assert step["metadata"] == {"parsed_code": code, "reason": reason, "num_passed": passed}


@needs_sandbox
def test_an_endless_program_fails_for_its_time():
    assert lcb("```\nwhile True: pass\n```", settings={"cpu_seconds": 0.5})[1]["metadata"] == {
        **{"parsed_code": "while True: pass", "reason": "timeout", "num_passed": 0}
    }


@needs_sandbox
def test_a_response_without_code():
    step = lcb("print(7)")[1]
    assert (step["reward"], step["metadata"]["reason"]) == (0.0, "no code")


@needs_sandbox
@pytest.mark.parametrize(
    ("code", "right"),
    [
        ("class Solution:\n    def add(self, a, b): return [x + b for x in a]", True),
        ("def add(a: List[int], b): print('hi'); return tuple(x + b for x in a)", True),
        ("def add(a, b): return np.array(a) + b", True),
        ("def add(a, b): return a", False),
        ("def plus(a, b): return [x + b for x in a]", False),
        # Equal to everything here, but only its JSON leaves the sandbox.
        (
            "class All:\n    def __eq__(self, other): return True\ndef add(a, b): return All()",
            False,
        ),
    ],
)
def test_functions(code, right):
    tests = [
        {"input": "[1, 2]\n3", "output": "[4, 5]", "testtype": "functional"},
        {"input": "[]\n3", "output": "[]", "testtype": "functional"},
    ]
    tests[0]["metadata"] = {"func_name": "add"}
    assert lcb(f"```python\n{code}\n```", tests)[1]["reward"] == float(right)


@pytest.mark.parametrize(
    ("ground_truth", "problem"),
    [
        ("not json", "is not JSON"),
        ("[]", r"needs a list of at least one test, got '\[\]'"),
        ('[{"input": "1"}]', "a test needs texts input and output"),
        (
            '[{"input": "1", "output": "1", "testtype": "functional"}]',
            r"need metadata\['func_name'\], the name of a function, got None",
        ),
        (
            '[{"input": "1", "output": "1", "testtype": "functional",'
            ' "metadata": {"func_name": "f(); import os"}}]',
            "got 'f",
        ),
    ],
)
def test_bad_tests_are_named(ground_truth, problem):
    with pytest.raises(ValueError, match=problem):
        envs.make("lcb", {"reward_spec": {"ground_truth": ground_truth}})


@pytest.mark.parametrize("env_class", ["lcb", "python_code"])
def test_a_machine_without_a_sandbox_says_so_before_anything_runs(monkeypatch, env_class):
    def require():
        raise sandbox.SandboxError("this machine does not allow the sandbox")

    monkeypatch.setattr(sandbox, "require", require)
    tests = '[{"input": "1", "output": "1"}]'
    with pytest.raises(sandbox.SandboxError, match="does not allow"):
        envs.make(env_class, {"reward_spec": {"ground_truth": tests}})


def test_the_config_has_the_limits_of_the_sandbox():
    assert asdict(SandboxConfig()) == asdict(sandbox.Limits())


@needs_sandbox
def test_the_examples_of_the_page(capsys):
    page = Path(__file__).parents[2] / "docs" / "environments.md"
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    names: dict = {}
    for block in blocks:
        if not block.startswith("config"):  # settings: tests/docs
            exec(block, names)
    assert len(names.keys() & {"Parrot", "Clock", "Timekeeper", "Limits"}) == 4
    parrot = names["Parrot"](extras={"word": "hi", "max_turns": 2})
    assert [parrot.step(said)["reward"] for said in ("ho", "hi")] == [0.0, 1.0]
    assert names["Timekeeper"]().step("UTC") is None  # goes on where the page has dots
    assert capsys.readouterr().out == "ok 7\n\n"
