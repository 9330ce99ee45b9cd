"""The log-probs of prompts: `echo`, `prompt_logprobs` and `max_tokens=0`, as evaluations ask."""

import jax
import numpy as np
import pytest

from jaxrl.models.hf import load_config
from jaxrl.models.transformer import init_params
from tests.models.test_transformer import logits_of
from tests.rollout.server.conftest import CHARACTERS
from tests.rollout.server.scripted import TypingEngine, serving
from tests.rollout.server.test_server import PROMPT, ask, completion

LONG = [3, 1, 4, 2, 13, 4, 4, 1, 0, 7, 8, 13, 2, 2, 9]


@pytest.fixture(scope="module")
def expected():
    """Log-probs [T, V] of a row, by the forward of the served model's weights."""
    config = load_config(CHARACTERS)
    params = init_params(config, 0)

    def of(row):
        tokens, places = np.array(row)[None], np.arange(len(row))[None]
        logits = logits_of(config, params, tokens, places, np.ones_like(tokens))[0]
        return np.asarray(jax.nn.log_softmax(logits))

    return of


def loglikelihood(choice, context):
    """What lm-eval reads of a choice, its last token left out: sum, and whether all are greedy."""
    scores = choice.logprobs.token_logprobs[context:-1]
    best = [max(top.values()) for top in choice.logprobs.top_logprobs[context:-1]]
    return sum(scores), scores == best


@pytest.mark.parametrize("as_text", [False, True])
def test_loglikelihoods_are_those_of_the_forward(client, server, expected, as_text):
    """The form of lm-eval's `local-completions`: prompts, and a token that it leaves out."""
    greedy = [*PROMPT, int(expected(PROMPT)[-1].argmax())]
    rows, context = [LONG, greedy, LONG[:7]], 5
    decode = server.served.tokenizer.decode
    answer = client.completions.create(
        model="policy",
        prompt=[decode(row) for row in rows] if as_text else rows,
        temperature=0,
        max_tokens=1,
        logprobs=1,
        seed=1234,
        echo=True,
    )
    assert len(answer.choices) == len(rows)
    for row, choice in zip(rows, answer.choices, strict=True):
        found = loglikelihood(choice, context)
        log_probs = expected(row)[:-1]
        own = log_probs[np.arange(len(row) - 1), row[1:]]
        np.testing.assert_allclose(choice.logprobs.token_logprobs[1:-1], own, atol=1e-5)
        np.testing.assert_allclose(found[0], own[context - 1 :].sum(), atol=1e-5)
        assert found[1] == (log_probs[context - 1 :].argmax(-1) == row[context:]).all()
        assert choice.logprobs.token_logprobs[0] is choice.logprobs.top_logprobs[0] is None
        assert choice.text.startswith(decode(row))
        assert choice.logprobs.text_offset[: len(row)] == [
            len(decode(row[:n])) for n in range(len(row))
        ]
    assert loglikelihood(answer.choices[1], context)[1] is True


def test_no_token_is_drawn_of_a_prompt_that_is_scored_alone(client, expected):
    row = (LONG * 5)[:64]  # as long as the context
    settings = {"prompt": row, "max_tokens": 0, "logprobs": 2, "echo": True}
    answer = completion(client, n=2, **settings)
    drawn = completion(client, **{**settings, "prompt": LONG, "max_tokens": 3})
    first, second = answer.choices
    assert (first.finish_reason, first.token_ids, first.text) == ("length", [], second.text)
    assert first.logprobs == second.logprobs and len(first.logprobs.tokens) == 64
    assert {len(top) for top in first.logprobs.top_logprobs[1:]} == {2}
    own = expected(row)[np.arange(63), row[1:]]
    np.testing.assert_allclose(first.logprobs.token_logprobs[1:], own, atol=1e-5)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (64, 0)
    (choice,) = drawn.choices
    own = expected([*LONG, *choice.token_ids])[np.arange(14, 17), choice.token_ids]
    np.testing.assert_allclose(choice.logprobs.token_logprobs[15:], own, atol=1e-5)


def test_prompt_logprobs_are_by_id_with_ranks(client, expected):
    told = {"prompt_logprobs": 3}
    choice = completion(client, prompt=LONG, max_tokens=2, extra_body=told).choices[0]
    alone = completion(client, prompt=LONG, max_tokens=0, extra_body=told).choices[0]
    plain = completion(client, prompt=LONG, max_tokens=2).choices[0]
    assert choice.prompt_logprobs == alone.prompt_logprobs
    assert (choice.text, choice.token_ids) == (plain.text, plain.token_ids)
    assert alone.text == "" and choice.logprobs is None
    first, *rest = choice.prompt_logprobs
    assert first is None and len(rest) == len(LONG) - 1
    for token, scores, found in zip(LONG[1:], expected(LONG), rest, strict=False):
        order = np.argsort(-scores)
        wanted = {int(i): n for n, i in enumerate(order[:3], 1)}
        wanted[token] = int(np.flatnonzero(order == token)[0]) + 1
        assert {int(i): entry["rank"] for i, entry in found.items()} == wanted
        for i, entry in found.items():
            np.testing.assert_allclose(entry["logprob"], scores[int(i)], atol=1e-5)
    only = completion(client, prompt=LONG, max_tokens=0, extra_body={"prompt_logprobs": 0})
    assert [list(x) for x in only.choices[0].prompt_logprobs[1:]] == [[str(t)] for t in LONG[1:]]


def test_a_stream_begins_with_its_prompt(client):
    settings = {"prompt": "3142>", "echo": True, "logprobs": 1, "max_tokens": 6}
    whole = completion(client, **settings).choices[0]
    pieces = [c for p in completion(client, stream=True, **settings) for c in p.choices]
    assert pieces[0].text == "3142>" and whole.text.startswith("3142>")
    assert "".join(piece.text for piece in pieces) == whole.text
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        column = sum((getattr(piece.logprobs, name) for piece in pieces), [])
        assert column == getattr(whole.logprobs, name)
    plain = completion(client, prompt="3142>", echo=True, max_tokens=6).choices[0]
    assert (plain.text, plain.logprobs) == (whole.text, None)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"echo": "yes"}, "echo"),
        ({"max_tokens": 0, "echo": True, "min_tokens": 1}, "min_tokens"),
        ({"max_tokens": 0, "echo": True, "prompt": [3] * 65}, "prompt"),
    ],
)
def test_what_tells_nothing_is_refused_by_name(server, body, field):
    status, answer = ask(server, "/v1/completions", {"prompt": PROMPT, **body})
    assert (status, answer["error"]["param"]) == (400, field), answer


def test_conversations_have_turns_of_tokens(server):
    headers = {"X-Session-ID": "scored"}
    body = {"prompt": PROMPT, "max_tokens": 0, "echo": True}
    status, answer = ask(server, "/v1/completions", body, headers=headers)
    assert (status, answer["error"]["param"]) == (400, "max_tokens")
    body |= {"max_tokens": 2, "logprobs": 0, "prompt_logprobs": 1}
    assert ask(server, "/v1/completions", body, headers=headers)[0] == 200
    (segment,) = ask(server, "/sessions/scored", method="GET")[1]["segments"]
    assert (segment["prompt_token_ids"], len(segment["response_token_ids"])) == (PROMPT, 2)
    chat = {"messages": [{"role": "user", "content": "3"}], "max_tokens": 0}
    status, answer = ask(server, "/v1/chat/completions", chat)
    assert (status, answer["error"]["param"]) == (400, "max_tokens")


def test_an_engine_that_scores_nothing_is_named(server):
    with serving(TypingEngine([5]), server.served.tokenizer) as other:
        for body, field in [
            ({"echo": True, "logprobs": 1}, "echo"),
            ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ]:
            status, answer = ask(other, "/v1/completions", {"prompt": PROMPT, **body})
            assert (status, answer["error"]["param"]) == (400, field)
        status, answer = ask(other, "/v1/completions", {"prompt": "3>", "echo": True})
        assert status == 200 and answer["choices"][0]["text"].startswith("3>")
