"""The table of environments, the protocol, splits, and finding answers in text."""

import copy
import pickle
import sys

import pytest

from jaxrl import envs
from jaxrl.envs.adapters.reasoning_gym import ReasoningGymEnv
from jaxrl.envs.answers import is_algebra, is_literal, last_number, tagged_answer
from jaxrl.envs.protocol import Env, StepOutput, read_ground_truth
from jaxrl.envs.tasks.gsm8k import Gsm8kEnv
from jaxrl.envs.toys.sort_digits import SortDigitsEnv
from jaxrl.envs.toys.split import draw_distinct, in_split

SPEC = {"reward_spec": {"method": "rule", "ground_truth": "12"}}


class EchoEnv(Env):
    """A user's environment: rewards the length of the response."""

    def step(self, action):
        return StepOutput(observations=[], reward=float(len(action)), done=True, metadata={})


class DuckEnv:
    """Not a subclass of ours."""

    def __init__(self, env_config, extras):
        self.given = (env_config, extras)

    def step(self, action):
        return {"observations": [], "reward": 1.0, "done": True, "metadata": {}}


@pytest.fixture(autouse=True)
def table(monkeypatch):
    """Undoes registrations and makes this module importable as `my_envs`."""
    monkeypatch.setattr(envs, "ENVS", dict(envs.ENVS))
    monkeypatch.setitem(sys.modules, "my_envs", sys.modules[__name__])


# ---- make, load, register ------------------------------------------------------------------------


def test_names_of_the_table_make_their_class():
    for name in envs.ENVS:
        assert callable(envs.load(name).step)
    assert type(envs.make("gsm8k", SPEC)) is Gsm8kEnv
    assert type(envs.make("sort_digits", SPEC)) is SortDigitsEnv
    assert envs.load("gsm8k") is Gsm8kEnv
    assert envs.load("reasoning_gym:chain_sum") is ReasoningGymEnv


@pytest.mark.parametrize(
    ("name", "ours"),
    [("gsm8k", True), ("gymnasium:CartPole-v1", True), ("my_pkg.my_module:gymnasium", False)],
)
def test_what_is_the_librarys_is_told_from_the_users(name, ours):
    assert envs.is_ours(name) == ours


def test_module_and_class_make_a_users_environment():
    env = envs.make("my_envs:EchoEnv", {"a": 1}, {"b": 2})
    assert (env.extras, env.env_config, env.turns, env.max_turns) == ({"a": 1}, {"b": 2}, 0, 1)
    assert env.step("four")["reward"] == 4.0


def test_an_environment_need_not_be_a_subclass():
    assert envs.make("my_envs:DuckEnv", {"a": 1}, {"b": 2}).given == ({"b": 2}, {"a": 1})


def test_settings_are_read_as_keys_and_as_attributes():
    env = envs.make("my_envs:DuckEnv", {}, {"search": {"topk": 3}, "sandbox": {}})
    config = env.given[0]
    assert config["search"]["topk"] == config.search.topk == config.get("search").topk == 3
    assert pickle.loads(pickle.dumps(config)) == copy.deepcopy(config) == config
    with pytest.raises(AttributeError, match="no setting 'top'; there are topk"):
        _ = config.search.top


@pytest.mark.parametrize("entry_point", [EchoEnv, "my_envs:EchoEnv"])
def test_registered_name(entry_point):
    envs.register("echo", entry_point)
    envs.register("echo", entry_point)  # the same again is no clash
    assert type(envs.make("echo")).__name__ == "EchoEnv"
    with pytest.raises(ValueError, match="environment 'echo' is already registered as"):
        envs.register("echo", "other:Env")


def test_an_edited_cell_of_a_notebook_counts(monkeypatch):
    main = sys.modules["__main__"]
    monkeypatch.delattr(main, "__file__", raising=False)  # a notebook has no file
    for reward in (1.0, 2.0):
        found = type("CellEnv", (EchoEnv,), {"__module__": "__main__", "reward": reward})
        monkeypatch.setattr(main, "CellEnv", found, raising=False)
        envs.register("cell", found)
        assert envs.make("cell").reward == envs.make("__main__:CellEnv").reward == reward


@pytest.mark.parametrize("name", ["", "a:b"])
def test_names_have_no_colon(name):
    with pytest.raises(ValueError, match=f"a word without a colon, got '{name}'"):
        envs.register(name, EchoEnv)


def test_the_name_of_an_adapter_is_taken():
    with pytest.raises(ValueError, match="'gymnasium' is already registered"):
        envs.register("gymnasium", EchoEnv)


def test_the_name_of_a_built_in_is_taken_and_two_ways_out_are_named():
    message = (
        "'llm_as_a_judge' is already registered as '.*:LLMJudgeEnv', which is built in: register "
        r"yours under another name, or .* env_class='pkg.module:Class'$"
    )
    with pytest.raises(ValueError, match=message):
        envs.register("llm_as_a_judge", EchoEnv)


@pytest.mark.parametrize(
    ("env_class", "problem"),
    [
        ("gsm8", "unknown environment 'gsm8'; did you mean 'gsm8k'. known are addition, .*gsm8k, "),
        ("my_envs.EchoEnv", r"^unknown .*'my_envs.EchoEnv'; did you mean 'my_envs:EchoEnv'\?$"),
        ("zzz", "unknown environment 'zzz'; known are addition, .*guess_number, .*'verifiers:"),
        ("reasoning_gym", "'reasoning_gym' needs a name, as in 'reasoning_gym:chain_sum'"),
        ("gymnasium:", "'gymnasium' needs a name, as in 'gymnasium:FrozenLake-v1'"),
        ("nowhere.at_all:Env", "'nowhere.at_all:Env': no module 'nowhere'"),
        ("my_envs:EchEnv", "'EchEnv' in module 'my_envs' is not a class.*did you mean 'EchoEnv'"),
        ("my_envs:SPEC", "'SPEC' in module 'my_envs' is not a class with a method step"),
    ],
)
def test_unknown_environment(env_class, problem):
    with pytest.raises(ValueError, match=problem):
        envs.make(env_class)


def test_module_that_lacks_an_import_says_so(tmp_path, monkeypatch):
    (tmp_path / "env_that_needs_more.py").write_text("import not_installed\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="not_installed"):
        envs.make("env_that_needs_more:MyEnv")


def test_an_environment_of_skyrl_gym_says_what_to_install_or_to_import(tmp_path, monkeypatch):
    (tmp_path / "env_of_skyrl_gym.py").write_text("from skyrl_gym.envs.base_text_env import X\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.startswith("skyrl_gym.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "skyrl_gym", None)  # wherever it is installed
    with pytest.raises(ValueError, match=r"pip install 'jaxrl\[envs\]', or write `from jaxrl.envs"):
        envs.make("env_of_skyrl_gym:MyEnv")


SKYRL_GYM_ENV = """\
from jaxrl.envs import BaseTextEnv, BaseTextEnvStepOutput, ConversationType
from typing import Any, Dict


class MultiplyEnv(BaseTextEnv):
    def __init__(self, env_config: Dict[str, Any], extras: Dict[str, Any] = {}):
        super().__init__()
        self.ground_truth = extras["reward_model"]["ground_truth"]
        self.max_turns = extras["max_turns"] if "max_turns" in extras else 5

    def step(self, action: str) -> BaseTextEnvStepOutput:
        self.turns += 1
        right = action.strip() == self.ground_truth
        done = self.turns >= self.max_turns or right
        said: ConversationType = [] if done else [{"role": "user", "content": "Again."}]
        return BaseTextEnvStepOutput(
            observations=said, reward=float(right), done=done, metadata={"answer": action}
        )
"""


def test_an_environment_of_skyrl_gym_runs_with_another_import_line(tmp_path, monkeypatch):
    (tmp_path / "skyrl_multiply.py").write_text(SKYRL_GYM_ENV)
    monkeypatch.syspath_prepend(tmp_path)
    envs.register(id="theirs", entry_point="skyrl_multiply:MultiplyEnv")
    env = envs.make("theirs", {"reward_model": {"ground_truth": "12"}, "max_turns": 2})
    assert env.init([{"role": "user", "content": "3 * 4"}])[1] == {}
    assert env.step("7")["observations"] == [{"role": "user", "content": "Again."}]
    last = {"observations": [], "reward": 1.0, "done": True, "metadata": {"answer": "12"}}
    assert env.step("12") == last


class ExtrasAlone(Env):
    def __init__(self, extras):
        super().__init__(extras=extras)


class NoParameters:
    def step(self, action):
        return {}


@pytest.mark.parametrize("name", ["ExtrasAlone", "NoParameters"])
def test_an_environment_that_cannot_be_called_is_told_its_signature(name):
    with pytest.raises(
        ValueError, match=r"write `def __init__\(self, env_config=None, extras=None"
    ):
        envs.make(f"my_envs:{name}")


# ---- protocol ------------------------------------------------------------------------------------


def test_defaults_of_an_environment():
    env = Env()
    prompt = [{"role": "user", "content": "1"}]
    assert env.init(prompt) == (prompt, {})
    assert (env.get_metrics(), env.close(), env.extras, env.env_config) == ({}, None, {}, {})
    with pytest.raises(NotImplementedError, match="Env has no step"):
        env.step("1")


def test_metrics_are_means_over_the_conversations_that_have_them():
    metrics = [{"a": 1, "b": True, "text": "x"}, {"a": 4.0, "b": False}, {"c": 0.5}, {}]
    # a: (1 + 4) / 2, b: (1 + 0) / 2
    assert Env.aggregate_metrics(metrics) == {"a": 2.5, "b": 0.5, "c": 0.5}
    assert Env.aggregate_metrics([]) == {}


def test_ground_truth_becomes_text():
    assert read_ground_truth({"reward_spec": {"ground_truth": 72}}, "gsm8k") == "72"


@pytest.mark.parametrize("extras", [{}, {"reward_spec": None}, {"reward_spec": {"method": "rule"}}])
@pytest.mark.parametrize("env_class", ["gsm8k", "sort_digits"])
def test_missing_ground_truth(extras, env_class):
    with pytest.raises(ValueError, match=f"environment '{env_class}' needs a column reward_spec"):
        envs.make(env_class, extras | {"reward_model": {"ground_truth": "1"}})


# ---- splits --------------------------------------------------------------------------------------


def test_every_text_is_in_exactly_one_split():
    texts = [f"{i:04d}" for i in range(10_000)]
    is_eval = [in_split(text, "eval") for text in texts]
    assert [in_split(text, "train") for text in texts] == [not e for e in is_eval]
    assert all(in_split(text, None) for text in texts)
    # A tenth, by a checksum: 1000 of 10000, give or take three standard deviations of 30.
    assert 910 < sum(is_eval) < 1090


def test_unknown_split():
    with pytest.raises(ValueError, match="split must be 'train', 'eval' or None, got 'test'"):
        in_split("1", "test")


def test_texts_are_drawn_once():
    drawn = iter("abacb")
    assert draw_distinct(lambda: next(drawn), 3, None, "letters") == ["a", "b", "c"]
    # crc32("a") = 3904355907, no multiple of ten
    assert draw_distinct(lambda: "a", 1, "train", "letters") == ["a"]
    with pytest.raises(ValueError, match="found only 1 letters in split 'train', size=2 were"):
        draw_distinct(lambda: "a", 2, "train", "letters")
    with pytest.raises(ValueError, match="size=0 must be at least 1"):
        draw_distinct(lambda: "a", 0, None, "letters")


# ---- answers -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("3 + 4 = 7.", "7"),
        ("It costs $1,250.50.", "1250.50"),
        ("5 - 9 = -4", "-4"),
        ("5 \u2212 9 = \u22124", "-4"),
        ("9-4", "4"),  # an operator
        ("f(2)-3", "3"),
        ("between 3, and 4, I say", "4"),
        ("1,2", "2"),  # not a thousands comma
        ("**12**", "12"),
        ("72", "72"),
        ("none at all", None),
        ("", None),
    ],
)
def test_last_number(text, number):
    assert last_number(text) == number


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("so <answer> 7 </answer>.", "7"),
        ("<answer>6</answer> no, <answer>\n7\n8</answer>", "7\n8"),
        ("  7 ", "7"),
        ("<think>maybe 6</think>\n7", "7"),
        ("<answer>7", "<answer>7"),
    ],
)
def test_tagged_answer(text, answer):
    assert tagged_answer(text) == answer


@pytest.mark.parametrize(
    "text", ["[1, 2]", "[['A', 'B'], (1, -2)]", "0 1\n1 0", "ABC", "_ Q _ _", "", "the answer is 3"]
)
def test_data_is_literal(text):
    assert is_literal(text)


@pytest.mark.parametrize(
    "text",
    [
        "open('x', 'w')",
        " \t__import__('os').system('true')",
        "[f'{open(0)}']",
        "9**9**9",
        "'a'*10**10",
        "[x for x in ()]",
        "().__class__",
    ],
)
def test_code_is_not_literal(text):
    assert not is_literal(text)


@pytest.mark.parametrize(
    "text", ["3*(4 + 5) - 6/2", "x**3/3 + C", "-sin(2*x)*exp(x**2)", "(x**2)**3", "1.5*x"]
)
def test_formula_is_algebra(text):
    assert is_algebra(text)


@pytest.mark.parametrize(
    "text",
    [
        "open(x)",
        "sin('1')",
        "(open)(1)",
        "x.subs",
        "9**9**9",
        "((9**9)**9)**9",
        "9**99999",
        "1 << 9999999999",
        "99999!",
        "3 + 4 = 7",
        "",
        "sqrt(x, evaluate=1)",
    ],
)
def test_everything_else_is_not_algebra(text):
    assert not is_algebra(text)
