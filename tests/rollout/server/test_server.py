"""The server on loopback, asked by the `openai` client and by hand; the engine is real."""

import asyncio
import dataclasses
import json
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import openai
import pytest

from jaxrl.rollout.protocol import Request, Sampling
from jaxrl.rollout.server.server import HttpServer
from tests.rollout.server.conftest import model_folder

PROMPT = [3, 1, 4, 2, 13]  # "3142>"
EOS = 45
HELLO = [{"role": "user", "content": "3142"}]


def ask(server, path, body=None, method="POST", raw=None, headers=None):
    """Status and JSON of a request by hand."""
    data = raw if raw is not None else None if body is None else json.dumps(body).encode()
    url = server.url.removesuffix("/v1") + path
    request = urllib.request.Request(url, data=data, method=method, headers=headers or {})
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, json.loads(response.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def completion(client, **options):
    extra = {"return_token_ids": True, **options.pop("extra_body", {})}
    settings = {"model": "policy", "prompt": PROMPT, "max_tokens": 8, "seed": 3, **options}
    return client.completions.create(**settings, extra_body=extra)


@pytest.fixture
def paused(server):
    """Requests wait until the end of the test."""
    assert ask(server, "/pause?mode=keep")[0] == 200
    yield
    assert ask(server, "/resume")[0] == 200


def until(condition):
    for _ in range(600):
        if condition():
            return
        time.sleep(0.05)
    raise AssertionError("it did not come to that")


def waiting(server):
    """Samples that the server counts."""
    page = urllib.request.urlopen(server.url.removesuffix("/v1") + "/metrics").read().decode()
    (line,) = [line for line in page.splitlines() if line.startswith("jaxrl_samples ")]
    return float(line.split()[1])


def test_keys_give_the_tokens_and_log_probs_of_the_engine_in_process(server, client):
    keys = [[1, 2], [3, 4]]
    sampling = Sampling(max_tokens=8, stop_token_ids=(EOS,), temperature=0.7)
    inside = server.host.generate([Request(tuple(PROMPT), ((1, 2), (3, 4)), sampling)])[0]
    outside = completion(
        client, seed=None, n=2, logprobs=0, temperature=0.7, extra_body={"keys": keys}
    )
    for choice, expected in zip(outside.choices, inside, strict=True):
        assert choice.token_ids == expected.tokens
        assert choice.prompt_token_ids == PROMPT
        assert choice.versions == expected.versions
        assert choice.context_versions == expected.context_versions == expected.versions
        assert choice.finish_reason == expected.stop_reason
        np.testing.assert_allclose(choice.logprobs.token_logprobs, expected.log_probs, atol=1e-5)
    assert outside.usage.completion_tokens == sum(len(c.tokens) for c in inside)


@pytest.mark.parametrize("options", [{}, {"n": 2, "logprobs": 2}, {"stop": ["q", "5r"]}])
def test_a_stream_adds_up_to_the_answer_in_one_piece(client, options):
    settings = {"max_tokens": 40, "extra_body": {"ignore_eos": True}, **options}
    whole = completion(client, **settings)
    pieces = list(completion(client, stream=True, **settings))
    assert len(pieces) > len(whole.choices)
    for number, choice in enumerate(whole.choices):
        mine = [c for p in pieces for c in p.choices if c.index == number]
        assert "".join(c.text for c in mine) == choice.text
        assert sum((c.token_ids for c in mine), []) == choice.token_ids
        assert [c.finish_reason for c in mine[:-1]] == [None] * (len(mine) - 1)
        assert mine[-1].finish_reason == choice.finish_reason
        if "logprobs" in options:
            scores = sum((c.logprobs.token_logprobs for c in mine), [])
            assert scores == choice.logprobs.token_logprobs
            assert sum((c.logprobs.text_offset for c in mine[:1]), [])[0] == 0


def test_chat_whole_and_streamed(client):
    settings = {"model": "policy", "messages": HELLO, "max_tokens": 30, "seed": 5}
    whole = client.chat.completions.create(**settings, logprobs=True, top_logprobs=2)
    text = whole.choices[0].message.content
    entries = whole.choices[0].logprobs.content
    assert len(entries) == whole.usage.completion_tokens
    assert {len(entry.top_logprobs) for entry in entries} == {2}
    pieces = list(
        client.chat.completions.create(
            **settings, stream=True, stream_options={"include_usage": True}
        )
    )
    assert pieces[0].choices[0].delta.role == "assistant"
    assert "".join(p.choices[0].delta.content or "" for p in pieces[:-1]) == text
    assert pieces[-1].usage == whole.usage


def test_a_stop_string_is_left_out_and_named(client):
    free = completion(client, max_tokens=30, extra_body={"ignore_eos": True}).choices[0]
    stop = free.text[4:6]
    choice = completion(client, max_tokens=30, stop=[stop], extra_body={"ignore_eos": True})
    (choice,) = choice.choices
    assert choice.text == free.text[: free.text.index(stop)]
    assert (choice.finish_reason, choice.stop_reason) == ("stop", stop)


def test_prompts_as_texts_and_lists(client):
    together = completion(client, prompt=["3142>", "5>"], n=2)
    assert [c.index for c in together.choices] == [0, 1, 2, 3]
    assert [c.prompt_token_ids for c in together.choices] == [PROMPT, PROMPT, [5, 13], [5, 13]]
    ids = completion(client, prompt=[PROMPT, [5, 13]], n=2)
    assert [c.token_ids for c in ids.choices] == [c.token_ids for c in together.choices]


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ({"model": "gpt"}, 404, "'gpt' does not exist"),
        ({"temperature": 10**400}, 400, "temperature=1000"),
        ({"temperature": 101}, 400, "temperature=101: should be less than or equal to 100"),
        ({"top_p": -(10**400)}, 400, "should be a valid number"),
        ({"top_p": 1.5}, 400, "top_p=1.5: should be less than or equal to 1"),
        ({"prompt": None}, 400, "prompt=None"),
        ({"prompt": []}, 400, "empty"),
        ({"prompt": [3, 48]}, 400, "integers from 0 to 47"),
        ({"prompt": [3] * 64}, 400, "no room"),
        ({"max_tokens": 60}, 400, "at most 59"),
        ({"max_tokens": 0}, 400, "max_tokens=0"),
        ({"temperature": -1}, 400, "temperature=-1"),
        ({"temperature": True}, 400, "temperature=True"),
        ({"temperature": 1e-36}, 400, "temperature=1e-36 must be 0"),
        ({"repetition_penalty": 1e-45}, 400, "repetition_penalty=1e-45 must be from 0.0001"),
        ({"top_p": 0}, 400, "top_p=0"),
        ({"n": 9}, 400, "n=9"),
        ({"logprobs": 21}, 400, "logprobs=21"),
        ({"stop": [""]}, 400, "stop.0=''"),
        ({"stop": ["a"] * 17}, 400, "at most 16 items"),
        ({"prompt": 3.5}, 400, "prompt.0.str=3.5: should be a valid string"),
        ({"prompt": None, "n": 0}, 400, "n=0: should be greater than or equal to 1; prompt=None"),
        ({"min_tokens": 9, "max_tokens": 8}, 400, "min_tokens=9: must be at most max_tokens"),
        ({"top_k": 49}, 400, "top_k=49: must be at most 48"),
        ({"stream_options": {"usage": True}}, 400, "stream_options.usage=True: is not a field"),
        ({"stream_options": {"user": "me"}}, 400, "stream_options.user='me': is not a field"),
        ({"keys": [[1]]}, 400, "keys"),
        ({"seed": "a"}, 400, "seed"),
        ({"frequency_penalty": 0.5}, 400, "frequency_penalty=0.5: is not supported"),
        ({"suffix": "!"}, 400, "suffix='!': is not supported"),
        ({"temperatur": 1}, 400, "temperatur=1: is not a field"),
        ({"user": "me", "echo": False, "max_tokens": 1}, 200, ""),
    ],
)
def test_fields_are_checked_and_none_is_ignored(server, body, status, said):
    found, answer = ask(server, "/v1/completions", {"prompt": PROMPT, **body})
    assert found == status
    if status != 200:
        assert set(answer["error"]) == {"message", "type", "param", "code"}
        assert said in answer["error"]["message"]


@pytest.mark.parametrize(
    ("path", "method", "raw", "status"),
    [
        ("/v1/completions", "POST", b"{", 400),
        ("/v1/completions", "POST", b"[1]", 400),
        ("/v1/completions", "POST", b'{"prompt": "\\ud800"}', 400),
        ("/v1/completions", "POST", b"[" * 100_000, 400),
        ("/v1/chat/completions", "POST", b'{"messages": [{"content": "x"}]}', 400),
        ("/v1/completions", "POST", b" " * (4 * 1024**2 + 1), 413),
        ("/v1/completions", "GET", None, 405),
        ("/nothing", "GET", None, 404),
        ("/sessions/unknown", "GET", None, 404),
    ],
)
def test_errors_have_openais_form(server, path, method, raw, status):
    found, answer = ask(server, path, method=method, raw=raw)
    assert (found, answer["error"]["param"] in (None, "prompt", "messages")) == (status, True)


def test_models_tokenize_detokenize_health(server, client):
    assert [model.id for model in client.models.list()] == ["policy"]
    tokens = {"count": 5, "max_model_len": 64, "tokens": PROMPT}
    assert ask(server, "/tokenize", {"prompt": "3142>"}) == (200, tokens)
    assert ask(server, "/tokenize", {"messages": HELLO}) == (200, tokens)
    assert ask(server, "/detokenize", {"tokens": PROMPT}) == (200, {"prompt": "3142>"})
    status, health = ask(server, "/health", method="GET")
    assert (status, health["status"]) == (200, "ok")


@pytest.mark.parametrize("name", ["policy", "gpt/4"])
def test_one_model_by_its_name(client, name):
    if name == "policy":
        assert client.models.retrieve(name).id == name
        return
    with pytest.raises(openai.NotFoundError, match="'gpt/4' does not exist; this server has 'pol"):
        client.models.retrieve(name)


TAKEN = (
    "tools documents chat_template add_generation_prompt continue_final_message tokenize padding "
)
TAKEN += "truncation max_length return_tensors return_dict tokenizer_kwargs conversation"


@pytest.mark.parametrize("name", TAKEN.split())
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_template_variables_do_not_change_how_text_is_made_to_tokens(server, path, name):
    body = {"messages": HELLO, "chat_template_kwargs": {"enable_thinking": False}}
    assert ask(server, path, body)[0] == 200
    body["chat_template_kwargs"] |= {name: "max_length"}
    status, answer = ask(server, path, body)
    assert (status, answer["error"]["param"]) == (400, "chat_template_kwargs")
    assert f"leave {name} out" in answer["error"]["message"]


def test_a_host_that_is_none(server, tmp_path, caplog):
    status, answer = ask(server, "/health", method="GET", headers={"Host": "a:99999999"})
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
    (tmp_path / "token").write_text("secret")
    limits = dataclasses.replace(server.limits, token_file=str(tmp_path / "token"))
    guarded = HttpServer(server.host.engine, server.served, limits)
    guarded.start()
    host = {"Host": "a:99999999"}
    try:
        assert ask(guarded, "/v1/models", method="GET", headers=host)[0] == 401
        host["Authorization"] = "Bearer secret"
        assert ask(guarded, "/v1/models", method="GET", headers=host)[0] == 400
    finally:
        guarded.stop()
    assert caplog.records == []


@pytest.mark.parametrize("streams", [40, pytest.param(200, marks=pytest.mark.slow)])
def test_many_streams_lose_nothing(server, streams):
    async def one(client, seed):
        stream = await client.completions.create(
            model="policy",
            prompt=PROMPT,
            max_tokens=4,
            seed=seed % 20,
            stream=True,
            extra_body={"return_token_ids": True},
        )
        return [t for p in [piece async for piece in stream] for t in p.choices[0].token_ids]

    async def all_of_them():
        async with openai.AsyncOpenAI(base_url=server.url, api_key="none") as client:
            return await asyncio.gather(*(one(client, seed) for seed in range(streams)))

    rows = asyncio.run(all_of_them())
    assert rows == rows[:20] * (streams // 20)  # one seed, one answer, whatever runs beside it
    assert len({tuple(row) for row in rows}) == 20
    until(lambda: waiting(server) == 0)


def test_a_client_that_leaves_frees_its_samples(server, client, paused):
    stream = threading.Thread(target=lambda: _leave(client))
    whole = threading.Thread(target=lambda: _leave(client, stream=False))
    for thread in (stream, whole):
        thread.start()
    until(lambda: waiting(server) == 4)
    for thread in (stream, whole):
        thread.join()
    until(lambda: waiting(server) == 0)
    server.host.engine.sleep()  # raises if samples are left in the engine
    server.host.update_weights(server._weights[0](server._weights[1]), 0)


def _leave(client, stream=True):
    with pytest.raises(openai.APITimeoutError):
        list(completion(client.with_options(timeout=0.5), n=2, stream=stream))


def test_a_flood_is_answered_429(server, paused, monkeypatch):
    monkeypatch.setattr(server.limits, "max_samples", 3)
    monkeypatch.setattr(server.limits, "request_seconds", 2)
    with ThreadPoolExecutor(8) as threads:
        calls = [threads.submit(ask, server, "/v1/completions", {"prompt": [1]}) for _ in range(8)]
        answers = [call.result() for call in calls]
    assert sorted(status for status, _ in answers) == [429] * 5 + [504] * 3
    assert {a["error"]["code"] for _, a in answers} == {"queue_full", "timeout"}
    until(lambda: waiting(server) == 0)


def test_a_stream_that_takes_too_long_ends_with_an_error(server, client, paused, monkeypatch):
    monkeypatch.setattr(server.limits, "request_seconds", 0.5)
    with pytest.raises(openai.APIError, match="not finished after 0.5 seconds"):
        list(completion(client, stream=True))


def test_abort_gives_what_there_is(server, client, paused):
    with ThreadPoolExecutor(1) as thread:
        call = thread.submit(completion, client, extra_body={"request_id": "mine"})
        until(lambda: waiting(server) == 1)
        status, answer = ask(server, "/abort", {"request_ids": ["mine", "other"]})
        assert (status, answer) == (200, {"aborted": ["mine"]})
        ask(server, "/resume")
        (choice,) = call.result().choices
    assert (choice.finish_reason, choice.token_ids) == ("abort", [])


def test_pause_waits_resumes_and_sleeps(server, client):
    assert ask(server, "/pause?mode=later")[0] == 400
    assert ask(server, "/pause?mode=wait") == (200, {"status": "paused"})
    assert ask(server, "/is_paused", method="GET") == (200, {"is_paused": True})
    ask(server, "/resume")
    expected = completion(client).choices[0].token_ids
    assert ask(server, "/sleep")[0] == 200
    assert ask(server, "/health", method="GET")[0] == 503
    with pytest.raises(openai.InternalServerError, match="no weights"):
        completion(client)
    assert ask(server, "/wake_up")[0] == 200
    assert completion(client).choices[0].token_ids == expected


def test_new_weights_from_a_folder(server, client, folder):
    model_folder(folder.parent / "second", 1)
    before = completion(client, logprobs=0).choices[0]
    status, answer = ask(server, "/update_weights", {"path": "second", "version": 7})
    assert (status, answer) == (200, {"status": "updated", "version": 7})
    assert ask(server, "/health", method="GET")[1]["version"] == 7
    after = completion(client, logprobs=0).choices[0]
    assert set(after.versions) == {7}
    assert after.logprobs.token_logprobs != before.logprobs.token_logprobs
    assert ask(server, "/update_weights", {"path": str(folder), "version": 0})[0] == 200
    assert completion(client).choices[0].token_ids == before.token_ids


def test_tricks_with_the_weight_folder_are_refused(server, folder, tmp_path):
    root = folder.parent
    (root / "link").symlink_to(tmp_path)
    (root / "loop").symlink_to(root / "loop")
    (root / "linked").mkdir()
    (root / "linked" / "model.safetensors").symlink_to(tmp_path / "model.safetensors")
    (root / "index").mkdir()
    index = {"weight_map": {"x": "../../elsewhere.safetensors"}}
    (root / "index" / "model.safetensors.index.json").write_text(json.dumps(index))
    tricks = {
        "..": 403,
        "first/../..": 403,
        str(tmp_path): 403,
        "/": 403,
        "link": 403,
        "linked": 403,
        "index": 403,
        "loop": 400,
        "nothing": 400,
        "first/config.json": 400,
        "a\0b": 400,
        "": 400,
    }
    found = {p: ask(server, "/update_weights", {"path": p})[0] for p in tricks}
    assert found == tricks
    assert ask(server, "/health", method="GET")[1]["version"] == 0


def test_a_token_is_asked_for_everywhere(server, tmp_path, monkeypatch):
    monkeypatch.delenv("JAXRL_SERVE_TOKEN", raising=False)
    with pytest.raises(ValueError, match="JAXRL_SERVE_TOKEN"):
        HttpServer(server.host.engine, server.served, server.limits, host="0.0.0.0")
    (tmp_path / "token").write_text("secret\n")
    limits = dataclasses.replace(server.limits, token_file=str(tmp_path / "token"))
    guarded = HttpServer(server.host.engine, server.served, limits)
    guarded.start()
    try:
        for path in ("/health", "/metrics", "/v1/models", "/nothing"):
            for headers in ({}, {"Authorization": "Bearer secre"}, {"Authorization": "secret"}):
                status, answer = ask(guarded, path, method="GET", headers=headers)
                assert (status, answer["error"]["type"]) == (401, "authentication_error")
        right = {"Authorization": "Bearer secret"}
        assert ask(guarded, "/v1/models", method="GET", headers=right)[0] == 200
        assert ask(guarded, "/sleep", headers=right)[0] == 404  # the engine is another's
    finally:
        guarded.stop()


@pytest.mark.parametrize("headers", [{"Origin": "http://evil.test"}, {"Host": "evil.test"}])
def test_web_pages_may_not_ask_without_a_token(server, headers):
    assert ask(server, "/v1/models", method="GET", headers=headers)[0] == 403
