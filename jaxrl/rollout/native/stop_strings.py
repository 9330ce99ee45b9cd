"""The text of a sample that grows, and the stop strings in it; both cost the same for every token.

A token's text depends on its neighbours: it may be a part of a character, or lose a space where the
text begins with it. So new tokens are decoded behind those that came just before.
"""

import copy
import os.path
from collections.abc import Callable, Iterable, Sequence

from jaxrl.rollout.conversations.turns import spoken_tokens
from jaxrl.rollout.protocol import Completion

REPLACEMENT = "\ufffd"  # a decoder writes it for bytes that are no whole character yet
PARTS = 3  # most tokens of a character without its last byte; UTF-8 has four bytes at most

Decode = Callable[[Sequence[int]], str]


class GrowingText:
    """Decode the tokens of one sample as they come, each of them a few times at most.

    What `add` returned, put together, is the beginning of the text of all tokens; `rest` is what is
    missing at its end. A shallow copy goes on by itself.

    Example: with the tokens "I", " ", a byte of "é", the other byte and "!", `add` returns
    "I", " ", "", "é" and "!".

    Args:
        decode: token ids to text.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._before: list[int] = []  # what the text of the next tokens depends on
        self._skip = 0  # characters of its own text
        self._open: list[int] = []  # tokens whose text is not certain yet
        self._given = 0  # characters of it that are

    def add(self, tokens: Sequence[int]) -> str:
        """Add tokens, and return the new text that they make certain."""
        self._open = [*self._open, *tokens]
        text = self._text(self._open)
        head, end = text, len(self._open)
        while head.endswith(REPLACEMENT) and end > len(self._open) - PARTS:
            end -= 1
            head = self._text(self._open[:end])
        certain = max(text.rstrip(REPLACEMENT), head, key=len)  # no token mends the end of `head`
        new, self._given = certain[self._given :], len(certain)
        if head:
            self._before, self._open = self._open[:end], self._open[end:]
            self._given -= len(head)
            self._skip = len(self._decode(self._before))
        return new

    def rest(self) -> str:
        """Return the text after what `add` returned: bytes that are no whole character."""
        return self._text(self._open)[self._given :]

    def _text(self, tokens: Sequence[int]) -> str:
        return self._decode([*self._before, *tokens])[self._skip :] if tokens else ""


class StopStrings:
    """Look for stop strings in the text of a sample, in what is new alone.

    Args:
        strings: none of them empty.
        decode: token ids to text.
    """

    def __init__(self, strings: Sequence[str], decode: Decode) -> None:
        self._strings, self._text = strings, GrowingText(decode)
        self._longest = max(map(len, strings))
        self._end = ""  # of the text so far, as much as a string may begin in

    def skip(self, tokens: Sequence[int]) -> None:
        """Add tokens that complete no string, whatever their text is."""
        if tokens:
            self._advance(self._text.add(tokens))

    def find(self, tokens: Sequence[int]) -> tuple[int, str] | None:
        """Add tokens; return how many there are up to the first that completes a string, and which.

        Of several that a token completes it is the one that begins first.
        """
        before = copy.copy(self._text)
        new = self._text.add(tokens)
        if self._in(new) is None:
            self._advance(new)
            return None
        for size, token in enumerate(tokens, 1):
            new = before.add([token])
            if (string := self._in(new)) is not None:
                return size, string
            self._advance(new)
        return None  # a decoder that writes other text for tokens one by one

    def _advance(self, new: str) -> None:
        self._end = (self._end + new)[-(self._longest - 1) :] if self._longest > 1 else ""

    def _in(self, new: str) -> str | None:
        """Return the string that ends in new text and begins first."""
        found = first_stop(self._end + new, len(self._end), self._strings)
        return None if found is None else found[1]


def first_stop(text: str, known: int, strings: Iterable[str]) -> tuple[int, str] | None:
    """Return the place and the string of the first one that ends after `known` characters.

    The first in the list, if several begin there.
    """
    places = [(text.find(string, max(known - len(string) + 1, 0)), string) for string in strings]
    return min((p for p in places if p[0] >= 0), key=lambda place: place[0], default=None)


def completion_text(
    decode: Decode, completion: Completion, strings: Iterable[str], *, keep_stop: bool = False
) -> str:
    """Return the text of a finished sample, cut at the first stop string that its end completes.

    Its last token may complete several, and reach beyond them. What came before does not count: it
    lies within the first `min_tokens`.

    Args:
        keep_stop: cut behind the stop string instead of before it.

    Example: "x" and ".y." with the stop string "." say "x", or with `keep_stop` "x.".
    """
    text = decode(spoken_tokens(completion))
    if completion.stop_string is None:
        return text
    before = os.path.commonprefix([decode(completion.tokens[:-1]), text])
    found = first_stop(text, len(before), strings)
    if found is None:  # the engine decodes special tokens otherwise
        return text
    at, string = found
    return text[: at + len(string)] if keep_stop else text[:at]
