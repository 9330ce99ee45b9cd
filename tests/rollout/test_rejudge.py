"""A second judgement: what it finds, what it leaves alone, and which trajectories get one."""

import itertools
import logging

import pytest

from jaxrl.config import GeneratorConfig, TrainConfig, validate
from jaxrl.rollout.conversations import session
from jaxrl.rollout.conversations.concat_outputs import concat_batch
from jaxrl.rollout.conversations.conversation import ConversationGenerator, sample_key
from jaxrl.rollout.conversations.rejudge import is_chosen
from jaxrl.rollout.conversations.reward_terms import RewardTerms
from jaxrl.rollout.generator import generate_now
from jaxrl.rollout.protocol import Sampling
from tests.rollout.scripted import ScriptedEngine, TalkingEnv, make_prompt
from tests.rollout.test_multi_turn import END, TOKENIZER, by_turn

HERE = __name__
CALLS = {"next": itertools.count()}


def counting(action):
    """Another reward at every call."""
    return float(next(CALLS["next"]))


def steady(action):
    return float(len(action))


class CountingEnv(TalkingEnv):
    """The 1st, 3rd, ... environment is as it was written, others pay 10 more."""

    made = itertools.count()

    def init(self, prompt):
        self.extra = 10.0 * (next(self.made) % 2)
        return prompt, {}

    def step(self, action):
        step = super().step(action)
        return {**step, "reward": step["reward"] + self.extra}


class FailsAgainEnv(CountingEnv):
    def step(self, action):
        assert not self.extra, "gone"
        return super().step(action)


class HastyEnv(CountingEnv):
    """Ends at once when it is made again."""

    def step(self, action):
        step = super().step(action)
        done = step["done"] or bool(self.extra)
        return {**step, "reward": step["reward"] - self.extra, "done": done}


def talk(env="TalkingEnv", functions=(), *, fraction=1.0, workers=0, prompts=1):
    """Conversations of two turns, "34<end>" and "5<end>"."""
    module = HERE if env != "TalkingEnv" else "tests.rollout.scripted"
    CountingEnv.made = itertools.count()
    TalkingEnv.closed = []
    said = [
        make_prompt(TOKENIZER, "12", uid=f"0:{i}", env_class=f"{module}:{env}", says=["ab", None])
        for i in range(prompts)
    ]
    generator = ConversationGenerator(
        ScriptedEngine(by_turn([3, 4, END], [5, END])),
        TOKENIZER,
        GeneratorConfig(max_turns=5),
        max_env_workers=workers,
        reward_terms=RewardTerms({}, [f"{HERE}:{name}" for name in functions]),
        rejudge_fraction=fraction,
    )
    keys = [sample_key(i) for i in range(prompts)]
    sampling = Sampling(8, stop_token_ids=(END,))
    return generate_now(generator, {"prompts": said, "keys": keys, "sampling": sampling})


def counted(output):
    names = ("reward/rejudged", "reward/rejudged_differently")
    return tuple(output["rollout_metrics"][name] for name in names)


@pytest.mark.parametrize("workers", [0, 2])
def test_the_same_judgement_changes_nothing(workers, caplog):
    output = talk(functions=["steady"], workers=workers)
    alone = talk(functions=["steady"], workers=workers, fraction=0.0)
    assert (counted(output), counted(alone)) == ((1, 0), (0, 0))
    times = "timing/environment"
    for one in (output, alone):
        one["rollout_metrics"] = {
            k: v
            for k, v in one["rollout_metrics"].items()
            if k != times and not k.startswith("reward/rejudged")
        }
    assert output == alone and not caplog.records


def test_every_environment_is_closed():
    talk()
    assert TalkingEnv.closed == [["ab", None]] * 2
    talk(fraction=0.0)
    assert TalkingEnv.closed == [["ab", None]]


@pytest.mark.parametrize(
    ("env", "functions", "message"),
    [
        (
            "CountingEnv",
            [],
            f"environment '{HERE}:CountingEnv' on prompt 0:0, judged again: the reward of the "
            "answer '34' was 1.0, and is now 11.0",
        ),
        (
            "TalkingEnv",
            ["steady", "counting"],
            "on prompt 0:0, judged again: the reward term 'counting' of the answer '34' was 0.0, "
            "and is now 2.0",  # the second turn's was 1
        ),
        ("HastyEnv", [], "conversation went on after the answer '34', and does not now"),
    ],
)
def test_another_judgement_is_told_and_the_first_one_stands(env, functions, message, caplog):
    CALLS["next"] = itertools.count()
    with caplog.at_level(logging.WARNING):
        output = talk(env, functions)
    assert counted(output) == (1, 1)
    (record,) = caplog.records
    with pytest.raises(ValueError, match=message):
        raise ValueError(record.getMessage())
    terms = {"counting": 1.0, "environment": 3.0, "steady": 3.0}
    assert sum(output["rewards"][0]) == (7.0 if functions else 3.0)
    assert output.get("reward_terms") == ([terms] if functions else None)


def test_an_outage_is_no_difference(caplog):
    assert counted(talk("FailsAgainEnv")) == (0, 0)
    (record,) = caplog.records
    with pytest.raises(ValueError, match="not judged a second time: .*FailsAgainEnv.*gone"):
        raise ValueError(record.getMessage())


def test_its_seconds_count(monkeypatch):
    """Two turns: make, init, 2 steps, metrics and close, and all but the metrics again."""
    clock = itertools.count()
    monkeypatch.setattr(session.time, "perf_counter", lambda: float(next(clock)))
    times = [talk(fraction=f)["rollout_metrics"]["timing/environment"] for f in (0.0, 1.0)]
    assert times == [6.0, 11.0]


def test_which_ones_are_judged_again_is_named_by_their_keys():
    keys = [sample_key("seed", i) for i in range(4000)]
    chosen = [is_chosen(key, 0.25) for key in keys]
    assert chosen == [key[0] < 2**30 for key in keys]
    assert 0.22 < sum(chosen) / 4000 < 0.28
    assert not any(is_chosen(key, 0.0) for key in keys)
    assert all(is_chosen(key, 1.0) for key in [*keys, (2**32 - 1, 0)])
    expected = sum(is_chosen(sample_key(i), 0.5) for i in range(8))
    assert counted(talk(prompts=8, fraction=0.5)) == (expected, 0) and 0 < expected < 8


def test_parts_are_counted_together():
    parts = []
    for _ in range(2):
        part = talk("CountingEnv", prompts=1)
        measured = ("e", {}, 0.0, [(0, 3)], "", False)
        parts.append({**part, "measured": [measured]})
    parts[0]["measured"] = [("e", {}, 0.0, [(0, 3)], "")]  # of a checkpoint before there was this
    for part in parts:
        part["measured"] = [(f"{HERE}:CountingEnv", *part["measured"][0][1:])]
    assert counted(concat_batch(parts)) == (1, 1)


@pytest.mark.parametrize("fraction", [-0.1, 1.1])
def test_a_fraction_is_between_0_and_1(fraction):
    config = TrainConfig()
    config.environment.rejudge_fraction = fraction
    with pytest.raises(ValueError, match=rf"environment.rejudge_fraction={fraction}: must be in"):
        validate(config)
