"""Environments of verifiers, where it is installed: `pip install 'jaxrl[verifiers]'`."""

import asyncio
import json
import signal
import sys
import textwrap

import pytest

from jaxrl import envs
from jaxrl.envs.adapters import verifiers
from jaxrl.rollout.conversations.environment_pool import EnvironmentPool

MODULES = {
    "vf_sums": """
        import verifiers as vf
        from datasets import Dataset

        def right(completion, answer):
            return float(completion[-1]["content"].strip() == answer)

        async def short(completion, **kwargs):
            return float(len(completion[-1]["content"]) < 4)

        def load_environment(rows=3):
            data = [{"question": f"{i} + 2", "answer": str(i + 2)} for i in range(rows)]
            rubric = vf.Rubric(funcs=[right, short], weights=[1.0, 0.5])
            return vf.SingleTurnEnv(
                dataset=Dataset.from_list(data), system_prompt="Add.", rubric=rubric
            )
    """,
    "vf_guess": """
        import verifiers as vf
        from datasets import Dataset

        def solved(state):
            return 1.0 / len(state["trajectory"]) if state["solved"] else 0.0

        class Guess(vf.MultiTurnEnv):
            async def setup_state(self, state):
                state["solved"] = False
                state["cleaned"] = 0

            @vf.stop
            async def is_solved(self, state):
                if state["trajectory"]:
                    said = state["trajectory"][-1]["completion"][-1]["content"]
                    state["solved"] = said == state["answer"]
                return state["solved"]

            async def env_response(self, messages, state, **kwargs):
                low = int(messages[-1]["content"]) < int(state["answer"])
                return [{"role": "user", "content": "higher" if low else "lower"}]

            @vf.cleanup
            async def count(self, state):
                CLEANED.append(len(state["trajectory"]))

        CLEANED = []

        def load_environment(max_turns=4):
            data = [{"question": "a digit?", "answer": "7"}]
            rubric = vf.Rubric(funcs=[solved])
            return Guess(dataset=Dataset.from_list(data), rubric=rubric, max_turns=max_turns)
    """,
    "vf_tools": """
        import verifiers as vf
        from datasets import Dataset

        def multiply(a: int, b: int) -> int:
            '''Multiply two numbers.'''
            return a * b

        def right(completion, answer):
            return float(answer in completion[-1]["content"])

        def load_environment():
            data = [{"question": "6 times 7?", "answer": "42"}]
            return vf.ToolEnv(
                dataset=Dataset.from_list(data), rubric=vf.Rubric(funcs=[right]), tools=[multiply]
            )
    """,
    "vf_group": """
        import verifiers as vf
        from datasets import Dataset

        def best(completions) -> list[float]:
            return [0.0 for _ in completions]

        def load_environment():
            data = Dataset.from_list([{"question": "?", "answer": "!"}])
            return vf.SingleTurnEnv(dataset=data, rubric=vf.Rubric(funcs=[best]))
    """,
    "vf_broken": """
        import verifiers as vf
        from datasets import Dataset

        class Broken(vf.MultiTurnEnv):
            async def setup_state(self, state):
                if state["answer"] == "?":
                    raise vf.InfraError("nothing to begin with")

            async def env_response(self, messages, state, **kwargs):
                raise vf.InfraError("the sandbox is gone")

        def load_environment():
            data = Dataset.from_list([{"question": "?", "answer": x} for x in "!?"])
            return Broken(dataset=data, rubric=vf.Rubric(funcs=[lambda **kwargs: 1.0]))
    """,
}


@pytest.fixture(scope="module")
def vf(tmp_path_factory):
    """Modules with environments, on the path."""
    pytest.importorskip("verifiers")
    folder = tmp_path_factory.mktemp("verifiers")
    for name, text in MODULES.items():
        (folder / f"{name}.py").write_text(textwrap.dedent(text))
    sys.path.insert(0, str(folder))
    from jaxrl.envs.adapters import verifiers

    yield verifiers
    sys.path.remove(str(folder))


async def talk(row, actions, max_turns=10, pool=None):
    """What is said, what is earned and the metrics, by way of the pool."""
    pool = pool or EnvironmentPool(4, timeout_seconds=30)
    extras = {key: row[key] for key in row if key not in ("prompt", "env_class")}
    extras["max_turns"] = max_turns
    env = await pool.run(lambda: pool.make(row["env_class"], extras))

    async def init():
        return await env.init(row["prompt"])

    messages, _ = await pool.run(init)
    said, earned, done = list(messages), [], False
    for action in actions:

        async def step(action=action):
            return await env.step(action)

        output = await pool.run(step)
        said += [{"role": "assistant", "content": action}, *output["observations"]]
        earned.append(output["reward"])
        done = output["done"]
        if done:
            break
    await env.close()
    return said, earned, env.get_metrics(), done


def play(row, actions, **how):
    return asyncio.run(talk(row, actions, **how))


def test_single_turn_with_a_weighted_rubric(vf):
    rows = list(vf.prompts("vf-sums", size=2))
    assert rows[1]["prompt"] == [
        {"role": "system", "content": "Add."},
        {"role": "user", "content": "1 + 2"},
    ]
    assert rows[1]["env_class"] == "verifiers:vf-sums"
    said, earned, metrics, done = play(rows[1], ["3"])
    assert said[:2] == rows[1]["prompt"]
    assert (earned, done) == ([1.5], True)  # right, and half for short
    assert metrics == {"right": 1.0, "short": 1.0, "num_turns": 1}
    assert play(rows[0], ["I say 3"])[1] == [0.0]
    assert len(list(vf.prompts("vf-sums", rows=5))) == 5
    assert len(list(vf.prompts("vf-sums", split="eval"))) == 3  # it has no other


def test_several_turns_with_its_own_stop_conditions(vf):
    [row] = vf.prompts("vf-guess")
    said, earned, metrics, done = play(row, ["3", "9", "7"])
    assert [m["content"] for m in said] == ["a digit?", "3", "higher", "9", "lower", "7"]
    assert (earned, done) == ([0.0, 0.0, pytest.approx(1 / 3)], True)
    assert metrics["num_turns"] == 3
    said, earned, _, done = play(row, ["1", "1", "1", "1", "7"])  # its own limit is four turns
    assert (earned, done) == ([0.0] * 4, True)


def test_our_limit_of_turns_ends_it_with_its_reward(vf):
    [row] = vf.prompts("vf-guess", max_turns=-1)
    assert play(row, ["1", "7"], max_turns=2)[1] == [0.0, 0.5]
    _, earned, metrics, done = play(row, ["1", "2", "7"], max_turns=2)
    assert (earned, done, metrics["num_turns"]) == ([0.0, 0.0], True, 2)


def test_a_conversation_that_is_left_is_cleaned_up(vf):
    import vf_guess

    [row] = vf.prompts("vf-guess")
    del vf_guess.CLEANED[:]
    said, _, metrics, done = play(row, ["1"])
    assert (said[-1]["content"], done, metrics) == ("higher", False, {})
    assert vf_guess.CLEANED == [1]


def test_tools_are_described_called_and_answer(vf):
    [row] = vf.prompts("vf-tools")
    system = row["prompt"][0]
    assert system["role"] == "system"
    assert '"name": "multiply"' in system["content"]
    call = '<tool_call>\n{"name": "multiply", "arguments": {"a": 6, "b": 7}}\n</tool_call>'
    said, earned, metrics, done = play(row, [f"Let me see. {call}", "It is 42."])
    assert [m["role"] for m in said[-3:]] == ["assistant", "tool", "assistant"]
    assert said[-2]["content"] == "42"
    assert (earned, done) == ([0.0, 1.0], True)
    assert (metrics["multiply_calls"], metrics["total_tool_calls"]) == (1, 1.0)


@pytest.mark.parametrize(
    "call", ["no json", '{"name": "divide", "arguments": {}}', '{"name": "multiply"}', "[1]"]
)
def test_a_wrong_tool_call_is_answered(vf, call):
    [row] = vf.prompts("vf-tools")
    said, earned, _, done = play(row, [f"<tool_call>{call}</tool_call>", "42"])
    assert said[-2]["role"] == "tool" and said[-2]["content"]
    assert (earned, done) == ([0.0, 1.0], True)


def test_conversations_side_by_side_do_not_mix(vf):
    [row] = vf.prompts("vf-guess")
    games = [["7"], ["1", "7"], ["9", "8", "7"], ["0"] * 4] * 3

    async def all_of_them():
        pool = EnvironmentPool(4, timeout_seconds=30)
        return await asyncio.gather(*[talk(row, game, pool=pool) for game in games])

    rewards = [sum(earned) for _, earned, _, _ in asyncio.run(all_of_them())]
    assert rewards == pytest.approx([1.0, 1 / 2, 1 / 3, 0.0] * 3)


def test_its_failures_are_ours(vf):
    import verifiers

    later, at_once = vf.prompts("vf-broken")
    with pytest.raises(verifiers.InfraError, match="the sandbox is gone"):
        play(later, ["anything"])
    with pytest.raises(verifiers.InfraError, match="nothing to begin with"):
        play(at_once, [])


def test_the_signals_stay_the_trainers(vf):
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    list(vf.prompts("vf-sums", rows=7))
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_what_cannot_be_trained_on_is_named(vf):
    with pytest.raises(ValueError, match="'verifiers:vf-group' has a rubric that judges a group"):
        list(vf.prompts("vf-group"))
    with pytest.raises(ValueError, match="no environment of verifiers 'vf-nothing': no module"):
        envs.load("verifiers:vf-nothing")
    with pytest.raises(ValueError, match="'verifiers:vf-sums' needs the column 'task'"):
        envs.make("verifiers:vf-sums", {"answer": "3"})
    with pytest.raises(ValueError, match="split must be 'train' or 'eval', got 'test'"):
        list(vf.prompts("vf-sums", split="test"))


def test_rows_are_text(vf):
    [row] = vf.prompts("vf-tools")
    assert json.loads(json.dumps(row)) == row
    assert json.loads(row["task"])["answer"] == "42"


@pytest.mark.parametrize("text", ["no json", "[" * 100_000])
def test_what_is_no_call_is_left_for_the_environment(text):
    assert verifiers._call(text) == {"name": "", "arguments": text}


def test_missing_package_says_how_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "verifiers", None)
    with pytest.raises(ImportError, match=r"package verifiers: pip install 'jaxrl\[verifiers\]'"):
        envs.load("verifiers:gsm8k")
