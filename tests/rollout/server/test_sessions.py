"""Conversations that the server keeps, and rollouts made of them."""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import openai
import pytest

from jaxrl.config import GeneratorConfig
from jaxrl.data.tokenizer import encode_prompt, load_tokenizer
from jaxrl.rollout.conversations.conversation import ConversationGenerator
from jaxrl.rollout.generator import generate_now
from jaxrl.rollout.protocol import Completion, Sampling
from jaxrl.rollout.server.agent_generator import AgentGenerator
from jaxrl.rollout.server.errors import ApiError
from jaxrl.rollout.server.sessions import MOST_SEGMENTS, ServedSession, ServedSessions
from jaxrl.types import Prompt
from tests.rollout.server.conftest import CHARACTERS
from tests.rollout.server.test_server import ask, until, waiting

USER, AGAIN = {"role": "user", "content": "3142"}, {"role": "user", "content": "no"}
PROMPT, NO = [3, 1, 4, 2, 13], [32, 33]  # "3142>", "no"
EOS, PROMPT_END = 45, 13
SAMPLING = Sampling(max_tokens=6, stop_token_ids=(EOS,), temperature=0.9)


def chat(client, name, messages, **options):
    extra = {"return_token_ids": True, **options.pop("extra_body", {})}
    settings = {"max_tokens": 6, "seed": 4, **options}
    answer = client.chat.completions.create(
        model="policy",
        messages=messages,
        extra_headers={"X-Session-ID": name},
        extra_body=extra,
        **settings,
    )
    return answer.choices[0]


def test_a_second_turn_goes_on_from_the_first_ones_tokens(server, client):
    first = chat(client, "two-turns", [USER])
    said = first.message.model_dump(exclude_none=True)
    second = chat(client, "two-turns", [USER, said, AGAIN])
    (segment,) = server.take_session("two-turns").segments
    transcript = segment.transcript
    end = [] if first.token_ids[-1] == EOS else [EOS]
    between = [*end, *load_tokenizer(CHARACTERS).encode("no>")]
    assert transcript.prompt == PROMPT
    assert transcript.tokens == [*first.token_ids, *between, *second.token_ids]
    assert second.prompt_token_ids == [*PROMPT, *first.token_ids, *between]
    sampled = [1] * len(first.token_ids), [0] * len(between), [1] * len(second.token_ids)
    assert transcript.loss_mask == sum(sampled, [])
    versions = [version for version in segment.transcript.versions if version >= 0]
    assert len(versions) == sum(transcript.loss_mask)
    with pytest.raises(ApiError, match="no session"):
        server.take_session("two-turns")


def test_what_is_changed_or_branches_begins_a_new_segment(server, client):
    said = chat(client, "changed", [USER]).message.content
    changed = [USER, {"role": "assistant", "content": "7" + said}, AGAIN]
    chat(client, "changed", changed)
    chat(client, "changed", [USER], seed=5)
    segments = server.take_session("changed").segments
    assert [(s.number, s.parent, len(s.points)) for s in segments] == [
        (i, None, 1) for i in (0, 1, 2)
    ]
    assert segments[1].transcript.prompt == encode_prompt(load_tokenizer(CHARACTERS), changed)


def test_words_that_a_client_adds_to_the_assistants_are_given_ones(server, client):
    first = chat(client, "added", [USER])
    assert first.finish_reason == "length"  # without an end its tokens begin those of the request
    added = {"role": "assistant", "content": first.message.content + "7"}
    second = chat(client, "added", [USER, added, AGAIN])
    (segment,) = server.take_session("added").segments
    given = [7, EOS, *NO, PROMPT_END]
    assert segment.transcript.tokens == [*first.token_ids, *given, *second.token_ids]
    assert segment.transcript.loss_mask == [1] * 6 + [0] * 5 + [1] * len(second.token_ids)


def test_token_prompts_go_on_too(client, server):
    def complete(prompt):
        extra = {"return_token_ids": True}
        headers = {"X-Session-ID": "tokens"}
        settings = {"model": "policy", "max_tokens": 4, "seed": 1, "prompt": prompt}
        answer = client.completions.create(**settings, extra_body=extra, extra_headers=headers)
        return answer.choices[0].token_ids

    first = complete(PROMPT)
    second = complete([*PROMPT, *first, 5])
    (segment,) = server.take_session("tokens").segments
    assert segment.transcript.tokens == [*first, 5, *second]
    assert segment.transcript.versions == [0] * len(first) + [-1] + [0] * len(second)


def test_sessions_over_http(server, client):
    token_ids = chat(client, "over-http", [USER]).token_ids
    for take in (client.get, client.delete):
        body = take("../sessions/over-http", cast_to=object)
        (segment,) = body["segments"]
        assert segment["prompt_token_ids"] == PROMPT
        assert segment["response_token_ids"] == token_ids
        assert len(segment["logprobs"]) == len(segment["versions"]) == len(token_ids)
        assert segment["context_versions"] == segment["versions"]
    with pytest.raises(openai.NotFoundError):
        client.get("../sessions/over-http", cast_to=object)


def test_their_number_and_age_are_bounded():
    sessions = ServedSessions(most=2, seconds=0.05, tokens=100)
    for name in ("a", "b", "a", "c"):
        sessions.open(name)
    assert sessions.get("a").name == "a"
    with pytest.raises(ApiError, match="'b'"):
        sessions.get("b")
    time.sleep(0.1)
    with pytest.raises(ApiError, match="'c'"):
        sessions.get("c")
    with pytest.raises(ApiError, match="1 to 200"):
        sessions.open("x" * 201)


def say(session, prompt, tokens=(7, 8), reason="stop"):
    """A turn of a session, without a server."""
    versions, log_probs = [3] * len(tokens), [-1.0] * len(tokens)
    completion = Completion(list(tokens), log_probs, reason, versions)
    session.record(session.continue_tokens(tuple(prompt)), completion, "")


def test_the_parts_of_a_session_are_bounded_and_the_one_used_least_lately_goes():
    session = ServedSession("branches")
    for i in range(MOST_SEGMENTS):
        say(session, [1, i])
    say(session, [1, 0, 7, 8, 9])  # the first goes on
    say(session, [2])
    prompts = [segment.transcript.prompt for segment in session.segments]
    assert prompts == [[1, 0], *([1, i] for i in range(2, MOST_SEGMENTS)), [2]]
    # [1, i] and 2 sampled tokens, 63 times; 1 + 2 more in the first; the last has 1 + 2
    assert session.tokens == 63 * 4 + 3 + 3
    trained = ServedSession("trained", SAMPLING, (1, 2))
    for i in range(MOST_SEGMENTS + 5):
        say(trained, [i])
    assert len(trained.segments) == MOST_SEGMENTS + 5  # each is a row of the batch


def test_the_tokens_of_all_sessions_are_bounded():
    sessions = ServedSessions(most=9, seconds=60, tokens=10)
    for name in ("a", "b", "c"):
        say(sessions.open(name), [1, 2])  # 4 tokens
    sessions.open("a")  # 12 tokens are too many: the one that was used least lately goes
    assert sessions.get("a").tokens == sessions.get("c").tokens == 4
    with pytest.raises(ApiError, match="'b'"):
        sessions.get("b")


def test_a_turn_that_was_aborted_before_its_first_token_is_none():
    session = ServedSession("aborted")
    say(session, [1, 2], [], "abort")
    assert session.segments == []
    say(session, [1, 2])
    say(session, [1, 2, 7, 8, 9], [], "abort")
    (segment,) = session.segments
    assert (segment.transcript.input, segment.stop_reason) == ((1, 2, 7, 8), "abort")
    say(session, [1, 2, 7, 8, 9])
    (segment,) = session.segments
    assert (segment.transcript.tokens, segment.stop_reason) == ([7, 8, 9, 7, 8], "stop")


def test_a_conversation_goes_on_after_an_abort(server, client):
    assert ask(server, "/pause?mode=keep")[0] == 200
    with ThreadPoolExecutor(1) as pool:
        extra = {"request_id": "halted"}
        call = pool.submit(chat, client, "after-abort", [USER], extra_body=extra)
        until(lambda: waiting(server) == 1)
        ask(server, "/abort", {"request_ids": ["halted"]})
        assert ask(server, "/resume")[0] == 200
        aborted = call.result()
    assert (aborted.message.content, aborted.finish_reason) == ("", "abort")
    again = [USER, {"role": "assistant", "content": ""}, AGAIN]
    assert chat(client, "after-abort", again).token_ids
    assert chat(client, "after-abort", [USER]).token_ids


def test_a_session_of_the_trainer_has_its_sampling(server, client):
    server.open_session("trained", SAMPLING, (1, 2))
    with pytest.raises(openai.BadRequestError, match=r"trained on with temperature=0\.9"):
        chat(client, "trained", [USER], temperature=0.5)


def prompts(number):
    return [Prompt(f"0:{i}", [USER], tuple(PROMPT), "sort_digits", EXTRAS) for i in range(number)]


EXTRAS = {"reward_spec": {"ground_truth": "1234"}}


def batch(number):
    keys = [(7, i) for i in range(number)]
    return {"prompts": prompts(number), "keys": keys, "sampling": SAMPLING}


async def answer_once(base_url, session_id, prompt):
    """The simplest agent; what it is rewarded for is the length of its answer."""
    headers = {"X-Session-ID": session_id}
    async with openai.AsyncOpenAI(base_url=base_url, api_key="-", default_headers=headers) as api:
        answer = await api.chat.completions.create(model="policy", messages=prompt.messages)
    return answer.usage.completion_tokens


def test_agents_make_the_trajectories_that_the_generator_makes_in_process(server):
    tokenizer = load_tokenizer(CHARACTERS)
    inside = generate_now(
        ConversationGenerator(server.host, tokenizer, GeneratorConfig(), max_env_workers=0),
        batch(4),
    )
    outside = generate_now(AgentGenerator(server, answer_once), batch(4))
    for column in ("prompt_token_ids", "response_ids", "loss_masks", "stop_reasons"):
        assert outside[column] == inside[column]
    for ours, expected in zip(outside["rollout_logprobs"], inside["rollout_logprobs"], strict=True):
        np.testing.assert_allclose(ours, expected, atol=1e-5)
    assert [sum(r) for r in outside["rewards"]] == [len(r) for r in outside["response_ids"]]
    assert outside["policy_versions"] == [0] * 4


def test_agents_that_fail_are_masked(server):
    async def agent(base_url, session_id, prompt):
        if prompt.uid == "0:0":
            raise ValueError("it broke")
        return await answer_once(base_url, session_id, prompt)

    output = generate_now(AgentGenerator(server, agent), batch(2))
    assert output["stop_reasons"][0] == "env_error"
    assert (output["response_ids"][0], sum(output["loss_masks"][1]) > 0) == ([], True)

    async def broken(base_url, session_id, prompt):
        await asyncio.sleep(60)

    with pytest.raises(RuntimeError, match="all 2 agents"):
        generate_now(AgentGenerator(server, broken, seconds=0.05), batch(2))


def test_an_agent_that_changes_the_past_makes_a_row_for_each_part(server):
    async def agent(base_url, session_id, prompt):
        for _ in range(2):
            await answer_once(base_url, session_id, prompt)
        return 2.0

    output = generate_now(AgentGenerator(server, agent, max_branches=2), batch(2))
    assert output["is_last_step"] == [False, True, False, True]
    assert [sum(rewards) for rewards in output["rewards"]] == [0, 2, 0, 2]
    with pytest.raises(RuntimeError, match="all 2 agents"):
        generate_now(AgentGenerator(server, agent), batch(2))
