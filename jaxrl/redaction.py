"""Keys and passwords in text: found in what a user sets, hidden in what is shown or written down.

A config names the variable of the environment that holds a key. So no record of a run has one.
"""

import os
import re
from collections.abc import Mapping

HIDDEN = "<hidden>"
LEAST = 8  # characters of a value of the environment that is hidden wherever it stands
_VARIABLE = re.compile(
    "TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|AUTH|(^|_)KEY|API_?KEY", re.IGNORECASE
)
_NO_KEYS = "TOKENIZERS_"
_NAME = (
    r"(?i:(?:\w*_)?(?:api_?key|access_?key|secret(?:_key)?|passw(?:or)?d|passphrase|credentials?"
    r"|authorization|(?:hf|auth|access|bearer|api)_token)|token)"
)
_IN_TEXT = re.compile(
    rf"(?P<entry>(['\"]){_NAME}\2\s*:\s*['\"])[^'\"\s]{{8,}}"  # of a dict, as it is written
    rf"|(?P<argument>(?<![\w.]){_NAME}\s*=\s*['\"])[^'\"]+"  # of a call
    r"|(?<=://)[^/@\s'\"]+(?=@)"  # user:password of an address
    r"|(?<=[?&])(?P<name>(?i:(?:[\w-]*[_-])?(?:api_?key|key|token|secret|passw(?:or)?d|sig|signature"
    r"|auth|credentials?))=)[^&#\s'\"]+"
    r"|(?<![\w-])(?:sk-(?:[a-z]+\d*-)?(?=[A-Za-z0-9]*\d)[A-Za-z0-9]{20,}|hf_[A-Za-z0-9]{30,}|gh[opsu]_[A-Za-z0-9]{30,}"
    r"|github_pat_\w{40,}|xox[abprs]-[\w-]{20,}|AKIA[0-9A-Z]{16}|AIza[\w-]{30,}|tml-[\w-]{20,})"
    r"|(?P<scheme>\b(?i:bearer) +)(?=[\w.~+/=-]*\d)[\w.~+/=-]{8,}"
)


def redacted(text: str, *keys: str) -> str:
    """Return a text with `HIDDEN` in the place of what may be a key.

    That is what an address has before its host, or as a parameter that is named so; what looks like
    a key of a known service; and the values of this process's variables that are named so.

    Args:
        keys: others that are to be hidden.
    """
    ours = (value for name, value in os.environ.items() if names_key(name) and len(value) >= LEAST)
    for key in sorted(filter(None, {*keys, *ours}), key=len, reverse=True):
        text = text.replace(key, HIDDEN)
    return _IN_TEXT.sub(
        lambda m: f"{m['entry'] or m['argument'] or m['name'] or m['scheme'] or ''}{HIDDEN}", text
    )


def names_key(variable: str) -> bool:
    """Tell whether a variable of the environment holds a key, by its name."""
    return bool(_VARIABLE.search(variable)) and not variable.startswith(_NO_KEYS)


def holds_key(name: str, value: object) -> bool:
    """Tell whether a value may hold a key; of a dict or list also whether one of its members does.

    Args:
        name: of the field or of the entry, which may say so: "api_key".
    """
    if isinstance(value, Mapping):
        return any(holds_key(str(key), inner) for key, inner in value.items())
    if isinstance(value, list | tuple):
        return any(holds_key(name, inner) for inner in value)
    if not isinstance(value, str) or not value:
        return False
    named = re.fullmatch(_NAME, name.rpartition(".")[2].replace("-", "_"))
    return bool(named or _IN_TEXT.search(value))
