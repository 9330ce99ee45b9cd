"""One turn before the run: what an environment or a reward function gets wrong is named."""

import copy
import inspect
import threading
import time
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest

from jaxrl import config as cfg
from jaxrl.config import load_config_file
from jaxrl.envs import ENVS, Env
from jaxrl.envs.json_request import RequestError
from jaxrl.rollout.conversations.reward_terms import RewardTerms
from jaxrl.rollout.conversations.session import EnvironmentFailure
from jaxrl.rollout.conversations.trial import try_environments
from jaxrl.train import BasePPOExp, exit_status
from tests.rollout.scripted import make_prompt
from tests.rollout.test_multi_turn import END, TOKENIZER
from tests.test_train import QUICKSTART

HERE = __name__
ANSWERS: dict = {}
SEEN: list = []


class GivenEnv(Env):
    """Answers what the test wants."""

    closed = 0

    def step(self, action, tokens, stopped):
        SEEN.append((action, tokens, stopped))
        given = ANSWERS["step"]
        return given(tokens) if callable(given) else given

    def close(self):
        GivenEnv.closed += 1


class GymnasiumHabit(Env):
    def step(self, action):
        return [], 1.0, True, False, {}


class ReturnsNothing(Env):
    def step(self, action):
        self.turns += 1


class RaisingEnv(Env):
    def step(self, action):
        return {"observations": [], "reward": float(action[0]), "done": True}


class HangingEnv(Env):
    def step(self, action):
        time.sleep(60)


class ServedEnv(Env):
    def step(self, action):
        raise RequestError("503")


class NoMessages(Env):
    def init(self, prompt):
        return prompt


class Tool(Env):
    def step(self, action):
        said = [{"role": "tool", "content": "again"}]
        return {"observations": said, "reward": 0.0, "done": False}


class NoAverages:
    def __init__(self, env_config=None, extras=None): ...

    def init(self, prompt):
        return prompt, {}

    def step(self, action):
        return {"observations": [], "reward": 1.0, "done": True}

    def get_metrics(self):
        return {}

    def close(self): ...


def given_reward(tokens):
    given = ANSWERS["reward"]
    return given(tokens) if callable(given) else given


class OwnThread(Env):
    def step(self, action):
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("in another thread")
        return {"observations": [], "reward": 1.0, "done": True}


def forgets(action, extras):
    float(action == extras["answer"])


def wants_column(action, extras):
    return float(action == extras["anwser"])


def wants_text(action):
    return action[0] == "1"


NO_TOOLS = copy.deepcopy(TOKENIZER)
NO_TOOLS.chat_template = (
    "{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('no tools here') }}"
    "{% endif %}{{ m['content'] }}>{% endfor %}"
)


def attempt(
    env="single_turn", function=None, *, weights=None, max_turns=1, tokenizer=TOKENIZER, **settings
):
    env = env if env in ENVS or ":" in env else f"{HERE}:{env}"
    columns = {"answer": "21", "reward_spec": {"ground_truth": "12"}}
    prompt = make_prompt(tokenizer, "12", "0:7", env, **columns)
    terms = RewardTerms(weights, [f"{HERE}:{function}"] if function else [])
    options = {
        "env_config": {},
        "max_env_workers": 1,
        "timeout_seconds": 20,
        "chat_template_kwargs": {},
        **settings,
    }
    try_environments([prompt], terms, tokenizer, max_turns=max_turns, **options)


def place(function, line=0):
    return f" ({__file__}:{inspect.getsourcelines(function)[1] + line})"


STEP = ": return {'observations': [], 'reward': 1.0, 'done': True}"


@pytest.mark.parametrize(
    ("env", "message", "where"),
    [
        (
            "GymnasiumHabit",
            f"with the answer '': step returned a tuple of 5; it must return a dict{STEP}",
            place(GymnasiumHabit.step),
        ),
        (
            "ReturnsNothing",
            "with the answer '': step returned None: is a `return` missing?; it must return a dict"
            + STEP,
            place(ReturnsNothing.step),
        ),
        (
            "NoMessages",
            "at the start: init returned a list of 1; it must return a pair: return prompt, {}",
            place(NoMessages.init),
        ),
    ],
)
def test_an_environment_is_told_what_it_gave(env, message, where):
    with pytest.raises(EnvironmentFailure) as raised:
        attempt(env)
    said = f"environment '{HERE}:{env}' failed on prompt 0:7 {message}{where}"
    assert str(raised.value) == said


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (
            {"observations": [], "reward": 1.0},
            "step gave no 'done', only ['observations', 'reward'",
        ),
        ({}, "step gave no 'reward' and no 'done', only []"),
        (
            {"observations": "again", "reward": 1.0, "done": False},
            "step gave the observations 'again'; give messages: [{'role': 'user', ",
        ),
        ({"reward": None, "done": True}, "gave None as the reward: is a `return` missing?"),
        ({"reward": {"a": None}, "done": True}, "gave None for 'a' as the reward"),
        ({"reward": "0.5", "done": True}, "gave the reward '0.5'; give a number: 0.5"),
        ({"reward": ["0.5"], "done": True}, "gave the reward ['0.5']; give a number: 0.5"),
        ({"reward": [None], "done": True}, "gave the reward [None]; give a number: 0.5"),
        ({"reward": float("nan"), "done": True}, "gave the reward nan; rewards must be finite"),
        ({"reward": [1.0, 2.0], "done": True}, "gave 2 rewards for 1 tokens; give one per token"),
    ],
)
def test_a_step_of_the_wrong_form_is_named(monkeypatch, step, message):
    monkeypatch.setitem(ANSWERS, "step", step)
    monkeypatch.setattr(GivenEnv, "closed", 0)
    with pytest.raises(EnvironmentFailure) as raised:
        attempt("GivenEnv")
    assert f"with the answer '': {message}" in str(raised.value)
    assert str(raised.value).endswith(place(GivenEnv.step))
    assert GivenEnv.closed == 1


@pytest.mark.parametrize(
    "reward",
    [True, 1, np.float32(0.5), np.array(0.5), np.array([0.5]), [1], Decimal("0.5"), Fraction(1, 2)],
)
def test_whatever_is_a_number_is_a_reward(monkeypatch, reward):
    def for_each(tokens):  # a list is one of a reward for each token
        return np.repeat(reward, len(tokens)) if np.ndim(reward) else reward

    monkeypatch.setitem(ANSWERS, "step", lambda x: {"reward": for_each(x), "done": True})
    monkeypatch.setitem(ANSWERS, "reward", for_each)
    SEEN.clear()
    attempt("GivenEnv", "given_reward")
    end = TOKENIZER.decode([END])
    assert [("", [end], True), ("12", ["1", "2", end], True)] == SEEN


class ForgetsForLongOnes(Env):
    def step(self, action):
        if len(action) < 2:
            return {"observations": [], "reward": 0.0, "done": True}
        return None


class NeverSet(Env):
    def step(self, action):
        return {"observations": [], "reward": self.right, "done": True}


def test_a_second_answer_shows_what_the_empty_one_hides(capsys):
    with pytest.raises(EnvironmentFailure, match="with the answer '12': step returned None"):
        attempt("ForgetsForLongOnes")
    with pytest.raises(EnvironmentFailure) as raised:  # at one line for both: not of the answer
        attempt("NeverSet")
    assert "no attribute 'right'" in str(raised.value)
    assert capsys.readouterr().err.count("warning: ") == 1  # of the first


@pytest.mark.parametrize(
    ("function", "message", "line"),
    [
        (forgets, "gave None for 'forgets' as the reward: is a `return` missing?", 0),
        (wants_column, "KeyError('anwser')", 1),
    ],
)
def test_a_reward_function_is_told_its_line(function, message, line):
    name = function.__name__
    with pytest.raises(EnvironmentFailure) as raised:
        attempt("single_turn", name)
    assert f"in reward function '{name}' with the answer '': {message}" in str(raised.value)
    assert str(raised.value).endswith(place(function, line))


@pytest.mark.parametrize(
    ("env", "function", "line"),
    [("RaisingEnv", None, place(RaisingEnv.step, 1)), ("sort_digits", wants_text, "")],
)
def test_what_looks_for_something_in_the_empty_answer_is_warned_of(env, function, line, capsys):
    """A model seldom says nothing: of such an answer the trajectory is lost, not the run."""
    attempt(env, function and function.__name__)
    said = capsys.readouterr().err
    assert said.startswith("warning: tried before the run with an empty answer: environment")
    assert "IndexError('string index out of range')" in said
    assert line in said


def test_without_workers_an_environment_is_tried_in_this_thread():
    attempt("OwnThread", max_env_workers=0)
    with pytest.raises(EnvironmentFailure, match="in another thread"):
        attempt("OwnThread", max_env_workers=1)


def test_words_that_nobody_will_read_have_any_form(monkeypatch):
    said = {"observations": "the end", "reward": 1.0, "done": True}
    monkeypatch.setitem(ANSWERS, "step", said)
    attempt("GivenEnv")


AGAIN = [{"role": "user", "content": "again"}]


@pytest.mark.parametrize(
    ("step", "settings", "warning"),
    [
        (
            {"observations": AGAIN, "done": False},
            {},
            " goes on after its first turn, but generator.max_turns=1: set generator.max_turns=4, "
            "or what it needs",
        ),
        (
            {"observation": AGAIN, "done": True, "info": {}},
            {},
            ": step gives 'observation' (did you mean 'observations'?), 'info', which nobody "
            "reads; the keys are observations, reward, done, metadata, postprocessed_action",
        ),
        (
            {"done": False},
            {"max_turns": 2},
            " goes on after its first turn without observations: the model would speak twice in a "
            "row; give messages, or 'done': True",
        ),
        ({"observations": AGAIN, "done": False}, {"max_turns": 2}, None),
        ({"observations": [], "done": False}, {}, None),
        ({"done": False}, {"max_turns": 2, "use_conversation_multi_turn": False}, None),
        ({"done": True, "metadata": {}, "postprocessed_action": None}, {}, None),
    ],
)
def test_what_a_step_says_in_vain_is_warned_of(monkeypatch, capsys, step, settings, warning):
    monkeypatch.setitem(ANSWERS, "step", {"reward": 1.0, **step})
    attempt("GivenEnv", **settings)
    line = f"warning: environment '{HERE}:GivenEnv'{warning}\n"
    assert capsys.readouterr().err == (line if warning else "")


def test_of_an_environment_of_the_library_nothing_is_in_vain(monkeypatch, capsys):
    monkeypatch.setitem(ANSWERS, "reward", 1.0)
    attempt("multiply", "given_reward")  # its next words are for runs of several turns
    assert capsys.readouterr().err == ""


def test_a_reward_function_may_not_give_text(monkeypatch):
    monkeypatch.setitem(ANSWERS, "reward", "0.5")
    with pytest.raises(EnvironmentFailure, match=r"the reward '0.5' for 'given_reward'; give a n"):
        attempt(function="given_reward")


def test_terms_without_a_weight_are_refused_before_the_run(monkeypatch):
    monkeypatch.setitem(ANSWERS, "reward", {"a": 1.0})
    with pytest.raises(ValueError, match="gave the reward term 'a', environment.reward_weights is"):
        attempt(function="given_reward", weights={"b": 1.0})


def test_what_comes_after_the_reward_is_tried_too():
    with pytest.raises(EnvironmentFailure, match="with its observations: .*no tools here"):
        attempt("Tool", max_turns=2, tokenizer=NO_TOOLS)
    attempt("Tool", tokenizer=NO_TOOLS)  # nobody would read its words
    with pytest.raises(EnvironmentFailure, match="in aggregate_metrics: AttributeError"):
        attempt("NoAverages")


def test_a_call_that_hangs_has_its_time_limit():
    with pytest.raises(EnvironmentFailure, match=r"TimeoutError\('no answer within 0.05 s'\)"):
        attempt("HangingEnv", timeout_seconds=0.05)


def test_environments_of_the_library_are_not_tried_for_their_own_sake():
    attempt("gsm8k")  # the row has no ground truth; that is asked elsewhere


def tiny(tmp_path, **changes):
    return cfg.apply_overrides(
        load_config_file(QUICKSTART),
        {
            "data.train_data": [str(tmp_path / "rows.jsonl")],
            "data.val_data": [],
            "environment.env_class": "single_turn",
            "environment.reward_functions": [f"{HERE}:wants_column"],
            "trainer.train_batch_size": 2,
            "trainer.policy_mini_batch_size": 2,
            "trainer.algorithm.advantage_estimator": "grpo",
            "trainer.log_path": str(tmp_path),
            **changes,
        },
    )


class NoEngine(BasePPOExp):
    def get_engine(self, model, mesh):
        raise AssertionError("the engine was made")


def test_a_run_says_it_in_one_line_that_names_the_row(tmp_path, capsys):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "12", "answer": "21"}\n' * 4)
    assert exit_status(NoEngine, tiny(tmp_path)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    file = tmp_path / "rows.jsonl"
    assert line == (
        "error: tried once before the run: environment 'single_turn' failed on prompt 0:0 (row 0 "
        f"of {file}, counted from 0) in reward function 'wants_column' with the answer '': "
        f"KeyError('anwser'); the row's columns are ['answer']{place(wants_column, 1)}"
    )


@pytest.mark.parametrize(("env", "status"), [("ServedEnv", 70), ("ReturnsNothing", 2)])
def test_a_server_that_does_not_answer_may_be_back(tmp_path, env, status):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "12"}\n' * 4)
    functions = {"environment.reward_functions": [], "environment.env_class": f"{HERE}:{env}"}
    assert exit_status(NoEngine, tiny(tmp_path, **functions)) == status
