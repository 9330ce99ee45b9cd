"""The bodies of requests: their fields, and what these may be.

A field that is null is as if absent, and none is silently ignored but those of `IGNORED`, which
cannot change an answer. Bounds that depend on the model or the config are checked where they are
known: in `requests`.
"""

import contextlib
import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from jaxrl.rollout.server.errors import ApiError, shown
from jaxrl.types import Message

MOST_ALTERNATIVES = 20
MOST_STOPS = 16
# about the client, its bills and its caches
IGNORED = {
    "user",
    "metadata",
    "store",
    "service_tier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "prediction",
    "priority",
    "cache_salt",
}
# features that are not there, with the values that do not ask for them
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "best_of": (1,),
    "echo": (False,),
    "prompt_logprobs": (),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("auto",),
    "parallel_tool_calls": (True,),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "use_beam_search": (False,),
    "detokenize": (True,),
    "length_penalty": (1,),
    "spaces_between_special_tokens": (True,),
    "bad_words": ([],),
    "watermarking": (False,),
    "documents": ([],),
    "include_reasoning": (True,),
    "return_tokens_as_token_ids": (False,),
    "return_token_offsets": (False,),
    "return_prompt_text": (False,),
    "return_mm_kwargs": (True,),
    "routed_experts_prompt_start": (0,),
}

# older names of vLLM, and what has taken their place
RENAMED = {
    f"guided_{kind}": f'structured_outputs={{"{kind}": ...}}'
    for kind in ("json", "regex", "choice")
}


def invalid(error: ValidationError) -> ApiError:
    """Return the answer to a body with wrong fields: status 400, each field, its value, the fix."""
    problems = error.errors(include_url=False)
    message = "; ".join(map(_problem, problems))
    return ApiError(400, message, param=str(problems[0]["loc"][0]))


def _problem(problem: Mapping[str, Any]) -> str:
    name = ".".join(map(str, problem["loc"]))
    value, fix = problem["input"], problem["msg"].removeprefix("Input ")
    if problem["type"] == "missing":
        value, fix = None, "is required"
    elif problem["type"] == "extra_forbidden" and name in RENAMED:
        fix = f"is {RENAMED[name]} in vLLM's newer words; write that"
    elif problem["type"] == "extra_forbidden" and name in UNSUPPORTED:
        fix = "is not supported by this server; leave it out"
    elif problem["type"] == "extra_forbidden":
        fix = "is not a field that this server knows; leave it out"
    return f"{name}={shown(value)}: {fix}"


class Body(BaseModel):
    """Describe the JSON object of a request."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _leave_out(cls, body: Any) -> Any:
        """Leave out null, and what cannot change an answer."""
        if not isinstance(body, dict):
            return body
        return {
            name: value
            for name, value in body.items()
            if value not in (None, *UNSUPPORTED.get(name, ())) and name not in IGNORED
        }


def _as_list(stop: Any) -> Any:
    return [stop] if isinstance(stop, str) else stop


def _as_prompts(prompt: Any) -> Any:
    """Return one prompt, a text or token ids, as a list of one."""
    several = isinstance(prompt, list) and not all(type(entry) is int for entry in prompt)
    return prompt if several else [prompt]


def plain_messages(messages: list[dict[str, Any]]) -> list[Message]:
    """Return messages in the one form in which they are rendered and compared.

    Fields that are null are gone, a content of text parts is one string, that of an assistant who
    only calls tools is "", and arguments of calls are objects, not their JSON, as chat templates
    want them.
    """
    if not all(isinstance(message.get("role"), str) for message in messages):
        raise ValueError('each must be an object with a "role" and a "content"')
    return [_plain_message(message) for message in messages]


def _plain_message(message: dict[str, Any]) -> Message:
    plain = {k: _plain(v) if k == "content" else v for k, v in message.items() if v is not None}
    if plain["role"] == "assistant":
        calls = plain.pop("tool_calls", [])
        if not isinstance(calls, list) or not all(_is_call(call) for call in calls):
            raise ValueError('tool_calls is a list of {"id", "type", "function"}')
        plain = {"role": "assistant", "content": "", **plain}
        if calls:
            plain["tool_calls"] = [_plain_call(call) for call in calls]
    return plain


def _is_call(call: Any) -> bool:
    function = call.get("function") if isinstance(call, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def _plain_call(call: dict[str, Any]) -> dict[str, Any]:
    arguments = call["function"].get("arguments", {})
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError):  # the client's own words; a template may write them
            arguments = json.loads(arguments)
    return {**call, "function": {**call["function"], "arguments": arguments}}


def plain_tools(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return tools as they are; refuse what no template can write."""
    for tool in tools:
        if tool.get("type") != "function" or not _is_call(tool):
            raise ValueError('each must be {"type": "function", "function": {"name": ...}}')
    return tools


def _plain(content: Any) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    if not all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in parts):
        raise ValueError("a content is a string or a list of parts of type text")
    return "".join(p["text"] for p in parts)


UInt32 = Annotated[int, Field(ge=0, lt=2**32)]
Key = Annotated[list[UInt32], Field(min_length=2, max_length=2)]  # of a PRNG
Positive = Annotated[int, Field(ge=1)]
NotEmpty = Annotated[str, Field(min_length=1)]
Stops = Annotated[list[NotEmpty], BeforeValidator(_as_list), Field(max_length=MOST_STOPS)]
Prompts = Annotated[list[str | list[int]], BeforeValidator(_as_prompts)]
Messages = Annotated[list[dict[str, Any]], Field(min_length=1), AfterValidator(plain_messages)]
Tools = Annotated[list[dict[str, Any]], AfterValidator(plain_tools)]
Alternatives = Annotated[int, Field(ge=0, le=MOST_ALTERNATIVES)]


class Part(Body):
    """Describe an object within a body."""

    @model_validator(mode="before")
    @classmethod
    def _leave_out(cls, body: Any) -> Any:
        """Leave out null alone: fields that other bodies ignore do not belong here."""
        known = isinstance(body, dict)
        return {name: x for name, x in body.items() if x is not None} if known else body


class StreamOptions(Part):
    """Describe what a stream has beside the answer."""

    include_usage: bool = False
    include_obfuscation: bool = False  # nothing is hidden by it on a connection of one's own


class JsonSchema(Part):
    """Describe the schema of an answer; it is kept to, `strict` or not."""

    name: str = ""
    description: str = ""
    strict: bool = True
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class ResponseFormat(Part):
    """Describe what the text of an answer must be: anything, any JSON object, or of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> "ResponseFormat":
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError('"json_schema" is there if, and only if, it is the type')
        return self


def _schema(given: Any) -> Any:
    """Return the schema in a string, or what is none."""
    with contextlib.suppress(ValueError):
        return json.loads(given) if isinstance(given, str) else given
    return given


class StructuredOutputs(Part):
    """Describe what the text of an answer must be, as vLLM's users do: one of these."""

    json_: Annotated[dict[str, Any] | None, BeforeValidator(_schema), Field(alias="json")] = None
    json_object: Literal[True] | None = None
    regex: NotEmpty | None = None
    choice: Annotated[list[NotEmpty], Field(min_length=1)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _has_one(cls, body: Any) -> Any:
        if isinstance(body, dict) and len(body) != 1:
            raise ValueError("needs exactly one of json, json_object, regex and choice")
        return body

    @property
    def kind(self) -> Literal["json", "json_object", "regex", "choice"]:
        """Return which it is."""
        return next(iter(self.model_dump(by_alias=True, exclude_none=True)))  # type: ignore[return-value]

    @property
    def value(self) -> Any:
        """Return the schema, the expression or the texts."""
        return self.model_dump(by_alias=True)[self.kind]


class FunctionName(Part):
    """Say which function a model must call, by its name."""

    name: str


class NamedTool(Part):
    """Name the tool that an answer must call."""

    type: Literal["function"]
    function: FunctionName


class SamplesBody(Body):
    """Describe what chats and completions have in common.

    None is the default of the server, or of the session.
    """

    model: str | None = None
    request_id: str | None = None
    n: Positive | None = None
    keys: Annotated[list[Key], Field(min_length=1)] | None = None
    seed: int | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    max_completion_tokens: Positive | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    stop: Stops = []
    stop_token_ids: Annotated[list[int], Field(max_length=MOST_STOPS)] = []
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    return_token_ids: bool = False
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False


class CompletionBody(SamplesBody):
    """Describe the body that asks for completions of prompts, POST /v1/completions."""

    prompt: Prompts
    add_special_tokens: bool = True
    logprobs: Alternatives | None = None
    prompt_logprobs: Alternatives | None = None
    echo: bool = False


class Rendered(Body):
    """Describe messages, and how the chat template writes them."""

    messages: Messages
    chat_template_kwargs: dict[str, Any] = {}
    reasoning_effort: NotEmpty | None = None
    add_special_tokens: Literal[False] = False  # the template writes them
    add_generation_prompt: bool = True
    continue_final_message: bool = False


class ChatBody(SamplesBody, Rendered):
    """Describe the body that asks for the next turn of a chat, POST /v1/chat/completions."""

    tools: Tools = []
    tool_choice: Literal["auto", "none", "required"] | NamedTool = "auto"
    parallel_tool_calls: bool = True
    logprobs: bool = False
    top_logprobs: Alternatives = 0


class TokenizeTextBody(Body):
    """Describe POST /tokenize of a text."""

    model: str | None = None
    prompt: str = ""
    add_special_tokens: bool = True


class TokenizeChatBody(Rendered):
    """Describe POST /tokenize of messages."""

    model: str | None = None


class DetokenizeBody(Body):
    """Describe the body that asks for the text of token ids, POST /detokenize."""

    model: str | None = None
    tokens: list[int]


class AbortBody(Body):
    """Describe POST /abort; without ids all requests are meant."""

    request_ids: list[str] | None = None


class RewardBody(Body):
    """Describe POST /sessions/ID/reward: what the whole conversation was worth.

    One of a training run needs the secret that its agent was told.
    """

    reward: float
    secret: str | None = None


class UpdateWeightsBody(Body):
    """Describe POST /update_weights: a folder, and the number of its weights."""

    path: NotEmpty
    version: Annotated[int, Field(ge=0, lt=2**31)] | None = None
