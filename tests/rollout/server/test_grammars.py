"""Answers of a schema, and calls that must come, from random weights over HTTP."""

import copy
import json
import re
import sys
from concurrent.futures import ThreadPoolExecutor

import jax
import jsonschema
import numpy as np
import openai
import pytest
from tokenizers import AddedToken

from jaxrl.models.transformer import TransformerConfig, init_params
from jaxrl.parallel import make_mesh
from jaxrl.rollout.native.engine import NativeEngine
from jaxrl.rollout.protocol import Request, Sampling
from jaxrl.rollout.server.answer_formats import Said, tags
from jaxrl.rollout.server.grammars import Form, Grammars, lark
from jaxrl.rollout.server.served_model import ServedModel
from tests.rollout.bpe import bpe_tokenizer
from tests.rollout.server.scripted import TypingEngine, serving
from tests.rollout.server.test_server import ask as by_hand
from tests.rollout.server.test_tool_calls import LOOK, TEMPLATE
from tests.rollout.test_native import reserve

MODEL = TransformerConfig(
    vocab_size=290,
    hidden_size=16,
    intermediate_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    initializer_range=0.3,
)
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "kind": {"enum": ["größer", "kleiner"]},
        "sizes": {"type": "array", "items": {"$ref": "#/$defs/size"}, "maxItems": 3},
        "known": {"type": "boolean"},
    },
    "required": ["name", "kind", "sizes", "known"],
    "additionalProperties": False,
    "$defs": {"size": {"type": "integer", "minimum": 0, "maximum": 99}},
}
PLACE = {
    "type": "function",
    "function": {
        "name": "place",
        "parameters": {
            "type": "object",
            "properties": {"x": {"$ref": "#/$defs/x"}},
            "required": ["x"],
            "additionalProperties": False,
            "$defs": {"x": {"enum": [1, 2, 3]}},
        },
    },
}
CLOSED = {"type": "object", "properties": {}, "additionalProperties": False}
LEAVE = {"type": "function", "function": {"name": "leave", "parameters": CLOSED}}
USER = [{"role": "user", "content": "what is in it?"}]
STRICT = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}}


@pytest.fixture(scope="module")
def engine():
    engine = NativeEngine(
        MODEL,
        make_mesh(devices=jax.devices()[:1]),
        max_num_seqs=8,
        steps_per_dispatch=4,
        shrink=False,
        decode_text=bpe_tokenizer().decode,
    )
    engine.update_weights(init_params(MODEL, 0), 0)
    reserve(engine, 768)
    return engine


@pytest.fixture(scope="module")
def server(engine):
    tokenizer = bpe_tokenizer()
    plain, tokenizer.chat_template = tokenizer.chat_template, TEMPLATE
    with serving(engine, tokenizer, answer_format=tags, params=init_params(MODEL, 0)) as server:
        yield server
    tokenizer.chat_template = plain


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=server.url, api_key="-", max_retries=0) as client:
        yield client


def ask(client, **options):
    extra = {"return_token_ids": True, **options.pop("extra_body", {})}
    settings = {"model": "org/policy", "messages": USER, "max_tokens": 400, "seed": 1}
    return client.chat.completions.create(**{**settings, **options}, extra_body=extra)


def assert_of_the_schema(choices):
    ended = [choice for choice in choices if choice.finish_reason == "stop"]
    for choice in ended:
        jsonschema.validate(json.loads(choice.message.content), SCHEMA)
    return len(ended)


def test_answers_are_of_the_schema(client):
    choices = ask(client, response_format=STRICT, n=6).choices
    assert assert_of_the_schema(choices) == 6
    assert len({choice.message.content for choice in choices}) == 6
    (greedy,) = ask(client, response_format=STRICT, temperature=0).choices
    assert greedy.finish_reason in ("stop", "length")
    assert_of_the_schema([greedy])


def test_log_probs_are_those_of_what_the_grammar_allows(server, client):
    (choice,) = ask(client, response_format=STRICT, temperature=0.8, logprobs=True).choices
    tokens, scores = choice.token_ids, [entry.logprob for entry in choice.logprobs.content]
    tokenizer = bpe_tokenizer()
    follow = server_grammar(server)
    # what the engine gives tokens without a grammar: their log-probs under the policy
    sampling = Sampling(max_tokens=1, stop_token_ids=(tokenizer.eos_token_id,), logprobs=290)
    for at in (0, 1, 5, len(tokens) - 1):
        follow_to = follow()
        follow_to.take(tokens[:at])
        allowed = np.unpackbits(follow_to.allowed(), bitorder="little")[:290].astype(bool)
        row = (*choice.prompt_token_ids, *tokens[:at])
        free = server.host.generate([Request(row, ((0, 0),), sampling)])[0][0]
        policy = np.array([free.top_log_probs[0][i] for i in range(290)]) / 0.8
        expected = policy[tokens[at]] - np.log(np.exp(policy[allowed]).sum())
        np.testing.assert_allclose(scores[at], expected, atol=1e-3)


def test_alternatives_are_those_that_may_come(server):
    body = {"messages": USER, "response_format": STRICT, "max_tokens": 12, "seed": 1}
    status, answer = by_hand(
        server, "/v1/chat/completions", body | {"logprobs": True, "top_logprobs": 3}
    )
    assert status == 200
    assert "Infinity" not in json.dumps(answer)  # which is no JSON
    first, *others = answer["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in first["top_logprobs"]] == ["{"]
    assert first["top_logprobs"][0]["logprob"] == 0
    assert max(len(entry["top_logprobs"]) for entry in others) == 3


def server_grammar(server):
    return Grammars(server.served).constrain("response_format", STRICT, Form("json", SCHEMA))


def test_a_stream_and_a_completion(client):
    whole = ask(client, response_format=STRICT).choices[0]
    pieces = list(ask(client, response_format=STRICT, stream=True))
    assert "".join(p.choices[0].delta.content or "" for p in pieces) == whole.message.content
    assert pieces[-1].choices[0].finish_reason == "stop"
    assert len(pieces) > 10  # one for every token, though answers of tools come as a whole
    prompts = client.completions.create(
        model="org/policy",
        prompt=["one", "two"],
        max_tokens=400,
        seed=1,
        extra_body={"response_format": STRICT},
    )
    for choice in prompts.choices:
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.text), SCHEMA)


def test_any_object(client):
    for choice in ask(client, response_format={"type": "json_object"}, n=8, max_tokens=150).choices:
        if choice.finish_reason == "stop":
            assert isinstance(json.loads(choice.message.content), dict)
        else:
            assert choice.message.content.lstrip().startswith("{")


def test_several_at_a_time_and_neighbours_that_ask_for_nothing(client):
    def free(seed):
        return ask(client, seed=seed, max_tokens=40, logprobs=True).choices[0]

    alone = [free(seed) for seed in range(3)]
    with ThreadPoolExecutor(6) as pool:
        bound = [pool.submit(ask, client, response_format=STRICT, seed=s) for s in range(3)]
        beside = list(pool.map(free, range(3)))
    for one, other in zip(beside, alone, strict=True):
        assert one.token_ids == other.token_ids
        assert one.logprobs == other.logprobs
    assert sum(assert_of_the_schema(job.result().choices) for job in bound) == 3


def test_a_call_that_must_come(client):
    for choice, tools in (("required", [PLACE, LEAVE]), ({"name": "place"}, [LEAVE, PLACE])):
        named = choice if choice == "required" else {"type": "function", "function": choice}
        options = {"tools": tools, "parallel_tool_calls": False, "n": 4}
        for found in ask(client, tool_choice=named, **options).choices:
            assert (found.finish_reason, found.message.content) == ("tool_calls", None)
            (call,) = found.message.tool_calls
            arguments = json.loads(call.function.arguments)
            if call.function.name == "place":
                jsonschema.validate(arguments, PLACE["function"]["parameters"])
            else:
                assert (choice, call.function.name, arguments) == ("required", "leave", {})


def test_several_calls_or_an_answer(client):
    options = {"tools": [PLACE, LEAVE], "n": 8, "max_tokens": 200}
    calls = ask(client, tool_choice="required", **options).choices
    ended = [len(c.message.tool_calls) for c in calls if c.finish_reason == "tool_calls"]
    assert max(ended) > 1
    kinds = set()
    for seed in range(3):  # a schema beside tools: the model may call one all the same
        for choice in ask(client, response_format=STRICT, seed=seed, **options).choices:
            kinds.add(choice.finish_reason)
            if choice.finish_reason == "stop":
                assert_of_the_schema([choice])
        if {"tool_calls", "stop"} <= kinds:
            return
    raise AssertionError(kinds)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type='xml': should be 'text'"),
        ({"response_format": {"type": "json_schema"}}, '"json_schema" is there if, and only if'),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema=None: is required",
        ),
        (
            {"schema": {"type": "object", "unevaluatedProperties": False}},
            'response_format.json_schema.schema: Unimplemented keys: ["unevaluatedProperties"]; '
            "change the schema, or leave",
        ),
        ({"schema": {"type": "thing"}}, "schema: Invalid type: thing; change the schema"),
        ({"schema": {"$ref": "https://localhost/x"}}, "does not fetch resources; change the"),
        ({"schema": {"type": "string", "pattern": "(?=a)b"}}, "look-ahead and look-behind, is not"),
        (
            {
                "tools": [
                    {"type": "function", "function": {"name": "f", "parameters": {"$ref": 3}}}
                ],
                "tool_choice": "required",
            },
            "tools, parameters of 'f': $ref must be a string, got 3",
        ),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": [3]}}],
                "tool_choice": "required",
            },
            "tools, parameters of 'f': must be a JSON schema, an object; change the schema",
        ),
        ({"response_format": STRICT, "extra_body": {"min_tokens": 3}}, "leave min_tokens and"),
        ({"response_format": STRICT, "extra_body": {"ignore_eos": True}}, "leave min_tokens and"),
        ({"tool_choice": "required"}, "tool_choice='required': needs tools"),
        (
            {"extra_body": {"structured_outputs": {"regex": "a(?=b)"}}},
            'structured_outputs.regex: at 1(8): invalid regex "a(?=b)"',
        ),
        (
            {"extra_body": {"structured_outputs": {"json": {"type": "thing"}}}},
            "structured_outputs.json: Invalid type: thing",
        ),
        ({"extra_body": {"structured_outputs": {"json": "{"}}}, "structured_outputs.json='{'"),
        ({"extra_body": {"structured_outputs": {"choice": []}}}, "structured_outputs.choice=[]"),
        ({"extra_body": {"structured_outputs": {}}}, "exactly one of json, json_object, regex"),
        (
            {"extra_body": {"structured_outputs": {"regex": "a", "choice": ["a"]}}},
            "exactly one of json, json_object, regex",
        ),
        (
            {"extra_body": {"structured_outputs": {"grammar": "start: x"}}},
            "structured_outputs.grammar='start: x': is not a field that this server knows",
        ),
        (
            {
                "response_format": STRICT,
                "extra_body": {"structured_outputs": {"choice": ["a"]}},
            },
            "response_format says already what an answer is; leave one of them out",
        ),
        *(
            (
                {"extra_body": {f"guided_{kind}": value}},
                f'is structured_outputs={{"{kind}": ...}} in vLLM\'s newer words; write that',
            )
            for kind, value in (("choice", ["a"]), ("regex", "a"), ("json", {}))
        ),
        (
            {
                "tools": [LOOK],
                "tool_choice": {"type": "function", "function": {"name": "hear"}},
            },
            "tool_choice='hear': names none of the tools",
        ),
    ],
)
def test_what_cannot_be_kept_to_is_refused(client, options, said):
    if schema := options.get("schema"):
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        options = {"response_format": form}
    with pytest.raises(openai.BadRequestError) as error:
        ask(client, **options)
    assert said in error.value.message
    named = "response_format", "structured_outputs", "tool_choice", "tools"
    assert error.value.param in named or error.value.param.startswith("guided_")


@pytest.mark.parametrize(
    ("wanted", "pattern"),
    [
        ({"choice": ['yes "/"', "no", "ne\nin"]}, '(yes "/"|no|ne\nin)'),
        ({"regex": r"[a-c]{2}/x\/[0-9]\n?"}, r"[a-c]{2}/x/[0-9]\n?"),
        ({"json": {"type": "boolean"}}, "true|false"),
        ({"json": '{"enum": [1, 2]}'}, "1|2"),
        ({"json_object": True}, r"\{.*\}"),
    ],
)
def test_answers_are_what_structured_outputs_say(client, wanted, pattern):
    asked = {"extra_body": {"structured_outputs": wanted}, "max_tokens": 150}
    texts = [choice.message.content for choice in ask(client, n=8, **asked).choices]
    # a JSON object of random weights may find no end
    ended = [text for text in texts if re.fullmatch(pattern, text, re.DOTALL)]
    assert len(ended) == 8 or "json_object" in wanted and ended
    if "json_object" not in wanted:
        assert len(set(ended)) > 1


def test_completions_keep_to_structured_outputs_too(client):
    answer = client.completions.create(
        model="org/policy",
        prompt="yes or no? ",
        max_tokens=20,
        extra_body={"structured_outputs": {"choice": ["yes", "no"]}},
    )
    assert answer.choices[0].text in ("yes", "no")


def test_responses_keep_to_their_schema(client):
    wanted = {"type": "json_schema", "name": "x", "strict": True, "schema": {"enum": [1, 24]}}
    settings = {"model": "org/policy", "input": "a", "text": {"format": wanted}}
    assert client.responses.create(**settings, max_output_tokens=9).output_text in ("1", "24")


def test_text_is_no_grammar(client):
    free = ask(client, max_tokens=5).choices[0].token_ids
    text = ask(client, max_tokens=5, response_format={"type": "text"}).choices[0].token_ids
    assert text == free


def test_a_conversation_that_is_trained_on_is_not_constrained(server, client):
    for fixed in (False, True):
        sampling = Sampling(max_tokens=4, stop_token_ids=(0,))
        server.open_session("trained", sampling, (1, 2), fixed=fixed)
        headers = {"X-Session-ID": "trained"}
        for asked in (
            {"response_format": STRICT},
            {"extra_body": {"structured_outputs": {"choice": ["a"]}}},
            {"tools": [LOOK], "tool_choice": "required"},
        ):
            with pytest.raises(openai.BadRequestError, match="this conversation is trained on"):
                ask(client, extra_headers=headers, **asked)
        assert not server.take_session("trained").segments
    headers = {"X-Session-ID": "own"}  # a client's own, which the server only keeps
    (choice,) = ask(client, response_format=STRICT, extra_headers=headers).choices
    (segment,) = server.take_session("own").segments
    assert segment.transcript.tokens == choice.token_ids


def test_servers_that_cannot_say_why(server, engine, monkeypatch):
    tokenizer = bpe_tokenizer()
    with (
        serving(TypingEngine([1]), tokenizer) as other,
        openai.OpenAI(base_url=other.url, api_key="-", max_retries=0) as client,
        pytest.raises(openai.BadRequestError, match="the native one does"),
    ):
        ask(client, response_format=STRICT)

    def of_mine(text, with_calls):
        return Said(text)

    with (
        serving(engine, tokenizer, answer_format=of_mine, params=init_params(MODEL, 0)) as other,
        openai.OpenAI(base_url=other.url, api_key="-", max_retries=0) as client,
    ):
        with pytest.raises(openai.BadRequestError, match="only known of serve.answer_format=tags"):
            ask(client, tools=[LOOK], tool_choice="required")
        monkeypatch.setitem(sys.modules, "llguidance", None)
        with pytest.raises(openai.APIStatusError, match=r"pip install 'jaxrl\[serve\]'") as error:
            ask(client, response_format=STRICT)
        assert error.value.status_code == 501


def test_a_grammar_that_grows_too_large_ends_its_own_answer(server, client, monkeypatch):
    monkeypatch.setattr(
        "jaxrl.rollout.server.grammars.Answer.take", lambda self, _: self.matcher.consume_token(1)
    )
    with ThreadPoolExecutor(2) as pool:
        free = pool.submit(ask, client, max_tokens=30)
        with pytest.raises(openai.BadRequestError, match="change the schema, or leave") as error:
            ask(client, response_format=STRICT)
        assert free.result().choices[0].token_ids
    assert error.value.param == "response_format"


def test_grammars_as_they_are_written():
    parameters = {"type": "object", "properties": {}}
    assert lark(None, [{"name": 'a"b', "parameters": parameters}], several=True).splitlines() == [
        "start: calls",
        'calls: call ("\\n" call)*',
        'call: "<tool_call>" "\\n" (call_0) "\\n" "</tool_call>"',
        'call_0: "{\\"name\\": \\"a\\\\\\"b\\", \\"arguments\\": " arguments_0 "}"',
        'arguments_0: %json {"type": "object", "properties": {}, '
        '"x-guidance": {"whitespace_pattern": "[ \\\\n\\\\t]{1,16}"}}',
    ]


# ---- tokenizers in which a tag is one token ------------------------------------------------------

ADDED = {  # as in the tokenizers' files: (token, whether it is special there)
    "qwen3": [("<|im_start|>", True), ("<tool_call>", False), ("</tool_call>", False)],
    "qwen2.5": [("<tool_call>", False), ("</tool_call>", False), ("<|fim_pad|>", False)],
    "hermes": [("<tool_call>", True), ("</tool_call>", True), ("<|im_end|>", True)],
    "llama3": [("<|python_tag|>", True), ("<|eot_id|>", True)],
    "gpt-oss": [("<|call|>", True), ("<|channel|>", True), ("<|message|>", True)],
}


@pytest.mark.parametrize("family", ADDED)
@pytest.mark.parametrize("several", [False, True])
def test_calls_are_written_with_the_tokens_of_the_tokenizer(family, several):
    """Any walk along what is allowed ends in a call that the reader of answers finds."""
    tokenizer = copy.deepcopy(bpe_tokenizer())
    for name, special in ADDED[family]:
        tokenizer.add_tokens([AddedToken(name, special=special, normalized=False)], special)
    served = ServedModel("m", tokenizer, len(tokenizer) + 6, 64, (tokenizer.eos_token_id,))
    functions = [PLACE["function"], LEAVE["function"]]
    make = Grammars(served).constrain("tools", functions, None, functions, several=several)
    rng, one = np.random.default_rng(0), tokenizer.get_added_vocab().get("<tool_call>")
    for _ in range(5):
        answer, tokens = make(), []
        while not tokens or tokens[-1] != tokenizer.eos_token_id:
            bits = np.unpackbits(answer.allowed(), bitorder="little")
            ends = several and len(tokens) > 200
            allowed = np.flatnonzero(bits[: len(tokenizer)])
            last = tokenizer.eos_token_id
            tokens.append(int(last if ends and last in allowed else rng.choice(allowed)))
            answer.take(tokens[-1:])
        said = tags(tokenizer.decode(tokens[:-1]), True)
        assert not said.content
        assert said.calls and all(name in ("place", "leave") for name, _ in said.calls)
        assert one is None or tokens[0] == one
