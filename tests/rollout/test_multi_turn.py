"""Conversations of several turns: which tokens, masks, log-probs and rewards a row has."""

import asyncio
import logging
import re
import threading

import pytest

from jaxrl.data.tokenizer import character_tokenizer
from jaxrl.envs import Env
from jaxrl.rollout.conversations.conversation import sample_key
from jaxrl.rollout.conversations.trajectories import AllFailed
from jaxrl.rollout.generator import generate_now
from jaxrl.rollout.protocol import Completion
from tests.rollout.scripted import ScriptedEngine, TalkingEnv, completion, converse, make_prompt

# The token of a digit is the digit; a to e are 10 to 14, "." 15, ">" 16, the end 17.
TOKENIZER = character_tokenizer("0123456789abcde.>")
END, ASK = 17, 16
TALK = make_prompt(TOKENIZER, "12", says=["ab", "c", None])  # two answers, then it is over


def by_turn(*turns):
    """Replies by the number of turns so far: each turn but the first begins behind an ASK."""
    return lambda tokens, key: turns[list(tokens).count(ASK) - 1]


def row(output, i=0):
    names = ("response_ids", "loss_masks", "rewards", "rollout_logprobs", "stop_reasons")
    return [output[name][i] for name in names]


def test_three_turns_by_hand():
    # "12>" 3 4 end | "ab>" 5 end | "c>" 6 end. Turn n earns n on its last token.
    output = converse(by_turn([3, 4, END], [5, END], [6, END]), [TALK], TOKENIZER)
    assert output["prompt_token_ids"] == [[1, 2, ASK]]
    assert row(output) == [
        [3, 4, END, 10, 11, ASK, 5, END, 12, ASK, 6, END],
        [1, 1, 1, 0, 0, 0, 1, 1, 0, 0, 1, 1],
        [0, 0, 1, 0, 0, 0, 0, 2, 0, 0, 0, 3],
        [-0.125, -0.25, -0.375, 0, 0, 0, -0.125, -0.25, 0, 0, -0.125, -0.25],
        "stop",
    ]
    assert output["policy_versions"] == [7]
    assert output["token_versions"] == [[7, 7, 7, -1, -1, -1, 7, 7, -1, -1, 7, 7]]
    assert output["context_versions"] == output["token_versions"]  # the engine says none
    assert output["rollout_metrics"].pop("timing/environment") > 0
    assert output["rollout_metrics"] == {
        "environment/answered": 3.0,
        "generate/avg_turns": 3.0,
        "generate/max_turns": 3.0,
        "generate/sampled_tokens": 7.0,
        "generate/env_errors": 0.0,
        "generate/env_error_ratio": 0.0,
        "reward/rejudged": 0.0,
        "reward/rejudged_differently": 0.0,
    }


def test_each_token_keeps_the_oldest_version_in_its_context():
    turns = [completion([3, 4, END], "stop"), completion([5, END], "stop", context_versions=[6, 7])]
    output = converse(by_turn(*turns, [6, END]), [TALK], TOKENIZER)
    assert output["context_versions"] == [[7, 7, 7, -1, -1, -1, 6, 7, -1, -1, 7, 7]]
    assert output["policy_versions"] == [7]
    first = completion([3, 4, END], "stop", context_versions=[5, 5, 6])
    output = converse(by_turn(first, [5, END], [6, END]), [TALK], TOKENIZER)
    assert output["policy_versions"] == [5]  # the older of the first token's two


def test_a_turn_that_was_cut_off_is_ended_by_the_template():
    output = converse(by_turn([3, 4], [5, END], [6]), [TALK], TOKENIZER)
    tokens, mask, _, _, reason = row(output)
    assert tokens == [3, 4, END, 10, 11, ASK, 5, END, 12, ASK, 6]
    assert mask == [1, 1, 0, 0, 0, 0, 1, 1, 0, 0, 1]
    assert reason == "length"  # of the last turn


def test_requests_share_the_first_prefill_and_each_turn_has_a_key_of_its_own():
    engine = ScriptedEngine(by_turn([3, END], [5, END], [6, END]))
    converse(None, [TALK, TALK], TOKENIZER, engine=engine)
    first, *later = engine.calls
    assert [(r.prompt_tokens, len(r.keys)) for r in first] == [((1, 2, ASK), 2)]
    later = [request for call in later for request in call]
    assert len(later) == 4  # two turns of two conversations
    keys = [sample_key("test", i) for i in range(2)]
    assert first[0].keys == tuple(keys)
    asked = {r.keys[0] for r in later}
    assert asked == {sample_key(*key, turn) for key in keys for turn in (1, 2)}
    assert sorted(r.prompt_tokens for r in later)[0] == (1, 2, ASK, 3, END, 10, 11, ASK)


@pytest.mark.parametrize("turns", [1, 2])
def test_max_turns_ends_what_the_environment_does_not(turns):
    output = converse(by_turn([3, END], [5, END]), [TALK], TOKENIZER, max_turns=turns)
    expected = [3, END] if turns == 1 else [3, END, 10, 11, ASK, 5, END]
    assert output["response_ids"] == [expected]  # without the last observation
    assert output["stop_reasons"] == ["stop"]


def test_an_input_that_is_too_long_ends_the_conversation():
    # 3 tokens of the prompt, then 2 + 3: 8 for the second turn; 12 for the third
    replies = by_turn([3, END], [5, END])
    output = converse(replies, [TALK], TOKENIZER, max_input_length=8)
    assert row(output)[0] == [3, END, 10, 11, ASK, 5, END]
    assert row(output)[2:] == [
        [0, 1, 0, 0, 0, 0, 2],
        [-0.125, -0.25, 0, 0, 0, -0.125, -0.25],
        "length",
    ]


def test_inputs_that_end_most_conversations_are_told_of_once(caplog):
    # the second turn of TALK has 8 tokens of input, see above; of two conversations one is half
    short = make_prompt(TOKENIZER, "12", uid="0:q", says=[None])
    converse(by_turn([3, END], [5, END]), [TALK, short], TOKENIZER, max_input_length=7)
    assert caplog.records == []
    converse(by_turn([3, END], [5, END]), [TALK, TALK, short], TOKENIZER, max_input_length=7)
    (record,) = caplog.records
    assert record.getMessage() == (
        "2 of 3 conversations ended because the input of their next turn was longer than "
        "generator.max_input_length=7: 8 tokens in the middle, 8 at most. Raise it, or let the "
        "environment say less"
    )


def test_a_prompt_that_is_too_long_is_recorded():
    long = make_prompt(TOKENIZER, "1234567", uid="0:q", says=[None])
    engine = ScriptedEngine(by_turn([3, END], [5, END]))
    output = converse(None, [long, TALK], TOKENIZER, engine=engine, max_input_length=7)
    assert output["prompt_token_ids"][0] == [1, 2, 3, 4, 5, 6, 7, ASK]
    assert row(output) == [[], [], [], [], "length"]
    assert output["policy_versions"] == [-1, 7]
    assert len(engine.calls[0]) == 1


def test_one_message_for_all_turns():
    # observations are plain text; a turn's end goes, but for the last one's
    replies = {3: [3, END], 6: [4, END], 8: [5, END]}
    output = converse(
        lambda tokens, key: replies[len(tokens)],
        [TALK],
        TOKENIZER,
        use_conversation_multi_turn=False,
    )
    assert row(output) == [
        [3, 10, 11, 4, 12, 5, END],
        [1, 0, 0, 1, 0, 1, 1],
        [1, 0, 0, 2, 0, 0, 3],
        [-0.125, 0, 0, -0.125, 0, -0.125, -0.25],
        "stop",
    ]


STOPPED = completion([3, 15], "stop", stop_string=".")


@pytest.mark.parametrize(
    ("settings", "tokens", "mask"),
    [
        ({}, [3, 15, END, 10, ASK, 3, 15, END], [1, 1, 0, 0, 0, 1, 1, 0]),
        (
            {"append_eos_token_after_stop_str_in_multi_turn": False},
            [3, 15, 10, ASK, 3, 15],
            [1, 1, 0, 0, 1, 1],
        ),
        ({"use_conversation_multi_turn": False}, [3, 15, 10, 3, 15, END], [1, 1, 0, 1, 1, 0]),
    ],
)
def test_the_end_of_sequence_after_a_stop_string_is_masked(settings, tokens, mask):
    talk = make_prompt(TOKENIZER, "12", says=["a", None])
    output = converse(lambda *_: STOPPED, [talk], TOKENIZER, stop=(".",), **settings)
    assert row(output)[:2] == [tokens, mask]
    at = [i for i, token in enumerate(tokens) if token == 15]  # the rewards are on sampled tokens
    assert [output["rewards"][0][i] for i in at] == [1, 2]


class CuttingEnv(Env):
    """Lets the beginning of the answer stand that the row names."""

    def step(self, action):
        assert action == "3.45"
        stands = {"postprocessed_action": self.extras["stands"]}
        return {"observations": [], "reward": 1.0, "done": True, "metadata": {}, **stands}


@pytest.mark.parametrize(
    ("stands", "tokens"),
    [("3.", [3, 15]), ("3.45", [3, 15, 4, 5, END]), (None, [3, 15, 4, 5, END])],
)
def test_the_environment_can_cut_tokens_off(stands, tokens):
    prompt = make_prompt(TOKENIZER, env_class=f"{__name__}:CuttingEnv", stands=stands)
    output = converse(lambda *_: [3, 15, 4, 5, END], [prompt], TOKENIZER)
    assert output["response_ids"] == [tokens]
    assert output["rewards"] == [1.0] or output["rewards"] == [[*[0.0] * (len(tokens) - 1), 1.0]]


def test_the_environment_cannot_put_other_words_in():
    prompt = make_prompt(TOKENIZER, env_class=f"{__name__}:CuttingEnv", stands="9")
    with pytest.raises(RuntimeError, match="'9' is not a prefix of the response; sampled tokens"):
        converse(lambda *_: [3, 15, 4, 5, END], [prompt], TOKENIZER)


def test_an_aborted_turn_teaches_nothing():
    replies = by_turn([3, END], completion([5], "abort"))
    output = converse(replies, [TALK], TOKENIZER)
    assert row(output)[:3] == [[3, END, 10, 11, ASK, 5], [0] * 6, [0.0] * 6]
    assert output["stop_reasons"] == ["abort"]


def test_a_turn_that_was_aborted_before_its_first_token_teaches_nothing():
    first = converse(lambda *_: completion([], "abort"), [TALK], TOKENIZER)
    assert row(first) == [[], [], [], [], "abort"]
    assert first["policy_versions"] == [-1]
    assert first["rollout_metrics"]["generate/sampled_tokens"] == 0
    second = converse(by_turn([3, END], completion([], "abort")), [TALK], TOKENIZER)
    # the question that nobody answered is cut off
    assert row(second) == [[3, END], [0] * 2, [0.0] * 2, [-0.125, -0.25], "abort"]
    assert second["policy_versions"] == [7]


class OpeningEnv(TalkingEnv):
    """Opens the conversation itself."""

    def init(self, prompt):
        return [{"role": "user", "content": "a"}], {}


def test_the_environment_may_open_the_conversation():
    prompt = make_prompt(TOKENIZER, "12", env_class=f"{__name__}:OpeningEnv", says=[None])
    output = converse(by_turn([3, END]), [prompt], TOKENIZER)
    assert output["prompt_token_ids"] == [[10, ASK]]


# ---------------------------------------------------------------- faults


RELEASE = threading.Event()


class FaultyEnv(TalkingEnv):
    """Does what the row's `fault` says in the second turn."""

    def step(self, action):
        if self.turns == 1:
            fault = self.extras["fault"]
            if fault == "hangs":
                RELEASE.wait()
            if fault == "exits":
                raise SystemExit(3)
            if fault == "says nonsense":
                return {"observations": ["no message"], "reward": 0.0, "done": False}
            if fault == "says nothing":
                return None
        return super().step(action)


class AsyncEnv(TalkingEnv):
    async def step(self, action):
        await asyncio.sleep(0 if self.turns < 1 else self.extras.get("seconds", 0))
        return super().step(action)


def faulty(fault, uid="0:x"):
    says = ["ab", "c", None]
    env_class = f"{__name__}:FaultyEnv"
    return make_prompt(TOKENIZER, "12", uid=uid, env_class=env_class, says=says, fault=fault)


@pytest.mark.parametrize("fault", ["exits", "says nonsense", "says nothing"])
@pytest.mark.parametrize("workers", [1, 4])
def test_a_fault_in_a_later_turn(fault, workers, monkeypatch, caplog):
    monkeypatch.setattr(TalkingEnv, "closed", [])
    replies = by_turn([3, END], [5, END], [6, END])
    prompts = [TALK, faulty(fault)]
    output = converse(replies, prompts, TOKENIZER, max_env_workers=workers)
    assert row(output)[0] == [3, END, 10, 11, ASK, 5, END, 12, ASK, 6, END]
    assert row(output, 1)[:3] == [[3, END, 10, 11, ASK, 5, END], [0] * 7, [0.0] * 7]
    assert output["stop_reasons"] == ["stop", "env_error"]
    assert len(TalkingEnv.closed) == 2
    (record,) = caplog.records
    assert "test_multi_turn:FaultyEnv' failed on prompt 0:x with " in record.getMessage()


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (Completion([], [], "stop", []), "no token (stop_reason='stop')"),
        (Completion([], [], "length", []), "no token (stop_reason='length')"),
        (Completion([5, END], [-0.5], "stop", [7, 7]), "2 tokens and 1 log_probs"),
        (Completion([5, END], [-0.5] * 2, "stop", [7] * 3), "2 tokens and 3 versions"),
        (
            Completion([5, END], [-0.5] * 2, "stop", [7] * 2, context_versions=[7]),
            "2 tokens and 1 context_versions",
        ),
    ],
)
@pytest.mark.parametrize("turn", [0, 1])
def test_an_answer_of_the_engine_that_is_none_costs_its_own_trajectory(
    answer, said, turn, monkeypatch, caplog
):
    monkeypatch.setattr(TalkingEnv, "closed", [])
    good = [[3, END], [5, END], [6, END]]
    bad = good[:turn] + [answer]
    flawed = make_prompt(TOKENIZER, "21", uid="0:x", says=["ab", "c", None])
    replies = {1: by_turn(*good), 2: by_turn(*bad)}  # by the first token of the prompt
    output = converse(
        lambda tokens, key: replies[tokens[0]](tokens, key), [TALK, flawed], TOKENIZER
    )
    assert row(output)[0] == [3, END, 10, 11, ASK, 5, END, 12, ASK, 6, END]
    kept = [[], [3, END]][turn]  # of the turn before
    assert row(output, 1) == [kept, [0] * len(kept), [0.0] * len(kept), *row(output, 1)[3:]]
    assert output["stop_reasons"] == ["stop", "env_error"]
    assert output["rollout_metrics"]["generate/env_errors"] == 1
    assert len(TalkingEnv.closed) == 2
    (record,) = caplog.records
    assert record.getMessage().startswith(f"the engine answered prompt 0:x with {said}")


def test_an_engine_that_never_answers_ends_the_batch_with_its_reason():
    with pytest.raises(AllFailed, match="all 2 .* the engine answered prompt 0:p with no token"):
        converse(lambda *_: Completion([], [], "stop", []), [TALK] * 2, TOKENIZER)


def test_hung_environments_do_not_eat_the_pool(caplog):
    # four hang, one after the other, with one worker; the others still find one
    prompts = [faulty("hangs", f"0:{i}") for i in range(4)] + [TALK] * 2
    replies = by_turn([3, END], [5, END], [6, END])
    try:
        output = converse(replies, prompts, TOKENIZER, max_env_workers=1, env_timeout_seconds=0.1)
    finally:
        RELEASE.set()
    assert output["stop_reasons"] == ["env_error"] * 4 + ["stop"] * 2
    assert output["rollout_metrics"]["generate/env_errors"] == 4
    assert caplog.text.count("TimeoutError('no answer within 0.1 s')") == 3
    assert re.search(r"\.\.\. \d+ more environments of the batch failed", caplog.text)


def test_an_asynchronous_environment_is_awaited_and_has_the_same_limit():
    env_class, says = f"{__name__}:AsyncEnv", ["ab", None]
    prompts = [
        make_prompt(TOKENIZER, "12", uid=f"0:{s}", env_class=env_class, says=says, seconds=s)
        for s in (0, 60)
    ]
    replies = by_turn([3, END], [5, END])
    output = converse(replies, prompts, TOKENIZER, env_timeout_seconds=0.2)
    assert output["stop_reasons"] == ["stop", "env_error"]


def test_a_close_that_raises_changes_nothing(monkeypatch, caplog):
    def close(self):
        raise OSError("gone")

    monkeypatch.setattr(TalkingEnv, "close", close)
    output = converse(by_turn([3, END], [5, END], [6, END]), [TALK], TOKENIZER)
    assert row(output)[4] == "stop"
    assert "in close: OSError('gone')" in caplog.text


def test_an_error_of_the_engine_is_raised_and_environments_are_closed(monkeypatch):
    monkeypatch.setattr(TalkingEnv, "closed", [])

    def reply(tokens, key):
        if len(tokens) > 3:
            raise MemoryError("no room")
        return [3, END]

    with pytest.raises(MemoryError, match="no room"):
        converse(reply, [TALK, TALK], TOKENIZER)
    assert len(TalkingEnv.closed) == 2


# ---------------------------------------------------------------- the way from synchronous code


class OneRow:
    async def generate(self, batch):
        await asyncio.sleep(0)
        return {"response_ids": batch["prompts"]}


def test_a_generator_runs_with_and_without_a_loop():
    batch = {"prompts": [1], "keys": [], "sampling": None}
    assert generate_now(OneRow(), batch) == {"response_ids": [1]}

    async def notebook():
        return generate_now(OneRow(), batch)

    assert asyncio.run(notebook()) == {"response_ids": [1]}


def test_a_generator_that_is_not_asynchronous_is_refused():
    class Old:
        def generate(self, batch):
            return {}

    with pytest.raises(TypeError, match="Old.generate must be written 'async def generate'"):
        generate_now(Old(), {"prompts": [], "keys": [], "sampling": None})


@pytest.fixture(autouse=True)
def warnings_are_recorded(caplog):
    caplog.set_level(logging.WARNING)
