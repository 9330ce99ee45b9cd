"""Fields of vLLM's users that say how a chat is written, and where its text ends."""

import openai
import pytest

from jaxrl.rollout.protocol import Sampling
from tests.rollout.server.test_server import EOS, HELLO, ask, completion

BEGUN = [*HELLO, {"role": "assistant", "content": "12"}]
GOES_ON = {"continue_final_message": True, "add_generation_prompt": False}
EFFORT = "{%- if reasoning_effort is defined %}{{- reasoning_effort[0] }}{%- endif %}"


def tokenized(server, messages, **fields):
    status, answer = ask(server, "/tokenize", {"messages": messages, **fields})
    assert status == 200, answer
    return server.served.tokenizer.decode(answer["tokens"])


def test_an_answer_goes_on_from_the_last_message(server, client):
    assert tokenized(server, BEGUN, **GOES_ON) == "3142>12"
    assert tokenized(server, HELLO, add_generation_prompt=False) == "3142"
    assert tokenized(server, HELLO) == "3142>"
    body = {"messages": BEGUN, "max_tokens": 5, "seed": 3, "return_token_ids": True, **GOES_ON}
    status, answer = ask(server, "/v1/chat/completions", body)
    assert status == 200
    (choice,) = answer["choices"]
    same = completion(client, prompt="3142>12", max_tokens=5).choices[0]
    assert choice["prompt_token_ids"] == same.prompt_token_ids
    assert choice["message"]["content"] == same.text


@pytest.mark.parametrize(
    ("fields", "named", "said"),
    [
        ({"continue_final_message": True}, "continue_final_message", "add_generation_prompt=false"),
        ({**GOES_ON, "messages": HELLO}, "continue_final_message", "needs a last message of the"),
        ({"reasoning_effort": "low"}, "reasoning_effort", "the chat template of this model has no"),
        ({"reasoning_effort": 3}, "reasoning_effort", "should be a valid string"),
        ({"include_stop_str_in_output": "yes"}, "include_stop_str_in_output", "a valid boolean"),
        ({"prompt_logprobs": 1}, "prompt_logprobs", "is not supported by this server"),
        ({"echo": True}, "echo", "is not supported by this server"),
    ],
)
def test_what_cannot_be_is_refused_by_name(server, fields, named, said):
    status, answer = ask(server, "/v1/chat/completions", {"messages": BEGUN, **fields})
    assert (status, answer["error"]["param"]) == (400, named)
    assert said in answer["error"]["message"]


def test_a_conversation_goes_on_from_whole_turns(server):
    server.open_session("trained", Sampling(max_tokens=4, stop_token_ids=(EOS,)), (1, 2))
    for name in ("trained", "own"):
        for fields in (GOES_ON, {"add_generation_prompt": False}):
            body, headers = {"messages": BEGUN, **fields}, {"X-Session-ID": name}
            status, answer = ask(server, "/v1/chat/completions", body, headers=headers)
            assert (status, answer["error"]["param"]) == (400, "add_generation_prompt")
    assert not server.take_session("trained").segments


def test_reasoning_effort_is_a_variable_of_the_template(server, monkeypatch):
    tokenizer = server.served.tokenizer
    monkeypatch.setattr(tokenizer, "chat_template", EFFORT + tokenizer.chat_template)
    assert tokenized(server, HELLO) == "3142>"
    assert tokenized(server, HELLO, reasoning_effort="5") == "53142>"
    same = {"reasoning_effort": "5", "chat_template_kwargs": {"reasoning_effort": "5"}}
    assert tokenized(server, HELLO, **same) == "53142>"
    body = {"messages": HELLO, **same, "reasoning_effort": "7"}
    status, answer = ask(server, "/v1/chat/completions", body)
    assert (status, answer["error"]["param"]) == (400, "reasoning_effort")
    assert "leave one of them out" in answer["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_text_keeps_what_stopped_it_if_that_is_asked_for(client, stream):
    free = completion(client, max_tokens=30, extra_body={"ignore_eos": True})
    text, tokens = free.choices[0].text, free.choices[0].token_ids

    def said(**options):
        extra = {"ignore_eos": True, **options.pop("extra_body")}
        found = completion(client, max_tokens=30, stream=stream, extra_body=extra, **options)
        return "".join(c.text for piece in (found if stream else [found]) for c in piece.choices)

    stop, at = text[4:6], text.index(text[4:6])
    assert said(stop=[stop], extra_body={}) == text[:at]
    assert said(stop=[stop], extra_body={"include_stop_str_in_output": True}) == text[:at] + stop
    by_id = {"stop_token_ids": [tokens[4]], "include_stop_str_in_output": True}
    until = tokens[: tokens.index(tokens[4]) + 1]
    whole = free.choices[0].text[: len(until)]
    assert said(extra_body=by_id) == whole
    assert said(extra_body={**by_id, "include_stop_str_in_output": False}) == whole[:-1]


def test_a_chat_keeps_what_stopped_it(client):
    settings = {"model": "policy", "messages": HELLO, "max_tokens": 30, "seed": 5}
    free = client.chat.completions.create(**settings, extra_body={"ignore_eos": True})
    text = free.choices[0].message.content
    stop = text[3:5]
    kept = {"include_stop_str_in_output": True, "ignore_eos": True}
    answer = client.chat.completions.create(**settings, stop=stop, extra_body=kept)
    assert answer.choices[0].message.content == text[: text.index(stop)] + stop
    assert isinstance(answer, openai.types.chat.ChatCompletion)
