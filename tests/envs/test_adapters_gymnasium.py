"""Environments of gymnasium as conversations: its own, and one whose spaces are text."""

import asyncio
import json
import sys

import gymnasium
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jaxrl import envs
from jaxrl.data.prompts import load_rows
from jaxrl.envs.adapters.gymnasium import prompts
from jaxrl.rollout.conversations.environment_pool import EnvironmentPool

LAKE = {"actions": ["left", "down", "right", "up"], "is_slippery": False}
TAXI = max(name for name in gymnasium.registry if name.startswith("Taxi-v"))  # v3 in 1.0


class Parrot(gymnasium.Env):
    """Says a word of two letters; repeating it earns 1, three times in all."""

    observation_space = gymnasium.spaces.Text(2)
    action_space = gymnasium.spaces.Text(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.word, self.left = self._draw(), 3
        return self.word, {}

    def _draw(self):
        return "".join("abcdefghij"[i] for i in self.np_random.integers(0, 10, 2))

    def step(self, action):
        reward, self.left, self.word = float(action == self.word), self.left - 1, self._draw()
        return self.word, reward, self.left == 0, False, {}


class Picture(gymnasium.Env):
    """What is seen is no text."""

    observation_space = gymnasium.spaces.Box(0, 255, (8, 8, 3))
    action_space = gymnasium.spaces.Discrete(2, start=5)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observation_space.sample(), {}

    def step(self, action):
        return self.observation_space.sample(), float(action), True, False, {}


def describe(env, observation):
    """A picture in words."""
    return f"a picture of {observation.shape[0]} by {observation.shape[1]}"


@pytest.fixture(autouse=True, scope="module")
def registered():
    """Ids that importing this module by name does not need."""
    sys.modules["gymnasium_tasks"] = sys.modules[__name__]
    for name, made_by in {"Parrot-v0": Parrot, "Picture-v0": Picture}.items():
        gymnasium.register(name, made_by, disable_env_checker=True)
    yield
    for name in ("Parrot-v0", "Picture-v0"):
        del gymnasium.registry[name]
    del sys.modules["gymnasium_tasks"]


def opened(row, max_turns=20):
    extras = {key: row[key] for key in row if key not in ("prompt", "env_class")}
    env = envs.make(row["env_class"], {"max_turns": max_turns, **extras})
    return env, env.init(row["prompt"])[0]


def play(row, actions, max_turns=20):
    """What is said, what is earned, and the metrics, until the end or the last action."""
    env, messages = opened(row, max_turns)
    said, earned = [messages[-1]["content"]], []
    for action in actions:
        step = env.step(f"I think. <action>{action}</action>")
        earned.append(step["reward"])
        said += [m["content"] for m in step["observations"]]
        if step["done"]:
            break
    env.close()
    return said, earned, env.get_metrics(), step["done"]


# ---- gymnasium's own -----------------------------------------------------------------------------


def test_frozen_lake_is_read_and_walked_to_its_goal():
    [row] = prompts("FrozenLake-v1", size=1, **LAKE)
    assert row["prompt"] == [
        {
            "role": "user",
            "content": "The actions are left, down, right, up. Answer with <action>left</action>.",
        }
    ]
    env, messages = opened(row)
    # one message, as some chat templates want; "[S]" is where one stands
    assert [m["role"] for m in messages] == ["user"]
    assert messages[0]["content"].endswith("</action>.\n\n[S]FFF\nFHFH\nFFFH\nHFFG")
    walk = ["down", "Down", "right", "right", "1", "right"]  # a number will do
    said, earned, metrics, done = play(row, walk)
    assert said[1] == "  (Down)\nSFFF\n[F]HFH\nFFFH\nHFFG"
    assert (earned, done) == ([0.0, 0.0, 0.0, 0.0, 0.0, 1.0], True)
    assert metrics == {"return": 1.0, "steps": 6, "invalid_actions": 0, "truncated": 0.0}
    assert play(row, ["right", "down"])[1:] == (  # into the hole
        [0.0, 0.0],
        {"return": 0.0, "steps": 2, "invalid_actions": 0, "truncated": 0.0},
        True,
    )


def test_taxi_tells_by_signs_what_it_shows_in_colours():
    rows = list(prompts(TAXI, size=3, seed=1))
    first = [opened(row)[1][-1]["content"] for row in rows]
    assert len(set(first)) == 3  # a seed each
    assert all(text.count("(blue)") == 1 and text.count("(magenta)") == 1 for text in first)
    assert "\x1b" not in "".join(first)
    _, earned, metrics, _ = play(rows[0], [0, 5])
    assert earned == [-1.0, -10.0]  # a move; an illegal drop-off
    assert metrics["return"] == -11.0


def test_blackjack_is_shown_by_its_numbers_and_its_chance_is_the_rows():
    rows = list(prompts("Blackjack-v1", size=30, actions=["stick", "hit"]))
    games = [play(row, ["hit", "hit", "stick"]) for row in rows]
    assert games == [play(row, ["hit", "hit", "stick"]) for row in rows]
    for said, earned, _, done in games:
        player, dealer, ace = json.loads(said[0].split("\n\n")[1])
        assert 4 <= player <= 21 and 1 <= dealer <= 10 and ace in (0, 1)
        assert done and earned[-1] in (-1.0, 0.0, 1.0)
    assert len({tuple(earned) for _, earned, _, _ in games}) > 2


def test_cut_by_gymnasium_or_by_us():
    [row] = prompts("FrozenLake-v1", size=1, max_episode_steps=2, **LAKE)
    _, earned, metrics, done = play(row, ["left"] * 5)
    assert (len(earned), metrics["truncated"], done) == (2, 1.0, True)
    [row] = prompts("FrozenLake-v1", size=1, **LAKE)
    _, earned, metrics, done = play(row, ["left"] * 5, max_turns=3)
    assert (len(earned), metrics["truncated"], done) == (3, 0.0, True)


def test_no_action_is_no_step():
    [row] = prompts("FrozenLake-v1", size=1, **LAKE)
    env, _ = opened(row, max_turns=3)
    said = "The actions are left, down, right, up. Answer with <action>left</action>."
    silent, wrong, last = env.step("down"), env.step("<action>jump</action>"), env.step("")
    assert silent["observations"][0]["content"] == f"There is no action in your answer. {said}"
    assert wrong["observations"][0]["content"] == f"'jump' is not an action. {said}"
    assert (last["observations"], last["done"], last["reward"]) == ([], True, 0.0)
    assert env.get_metrics()["invalid_actions"] == 3
    assert env.get_metrics()["steps"] == 0


def test_a_pattern_finds_actions_without_tags():
    [row] = prompts("FrozenLake-v1", size=1, action_pattern="([0-3])", **LAKE)
    assert row["prompt"][0]["content"] == "The actions are left, down, right, up."
    env, _ = opened(row)
    env.step("first 0, no: 1.")  # the last one counts: down
    assert env.env.unwrapped.s == 4
    assert "no action in your answer" in env.step("down")["observations"][0]["content"]


def test_rows_survive_parquet(tmp_path):
    rows = list(prompts("FrozenLake-v1", size=2, instruction="Walk.", **LAKE))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "lake.parquet")
    assert load_rows(str(tmp_path / "lake.parquet")) == rows
    assert rows[0]["prompt"][0]["content"] == "Walk."
    assert [row["seed"] for row in rows] == [0, 1]
    assert [row["seed"] for row in prompts(TAXI, size=2, seed=3)] == [3_000_000, 3_000_001]


# ---- of one's own --------------------------------------------------------------------------------


def test_text_is_said_and_heard_as_it_is():
    [row] = prompts("gymnasium_tasks:Parrot-v0", size=1, seed=4)
    env, messages = opened(row)
    said, earned = messages[-1]["content"].split("\n\n")[1], []
    for answer in (None, "zz", None):
        step = env.step(f"<action>{said if answer is None else answer}</action>")
        earned.append(step["reward"])
        said = step["observations"][0]["content"] if step["observations"] else ""
    assert (earned, step["done"]) == ([1.0, 0.0, 1.0], True)
    env, _ = opened(row)
    refused = env.step("<action>much too long</action>")["observations"][0]["content"]
    assert refused.startswith("'much too long' is not a possible action. Answer with <action>")


def test_a_function_puts_into_words_what_is_no_text():
    given = {"observe": f"{__name__}:describe"}
    [row] = prompts("Picture-v0", size=1, **given)
    said, earned, _, done = play(row, [6])
    assert said[0].endswith("Answer with <action>5</action>.\n\na picture of 8 by 8")
    assert (earned, done) == ([6.0], True)  # its numbers begin with 5
    assert "'0' is not an action" in play(row, ["0"])[0][1]


def test_a_prompt_that_ends_with_another_role_gets_a_message_more():
    env, _ = opened(next(prompts("FrozenLake-v1", size=1, **LAKE)))
    messages, _ = env.init([{"role": "system", "content": "Walk."}])
    assert [m["role"] for m in messages] == ["system", "user"]


def test_in_the_threads_of_the_pool():
    [row] = prompts(TAXI, size=1)
    pool = EnvironmentPool(4, timeout_seconds=30)

    async def talk():
        return await asyncio.gather(*[pool.run(lambda: play(row, [0, 1, 2, 3])) for _ in range(8)])

    alone, together = play(row, [0, 1, 2, 3]), asyncio.run(talk())
    assert together == [alone] * 8


# ---- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"name": "FrozenLak-v1"}, "no environment 'FrozenLak-v1' .*did you mean 'FrozenLake-v1'"),
        ({"name": "nowhere_at_all:X-v0"}, "no environment 'nowhere_at_all:X-v0' .*No module named"),
        ({"name": "Pendulum-v1"}, "'gymnasium:Pendulum-v1' has actions of the space Box"),
        (
            {"name": "Picture-v0"},
            "'gymnasium:Picture-v0' has observations .*set the column observe",
        ),
        ({"actions": ["left"]}, r"has 4 actions, and 1 names: \['left'\]"),
        ({"name": "Parrot-v0", "actions": ["a"]}, "has actions of text, not"),
        ({"depth": 3}, "cannot make environment 'FrozenLake-v1' with {\"depth\": 3}: .*'depth'"),
        ({"seed": -1}, "seed must be 0 to 2000"),
        ({"action_pattern": "("}, r"action_pattern '\(' is not a regular expression: missing \)"),
        ({"action_pattern": "go"}, "action_pattern 'go' must have one group"),
    ],
)
def test_impossible_rows(arguments, problem):
    with pytest.raises(ValueError, match=problem):
        list(prompts(**{"name": "FrozenLake-v1", "size": 1, **arguments}))


def test_an_unknown_environment_of_a_row():
    with pytest.raises(ValueError, match="gymnasium has no environment 'Taxi-v99'"):
        envs.load("gymnasium:Taxi-v99")


def test_missing_package_says_how_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    said = r"package gymnasium: pip install 'jaxrl\[gymnasium\]'"
    with pytest.raises(ImportError, match=said) as raised:
        envs.load(f"gymnasium:{TAXI}")
    assert raised.value.__context__.__context__ is None  # said once, not while it is being said
