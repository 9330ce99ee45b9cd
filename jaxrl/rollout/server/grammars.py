"""What an answer must be, JSON of a schema, of a regex, or calls of tools, token by token.

llguidance follows the grammar, token by token; https://github.com/guidance-ai/llguidance has which
keywords of JSON schemas it knows.
"""

import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import numpy as np

from jaxrl.rollout.protocol import Constraint
from jaxrl.rollout.server.errors import ApiError, refuse
from jaxrl.rollout.server.served_model import ServedModel

# Between two signs of JSON. Without a bound a model may write spaces until its tokens end.
WHITESPACE = r"[ \n\t]{1,16}"
ANY_OBJECT = {"type": "object"}


class Form(NamedTuple):
    """Say what the text of an answer must be.

    Attributes:
        kind: "json", "regex" or "choice".
        value: a schema, an expression that the whole text matches, or the texts that it may be.
    """

    kind: Literal["json", "regex", "choice"]
    value: Any

    @property
    def rule(self) -> str:
        """Return it as the right side of a rule, in llguidance's form of Lark."""
        if self.kind == "json":
            return _json(self.value)
        if self.kind == "choice":
            return " | ".join(json.dumps(text, ensure_ascii=False) for text in self.value)
        signs = {"/": r"\/", "\n": r"\n"}  # that end a regex there, or its line
        return f"/{re.sub(_ESCAPED, lambda m: signs.get(m[0], m[0]), self.value)}/"


_ESCAPED = re.compile(r"\\.|/|\n", re.DOTALL)


class Grammars:
    """Make constraints for the vocabulary of a model.

    Args:
        served: model.
    """

    def __init__(self, served: ServedModel) -> None:
        self.served = served

    def constrain(
        self,
        field: str,
        value: Any,
        form: Form | None,
        calls: Sequence[Mapping[str, Any]] = (),
        *,
        several: bool = False,
    ) -> Callable[[], Constraint]:
        """Return what makes the constraint of each answer: it has a form, or calls tools.

        Args:
            field: of the body that asks for it, with its value, for errors.
            form: of a text; None: no such answer.
            calls: functions that an answer may call, as `answer_formats.tags` reads them.
            several: an answer may have several calls.

        Raises:
            ApiError: 400, the grammar cannot be followed; 501, llguidance is not there.
        """
        try:
            from llguidance import LLMatcher, LLParserLimits
        except ImportError as error:
            message = f"{field}: this server lacks llguidance: pip install 'jaxrl[serve]'"
            raise ApiError(501, message, param=field) from error
        parts = [] if form is None else [(field, form)]
        parts += [
            (f"tools, parameters of {f['name']!r}", Form("json", _parameters(f))) for f in calls
        ]
        for where, part in parts:  # each by itself: the error says no more than what is wrong
            alone = LLMatcher.grammar_from_lark(f"start: {part.rule}")
            if part.kind == "json":
                alone = LLMatcher.grammar_from_json_schema(json.dumps(part.value))
            wrong, messages = LLMatcher.validate_grammar_with_warnings(alone)
            if wrong:
                raise _not_followed(where, messages[0])
        added = self.served.tokenizer.get_added_vocab()
        grammar = LLMatcher.grammar_from_lark(lark(form, calls, added, several=several))
        limits = LLParserLimits(verbose_errors=False)
        try:
            matcher = LLMatcher(self._vocabulary, grammar, log_level=0, limits=limits)
        except ValueError as error:  # of a tokenizer whose tokens have no known bytes
            refuse(field, value, f"is not there for the tokenizer of this model ({error})")
        first = Answer(field, matcher, -(-self.served.vocab_size // 8))
        first.allowed()
        return first.copy

    @functools.cached_property
    def _vocabulary(self) -> Any:
        """Return the bytes of all tokens; that of a large vocabulary takes a second."""
        from llguidance.hf import from_tokenizer

        served, known = self.served, len(self.served.tokenizer)
        stops = [token for token in served.eos_token_ids if token < known]
        return from_tokenizer(
            served.tokenizer, n_vocab=max(served.vocab_size, known), eos_token=stops
        )


class Answer:
    """Follow one answer through a grammar, as a `protocol.Constraint`.

    Args:
        field: of the body that asks for it.
        matcher: of llguidance.
        size: bytes of the bits that are wanted.
    """

    def __init__(self, field: str, matcher: Any, size: int) -> None:
        self.field, self.matcher, self.size = field, matcher, size

    def copy(self) -> "Answer":
        """Return another answer that is as far as this one."""
        return Answer(self.field, self.matcher.deep_copy(), self.size)

    def allowed(self) -> np.ndarray:
        """Return the ids that may come next, see `Constraint`.

        Raises:
            ApiError: 400, the grammar is wrong, or too large to follow.
        """
        bits = np.frombuffer(self.matcher.compute_bitmask(), np.uint8)[: self.size]
        if self.matcher.is_error():
            raise _not_followed(self.field, self.matcher.get_error())
        if not bits.any():
            raise _not_followed(self.field, "no token of the vocabulary goes on as it asks")
        return bits

    def take(self, tokens: Sequence[int]) -> None:
        """Go on behind tokens that were drawn."""
        self.matcher.consume_tokens(list(tokens))


def lark(
    form: Form | None,
    calls: Sequence[Mapping[str, Any]] = (),
    added: Mapping[str, int] = MappingProxyType({}),
    *,
    several: bool,
) -> str:
    """Write the grammar of answers in llguidance's form of Lark; see `Grammars.constrain`.

    Args:
        added: tokens beside those of the vocabulary's merges. A tag that is one of them is written
            by its id: its letters, to llguidance, are other tokens.
    """
    begin, end = (
        f"<[{added[tag]}]>" if tag in added else json.dumps(tag)
        for tag in ("<tool_call>", "</tool_call>")
    )
    rules = []
    if form is not None:
        rules.append(f"answer: {form.rule}")
    if calls:
        rules.append('calls: call ("\\n" call)*' if several else "calls: call")
        which = " | ".join(f"call_{i}" for i in range(len(calls)))
        rules.append(f'call: {begin} "\\n" ({which}) "\\n" {end}')
    for i, function in enumerate(calls):
        named = f'{{"name": {json.dumps(function["name"], ensure_ascii=False)}, "arguments": '
        rules.append(f'call_{i}: {json.dumps(named)} arguments_{i} "}}"')
        rules.append(f"arguments_{i}: {_json(_parameters(function))}")
    kinds = [kind for kind, there in (("answer", form is not None), ("calls", calls)) if there]
    return "\n".join([f"start: {' | '.join(kinds)}", *rules])


def _parameters(function: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of a function's arguments, an object."""
    parameters = function.get("parameters") or {"additionalProperties": False}
    if not isinstance(parameters, dict):
        where = f"tools, parameters of {function['name']!r}"
        raise _not_followed(where, "must be a JSON schema, an object")
    return {**parameters, **ANY_OBJECT}


def _not_followed(where: str, why: str) -> ApiError:
    """Return the answer to a schema that the grammar cannot be made or followed for."""
    words = " ".join(why.removesuffix("<non-verbose/>").split())
    param = where.partition(".")[0].partition(",")[0]
    return ApiError(400, f"{where}: {words}; change the schema, or leave {param} out", param=param)


def _json(schema: Mapping[str, Any]) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': {'whitespace_pattern': WHITESPACE}})}"
