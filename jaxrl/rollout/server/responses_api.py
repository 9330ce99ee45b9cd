"""OpenAI's /v1/responses as a view of chat: what it asks is a chat, what it is told of one answer.

Nothing is kept between two requests: `store` is ignored, and `previous_response_id` refused.
"""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from jaxrl.rollout.protocol import Completion
from jaxrl.rollout.server.bodies import Body, Messages, NotEmpty, Part, Positive
from jaxrl.rollout.server.errors import ApiError
from jaxrl.rollout.server.responses import ResponseBuilder

# how a chat calls what is named otherwise here
_NAMES = {
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "response_format": "text",
    "reasoning_effort": "reasoning",
}
# values that ask for nothing, of features that are not there
_NOTHING = {
    "background": False,
    "include": [],
    "truncation": "disabled",
    "top_logprobs": 0,
    "tools": [],
}


def _as_messages(given: Any) -> Any:
    """Return the messages of an input, a text or items, as a chat has them."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise ValueError("is a text, or a list of messages")
    if not all(isinstance(x, dict) and x.get("type", "message") == "message" for x in given):
        raise ValueError("its items are messages; others (calls, files, references) are not read")
    return [{k: v for k, v in x.items() if k in ("role", "content")} for x in given]


class TextFormat(Part):
    """Describe what the text of an answer must be; see `bodies.JsonSchema`."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str = ""
    description: str = ""
    strict: bool = True
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None


class TextOptions(Part):
    """Describe the text of an answer."""

    format: TextFormat = TextFormat()


class Reasoning(Part):
    """Describe how long the model is to think."""

    effort: NotEmpty | None = None


class ResponsesBody(Body):
    """Describe the body of POST /v1/responses."""

    input: Annotated[Messages, BeforeValidator(_as_messages)]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: Positive | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool = False
    text: TextOptions = TextOptions()
    reasoning: Reasoning = Reasoning()


class ResponseView:
    """Show one chat as a response.

    Args:
        raw: the body of the request.

    Attributes:
        chat: the body of the chat.
    """

    def __init__(self, raw: dict[str, Any]) -> None:
        asks = {k: v for k, v in raw.items() if k not in _NOTHING or v != _NOTHING[k]}
        self.body = ResponsesBody.model_validate(asks)
        self.chat = self._chat()
        self._number = 0  # of the next event

    def _chat(self) -> dict[str, Any]:
        body, form = self.body, self.body.text.format
        before = [] if body.instructions is None else [("system", body.instructions)]
        chat: dict[str, Any] = {
            "messages": [*({"role": r, "content": c} for r, c in before), *body.input],
            "model": body.model,
            "max_completion_tokens": body.max_output_tokens,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "stream": body.stream,
            "reasoning_effort": body.reasoning.effort,
        }
        if form.type == "json_schema":
            schema = {"name": form.name, "schema": form.schema_}
            chat["response_format"] = {"type": form.type, "json_schema": schema}
        elif form.type == "json_object":
            chat["response_format"] = {"type": form.type}
        return chat

    def renamed(self, error: ApiError) -> ApiError:
        """Return an error of the chat as one of the field that the client gave."""
        error.param = _NAMES.get(error.param or "", error.param)
        return error

    def whole(self, answer: ResponseBuilder, completion: Completion) -> dict[str, Any]:
        """Return the answer to it."""
        reason = completion.stop_reason
        status = {"stop": "completed", "abort": "cancelled"}.get(reason, "incomplete")
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        usage = answer.usage(len(completion.tokens))
        return self._response(answer, status) | {
            "incomplete_details": cut,
            "output": list(self._items(answer, completion, status)),
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage["total_tokens"],
            },
        }

    def opening(self, answer: ResponseBuilder) -> Iterator[dict[str, Any]]:
        """Yield the events that a stream begins with."""
        begun = self._response(answer, "in_progress")
        yield self._event("response.created", response=begun)
        yield self._event("response.in_progress", response=begun)
        item = self._message(answer, "in_progress", [])
        yield self._event("response.output_item.added", output_index=0, item=item)
        part = _part("")
        yield self._event("response.content_part.added", **self._place(answer), part=part)

    def piece(self, answer: ResponseBuilder, text: str) -> dict[str, Any]:
        """Return the event of new text."""
        place = self._place(answer)
        return self._event("response.output_text.delta", **place, delta=text, logprobs=[])

    def ending(self, answer: ResponseBuilder, completion: Completion) -> Iterator[dict[str, Any]]:
        """Yield the events that a stream ends with."""
        whole, place = self.whole(answer, completion), self._place(answer)
        item = whole["output"][-1]
        (part,) = item["content"]
        yield self._event("response.output_text.done", **place, text=part["text"], logprobs=[])
        yield self._event("response.content_part.done", **place, part=part)
        yield self._event("response.output_item.done", output_index=0, item=item)
        whole["output"] = [item]  # thoughts have no place in the events that were sent
        kind = "completed" if whole["status"] == "completed" else "incomplete"
        yield self._event(f"response.{kind}", response=whole)

    def error(self, error: ApiError) -> dict[str, Any]:
        """Return the event of an error in a stream that has begun."""
        told = self.renamed(error)
        fields = {"message": str(told), "param": told.param, "code": told.code}
        return self._event("error", **fields)

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **fields}

    def _place(self, answer: ResponseBuilder) -> dict[str, Any]:
        return {
            "item_id": f"msg-{answer.request.request_id}",
            "output_index": 0,
            "content_index": 0,
        }

    def _response(self, answer: ResponseBuilder, status: str) -> dict[str, Any]:
        body = self.body
        return {
            "id": f"resp-{answer.request.request_id}",
            "object": "response",
            "created_at": answer.created,
            "model": answer.served.name,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "output": [],
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "temperature": answer.request.sampling.temperature,
            "text": body.text.model_dump(by_alias=True, exclude_none=True, exclude_defaults=True),
            "tool_choice": "auto",
            "tools": [],
            "top_p": answer.request.sampling.top_p,
            "usage": None,
        }

    def _items(
        self, answer: ResponseBuilder, completion: Completion, status: str
    ) -> Iterator[dict[str, Any]]:
        message = answer.message(0, completion)
        if thoughts := message.get("reasoning_content"):
            content = [{"type": "reasoning_text", "text": thoughts}]
            name = f"rs-{answer.request.request_id}"
            yield {"type": "reasoning", "id": name, "summary": [], "content": content}
        ended = "completed" if status == "completed" else "incomplete"
        yield self._message(answer, ended, [_part(message["content"])])

    def _message(
        self, answer: ResponseBuilder, status: str, content: list[dict[str, Any]]
    ) -> dict[str, Any]:
        name = f"msg-{answer.request.request_id}"
        message = {"type": "message", "id": name, "role": "assistant"}
        return {**message, "status": status, "content": content}


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
