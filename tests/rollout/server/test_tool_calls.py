"""Thoughts and calls of tools: read in answers, and known when they come back."""

import json

import openai
import pytest

from jaxrl.rollout.server.agent_generator import session_url
from jaxrl.rollout.server.answer_formats import Said, answer_format, tags
from tests.rollout.bpe import bpe_tokenizer
from tests.rollout.server.scripted import TypingEngine, serving

# As Qwen's: tools in front, thoughts of earlier turns left out, arguments as JSON.
TEMPLATE = """
{%- if tools %}{{- '[tools]' + tools|tojson + '\\n' }}{%- endif %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{{- '[assistant]' + m.content }}
{%- for call in m.tool_calls or [] %}
{{- '<tool_call>' + {'name': call.function.name, 'arguments': call.function.arguments}|tojson }}
{{- '</tool_call>' }}
{%- endfor %}{{- '<eos>' }}
{%- else %}{{- '[' + m.role + ']' + m.content + '\\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '[assistant]' }}{%- endif %}
"""
LOOK = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {}}},
}
WORDS = '<tool_call>\n{"arguments": {"x": 1, "box": "é"}, "name": "look"}\n</tool_call>'
SAID = f"<think>\nwhere?\n</think>\n\n{WORDS}"
USER = {"role": "user", "content": "what is in it?"}


@pytest.fixture
def talk():
    """A server, a client, and what makes the model say a text; with its tokens."""
    tokenizer = bpe_tokenizer()
    plain, tokenizer.chat_template = tokenizer.chat_template, TEMPLATE
    engine = TypingEngine(decode=tokenizer.decode)

    def says(text):
        engine.tokens = [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
        return engine.tokens

    with (
        serving(engine, tokenizer, answer_format=tags) as server,
        openai.OpenAI(
            base_url=session_url(server.url, "tools"), api_key="-", max_retries=0
        ) as client,
    ):
        yield server, client, says
    tokenizer.chat_template = plain


def ask(client, messages, **options):
    return client.chat.completions.create(
        model="org/policy", messages=messages, tools=[LOOK], **options
    )


def streamed(client, messages, **options):
    """A message, put together from its pieces as clients do it."""
    with client.chat.completions.stream(
        model="org/policy", messages=messages, tools=[LOOK], **options
    ) as stream:
        return stream.get_final_completion()


def sent_back(message, turned=False):
    """The message as a client says it again; `turned`: it has parsed it and written it anew."""
    known = message.model_dump(exclude_none=True)
    if not turned:
        return known
    call = known["tool_calls"][0]
    arguments = json.loads(call["function"]["arguments"])
    function = {"arguments": json.dumps(dict(reversed(arguments.items())), indent=1)}
    function["name"] = call["function"]["name"]
    return {
        "tool_calls": [{"function": function, "type": "function", "id": call["id"]}],
        "role": "assistant",
        "content": None,
    }


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("whole", [ask, streamed])
def test_a_call_comes_back_and_its_tokens_stay(talk, whole, turned):
    server, client, says = talk
    first_tokens = says(SAID)
    choice = whole(client, [USER]).choices[0]
    assert (choice.finish_reason, choice.message.content or "") == ("tool_calls", "")
    assert choice.message.reasoning_content == "where?"
    (call,) = choice.message.tool_calls
    assert call.function.name == "look"
    assert json.loads(call.function.arguments) == {"x": 1, "box": "é"}
    result = {"role": "tool", "tool_call_id": call.id, "content": "a ball"}
    second_tokens = says("A ball.")
    messages = [USER, sent_back(choice.message, turned), result]
    assert whole(client, messages).choices[0].message.content == "A ball."
    (segment,) = server.take_session("tools").segments
    given = server.served.tokenizer("[tool]a ball\n[assistant]")["input_ids"]
    assert segment.transcript.tokens == [*first_tokens, *given, *second_tokens]
    sampled = [1] * len(first_tokens) + [0] * len(given) + [1] * len(second_tokens)
    assert segment.transcript.loss_mask == sampled
    prompt = server.served.tokenizer.decode(segment.transcript.prompt)
    assert prompt.startswith('[tools][{"type": "function", "function": {"name": "look"')


def test_what_a_client_changes_begins_a_branch(talk):
    server, client, says = talk
    says(SAID)
    message = ask(client, [USER]).choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "a ball"}
    says("A ball.")
    for change in ({"content": "Look:"}, {"reasoning_content": "why?"}, {"tool_calls": []}):
        ask(client, [USER, sent_back(message) | change, result])
    client.chat.completions.create(  # other tools, another prompt
        model="org/policy", messages=[USER, sent_back(message), result]
    )
    ask(client, [USER, sent_back(message), result])
    segments = server.take_session("tools").segments
    assert [len(segment.points) for segment in segments] == [2, 1, 1, 1, 1]
    assert [segment.parent for segment in segments] == [None] * 5


def test_calls_that_nobody_asked_for_are_words(talk):
    _, client, says = talk
    says(SAID)
    for choice in ("none", None):
        extra = {"tool_choice": choice, "tools": [LOOK]} if choice else {}
        answer = client.chat.completions.create(
            model="org/policy", messages=[USER], **extra
        ).choices[0]
        assert (answer.finish_reason, answer.message.tool_calls) == ("stop", None)
        assert answer.message.content == WORDS
    says(SAID + WORDS)
    assert len(ask(client, [USER]).choices[0].message.tool_calls) == 2
    one = ask(client, [USER], parallel_tool_calls=False).choices[0].message
    assert len(one.tool_calls) == 1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tools": [{"type": "web_search"}]}, 'each must be {"type": "function"'),
        ({"tool_choice": "any"}, "should be 'auto', 'none' or 'required'"),
        ({"tool_choice": "required"}, "the engine of this server asks no grammar"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]},
            "tool_calls is a list",
        ),
    ],
)
def test_what_cannot_be_told_is_refused(talk, change, said):
    _, client, _ = talk
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(
            **{"model": "org/policy", "messages": [USER], "tools": [LOOK], **change}
        )
    assert said in error.value.message


def test_a_server_of_plain_text_takes_no_tools():
    tokenizer = bpe_tokenizer()
    with (
        serving(TypingEngine([1]), tokenizer) as server,
        openai.OpenAI(base_url=server.url, api_key="-") as client,
        pytest.raises(openai.BadRequestError, match="needs serve.answer_format=tags"),
    ):
        ask(client, [USER])


CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("plain", Said("plain")),
        ("<think>a</think>b", Said("b", "a")),
        ("a\n</think>\n\nb", Said("b", "a")),  # it began in the prompt
        ("<think>not whole", Said("<think>not whole")),
        (f"so: {CALL}\n{CALL}", Said("so:", "", (("f", {"a": 1}),) * 2)),
        ('<tool_call>{"name": "f"}</tool_call>', Said("", "", (("f", {}),))),
        *(
            (text, Said(text))
            for text in (
                "<tool_call>{</tool_call>",
                "<tool_call>[1]</tool_call>",
                '<tool_call>{"name": 1}</tool_call>',
                '<tool_call>{"name": "f", "arguments": "a"}</tool_call>',
                '<tool_call>{"name": "f"}',
            )
        ),
    ],
)
def test_tags(text, said):
    assert tags(text, True) == said


def test_formats_by_name():
    assert answer_format("text") is None
    assert answer_format("tags") is tags
    assert answer_format("jaxrl.rollout.server.answer_formats:tags") is tags
    with pytest.raises(ValueError, match="nothing"):
        answer_format("jaxrl.rollout.server.answer_formats:nothing")
