"""What stands between tags, found in time linear in the text.

`re.findall("<a>(.*?)</a>", text)` looks through the rest of the text at every tag that nothing
closes: seconds for the loops that a small policy falls into, with Python's lock held.
"""

from collections.abc import Iterator
from typing import NamedTuple


class Tagged(NamedTuple):
    """Hold one `<tag>content</tag>`, and where it begins and ends in the text."""

    tag: str
    content: str
    start: int
    end: int


def every_tagged(text: str, tag: str) -> Iterator[Tagged]:
    """Yield all such tags that do not overlap, from the left; the first closing tag ends each."""
    found = first_tagged(text, tag)
    while found is not None:
        yield found
        found = first_tagged(text, tag, start=found.end)


def last_tagged(text: str, tag: str) -> str | None:
    """Return the content of the last such tag, or None."""
    found = [tagged.content for tagged in every_tagged(text, tag)]
    return found[-1] if found else None


def first_tagged(text: str, *tags: str, start: int = 0) -> Tagged | None:
    """Return the first of these tags that is closed, from a place in the text on; or None."""
    found = [tagged for tag in tags if (tagged := _first(text, tag, start)) is not None]
    return min(found, key=lambda tagged: tagged.start, default=None)


def _first(text: str, tag: str, start: int) -> Tagged | None:
    opening, closing = f"<{tag}>", f"</{tag}>"
    at = text.find(opening, start)
    begin = at + len(opening)
    end = text.find(closing, begin) if at >= 0 else -1
    return Tagged(tag, text[begin:end], at, end + len(closing)) if end >= 0 else None
