"""Questions to servers, JSON in and out, asked again where that may help."""

import asyncio
import json
import logging
import os
import random
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import aiohttp

from jaxrl.redaction import redacted

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

    def __init__(self, status: int, text: str, retry_after: str) -> None:
        super().__init__(f"status {status}: {text}")
        self.final = status < 500 and status not in _RETRIED
        self.wait = float(retry_after) if retry_after.isdigit() else 0.0


def ask(
    url: str,
    question: Mapping[str, Any],
    read: Callable[[Any], _T],
    *,
    timeout: float,
    attempts: int,
    headers: Mapping[str, str] | None = None,
) -> tuple[_T, int]:
    """Return what a server answers, and at which attempt.

    Asked again, after a wait that doubles: where nobody answers in time, with the statuses 408,
    425, 429 and 5xx, and where the answer is not what it should be. Other statuses are final.

    Args:
        url: where the question is posted.
        question: what becomes the body.
        read: takes what is needed from the decoded answer; any LookupError, TypeError, ValueError
            or AttributeError of it means that the answer cannot be used.
        timeout: seconds of each attempt, from the connection to the last byte of the answer.
        attempts: most of them.
        headers: beside those of JSON.

    Raises:
        RequestError: no attempt brought an answer that can be used. It shows no key: servers there
            are that repeat what they were sent.
    """
    keys = [value.partition(" ")[2] for value in (headers or {}).values()]  # after "Bearer"
    body = json.dumps(question).encode()
    headers = {"Content-Type": "application/json", **(headers or {})}
    attempt, problem = 0, "never asked"
    for attempt in range(1, attempts + 1):
        wait = FIRST_WAIT * 2 ** (attempt - 1) * random.uniform(*_JITTER)
        try:
            with ThreadPoolExecutor(1) as thread:  # in the caller's a loop may run (Jupyter)
                answer = thread.submit(asyncio.run, _post(url, body, headers, timeout)).result()
        except _Refused as refused:
            problem, wait = str(refused), max(wait, refused.wait)
            if refused.final:
                break
        except TimeoutError:
            problem = f"timed out: the answer was not whole after {timeout:g} s"
        except (OSError, aiohttp.ClientError) as error:
            number = getattr(error, "errno", None) or 0  # below 0: not the system's
            reason = f" ({os.strerror(number)})" if number > 0 else ""
            problem = f"{type(error).__name__}: {error}{reason}"
        except ValueError as error:  # a password in the address beside a key
            problem = str(error)
            break
        else:
            try:
                return read(json.loads(answer)), attempt
            except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
                shown = answer[:_SHOWN].decode("utf-8", "replace")
                problem = f"cannot use the answer {shown!r}: {error!r}"
        problem = redacted(problem, *keys)
        _log.info("%s, attempt %d of %d: %s", redacted(url), attempt, attempts, problem)
        if attempt < attempts:
            time.sleep(min(wait, _LONGEST_WAIT))
    raise RequestError(f"{redacted(url)} gave no answer in {attempt} attempts; the last: {problem}")


def bearer(variable: str) -> dict[str, str]:
    """Return the header with the key that a variable of the environment holds; {} without a key.

    Raises:
        ValueError: it holds signs that no key has, which the error of a request would show.
    """
    key = os.environ.get(variable, "").strip()
    if not (key.isascii() and key.isprintable()):
        raise ValueError(f"the variable {variable} has a key with signs that no key has")
    return {"Authorization": f"Bearer {key}"} if key else {}


def longest_seconds(timeout: float, attempts: int) -> float:
    """Return the most seconds that `ask` takes.

    A server that says by Retry-After when to ask again may make it longer.
    """
    waits = (FIRST_WAIT * 2**i * _JITTER[1] for i in range(attempts - 1))
    return timeout * attempts + sum(min(wait, _LONGEST_WAIT) for wait in waits)


async def _post(url: str, body: bytes, headers: Mapping[str, str], timeout: float) -> bytes:
    """Return the body of an answer.

    A redirect is an error: a redirected POST would become a GET without its question, and take the
    key to another host. The environment names a proxy, but no password: ~/.netrc is not read.
    """
    limit, parts = aiohttp.ClientTimeout(total=timeout), urllib.parse.urlsplit(url)
    direct = urllib.request.proxy_bypass(parts.hostname or "")
    proxy = None if direct else urllib.request.getproxies().get(parts.scheme)
    async with (
        aiohttp.ClientSession(timeout=limit) as session,
        session.post(url, data=body, headers=headers, allow_redirects=False, proxy=proxy) as answer,
    ):
        if answer.status >= 300:
            shown = (await answer.content.read(_SHOWN)).decode("utf-8", "replace")
            after = answer.headers.get("Retry-After", "")
            raise _Refused(answer.status, shown or str(answer.reason), after)
        whole = bytearray()
        async for part in answer.content.iter_any():
            whole += part
            if len(whole) > _MAX_BYTES:
                raise aiohttp.ClientPayloadError(f"more than {_MAX_BYTES} bytes")
        return bytes(whole)
