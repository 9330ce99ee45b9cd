"""The rewards of skyrl-gym 0.4.0, and where ours differ and why."""

import json

import pytest

from jaxrl import envs
from jaxrl.envs.sandbox import sandbox
from tests.envs import corpus
from tests.envs.test_sandbox import needs_sandbox

THEIRS = json.loads(corpus.REWARDS.read_text())["rewards"]
# Name of the case -> theirs, ours.
DIFFERENCES = {
    "gsm8k": {},
    "gsm8k_multi_turn": {},
    "aime": {},
    "text2sql": {
        # What a database contains cannot spoil the format of a conversation.
        "solution in the database": ([0.0, -1.0], [0.0, 1.0]),
        # A statement that writes gives no rows, which is not the same as an empty result.
        "empty/2": ([1.0], [0.0]),
    },
    "search": {
        # What a document says is not what the policy says, neither an answer nor half of one.
        "found an answer": ([0.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.0, 0.0]),
        "found half an answer, says all": ([0.0, 0.0], [0.0, 1.0]),
        # A tag that was left open in one turn does not swallow the answer of another.
        "open, and right": ([0.0, 0.0], [0.0, 1.0]),
    },
    "lcb": {
        # Programs run as programs here: with a real stdin and stdout, and a module of their own.
        **dict.fromkeys(["buffer", "global", "future", "os._exit", "os.write"], ([0.0], [1.0])),
        # Every test of a function has a process of its own, and an object.
        "state (function)": ([0.0], [1.0]),
        # Results are compared where the program cannot say how.
        "equal to everything (function)": ([1.0], [0.0]),
    },
}


def play(env_class, extras, actions, config):
    env = envs.make(env_class, extras, config)
    rewards = []
    for action in actions:
        step = env.step(action)
        rewards.append(float(step["reward"]))
        if step["done"]:
            break
    return rewards


@pytest.mark.parametrize(
    ("env_class", "count", "every"),
    [
        ("gsm8k", 240, 1),
        ("gsm8k_multi_turn", 31, 1),
        ("aime", 688, 1),
        # Each statement and each program starts a process: all of them are slow.
        ("text2sql", 64, 4),
        pytest.param("text2sql", 64, 1, marks=pytest.mark.slow),
        pytest.param("lcb", 57, 4, marks=needs_sandbox),
        pytest.param("lcb", 57, 1, marks=[needs_sandbox, pytest.mark.slow]),
        ("search", 327, 1),
    ],
)
def test_rewards_are_those_of_skyrl_gym(env_class, count, every, tmp_path):
    """Of every so many cases, and of all that differ."""
    corpus.make_database(tmp_path)
    config = {
        "text2sql": {"db_path": str(tmp_path)},
        "sandbox": {"cpu_seconds": 0.5},
        "search": {"corpus": str(corpus.make_documents(tmp_path))},
    }
    expected = dict(DIFFERENCES[env_class])
    if env_class == "lcb" and sees_programs():
        expected["subprocess"] = [0.0], [1.0]
    cases = {
        name: (extras, actions)
        for kind, name, extras, actions in corpus.cases()
        if kind == env_class
    }
    theirs = THEIRS[env_class]
    assert cases.keys() == theirs.keys()
    assert len(cases) == count
    chosen = [n for i, n in enumerate(cases) if i % every == 0 or n in expected]
    found = {name: play(env_class, *cases[name], config) for name in chosen}
    assert len({tuple(theirs[name]) for name in chosen}) > 1
    different = {name: (theirs[name], ours) for name, ours in found.items() if ours != theirs[name]}
    assert different == expected


def sees_programs():
    """Whether the sandbox shows /usr/bin: where Python itself is installed in /usr."""
    code = "import os; print(os.path.exists('/usr/bin/true'))"
    return sandbox.run(code, "", sandbox.Limits()).stdout == "True\n"
