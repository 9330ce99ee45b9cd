"""Every field of vLLM's server that its pages name: it does what they say, or is refused by name.

What the fields do is in the tests of each; here the engine says what it is told to.
"""

import itertools

import numpy as np
import openai
import pytest

from jaxrl.rollout.protocol import PromptScores
from jaxrl.rollout.server.answer_formats import tags
from tests.rollout.bpe import bpe_tokenizer
from tests.rollout.server.scripted import TypingEngine, serving
from tests.rollout.server.test_server import ask

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
NAMED = {"type": "function", "function": {"name": "look"}}
# of each field values that are served, and values that are refused
BOTH = {
    "model": (["org/policy", None], ["gpt-4", 3]),
    "n": ([1, 2, None], [0, "2"]),
    "seed": ([0, -1, 2**40, None], [1.5, "a"]),
    "max_tokens": ([1, 40], [-1, "1"]),
    "max_completion_tokens": ([1], [0]),
    "min_tokens": ([0, 1], [-1]),
    "temperature": ([0, 0.7, 2], [-1, "hot"]),
    "top_p": ([0.5, 1], [0, 1.5]),
    "top_k": ([0, -1, 5], [-2, 0.5]),
    "min_p": ([0, 0.1], [1.5]),
    "repetition_penalty": ([1, 1.2], [0]),
    "presence_penalty": ([0, None], [0.5]),
    "frequency_penalty": ([0, None], [0.5]),
    "logit_bias": ([{}, None], [{"5": 1}]),
    "stop": (["x", ["x", "y"], [], None], [[""], 3]),
    "stop_token_ids": ([[5], []], [[-1], [10**6]]),
    "stream": ([False], ["yes"]),
    "stream_options": ([{"include_usage": True}], [{"usage": True}]),
    "user": (["me"], []),
    "priority": ([0], []),
    "cache_salt": (["x"], []),
    "ignore_eos": ([True, False], [1.5]),
    "skip_special_tokens": ([True, False], ["no"]),
    "spaces_between_special_tokens": ([True], [False]),
    "include_stop_str_in_output": ([True, False], ["no"]),
    "use_beam_search": ([False], [True]),
    "length_penalty": ([1.0], [2.0]),
    "watermarking": ([False, None], [True]),
    "truncate_prompt_tokens": ([None], [5, -1]),
    "truncation_side": ([None], ["left"]),
    "allowed_token_ids": ([None], [[5]]),
    "bad_words": ([[]], [["x"]]),
    "logprob_token_ids": ([None], [[5]]),
    "response_format": ([{"type": "text"}, {"type": "json_object"}, SCHEMA], [{"type": "tag"}]),
    "structured_outputs": (
        [{"choice": ["a"]}, {"regex": "a+"}, {"json": {}}, {"json_object": True}],
        [{"grammar": "x"}, {"structural_tag": "x"}, {}, {"choice": "a"}, {"regex": "("}],
    ),
    "guided_json": ([None], [{}]),
    "guided_regex": ([None], ["a"]),
    "guided_choice": ([None], [["a"]]),
    "guided_grammar": ([None], ["x"]),
    "request_id": (["mine"], [3]),
    "session_id": ([None], ["x"]),
    "return_token_ids": ([True, False], ["yes"]),
    "return_tokens_as_token_ids": ([False], [True]),
    "return_token_offsets": ([False], [True]),
    "return_mm_kwargs": ([True], [False]),
    "routed_experts_prompt_start": ([0], [1]),
    "kv_transfer_params": ([None], [{"a": 1}]),
    "ec_transfer_params": ([None], [{"a": 1}]),
    "vllm_xargs": ([None], [{"a": 1}]),
    "repetition_detection": ([None], [{"max_pattern_size": 2}]),
    "thinking_token_budget": ([None], [5]),
    "stream_interval": ([None], [4]),
    "logits_processors": ([None], [["x"]]),
    "no_such_field": ([None], [1]),
}
COMPLETIONS = {
    "prompt": (["a", ["a", "b"], [5, 6], [[5], [6]]], [3, [-1], {}]),
    "echo": ([True, False], ["yes"]),
    "logprobs": ([0, 5, 20, None], [21, -1, True]),
    "prompt_logprobs": ([0, 20, None], [21, -1, "all"]),
    "suffix": (["", None], ["x"]),
    "best_of": ([1], [2]),
    "add_special_tokens": ([True, False], ["no"]),
    "prompt_embeds": ([None], ["x"]),
}
CHATS = {
    "messages": ([[{"role": "user", "content": "a"}]], [[], "a", [{"content": "a"}]]),
    "logprobs": ([True, False], [3]),
    "top_logprobs": ([0], [3, 21]),  # which needs logprobs
    "tools": ([[TOOL], []], [[{}], "look"]),
    "tool_choice": (["none", "auto", None], ["required", "any", NAMED]),  # which need tools
    "parallel_tool_calls": ([True, False], ["no"]),
    "functions": ([[]], [[{"name": "look"}]]),
    "function_call": (["auto"], [{"name": "look"}]),
    "reasoning_effort": ([None], ["low"]),
    "include_reasoning": ([True], [False]),
    "echo": ([False], [True]),
    "prompt_logprobs": ([None], [1]),
    "add_generation_prompt": ([True, False], ["no"]),
    "continue_final_message": ([False], [True]),
    "add_special_tokens": ([False], [True]),
    "documents": ([None, []], [[{"text": "a"}]]),
    "chat_template": ([None], ["{{ messages }}"]),
    "chat_template_kwargs": ([{"enable_thinking": False}], [{"chat_template": "x"}, "x"]),
    "media_io_kwargs": ([None], [{"image": {}}]),
    "mm_processor_kwargs": ([None], [{"a": 1}]),
    "modalities": ([["text"]], [["audio"]]),
    "audio": ([None], [{"voice": "a"}]),
    "metadata": ([{"a": "b"}], []),
    "store": ([False, True], []),
    "service_tier": (["auto"], []),
    "prediction": ([{"type": "content", "content": "a"}], []),
    "verbosity": ([None], ["low"]),
    "web_search_options": ([None], [{}]),
    "return_prompt_text": ([False], [True]),
}
PATHS = {
    "/v1/completions": ({"prompt": "ab"}, COMPLETIONS),
    "/v1/chat/completions": ({"messages": [{"role": "user", "content": "ab"}]}, CHATS),
}
REQUESTS = [
    (path, {**body, name: value}, name, served)
    for path, (body, own) in PATHS.items()
    for name, values in (BOTH | own).items()
    for served, given in zip((True, False), values, strict=True)
    for value in given
]


class Scoring(TypingEngine):
    """Scores each prompt alike, and is asked no grammar for what it says."""

    constrains = scores = True

    def score(self, tokens):
        n = len(tokens) - 1
        ids = np.tile(np.arange(20), (n, 1))
        return PromptScores(np.full(n, -2.0), np.ones(n, int), ids, np.full((n, 20), -2.0))

    def _speak(self, sample):
        sample.top_log_probs += [{token: -1.0} for token in self.tokens]
        super()._speak(sample)


@pytest.fixture(scope="module")
def server():
    with serving(Scoring([5, 6, 7]), bpe_tokenizer(), answer_format=tags) as server:
        yield server


def test_requests_by_hand(server):
    assert len(REQUESTS) >= 200
    wrong = []
    for path, body, name, served in REQUESTS:
        status, answer = ask(server, path, body)
        if served and status == 200:
            prompts = body.get("prompt", [])
            several = isinstance(prompts, list) and not isinstance((prompts or [0])[0], int)
            number = (body.get("n") or 1) * (len(prompts) if several else 1)
            if len(answer["choices"]) == number and answer["usage"]["completion_tokens"]:
                continue
        elif not served and status in (400, 404) and answer["error"]["param"] == name:
            continue
        wrong.append((path, name, body[name], status, answer))
    assert not wrong, "\n".join(str(x)[:400] for x in wrong)


def test_the_same_requests_by_the_client(server):
    wrong = []
    with openai.OpenAI(base_url=server.url, api_key="-", max_retries=0) as client:
        calls = {
            "/v1/completions": (client.completions.create, "prompt"),
            "/v1/chat/completions": (client.chat.completions.create, "messages"),
        }
        for path, body, name, served in REQUESTS:
            call, first = calls[path]
            extra = {k: v for k, v in body.items() if k != first}
            try:
                answer = call(model="org/policy", extra_body=extra, **{first: body[first]})
            except openai.APIStatusError as error:
                if served or error.param != name or error.status_code not in (400, 404):
                    wrong.append((path, name, body[name], error))
            else:
                if not served or not answer.choices:
                    wrong.append((path, name, body[name], answer))
    assert not wrong, "\n".join(str(x)[:400] for x in wrong)


@pytest.mark.parametrize("path", PATHS)
def test_every_field_streams_or_is_refused_before_the_stream(server, path):
    body, own = PATHS[path]
    for name, (served, _) in itertools.islice((BOTH | own).items(), 0, None, 4):
        if name not in ("stream", "stream_options", *body):
            for value in served:
                given = {**body, "stream": True, name: value}
                with openai.OpenAI(base_url=server.url, api_key="-", max_retries=0) as client:
                    raw = client.post(path.removeprefix("/v1"), body=given, cast_to=str)
                assert raw.endswith("data: [DONE]\n\n"), (name, value)
