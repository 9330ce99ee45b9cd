"""POST /v1/responses: the same answers as a chat's, in another form."""

import openai
import pytest

from jaxrl.rollout.server.answer_formats import tags
from tests.rollout.bpe import bpe_tokenizer
from tests.rollout.server.scripted import TypingEngine, serving
from tests.rollout.server.test_server import HELLO, ask

THOUGHT = "<think>\nhm\n</think>\n\nso"


def test_an_answer_is_that_of_the_chat(server, client):
    chat = client.chat.completions.create(
        model="policy", messages=HELLO, max_tokens=9, temperature=0
    ).choices[0]
    settings = {"model": "policy", "max_output_tokens": 9, "temperature": 0}
    parts = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "31"}]}]
    parts[0]["content"].append({"type": "input_text", "text": "42"})
    for given in ("3142", HELLO, parts):
        answer = client.responses.create(input=given, **settings)
        assert answer.output_text == chat.message.content
        (item,) = answer.output
        assert (item.type, item.role) == ("message", "assistant")
        cut = chat.finish_reason == "length"
        assert answer.status == ("incomplete" if cut else "completed")
        assert (answer.incomplete_details is not None) == cut
        assert answer.usage.input_tokens == 5 and answer.usage.output_tokens > 0
    said = client.responses.create(input="142", instructions="3", **settings)
    assert said.output_text == chat.message.content


def test_a_stream_has_the_events_of_a_response(server, client):
    settings = {"model": "policy", "input": "3142", "max_output_tokens": 20, "temperature": 0}
    whole = client.responses.create(**settings)
    events = list(client.responses.create(**settings, stream=True))
    kinds = [event.type.removeprefix("response.") for event in events]
    first = ["created", "in_progress", "output_item.added", "content_part.added"]
    last = ["output_text.done", "content_part.done", "output_item.done", whole.status]
    deltas = len(events) - len(first) - len(last)
    assert deltas and kinds == [*first, *["output_text.delta"] * deltas, *last]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    texts = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(texts) == events[-1].response.output_text == whole.output_text
    with client.responses.stream(**settings) as stream:  # the client's own reading of events
        assert (
            stream.get_final_response().output_text == whole.output_text
            if (whole.status == "completed")
            else list(stream)
        )


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"previous_response_id": "resp-1"}, "previous_response_id"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"background": True}, "background"),
        ({"include": ["reasoning.encrypted_content"]}, "include"),
        ({"conversation": "x"}, "conversation"),
        ({"prompt": {"id": "x"}}, "prompt"),
        ({"truncation": "auto"}, "truncation"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"max_tool_calls": 3}, "max_tool_calls"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input"),
        ({"input": 3}, "input"),
        ({"max_output_tokens": 4000}, "max_output_tokens"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"reasoning": {"effort": "low"}}, "reasoning"),
        ({"reasoning": {"summary": "auto"}}, "reasoning"),
        ({"text": {"format": {"type": "grammar"}}}, "text"),
        ({"text": {"verbosity": "low"}}, "text"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text"),
        ({"model": "gpt"}, "model"),
    ],
)
def test_what_is_not_there_is_refused_by_name(server, fields, named):
    status, answer = ask(server, "/v1/responses", {"input": "3142", **fields})
    assert status in (400, 404) and answer["error"]["param"] == named, answer
    nothing = {"background": False, "tools": [], "include": [], "store": True, "metadata": {}}
    body = {"input": "3142", "max_output_tokens": 2, "truncation": "disabled", **nothing}
    assert ask(server, "/v1/responses", body)[0] == 200


def test_thoughts_are_items_of_their_own():
    tokenizer = bpe_tokenizer()
    engine = TypingEngine(decode=tokenizer.decode)
    engine.tokens = [*tokenizer(THOUGHT)["input_ids"], tokenizer.eos_token_id]
    with (
        serving(engine, tokenizer, answer_format=tags) as server,
        openai.OpenAI(base_url=server.url, api_key="-", max_retries=0) as client,
    ):
        answer = client.responses.create(model="org/policy", input="a")
        thoughts, said = answer.output
        assert (thoughts.type, thoughts.content[0].text) == ("reasoning", "hm")
        assert answer.output_text == "so" and said.status == "completed"
        events = list(client.responses.create(model="org/policy", input="a", stream=True))
        assert events[-1].type == "response.completed"
        assert events[-1].response.output_text == "so"


def test_a_conversation_keeps_its_turns(server):
    headers = {"X-Session-ID": "responding"}
    body = {"input": "3142", "max_output_tokens": 3}
    status, answer = ask(server, "/v1/responses", body, headers=headers)
    assert status == 200
    said = answer["output"][0]
    body["input"] = [*HELLO, said, {"role": "user", "content": "5"}]
    assert ask(server, "/v1/responses", body, headers=headers)[0] == 200
    (segment,) = ask(server, "/sessions/responding", method="GET")[1]["segments"]
    assert len(segment["turns"]) == 2
