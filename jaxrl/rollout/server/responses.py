"""Answers in OpenAI's form: whole, and as pieces of a stream."""

import functools
import json
import math
import re
import time
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from transformers.convert_slow_tokenizer import bytes_to_unicode

from jaxrl.rollout.native.stop_strings import Decode, GrowingText, completion_text
from jaxrl.rollout.protocol import Completion, PromptScores
from jaxrl.rollout.server.requests import SampleRequest
from jaxrl.rollout.server.served_model import ServedModel
from jaxrl.types import Message


def text_for_client(request: SampleRequest, tokenizer: Any, completion: Completion) -> str:
    """Return the text of a finished sample as its client gets it.

    It is without what stopped it, unless the request keeps that.
    """
    decode, stops, keep = _decode(tokenizer, request), request.sampling.stop, request.keep_stop
    if keep and completion.stop_string is None:  # perhaps a token
        return decode(completion.tokens)
    return completion_text(decode, completion, stops, keep_stop=keep)


def _decode(tokenizer: Any, request: SampleRequest) -> Decode:
    return functools.partial(tokenizer.decode, skip_special_tokens=request.skip_special_tokens)


class TextStream:
    """Hold the text of one sample, as far as nothing that comes can change it.

    Held back is what may be the beginning of a stop string, and bytes that are no whole character.

    Args:
        tokenizer: decodes tokens.
        request: has the stop strings.
    """

    def __init__(self, tokenizer: Any, request: SampleRequest) -> None:
        self.tokenizer, self.request = tokenizer, request
        self._text = GrowingText(_decode(tokenizer, request))
        self._sent, self._held = 0, ""

    def add(self, tokens: Sequence[int]) -> str:
        """Return the new text that these tokens make certain.

        None of them has stopped the sample.
        """
        text = self._held + self._text.add(tokens)
        length = certain(text, self.request.sampling.stop)
        self._sent, self._held = self._sent + length, text[length:]
        return text[:length]

    def finish(self, completion: Completion) -> str:
        """Return the rest of the text of a finished sample."""
        return text_for_client(self.request, self.tokenizer, completion)[self._sent :]


def certain(text: str, stops: Iterable[str]) -> int:
    """Return the length of the beginning of a text that no stop string completed later cuts off.

    Example: of "a b ST" with the stop string "STOP" it is 4.
    """
    sizes = (
        next((n for n in range(len(stop) - 1, 0, -1) if text.endswith(stop[:n])), 0)
        for stop in stops
    )
    return len(text) - max(sizes, default=0)


class ResponseBuilder:
    """Build the JSON of one request's answer.

    Args:
        served: model.
        request: what was asked.
        scores: of its prompts, where these are asked for.
    """

    def __init__(
        self, served: ServedModel, request: SampleRequest, scores: Sequence[PromptScores] = ()
    ) -> None:
        self.scores = scores
        self.served, self.tokenizer, self.request = served, served.tokenizer, request
        # JSON that was asked for is what it is, whatever its strings say
        is_json = request.constrain is not None and request.calls == 0
        self.answer_format = None if is_json else served.answer_format
        self._head = {"id": request.request_id, "created": int(time.time()), "model": served.name}
        self._prompt_of = [p for p, keys in enumerate(request.keys) for _ in keys]

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """Return the answer that is not streamed."""
        choices = []
        for number, completion in enumerate(completions):
            start = len(self.echo(number))
            choice = self._choice(number, completion, start)
            if self.request.chat:
                message = self.message(number, completion)
                choice["message"] = {**message, "refusal": None}
                _end_with_calls(choice, message)
            else:
                text = text_for_client(self.request, self.tokenizer, completion)
                choice["text"] = self.echo(number) + text
                if self.request.echo is not None and choice["logprobs"] is not None:
                    before = self._prompt_log_probs(number)
                    choice["logprobs"] = {
                        name: None if column is None else before[name] + column
                        for name, column in choice["logprobs"].items()
                    }
                if (told := self.request.prompt_alternatives) is not None:
                    choice["prompt_logprobs"] = self._scored(number, told)
            choices.append(choice)
        kind = "chat.completion" if self.request.chat else "text_completion"
        usage = self.usage(sum(len(c.tokens) for c in completions))
        return {**self._head, "object": kind, "choices": choices, "usage": usage}

    @property
    def created(self) -> int:
        """Return when it was asked for, in seconds of Unix time."""
        return int(self._head["created"])

    @property
    def in_parts(self) -> bool:
        """Return whether an answer is read as a whole: its thoughts, its calls, its content."""
        return self.request.chat and self.answer_format is not None

    def message(self, number: int, completion: Completion) -> Message:
        """Return what the assistant says in a finished sample; the same each time."""
        text = text_for_client(self.request, self.tokenizer, completion)
        if self.answer_format is None:
            return {"role": "assistant", "content": text}
        said = self.answer_format(text, self.request.calls != 0)
        calls = said.calls[: self.request.calls]
        message: Message = {"role": "assistant", "content": said.content}
        if said.thoughts:
            message["reasoning_content"] = said.thoughts
        if calls:
            message["content"] = said.content or None
            message["tool_calls"] = [
                {
                    "id": f"call-{self.request.request_id}-{number}-{i}",
                    "type": "function",
                    "function": {"name": name, "arguments": json.dumps(arguments)},
                }
                for i, (name, arguments) in enumerate(calls)
            ]
        return message

    @property
    def opens(self) -> bool:
        """Return whether a stream has an `opening`."""
        return self.request.chat or self.request.echo is not None

    def opening(self, number: int) -> dict[str, Any]:
        """Return the first piece of a chat, who speaks, or of a completion, its prompt."""
        choice = {"index": number, "logprobs": None, "finish_reason": None}
        if self.request.chat:
            return self._piece([{**choice, "delta": {"role": "assistant", "content": ""}}])
        if self.request.alternatives is not None:
            choice["logprobs"] = self._prompt_log_probs(number)
        return self._piece([{**choice, "text": self.echo(number)}])

    def echo(self, number: int) -> str:
        """Return what the text of a sample begins with: its prompt, if that is asked for."""
        echo = self.request.echo
        return "" if echo is None else echo[self._prompt_of[number]]

    def last_piece(self, number: int, new: Completion, whole: Completion) -> dict[str, Any]:
        """Return the last piece of a sample that is read as a whole: all that it says."""
        choice, message = self._choice(number, new), self.message(number, whole)
        _end_with_calls(choice, message)
        choice["delta"] = {name: value for name, value in message.items() if name != "role"}
        if calls := message.get("tool_calls"):
            choice["delta"]["tool_calls"] = [{"index": i, **c} for i, c in enumerate(calls)]
        return self._piece([choice])

    def piece(self, number: int, text: str, new: Completion, start: int) -> dict[str, Any]:
        """Return a piece of a stream.

        Args:
            start: characters of the sample's text before this piece.
        """
        choice = self._choice(number, new, start)
        if self.request.chat:
            choice["delta"] = {"content": text} if text or not new.stop_reason else {}
        else:
            choice["text"] = text
        return self._piece([choice])

    def usage_piece(self, tokens: int) -> dict[str, Any]:
        """Return the last piece of a stream, the usage, which is sent if it is asked for."""
        return self._piece([]) | {"usage": self.usage(tokens)}

    def usage(self, tokens: int) -> dict[str, int]:
        """Return the numbers of tokens of prompts and answers."""
        prompt = sum(map(len, self.request.prompts))
        return {
            "prompt_tokens": prompt,
            "completion_tokens": tokens,
            "total_tokens": prompt + tokens,
        }

    def _piece(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self.request.chat else "text_completion"
        return {**self._head, "object": kind, "choices": choices}

    def _choice(self, number: int, new: Completion, start: int = 0) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": number,
            "finish_reason": new.stop_reason or None,
            "stop_reason": self._stopped_by(new),
            "logprobs": None,
        }
        if self.request.alternatives is not None:
            choice["logprobs"] = (
                self._chat_log_probs(new) if self.request.chat else self._log_probs(new, start)
            )
        if self.request.return_token_ids:
            choice["token_ids"], choice["versions"] = new.tokens, new.versions
            choice["context_versions"] = new.context_versions
            choice["prompt_token_ids"] = list(self.request.prompts[self._prompt_of[number]])
        return choice

    def _stopped_by(self, new: Completion) -> str | int | None:
        if new.stop_reason != "stop":
            return None
        return new.tokens[-1] if new.stop_string is None else new.stop_string

    def _name(self, token: int) -> str:
        return self.tokenizer.decode([token])

    def _top(self, new: Completion, i: int) -> list[tuple[int, float]]:
        alternatives = self.request.alternatives or 0
        if not alternatives:
            return []
        possible = (pair for pair in new.top_log_probs[i].items() if math.isfinite(pair[1]))
        ranked = sorted(possible, key=lambda pair: -pair[1])
        return ranked[:alternatives]

    def _log_probs(self, new: Completion, start: int) -> dict[str, Any]:
        top = [self._named(self._top(new, i)) for i in range(len(new.tokens))]
        return self._columns(new.tokens, new.log_probs, top, start)

    def _columns(
        self, tokens: Sequence[int], log_probs: Sequence[Any], top: Sequence[Any], start: int
    ) -> dict[str, Any]:
        names = [self._name(token) for token in tokens]
        offsets = [start]
        for name in names:
            offsets.append(offsets[-1] + len(name))
        return {
            "tokens": names,
            "token_logprobs": log_probs,
            "top_logprobs": top if self.request.alternatives else None,
            "text_offset": offsets[:-1],
        }

    def _named(self, pairs: Sequence[tuple[int, float]]) -> dict[str, float]:
        return {self._name(token): score for token, score in pairs}

    def _prompt_log_probs(self, number: int) -> dict[str, Any]:
        """Return the log-probs of a sample's prompt as `_log_probs` has those of its answer."""
        prompt = self._prompt_of[number]
        scores, most = self.scores[prompt], self.request.alternatives or 0
        top = [
            self._named(list(zip(ids, values, strict=True))[:most])
            for ids, values in zip(
                scores.top_ids.tolist(), scores.top_log_probs.tolist(), strict=True
            )
        ]
        log_probs = [None, *scores.log_probs.tolist()]
        return self._columns(self.request.prompts[prompt], log_probs, [None, *top], 0)

    def _scored(self, number: int, alternatives: int) -> list[dict[str, Any] | None]:
        """Return of each token of a sample's prompt what vLLM does: of it, and of the likeliest."""
        prompt = self._prompt_of[number]
        found: list[dict[str, Any] | None] = [None]
        for token, own, rank, ids, values in zip(
            self.request.prompts[prompt][1:],
            *map(np.ndarray.tolist, self.scores[prompt]),
            strict=True,
        ):
            likeliest = zip(ids, values, range(1, alternatives + 1), strict=False)
            told = {token: (own, rank)} | {i: (x, n) for i, x, n in likeliest if i != token}
            found.append(
                {
                    str(i): {"logprob": x, "rank": n, "decoded_token": self._name(i)}
                    for i, (x, n) in told.items()
                }
            )
        return found

    def _chat_log_probs(self, new: Completion) -> dict[str, Any]:
        content = [
            self._entry(token, score)
            | {"top_logprobs": [self._entry(*pair) for pair in self._top(new, i)]}
            for i, (token, score) in enumerate(zip(new.tokens, new.log_probs, strict=True))
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token: int, score: float) -> dict[str, Any]:
        known = list(token_bytes(self.tokenizer, token))
        return {"token": self._name(token), "logprob": score, "bytes": known}


def _end_with_calls(choice: dict[str, Any], message: Message) -> None:
    """Let a choice say that it has ended with calls of tools, if it has."""
    if choice["finish_reason"] == "stop" and "tool_calls" in message:
        choice["finish_reason"] = "tool_calls"


def token_bytes(tokenizer: Any, token: int) -> bytes:
    """Return the bytes of UTF-8 that a token stands for, which may be a part of a character.

    Example: of a byte-level tokenizer's token "Ã" it is the byte c3, the first of an "é".
    """
    text = tokenizer.decode([token])
    if "\ufffd" not in text:
        return text.encode()
    name = tokenizer.convert_ids_to_tokens(token)
    if lone := re.fullmatch("<0x([0-9A-F]{2})>", name):  # SentencePiece's bytes
        return bytes.fromhex(lone[1])
    bytes_of = _byte_level()
    return bytes(map(bytes_of.__getitem__, name)) if bytes_of.keys() >= set(name) else text.encode()


@functools.cache
def _byte_level() -> dict[str, int]:
    """Return the byte that each character of a byte-level tokenizer's token stands for."""
    return {character: byte for byte, character in bytes_to_unicode().items()}
