"""Questions to servers, JSON in and out, asked again where that may help."""

import http.client
import json
import logging
import random
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

FIRST_WAIT = 1.0  # seconds before the second attempt; doubled for each further one
_LONGEST_WAIT = 30.0
_JITTER = 0.5, 1.5  # of a wait, so that many clients do not come back together
_MAX_BYTES = 16 * 1024**2
_RETRIED = (408, 425, 429)  # and 5xx: the same question may be answered later
_SHOWN = 300  # characters of an answer in a message


class RequestError(Exception):
    """Signals that a server gave no usable answer; says which, how often asked, and why."""


class _Refused(Exception):
    """Signals an answer with an error status.

    Attributes:
        final: to ask again would not help.
        wait: seconds that the server asks for before the next attempt.
    """

    def __init__(self, error: urllib.error.HTTPError) -> None:
        said = error.read(_SHOWN).decode("utf-8", "replace")
        super().__init__(f"status {error.code}: {said or error.reason}")
        self.final = error.code < 500 and error.code not in _RETRIED
        after = error.headers.get("Retry-After", "")
        self.wait = float(after) if after.isdigit() else 0.0


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Refuses to be redirected.

    A redirected POST becomes a GET without its question, and takes the key to another host.
    """

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None  # so that the status is an error


_opener = urllib.request.build_opener(_NoRedirect)


def ask(
    url: str,
    question: Mapping[str, Any],
    read: Callable[[Any], _T],
    *,
    timeout: float,
    attempts: int,
    headers: Mapping[str, str] | None = None,
) -> tuple[_T, int]:
    """Returns what a server answers, and at which attempt.

    Asked again, after a wait that doubles: where nobody answers in time, with the statuses 408,
    425, 429 and 5xx, and where the answer is not what it should be. Other statuses are final.

    Args:
        url: where the question is posted.
        question: what becomes the body.
        read: takes what is needed from the decoded answer; any LookupError, TypeError, ValueError
            or AttributeError of it means that the answer cannot be used.
        timeout: seconds of each attempt, for the connection, any silence and the whole body; a
            server that drips its headers line by line can take longer.
        attempts: most of them.
        headers: beside those of JSON.

    Raises:
        RequestError: no attempt brought an answer that can be used.
    """
    body = json.dumps(question).encode()
    headers = {"Content-Type": "application/json", **(headers or {})}
    attempt, problem = 0, "never asked"
    for attempt in range(1, attempts + 1):
        wait = FIRST_WAIT * 2 ** (attempt - 1) * random.uniform(*_JITTER)
        try:
            answer = _post(urllib.request.Request(url, body, headers), timeout)
        except _Refused as refused:
            problem, wait = str(refused), max(wait, refused.wait)
            if refused.final:
                break
        except (OSError, http.client.HTTPException) as error:  # also URLError and TimeoutError
            problem = f"{type(error).__name__}: {getattr(error, 'reason', error)}"
        else:
            try:
                return read(json.loads(answer)), attempt
            except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
                shown = answer[:_SHOWN].decode("utf-8", "replace")
                problem = f"cannot use the answer {shown!r}: {error!r}"
        _log.info("%s, attempt %d of %d: %s", url, attempt, attempts, problem)
        if attempt < attempts:
            time.sleep(min(wait, _LONGEST_WAIT))
    raise RequestError(f"{url} gave no answer in {attempt} attempts; the last: {problem}")


def longest_seconds(timeout: float, attempts: int) -> float:
    """Returns the most seconds that `ask` takes.

    A server that says by Retry-After when to ask again may make it longer.
    """
    waits = (FIRST_WAIT * 2**i * _JITTER[1] for i in range(attempts - 1))
    return timeout * attempts + sum(min(wait, _LONGEST_WAIT) for wait in waits)


def _post(request: urllib.request.Request, timeout: float) -> bytes:
    deadline = time.monotonic() + timeout
    try:
        with _opener.open(request, timeout=timeout) as answer:
            parts: list[bytes] = []
            while part := answer.read1(1 << 16):
                parts.append(part)
                # A server that sends a byte now and then never runs into the socket's limit.
                if time.monotonic() > deadline:
                    raise TimeoutError(f"the answer was not whole after {timeout:g} s")
                if sum(map(len, parts)) > _MAX_BYTES:
                    raise http.client.HTTPException(f"more than {_MAX_BYTES} bytes")
            return b"".join(parts)
    except urllib.error.HTTPError as error:
        with error:
            raise _Refused(error) from None
