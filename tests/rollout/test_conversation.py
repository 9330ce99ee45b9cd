"""Engine and environments in conversation: a real tiny engine, a character tokenizer."""

import inspect
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl import envs
from jaxrl.config import GeneratorConfig, SamplingParams
from jaxrl.data.tokenizer import encode_prompt, load_tokenizer
from jaxrl.envs import Env
from jaxrl.models.hf import load_config
from jaxrl.models.transformer import is_spec, param_specs
from jaxrl.parallel import make_mesh
from jaxrl.rollout.conversations.conversation import ConversationGenerator, sample_key
from jaxrl.rollout.conversations.reward_terms import RewardTerms
from jaxrl.rollout.conversations.trajectories import AllFailed
from jaxrl.rollout.generator import generate_now
from jaxrl.rollout.native.engine import NativeEngine
from jaxrl.rollout.protocol import Completion, Request, Sampling
from jaxrl.types import Prompt
from tests.rollout.bpe import bpe_tokenizer
from tests.rollout.scripted import ScriptedEngine, converse, make_prompt
from tests.rollout.test_native import reserve

FOLDER = Path(__file__).parent.parent.parent / "configs" / "tiny_char_model"
TOKENIZER = load_tokenizer(FOLDER)
STOP = (TOKENIZER.eos_token_id, *range(20, 26))  # many, so that random weights stop too
SAMPLING = Sampling(stop_token_ids=STOP, max_tokens=8)


class RecordingEnv(Env):
    """Rewards token by token with 0, 1, 2, ... and remembers what it was given."""

    seen: list = []

    def step(self, action, tokens, stopped):
        self.turns += 1
        self.seen.append((self.extras["name"], action, tokens, stopped))
        self.length = len(tokens)
        rewards = [float(i) for i in range(len(tokens))]
        return {"observations": [], "reward": rewards, "done": True, "metadata": {}}

    def get_metrics(self):
        return {"turns": self.turns, "length": self.length}


class NumberEnv(Env):
    def step(self, action):
        return {"observations": [], "reward": 0.5, "done": True, "metadata": {}}

    def get_metrics(self):
        return {"letters": 3 if self.extras["name"] == "p" else 5}


class RaisingEnv(Env):
    def step(self, action):
        raise KeyError("no such key")


class RewardEnv(Env):
    """Gives whatever reward the row names."""

    def step(self, action):
        return {
            "observations": [],
            "reward": self.extras["reward"],
            "done": True,
            "metadata": {},
        }


@pytest.fixture(autouse=True)
def test_environments(monkeypatch):
    table = {
        "recording": RecordingEnv,
        "number": NumberEnv,
        "raising": RaisingEnv,
        "given_reward": RewardEnv,
    }
    for name, env in table.items():
        monkeypatch.setitem(envs.ENVS, name, env)
    monkeypatch.setattr(RecordingEnv, "seen", [])


@pytest.fixture(scope="module", name="engine")
def engine_fixture():
    config, rng = load_config(FOLDER), np.random.default_rng(0)
    params = jax.tree.map(
        lambda spec: jnp.asarray(rng.normal(0, 0.3, spec.shape), jnp.float32),
        param_specs(config),
        is_leaf=is_spec,
    )
    engine = NativeEngine(config, make_mesh(), max_num_seqs=8, steps_per_dispatch=8)
    engine.update_weights(params, 12)
    reserve(engine)
    return engine


def prompt(name, text="3142", env_class="recording", **extras):
    messages = [{"role": "user", "content": text}]
    return Prompt(
        uid=f"0:{name}",
        messages=messages,
        tokens=tuple(encode_prompt(TOKENIZER, messages)),
        env_class=env_class,
        extras={"name": name, **extras},
    )


def generate(engine, prompts, **options):
    generator = ConversationGenerator(engine, TOKENIZER, **options)
    keys = [sample_key("test", i) for i in range(len(prompts))]
    return generate_now(generator, {"prompts": prompts, "keys": keys, "sampling": SAMPLING})


def test_an_engine_without_log_probs():
    silent = ScriptedEngine(lambda prompt, key: Completion([2, 1, 40], [], "stop", [7] * 3))
    with pytest.raises(ValueError, match="gives no log-probs .*sampling_params.logprobs to None"):
        generate(silent, [P])
    settings = GeneratorConfig(sampling_params=SamplingParams(logprobs=None))
    output = generate(silent, [P], settings=settings)
    assert output["rollout_logprobs"] is None and output["response_ids"] == [[2, 1, 40]]


def environment_metrics(output):
    metrics = output["rollout_metrics"]
    return {name: x for name, x in metrics.items() if name.startswith("environment/")}


P, Q = prompt("p"), prompt("q", "998")


def test_token_ids_and_log_probs_are_passed_on_untouched(engine):
    output = generate(engine, [P, P, Q, Q])
    keys = [sample_key("test", i) for i in range(4)]
    completions = engine.generate(
        [
            Request(P.tokens, (keys[0], keys[1]), SAMPLING),
            Request(Q.tokens, (keys[2], keys[3]), SAMPLING),
        ]
    )
    flat = [c for samples in completions for c in samples]
    assert output["response_ids"] == [c.tokens for c in flat]
    assert output["rollout_logprobs"] == [c.log_probs for c in flat]
    assert output["stop_reasons"] == [c.stop_reason for c in flat]
    assert set(output["stop_reasons"]) == {"stop", "length"}  # both kinds are tested
    assert output["loss_masks"] == [[1] * len(c.tokens) for c in flat]
    assert output["policy_versions"] == [12] * 4
    # "3142>" and "998>": the digits are their own ids, ">" is 13
    assert output["prompt_token_ids"] == [[3, 1, 4, 2, 13]] * 2 + [[9, 9, 8, 13]] * 2


def test_the_environment_sees_no_more_than_the_first_stop_string():
    bpe = bpe_tokenizer()
    tokens = bpe("one two.\n\n", add_special_tokens=False)["input_ids"]
    assert bpe.decode(tokens[-1:]) == ".\n\n"  # completes both, the second one twice
    sample = Completion(tokens, [-1.0] * len(tokens), "stop", [7] * len(tokens), "\n")
    RecordingEnv.seen.clear()
    prompt = make_prompt(TOKENIZER, env_class=f"{__name__}:RecordingEnv", name="p")
    converse(lambda *_: sample, [prompt], bpe, stop=("\n", "."))
    assert [action for _, action, *_ in RecordingEnv.seen] == ["one two."]


def test_the_environment_sees_the_text_without_the_stop_token_and_every_token(engine):
    output = generate(engine, [P, P, Q, Q], max_env_workers=0)
    assert [name for name, *_ in RecordingEnv.seen] == ["p", "p", "q", "q"]
    assert len({tuple(ids) for ids in output["response_ids"]}) > 1
    for (_, action, tokens, stopped), ids, reason in zip(
        RecordingEnv.seen, output["response_ids"], output["stop_reasons"], strict=True
    ):
        assert tokens == [TOKENIZER.decode([i]) for i in ids]
        assert stopped == (reason == "stop")
        spoken = ids[:-1] if reason == "stop" else ids
        assert action == TOKENIZER.decode(spoken, skip_special_tokens=True)


def test_rewards_per_token_and_rewards_as_a_number(engine):
    output = generate(engine, [P, prompt("r", env_class="number")])
    assert output["rewards"] == [[float(i) for i in range(len(output["response_ids"][0]))], 0.5]


def test_sort_digits_rewards_each_right_digit(engine):
    # the answer to 3142 is 1234: a right digit at position i earns 1/5, so does any stop token
    # after four
    sort = prompt("s", env_class="sort_digits", reward_spec={"ground_truth": "1234"})
    output = generate(engine, [sort] * 4)
    for ids, rewards, reason in zip(
        output["response_ids"], output["rewards"], output["stop_reasons"], strict=True
    ):
        right = [1, 2, 3, 4, ids[-1] if reason == "stop" else None]
        expected = [0.2 * (i < 5 and token == right[i]) for i, token in enumerate(ids)]
        np.testing.assert_allclose(rewards, expected)
    assert set(environment_metrics(output)) == {"environment/exact"}


def test_neighbouring_samples_of_a_prompt_share_one_request(engine, monkeypatch):
    calls, real = [], engine.submit
    monkeypatch.setattr(engine, "submit", lambda requests: calls.append(requests) or real(requests))
    output = generate(engine, [P, P, P, Q, P])
    (asked,) = calls  # one call for the whole batch
    assert [(r.prompt_tokens, len(r.keys)) for r in asked] == [
        (P.tokens, 3),  # one prefill for three samples
        (Q.tokens, 1),
        (P.tokens, 1),
    ]
    assert [key for r in asked for key in r.keys] == [sample_key("test", i) for i in range(5)]
    assert [len(ids) for ids in output["prompt_token_ids"]] == [5, 5, 5, 4, 5]


def test_threads_do_not_change_order_or_result(engine):
    prompts = [P, P, Q, prompt("r", env_class="number")]
    inline, threaded = (generate(engine, prompts, max_env_workers=n) for n in (0, 3))
    for output in (inline, threaded):
        assert output["rollout_metrics"].pop("timing/environment") > 0
    assert inline == threaded


def test_the_text_of_a_token_is_decoded_once(monkeypatch):
    decoded = []
    decode = TOKENIZER.decode

    def counting(tokens, **options):
        decoded.append(list(tokens))
        return decode(tokens, **options)

    monkeypatch.setattr(TOKENIZER, "decode", counting)
    prompts = [make_prompt(TOKENIZER, env_class="number", name="p") for _ in range(3)]
    eos = TOKENIZER.eos_token_id
    converse(lambda *_: [3, 4, 3, eos], prompts, TOKENIZER, max_turns=1)
    # three texts of whole answers; of 3 x 4 tokens three differ
    assert decoded == [[3, 4, 3], [3], [4], [eos], [3, 4, 3], [3, 4, 3]]


def test_metrics_are_averaged_and_named_by_environment_if_there_are_several(engine):
    numbers = [prompt("p", env_class="number"), prompt("q", env_class="number")]
    # letters 3 and 5
    assert environment_metrics(generate(engine, numbers)) == {"environment/letters": 4.0}
    output = generate(engine, [*numbers, P])
    assert environment_metrics(output) == {
        "environment/NumberEnv/letters": 4.0,
        "environment/RecordingEnv/turns": 1.0,
        "environment/RecordingEnv/length": float(len(output["response_ids"][2])),
    }


def failed(output, row):
    """Whether a row is recorded as an environment's failure: nothing is learnt from it."""
    length = len(output["response_ids"][row])
    assert output["loss_masks"][row] == [0] * length
    assert output["rewards"][row] == [0.0] * length
    return output["stop_reasons"][row] == "env_error"


@pytest.mark.parametrize("workers", [0, 2])
def test_an_environment_that_raises_costs_its_own_trajectory(engine, workers, caplog):
    output = generate(engine, [P, prompt("x", env_class="raising")], max_env_workers=workers)
    assert failed(output, 1)
    assert output["response_ids"][1]  # what was sampled is kept
    assert output["stop_reasons"][0] in ("stop", "length")
    assert output["loss_masks"][0] == [1] * len(output["response_ids"][0])
    assert output["rollout_metrics"]["generate/env_errors"] == 1
    assert output["rollout_metrics"]["generate/env_error_ratio"] == 1 / 2
    (record,) = caplog.records
    start = "environment 'raising' failed on prompt 0:x with the answer '"
    assert record.getMessage().startswith(start)
    raised_at = inspect.getsourcelines(RaisingEnv.step)[1] + 1
    assert record.getMessage().endswith(f"KeyError('no such key') ({__file__}:{raised_at})")


def test_of_environments_that_fail_the_first_three_are_told_and_the_rest_counted(engine, caplog):
    prompts = [P, *(prompt(name, env_class="raising") for name in "abcde")]
    generate(engine, prompts)
    said = [record.getMessage() for record in caplog.records]
    assert ["' failed on prompt 0:" in text for text in said] == [True, True, True, False]
    raised_at = inspect.getsourcelines(RaisingEnv.step)[1] + 1
    assert said[-1] == (
        "... 2 more environments of the batch failed; most often, 5 of 5 times, by KeyError "
        f"({__file__}:{raised_at})"
    )


def says_high(action):
    return "high"


def divides(action):
    return json.loads("{") if action else 1 / 0


@pytest.mark.parametrize(
    ("function", "line", "message"),
    [
        (says_high, 0, "gave the reward 'high' for 'says_high'; give a number"),
        (divides, 1, r"JSONDecodeError|ZeroDivision"),
    ],
)
def test_the_line_of_a_reward_function_is_named(engine, function, line, message):
    """What raised, called by a library or not; the function itself for what it returned."""
    terms = RewardTerms(functions=[f"{__name__}:{function.__name__}"])
    place = f"{re.escape(__file__)}:{inspect.getsourcelines(function)[1] + line}"
    with pytest.raises(AllFailed, match=rf"{function.__name__}' .*({message}).*\({place}\)$"):
        generate(engine, [prompt("x", env_class="number")], reward_terms=terms)


def test_a_batch_in_which_everything_fails_is_an_error(engine):
    message = r"all 2 trajectories of the batch failed; the first: environment 'raising' .* 0:x "
    with pytest.raises(AllFailed, match=message) as caught:
        generate(engine, [prompt(name, env_class="raising") for name in "xy"])
    assert isinstance(caught.value.__cause__.__cause__, KeyError)


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (float("nan"), "gave the reward nan; rewards must be finite"),
        ([0.0, float("inf")], "rewards must be finite"),
        ([0.0] * 20, r"gave 20 rewards for \d tokens; give one per token"),
        (None, r"gave None as the reward: is a `return` missing\?"),
        ("high", "gave the reward 'high'; give a number"),
    ],
)
def test_a_reward_that_cannot_be_used_costs_its_own_trajectory(engine, reward, message, caplog):
    output = generate(engine, [P, prompt("x", env_class="given_reward", reward=reward)])
    assert failed(output, 1)
    assert re.search(rf"'given_reward' failed on prompt 0:x .*{message}", caplog.text)


def test_sample_keys_are_two_words_of_the_name():
    key = sample_key(7, "train", 3, "0:17", 1)
    assert key == sample_key(7, "train", 3, "0:17", 1)
    assert all(0 <= word < 2**32 for word in key)
    others = {sample_key(7, "train", 3, "0:17", n) for n in range(1000)}
    assert len(others) == 1000
    assert sample_key(1, 23) != sample_key(12, 3)
