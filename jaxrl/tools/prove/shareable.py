"""Take out of a proof what names this machine, its user and its folders: it may be sent."""

import getpass
import re
import socket
from typing import Any

# An absolute path of two parts or more, not within a word or an address.
_PATH = re.compile(r"(?<![\w.:/])(?:~|[A-Za-z]:)?(?:[/\\][\w.@+~-]+){2,}[/\\]?")
_ADDRESS = re.compile(r"\b\w+://\S+|\b\d{1,3}(?:\.\d{1,3}){3}\b(?::\d+)?")
_FLAG = re.compile(r"(--?[\w-]+=)(~?[/\\]\S+)")  # of a flag whose value is a path


def shareable(value: Any, names: tuple[str, ...] | None = None) -> Any:
    """Return a JSON value without paths, addresses, host and user names in its strings.

    Args:
        names: of host and user; None = those of this process.
    """
    names = _names() if names is None else names
    if isinstance(value, dict):
        return {key: shareable(x, names) for key, x in value.items()}
    if isinstance(value, list | tuple):
        return [shareable(x, names) for x in value]
    if not isinstance(value, str):
        return value
    text = _ADDRESS.sub("<address>", value)
    text = _PATH.sub("<path>", _FLAG.sub(r"\1<path>", text))
    for name in names:
        text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", "<name>", text)
    return text


def _names() -> tuple[str, ...]:
    """Return the names of host and user that say more than that there are such."""
    host = socket.gethostname()
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user without a name
        user = ""
    found = {host, host.partition(".")[0], user} - {"", "root", "user", "localhost", "jaxrl"}
    return tuple(sorted(found, key=len, reverse=True))
