"""Sessions whose requests do not go on one after the other: branches, repeats, rewards."""

import asyncio
from collections import Counter

import openai
import pytest

from jaxrl.rollout.generator import generate_now
from jaxrl.rollout.protocol import Completion
from jaxrl.rollout.server.agent_generator import AgentGenerator, branch_metrics, session_url
from jaxrl.rollout.server.sessions import ServedSession
from tests.rollout.server.test_server import ask
from tests.rollout.server.test_sessions import AGAIN, PROMPT, SAMPLING, USER, batch, chat


def responses(session):
    """Each branch as its prompt, its response and which of its tokens were sampled."""
    return [
        (tuple(s.transcript.prompt), tuple(s.transcript.tokens), s.transcript.loss_mask)
        for s in session.segments
    ]


def sampled(session):
    """Every sampled token with all that stands before it, once for each time it is trained on."""
    places = Counter()
    for prompt, tokens, mask in responses(session):
        for i in range(len(tokens)):
            if mask[i]:
                places[(*prompt, *tokens[: i + 1])] += 1
    return places


def assistant(choice):
    return choice.message.model_dump(exclude_none=True)


def test_requests_that_go_on_from_one_turn_share_its_tokens(server, client):
    first = chat(client, "tree", [USER])
    first_turn = [USER, assistant(first)]
    second = chat(client, "tree", [*first_turn, AGAIN], seed=5)
    other = chat(client, "tree", [*first_turn, USER], seed=6)
    deeper = chat(client, "tree", [*first_turn, USER, assistant(other), AGAIN], seed=7)
    session = server.take_session("tree")
    trunk, branch = session.segments
    assert (trunk.number, trunk.parent, branch.number, branch.parent) == (0, None, 1, 0)
    shared = [*PROMPT, *first.token_ids]
    assert trunk.transcript.input[: len(shared)] == tuple(shared)
    assert branch.transcript.prompt[: len(shared)] == shared
    assert branch.transcript.prompt == other.prompt_token_ids
    assert list(branch.transcript.input) == [*deeper.prompt_token_ids, *deeper.token_ids]
    counts = sampled(session)
    said = (first, second, other, deeper)
    assert counts == {
        (*c.prompt_token_ids, *c.token_ids[: i + 1]): 1
        for c in said
        for i in range(len(c.token_ids))
    }
    metrics = branch_metrics([session])
    apart, every = len(other.token_ids) + len(deeper.token_ids), sum(len(c.token_ids) for c in said)
    assert metrics["agent/branch_token_share"] == apart / every
    assert (metrics["agent/branches"], metrics["agent/unmatched_branches"]) == (1, 0)


def test_of_several_samples_each_can_be_gone_on_from(server, client):
    headers, extra = {"X-Session-ID": "several"}, {"return_token_ids": True}
    answer = client.chat.completions.create(
        model="policy", messages=[USER], n=3, max_tokens=6, seed=1, extra_headers=headers,
        extra_body=extra,
    )  # fmt: skip
    middle = answer.choices[1]
    chat(client, "several", [USER, assistant(middle), AGAIN])
    session = server.take_session("several")
    assert [len(s.points) for s in session.segments] == [1, 2, 1]
    for segment, choice in zip(session.segments, answer.choices, strict=True):
        assert segment.transcript.prompt == PROMPT
        assert segment.transcript.tokens[: len(choice.token_ids)] == choice.token_ids
    assert set(sampled(session).values()) == {1}


def test_a_repeat_of_the_same_sample_is_kept_once(server, client):
    one, two = chat(client, "repeat", [USER]), chat(client, "repeat", [USER])
    assert one.token_ids == two.token_ids  # of the same seed
    (segment,) = server.take_session("repeat").segments
    assert segment.transcript.tokens == one.token_ids


def test_requests_of_the_trainers_session_have_keys_of_their_own(server):
    server.open_session("keys", SAMPLING, (1, 2))

    async def all_at_once():
        headers = {"X-Session-ID": "keys"}
        async with openai.AsyncOpenAI(
            base_url=server.url, api_key="-", default_headers=headers
        ) as api:
            calls = [
                api.chat.completions.create(model="policy", messages=[USER], n=2) for _ in range(4)
            ]
            return await asyncio.gather(*calls)

    answers = asyncio.run(all_at_once())
    session = server.take_session("keys")
    points = [point for segment in session.segments for point in segment.points]
    assert len({point.key for point in points}) == 8 == sum(len(a.choices) for a in answers)
    assert {s.parent for s in session.segments} == {None}
    assert sorted(s.number for s in session.segments) == list(range(8))


def test_a_fixed_session_samples_as_the_trainer_does(server, client):
    answers = []
    for number, asked in enumerate(({}, {"temperature": 0.0, "top_p": 0.5, "seed": 3})):
        server.open_session(f"fixed-{number}", SAMPLING, (1, 2), fixed=True)
        settings = {"seed": None, **asked}
        answers.append(chat(client, f"fixed-{number}", [USER], **settings).token_ids)
    assert answers[0] == answers[1]


def test_a_turn_that_says_nothing_gives_its_number_back():
    session = ServedSession("numbers", SAMPLING, (1, 2))
    first, second = session.continue_tokens((1, 2)), session.continue_tokens((1, 2))
    assert first.begin() == (1, 2)
    other = second.begin()
    assert other != (1, 2)
    session.record(first, Completion([7], [-1.0], "stop", [0]), None, (1, 2))
    for turn in (first, second):
        turn.close()
    again = session.continue_tokens((1, 2))
    assert (again.begin(), again.number) == (other, 1)


def test_a_faster_turn_makes_a_branch_of_the_slower():
    session = ServedSession("race")
    session.record(session.continue_tokens((1, 2)), Completion([7], [-1.0], "stop", [0]))
    turns = [session.continue_tokens((1, 2, 7, i)) for i in (8, 9)]
    for turn in turns:
        session.record(turn, Completion([5], [-1.0], "stop", [0]))
    assert responses(session) == [
        ((1, 2), (7, 8, 5), [1, 0, 1]),
        ((1, 2, 7, 9), (5,), [1]),
    ]
    assert session.segments[1].parent == 0


def test_a_session_by_its_address(server, client):
    address = session_url(server.url, "by-address")
    with openai.OpenAI(base_url=address, api_key="-") as api:
        answer = api.chat.completions.create(
            model="policy", messages=[USER], max_tokens=3, extra_body={"return_token_ids": True}
        )
        assert api.models.retrieve("policy").id == "policy"
    (segment,) = server.take_session("by-address").segments
    assert segment.transcript.tokens == answer.choices[0].token_ids


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"{}", "reward=None: is required"),
        (b'{"reward": "1"}', "reward='1'"),
        (b'{"reward": true}', "reward=True"),
        (b'{"reward": NaN}', "reward=nan"),
        (b'{"reward": [1]}', "reward=[1]"),
        (b'{"reward": 1, "score": 2}', "score=2: is not a field"),
        (b"1", "must be a JSON object"),
    ],
)
def test_a_reward_that_is_none(server, client, raw, said):
    chat(client, "malformed", [USER])
    status, answer = ask(server, "/sessions/malformed/reward", raw=raw)
    assert (status, said in answer["error"]["message"]) == (400, True)
    assert server.take_session("malformed").reward is None


def test_a_reward_is_posted_once(server, client):
    path, found = "/sessions/rewarded/reward", {"id": "rewarded", "reward": 0.25}
    assert ask(server, path, {"reward": 0.25})[0] == 404
    chat(client, "rewarded", [USER])
    for _ in range(2):
        assert ask(server, path, {"reward": 0.25}) == (200, found)
    status, answer = ask(server, path, {"reward": 1})
    assert (status, answer["error"]["code"]) == (409, "reward_conflict")
    assert client.get("../sessions/rewarded", cast_to=object)["reward"] == 0.25
    assert server.take_session("rewarded").reward == 0.25


def test_agents_whose_rewards_are_posted(server, caplog):
    async def agent(base_url, session_id, prompt, *, reward_secret):
        async with openai.AsyncOpenAI(
            base_url=session_url(base_url, session_id), api_key="-"
        ) as api:
            await api.chat.completions.create(model="policy", messages=prompt.messages, n=2)
            if prompt.uid != "0:1":
                body = {"reward": 3, "secret": reward_secret}
                await api.post("../reward", body=body, cast_to=object)

    output = generate_now(AgentGenerator(server, agent, max_branches=2), batch(2))
    assert [sum(rewards) for rewards in output["rewards"]] == [0, 3, 0]
    assert output["stop_reasons"][2] == "env_error"
    assert output["is_last_step"] == [False, True, True]
    assert "reward is None: it must return a number, or one must be posted" in caplog.text
    metrics = output["rollout_metrics"]
    assert (metrics["agent/branches"], metrics["agent/unmatched_branches"]) == (2, 2)
    assert 0 < metrics["agent/branch_token_share"] < 1


def test_branches_are_counted_for_prometheus(server, client):
    def counted(name):
        page = client.get("../metrics", cast_to=str)
        lines = [line.split() for line in page.splitlines() if line.startswith(name)]
        return float(lines[0][1]) if lines else 0.0

    names = (
        'jaxrl_session_tokens_total{branch="first"}',
        'jaxrl_session_tokens_total{branch="other"}',
        "jaxrl_session_branches_total",
    )
    before = [counted(name) for name in names]
    first = chat(client, "counted", [USER])
    others = [chat(client, "counted", [USER], seed=seed) for seed in (5, 6)]
    server.take_session("counted")
    more = [counted(name) - x for name, x in zip(names, before, strict=True)]
    assert more == [len(first.token_ids), sum(len(o.token_ids) for o in others), 2]
