"""Answers in OpenAI's form: whole, and as pieces of a stream."""

import time
from collections.abc import Iterable, Sequence
from typing import Any

from jaxrl.rollout.protocol import Completion
from jaxrl.rollout.turns import spoken_tokens
from jaxrl.serving.requests import Ask

_REPLACEMENT = "\ufffd"  # a decoder writes it for bytes that are no whole character yet


def said(tokenizer: Any, ask: Ask, completion: Completion) -> str:
    """The text of a finished sample, without what stopped it."""
    text = tokenizer.decode(spoken_tokens(completion), skip_special_tokens=ask.skip_special_tokens)
    if completion.stop_string is None:
        return text
    head, found, _ = text.rpartition(completion.stop_string)
    return head if found else text


class TextStream:
    """The text of one sample, as far as nothing that comes can change it.

    Held back is what may be the beginning of a stop string, and bytes that are no whole character.

    Args:
        tokenizer: decodes all tokens anew for every piece, since a token's text depends on others.
        ask: has the stop strings.
    """

    def __init__(self, tokenizer: Any, ask: Ask) -> None:
        self.tokenizer, self.ask = tokenizer, ask
        self._tokens: list[int] = []
        self._given = ""

    def add(self, tokens: Sequence[int]) -> str:
        """The new text that these tokens make certain."""
        self._tokens += tokens
        skip = self.ask.skip_special_tokens
        text = self.tokenizer.decode(self._tokens, skip_special_tokens=skip).rstrip(_REPLACEMENT)
        return self._give(text[: certain(text, self.ask.sampling.stop)])

    def finish(self, completion: Completion) -> str:
        """The rest."""
        return self._give(said(self.tokenizer, self.ask, completion))

    def _give(self, text: str) -> str:
        if not text.startswith(self._given):  # a decoder that rewrites what it wrote
            return ""
        new, self._given = text[len(self._given) :], text
        return new


def certain(text: str, stops: Iterable[str]) -> int:
    """Length of the beginning of a text that no stop string can cut off.

    Example: of "a b ST" with the stop string "STOP" it is 4.
    """
    length = len(text)
    for stop in stops:
        found = text.find(stop)
        if found >= 0:
            length = min(length, found)
        sizes = range(min(len(stop) - 1, len(text)), 0, -1)
        partial = next((n for n in sizes if text.endswith(stop[:n])), 0)
        length = min(length, len(text) - partial)
    return length


class Answer:
    """Builds the JSON of one request's answer.

    Args:
        model: name.
        tokenizer: to name tokens.
        ask: what was asked.
    """

    def __init__(self, model: str, tokenizer: Any, ask: Ask) -> None:
        self.tokenizer, self.ask = tokenizer, ask
        self._head = {"id": ask.request_id, "created": int(time.time()), "model": model}
        self._prompt_of = [p for p, keys in enumerate(ask.keys) for _ in keys]

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """The answer that is not streamed."""
        choices = []
        for number, completion in enumerate(completions):
            text = said(self.tokenizer, self.ask, completion)
            choice = self._choice(number, completion)
            if self.ask.chat:
                choice["message"] = {"role": "assistant", "content": text, "refusal": None}
            else:
                choice["text"] = text
            choices.append(choice)
        kind = "chat.completion" if self.ask.chat else "text_completion"
        usage = self.usage(sum(len(c.tokens) for c in completions))
        return {**self._head, "object": kind, "choices": choices, "usage": usage}

    def opening(self, number: int) -> dict[str, Any]:
        """The first piece of a chat: who speaks."""
        choice = {"index": number, "delta": {"role": "assistant", "content": ""}}
        return self._piece([{**choice, "logprobs": None, "finish_reason": None}])

    def piece(self, number: int, text: str, new: Completion, start: int) -> dict[str, Any]:
        """A piece of a stream.

        Args:
            start: characters of the sample's text before this piece.
        """
        choice = self._choice(number, new, start)
        if self.ask.chat:
            choice["delta"] = {"content": text} if text or not new.stop_reason else {}
        else:
            choice["text"] = text
        return self._piece([choice])

    def usage_piece(self, tokens: int) -> dict[str, Any]:
        """The last piece, if it is asked for."""
        return self._piece([]) | {"usage": self.usage(tokens)}

    def usage(self, tokens: int) -> dict[str, int]:
        """Tokens of prompts and answers."""
        prompt = sum(map(len, self.ask.prompts))
        return {
            "prompt_tokens": prompt,
            "completion_tokens": tokens,
            "total_tokens": prompt + tokens,
        }

    def _piece(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self.ask.chat else "text_completion"
        return {**self._head, "object": kind, "choices": choices}

    def _choice(self, number: int, new: Completion, start: int = 0) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": number,
            "finish_reason": new.stop_reason or None,
            "stop_reason": self._stopped_by(new),
            "logprobs": None,
        }
        if self.ask.alternatives is not None:
            choice["logprobs"] = (
                self._chat_log_probs(new) if self.ask.chat else self._log_probs(new, start)
            )
        if self.ask.return_token_ids:
            choice["token_ids"], choice["versions"] = new.tokens, new.versions
            choice["prompt_token_ids"] = list(self.ask.prompts[self._prompt_of[number]])
        return choice

    def _stopped_by(self, new: Completion) -> str | int | None:
        if new.stop_reason != "stop":
            return None
        return new.tokens[-1] if new.stop_string is None else new.stop_string

    def _name(self, token: int) -> str:
        return self.tokenizer.decode([token])

    def _top(self, new: Completion, i: int) -> list[tuple[str, float]]:
        alternatives = self.ask.alternatives or 0
        if not alternatives:
            return []
        ranked = sorted(new.top_log_probs[i].items(), key=lambda pair: -pair[1])
        return [(self._name(token), score) for token, score in ranked[:alternatives]]

    def _log_probs(self, new: Completion, start: int) -> dict[str, Any]:
        names = [self._name(token) for token in new.tokens]
        offsets = [start]
        for name in names:
            offsets.append(offsets[-1] + len(name))
        top = [dict(self._top(new, i)) for i in range(len(names))]
        return {
            "tokens": names,
            "token_logprobs": new.log_probs,
            "top_logprobs": top if self.ask.alternatives else None,
            "text_offset": offsets[:-1],
        }

    def _chat_log_probs(self, new: Completion) -> dict[str, Any]:
        content = [
            _entry(self._name(token), score)
            | {"top_logprobs": [_entry(*pair) for pair in self._top(new, i)]}
            for i, (token, score) in enumerate(zip(new.tokens, new.log_probs, strict=True))
        ]
        return {"content": content, "refusal": None}


def _entry(name: str, score: float) -> dict[str, Any]:
    return {"token": name, "logprob": score, "bytes": list(name.encode())}
