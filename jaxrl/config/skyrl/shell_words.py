"""Split the text of a shell script into commands of raw words; quotes and expansions are kept."""

import re
from collections.abc import Iterator
from typing import NamedTuple

_BLANK = re.compile(r"(?:[ \t]|\\\n)+|\#[^\n]*")
_SEPARATOR = re.compile(r"&&|\|\||;;|\|&|[\n;&|()]")
_REDIRECTION = re.compile(r"\d*(?:&>>?|<<<|<<-?|>>|>&|>\||<&|<>|[<>])[ \t]*")
_HERE_DOCUMENT = re.compile(r"(?<!<)<<(-?)[ \t]*([\"'\\]?\w+[\"']?)")
_NO_PARAMETERS = re.compile(r"\([ \t]*\)")  # of the definition of a function
_SIMPLE_PART = re.compile(r"\\.|\$(?:[A-Za-z_]\w*|[0-9@*#?$!-])", re.DOTALL)
_UNQUOTED_PART = re.compile(r"'[^']*'|\$'(?:\\.|[^'\\])*'|(?<=\s)#[^\n]*", re.DOTALL)
_BRACKETS = (('"', '"'), ("`", "`"), ("$(", ")"), ("${", "}"), ("$[", "]"), ('$"', '"'), ("(", ")"))


class Command(NamedTuple):
    """Hold a simple command, e.g. `A="$B c"`, `then`, `uv run x trainer.seed=1`.

    Attributes:
        separator: what stands before it: "", a newline, ";", "&&", "||", "|", "(", ")" ...
        words: as they are written, without redirections.
        here_documents: their marks, ["<<EOF"]; what they hold is skipped.
        end: what stands after it: a newline, ";", "&", "|" ..., "" at the end of the text.
    """

    separator: str
    words: list[str]
    here_documents: list[str]
    end: str = ""


def split_commands(text: str) -> Iterator[Command]:  # noqa: PLR0912
    """Yield the commands of a script in the order in which they are written.

    Raises:
        ValueError: a quotation or a bracket is not closed.
    """
    command, i = Command("", [], []), 0
    pending: list[str] = []  # marks of here-documents that begin after this line
    while i < len(text):
        words = command.words
        in_test = "[[" in words and "]]" not in words  # where && and < are operators
        if blank := _BLANK.match(text, i):
            i = blank.end()
        elif text.startswith("((", i) or (in_test and text[i] != ";" and text[i] != "\n"):
            end = _word_end(text, i, " \t\n;") if in_test else part_end(text, i)
            words.append(text[i:end])
            i = end
        elif words and (none := _NO_PARAMETERS.match(text, i)):
            words.append("()")
            i = none.end()
        elif redirection := _REDIRECTION.match(text, i):
            i = redirection.end()
            end = part_end(text, i + 1) if text[i : i + 2] in ("<(", ">(") else 0
            end = end or (part_end(text, i) if text[i : i + 1] == "(" else _word_end(text, i))
            if redirection[0].strip() in ("<<", "<<-"):
                command.here_documents.append(f"<<{text[i:end]}")
                pending.append(redirection[0].strip()[-1] + text[i:end])
            i = end
        elif separator := _SEPARATOR.match(text, i):
            i = separator.end()
            if separator[0] == "\n":
                i = _after_here_documents(text, i, pending)
                pending = []
            if separator[0] == "(":
                words.append("(")
            elif words or separator[0] == ")":
                if words:
                    yield command._replace(end=separator[0])
                command = Command(separator[0], [")"] if separator[0] == ")" else [], [])
            elif separator[0] != "\n":  # a line may end after && and the like
                command = command._replace(separator=separator[0])
        else:
            end = _word_end(text, i)
            words.append(text[i:end])
            i = end
    if command.words:
        yield command


def part_end(text: str, start: int, quoted: bool = False) -> int:
    """Return where the part that begins at `start` ends.

    A part is an escaped character, a quotation, an expansion, brackets, or one character.

    Args:
        text: of a script or a word.
        start: the first character of the part.
        quoted: whether it stands within double quotes.

    Raises:
        ValueError: it is not closed.
    """
    part = _SIMPLE_PART.match(text, start)
    part = part if part or quoted else _UNQUOTED_PART.match(text, start)
    if part:
        return part.end()
    if text[start] == "'" and not quoted:
        raise _unclosed(text, start)
    for opening, closing in _BRACKETS:
        if not text.startswith(opening, start) or (opening in ("(", '$"') and quoted):
            continue
        inner_quoted = opening in ('"', '$"', "`") or (opening == "${" and quoted)
        end = start + len(opening)
        marks: list[str] = []
        while not text.startswith(closing, end):
            if end >= len(text):
                raise _unclosed(text, start)
            document = opening == "$(" and _HERE_DOCUMENT.match(text, end)
            if document and not text.startswith("$((", start):
                marks.append(f"{document[1] or '<'}{document[2]}")
                end = document.end()
            elif marks and text[end] == "\n":
                end = _after_here_documents(text, end + 1, marks)
                marks = []
            else:
                end = part_end(text, end, inner_quoted)
        return end + 1
    return start + 1


def _word_end(text: str, start: int, stops: str = " \t\n;&|<>()") -> int:
    end = start
    while end < len(text):
        array = text[end] == "(" and re.fullmatch(r"[A-Za-z_]\w*\+?=", text[start:end])
        if (text[end] in stops and not array) or text.startswith("\\\n", end) and end == start:
            break
        end = part_end(text, end)
    return end


def _after_here_documents(text: str, start: int, marks: list[str]) -> int:
    """Return where the first line after the documents that `marks` announce begins.

    Args:
        text: of the script.
        start: where the first document begins.
        marks: "<EOF" of `<<EOF`, and "-EOF" of `<<-EOF`, whose lines may begin with tabs.
    """
    for mark in marks:
        last = re.sub(r"[\"'\\]", "", mark[1:])
        tabs = r"\t*" if mark[0] == "-" else ""
        line = re.compile(rf"^{tabs}{re.escape(last)}$", re.MULTILINE).search(text, start)
        start = line.end() + 1 if line else len(text)
    return start


def _unclosed(text: str, start: int) -> ValueError:
    shown = text[start:].partition("\n")[0][:60]
    return ValueError(f"line {text[:start].count(chr(10)) + 1}: not closed: {shown}")
