"""Rewards of several terms: their sum, by turn and by token, their record, and what is refused."""

import pytest

from jaxrl.config import GeneratorConfig, TrainConfig, validate
from jaxrl.rollout.conversations.conversation import ConversationGenerator, sample_key
from jaxrl.rollout.conversations.reward_terms import RewardTermError, RewardTerms
from jaxrl.rollout.conversations.step_wise import merge_steps
from jaxrl.rollout.generator import generate_now
from jaxrl.rollout.protocol import Sampling
from jaxrl.train import BasePPOExp
from jaxrl.training.metrics import rollout_metrics
from tests.rollout.scripted import ScriptedEngine, TalkingEnv, make_prompt
from tests.rollout.test_multi_turn import END, TOKENIZER, by_turn, row
from tests.test_train import small

HERE = __name__


class TermsEnv(TalkingEnv):
    """Turn n: `right` n, and `calm` -1 for every sampled token."""

    def step(self, action, tokens):
        step = super().step(action)
        return {**step, "reward": {"right": step["reward"], "calm": [-1.0] * len(tokens)}}


def brevity(action, turn, done, extras):
    """1 for a single character, and 10 in the last turn; the row's `says` is at hand."""
    assert len(extras["says"]) >= turn
    return float(len(action) == 1) + 10.0 * done


async def of_tokens(tokens, stopped):
    """Two terms, one of them by token."""
    return {"ended": float(stopped), "places": [float(i) for i in range(len(tokens))]}


def demands(action, judge):
    return 0.0


def exits(*, action, judge):
    return 0.0


def talk(env="TalkingEnv", weights=None, functions=(), *, paths=(), prompts=None, **settings):
    """Two turns, "34<end>" and "5<end>"; the first prompt's environment is in this module."""
    module = HERE if env == "TermsEnv" else "tests.rollout.scripted"
    said = prompts or [make_prompt(TOKENIZER, "12", env_class=f"{module}:{env}", says=["ab", None])]
    generator = ConversationGenerator(
        ScriptedEngine(by_turn([3, 4, END], [5, END])),
        TOKENIZER,
        GeneratorConfig(max_turns=5, **settings),
        max_env_workers=0,
        reward_terms=RewardTerms(weights, [*(f"{HERE}:{name}" for name in functions), *paths]),
    )
    keys, sampling = [sample_key(i) for i in range(len(said))], Sampling(8, stop_token_ids=(END,))
    return generate_now(generator, {"prompts": said, "keys": keys, "sampling": sampling})


def test_terms_of_an_environment_are_weighed_by_turn_and_token():
    output = talk("TermsEnv", {"right": 2.0, "calm": 0.5})
    # 3 4 end | a b > given | 5 end; right is 1 and 2 on the last tokens of the turns, times 2
    assert row(output)[:3] == [
        [3, 4, END, 10, 11, 16, 5, END],
        [1, 1, 1, 0, 0, 0, 1, 1],
        [-0.5, -0.5, 1.5, 0, 0, 0, -0.5, 3.5],
    ]
    assert output["reward_terms"] == [{"right": 3.0, "calm": -5.0}]  # unweighted, 1 + 2 and 3 + 2


def test_steps_have_the_same_total_and_the_terms_of_the_whole():
    settings = {"step_wise_trajectories": True}
    output = talk("TermsEnv", {"right": 2.0, "calm": 0.5}, **settings)
    assert output["rewards"] == [[0, 0, 0], [0, 3.5]]  # 2 * 3 - 5 / 2
    assert merge_steps(output)["reward_terms"] == [{"right": 3.0, "calm": -5.0}]
    assert rollout_metrics(output, ["0:p"], 1, 48)["reward/right/mean"] == 3.0


def test_functions_judge_beside_a_plain_reward_and_count_once_without_weights():
    output = talk(functions=["brevity", "of_tokens"])
    # turn 1: 1 + 0 + 1 and 0 1 2 by token; turn 2: 2 + 11 + 1 and 0 1
    assert output["rewards"] == [[0, 1, 4, 0, 0, 0, 0, 15]]
    terms = {"environment": 3.0, "brevity": 11.0, "ended": 2.0, "places": 4.0}
    assert output["reward_terms"] == [terms]


def test_a_plain_reward_can_be_weighed():
    output = talk(weights={"environment": 0.5})
    assert sum(output["rewards"][0]) == 1.5
    assert output["reward_terms"] == [{"environment": 3.0}]
    assert "reward_terms" not in talk()  # nothing to tell apart


def test_metrics_of_terms():
    terms = [{"a": 1.0}, {"a": 3.0, "b": 4.0}, {}]  # the last one failed
    output = talk()
    output |= {"rewards": [1.0] * 3, "response_ids": [[5, END]] * 3, "stop_reasons": ["stop"] * 3}
    output["reward_terms"] = terms
    metrics = rollout_metrics(output, ["x", "y", "z"], 1, 48)
    found = {name: metrics[name] for name in metrics if name.count("/") == 2}
    assert found == {
        "reward/a/mean": 2.0,
        "reward/a/std": 1.0,
        "reward/b/mean": 4.0,
        "reward/b/std": 0.0,
        "reward/b/abstained": 0.5,
    }


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"right": 1.0}, r"TermsEnv' on prompt 0:p gave the reward term 'calm', .*add a weight"),
        (
            {"right": 1.0, "calm": 1.0, "kind": 1.0},
            r"TermsEnv' on prompt 0:p gave no reward term 'kind', .*gave \['calm', 'right'\]",
        ),
    ],
)
def test_terms_and_weights_that_do_not_belong_together_end_the_run(weights, message):
    with pytest.raises(RewardTermError, match=message):
        talk("TermsEnv", weights)


def test_a_term_given_twice_fails_the_trajectory():
    class Named(TermsEnv):
        def step(self, action, tokens):
            return {**super().step(action, tokens), "reward": {"brevity": 1.0}}

    globals()["Named"] = Named
    with pytest.raises(RuntimeError, match=r"function 'brevity'.*term 'brevity', which is given"):
        prompt = make_prompt(TOKENIZER, "12", env_class=f"{HERE}:Named", says=[None])
        talk(functions=["brevity"], prompts=[prompt])


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("reward_functions", [f"{HERE}:missing"], r"has no function 'missing'"),
        ("reward_functions", ["no.such:f"], r"cannot import module 'no.such'"),
        ("reward_functions", [f"{HERE}:demands"], r"nobody supplies its parameter 'judge'"),
        ("reward_functions", [f"{HERE}:exits"], r"nobody supplies its parameter 'judge'"),
        (
            "reward_functions",
            [f"{HERE}:brevity"] * 2,
            r"two functions are named 'brevity'.*calls .*:brevity for one",
        ),
        ("reward_weights", {"a": float("inf")}, r"reward_weights\['a'\]=inf: must be a finite"),
        ("reward_weights", {"a": float("nan")}, r"reward_weights.a=nan"),
    ],
)
def test_the_config_is_checked_before_the_run(field, value, message):
    config = TrainConfig()
    setattr(config.environment, field, value)
    with pytest.raises(ValueError, match=message):
        validate(config)


def test_a_run_hands_weights_and_functions_to_its_generator(tmp_path):
    settings = {"reward_weights": "{environment: 1, brevity: 0.5}"}
    settings |= {"reward_functions": f"['{HERE}:brevity']"}
    overrides = [f"environment.{name}={value}" for name, value in settings.items()]
    environment = TrainConfig.from_cli_overrides(overrides).environment
    config = small(tmp_path)
    config.environment.reward_weights = environment.reward_weights
    config.environment.reward_functions = environment.reward_functions
    terms = BasePPOExp(config).get_generator(ScriptedEngine(None), TOKENIZER).reward_terms
    assert terms.weights == {"environment": 1.0, "brevity": 0.5}
    assert terms.functions == {"brevity": brevity}


def matches(action, extras):
    return float(action == extras["word"])


def test_an_environment_without_a_reward_of_its_own():
    """single_turn: the functions alone judge, with the other columns of the row."""
    words = {"word": "34"}, {"word": "35"}
    rows = [make_prompt(TOKENIZER, "12", env_class="single_turn", **word) for word in words]
    output = talk(functions=["matches"], prompts=rows)
    assert output["rewards"] == [1.0, 0.0]
    assert [sum(mask) for mask in output["loss_masks"]] == [3, 3]  # "34<end>", one turn


def of_short(action) -> float | None:
    """Judges a single character."""
    return 4.0 if len(action) == 1 else None


def forgetful(action) -> None:
    return None


def test_who_has_no_opinion_of_a_turn_leaves_its_weight_to_the_others():
    weights = {"environment": 3.0, "of_short": -1.0, "brevity": 1.0}
    output = talk(weights=weights, functions=["of_short", "brevity"])
    # "34": 3 x 1 + 0 of weights that are 4 of 5 together; "5": 3 x 2 - 4 + 11
    assert output["rewards"] == [[0, 0, 3.75, 0, 0, 0, 0, 13]]
    assert output["reward_terms"] == [{"environment": 3.0, "of_short": 4.0, "brevity": 11.0}]
    with pytest.raises(RuntimeError, match=r"'forgetful'.* is a `return` missing\?, where that is"):
        talk(functions=["forgetful"])


def test_a_trajectory_of_which_nobody_has_an_opinion_is_lost_and_counted():
    turns = [3, END], [3, 4, END]
    engine = ScriptedEngine(lambda prompt, key: turns[prompt[0] - 1])
    rows = [make_prompt(TOKENIZER, text, uid=text, env_class="single_turn") for text in ("1", "2")]
    terms = RewardTerms({"of_short": 1.0}, [f"{HERE}:of_short"])
    generator = ConversationGenerator(
        engine, TOKENIZER, GeneratorConfig(), max_env_workers=0, reward_terms=terms
    )
    keys, sampling = [sample_key(i) for i in range(2)], Sampling(8, stop_token_ids=(END,))
    output = generate_now(generator, {"prompts": rows, "keys": keys, "sampling": sampling})
    assert output["stop_reasons"] == ["stop", "env_error"]
    assert [sum(mask) for mask in output["loss_masks"]] == [2, 0]
    assert output["rewards"][0] == 4.0
    assert output["rollout_metrics"]["generate/env_error_ratio"] == 0.5


def test_estimators_of_terms_need_all_of_them(tmp_path):
    changes = {
        "trainer.algorithm.advantage_estimator": "gdpo",
        "environment.reward_functions": [f"{HERE}:of_short"],
    }
    with pytest.raises(ValueError, match=r"reward_functions=.*'of_short' may have no opinion"):
        BasePPOExp(small(tmp_path, **changes)).build()


def test_nobody_judges(tmp_path):
    config = small(tmp_path, **{"environment.env_class": "single_turn"})
    with pytest.raises(ValueError, match="'single_turn': has no reward of its own; set environ"):
        validate(config)
    config.environment.reward_functions = [f"{HERE}:matches"]
    validate(config)
