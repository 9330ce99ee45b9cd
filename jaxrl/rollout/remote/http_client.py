"""One server of a remote engine: HTTP calls, and what their failures mean."""

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from jaxrl.redaction import redacted
from jaxrl.rollout.protocol import Completion, Request
from jaxrl.rollout.remote.dialects import Dialect, InvalidAnswer

# Servers close idle connections, some after 5 s; to use one at that moment looks like a crash.
IDLE_SECONDS, RETRY_SECONDS = 2, 1.0
HEALTH_SECONDS, CONNECT_SECONDS = 30, 10
TOO_MANY, SERVER_ERROR, BAD_REQUEST, NOT_FOUND = 429, 500, 400, 404
LORA_NEEDS = (
    "vLLM takes adapters with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, --enable-lora and a "
    "--max-lora-rank of at least trainer.policy.model.lora.rank, and reads them from "
    "trainer.policy.model.lora.lora_sync_path"
)


@dataclass(frozen=True)
class RemoteOptions:
    """Describe how patient the engine is.

    Attributes:
        model: name of the model that requests carry; None = none.
        token: bearer token of the servers.
        timeout_seconds: of one call: all tokens of a request, or one update of weights.
        attempts: calls for one request, those aside that were answered with 429.
        backoff_seconds: before the second attempt; doubled for each further one, times 0.5 to 1.5.
        recovery_seconds: how long a request or an update waits while no server is ready.
        poll_seconds: between two looks at a server.
        max_model_len: most tokens of a row; None = the servers refuse what is too long.
    """

    model: str | None = None
    token: str | None = field(default=None, repr=False)
    timeout_seconds: float = 1800.0
    attempts: int = 8
    backoff_seconds: float = 0.5
    recovery_seconds: float = 900.0
    poll_seconds: float = 5.0
    max_model_len: int | None = None


class ServerError(Exception):
    """Signal that a call to a server failed.

    Attributes:
        retryable: the same call may succeed later, or elsewhere.
        broken: the connection failed, so the server may have died, or been restarted.
        wait: seconds that the server asks for before the next try.
        status: of its answer; 0 = there was none.
    """

    def __init__(
        self,
        message: str,
        *,
        retryable: bool = True,
        broken: bool = False,
        wait: float = 0.0,
        status: int = 0,
    ) -> None:
        super().__init__(message)
        self.retryable, self.broken, self.wait, self.status = retryable, broken, wait, status


def open_session(token: str | None) -> aiohttp.ClientSession:
    """Open a session for any number of connections; it belongs to the running loop."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_SECONDS)
    return aiohttp.ClientSession(connector=connector, headers=headers)


class RemoteServer:
    """Represent a server, as the client knows it.

    Args:
        url: its address.
        samples_url: where requests for samples go, if not there.

    Attributes:
        version: of its weights; None = not known to be anything.
        model: name that requests carry; None = none.
        ready: it has weights that were verified, and its last call did not find it dead.
        in_flight: samples that it was asked for.
        calls: requests for samples under way, and the version that each asks for.
        lock: held while it is given weights.
        doubt: set when somebody should look whether it lives.
        cause: why it is not ready.
    """

    def __init__(
        self,
        url: str,
        dialect: Dialect,
        options: RemoteOptions,
        samples_url: str | None = None,
    ) -> None:
        self.url, self.dialect, self.options = url.rstrip("/"), dialect, options
        self.samples_url = (samples_url or url).rstrip("/")
        self.version: int | None = None
        self.model = options.model
        self.ready, self.in_flight, self.cause = False, 0, "it has no weights yet"
        self.calls: dict[asyncio.Task[list[Completion]], int | None] = {}
        self.lock, self.doubt = asyncio.Lock(), asyncio.Event()
        self.session: aiohttp.ClientSession

    async def complete(self, request: Request, url: str | None = None) -> list[Completion]:
        """Return all samples of a request.

        Args:
            url: whom to ask; None = `samples_url`.

        Raises:
            ServerError: there is no whole answer.
        """
        body, version = self.dialect.body(request, self.model), self.version
        url = f"{url or self.samples_url}/v1/completions"
        try:
            text = await self._answer("POST", url, body)
            answer = json.loads(text)
            return self.dialect.completions(answer, request, -1 if version is None else version)
        except ValueError as error:  # InvalidAnswer among them
            raise ServerError(f"POST {url}: invalid answer, or cut off: {error}") from error
        except ServerError as error:
            if self.dialect.adapters and error.status == NOT_FOUND:  # started again without it
                raise ServerError(str(error), broken=True, status=NOT_FOUND) from error
            raise

    async def load(self, folder: str, version: int, name: str) -> None:
        """Have the server take the weights of a folder; raises ServerError.

        Args:
            name: of the adapter, where weights are one.
        """

        async def ask(path: str, body: Any, method: str = "POST") -> str:
            return await self._answer(method, f"{self.url}{path}", body)

        try:
            await self.dialect.load(ask, folder, version, name)
        except InvalidAnswer as error:
            raise ServerError(str(error)) from error
        except ServerError as error:
            if not self.dialect.adapters or not error.status:
                raise
            await self.look()  # if it is well it will refuse again
            raise ServerError(f"{error}. {LORA_NEEDS}", retryable=False) from error
        if self.dialect.adapters:
            self.model = name

    async def receive(self, group: dict[str, Any], seconds: float) -> str:
        """Have the server pull a group of weights, see `weights.transfer`; raises ServerError.

        Args:
            seconds: longest wait, if that is less than for any call.

        Returns:
            Where others can pull it; empty where they shall not.
        """
        seconds = min(seconds, self.options.timeout_seconds)
        text = await self._answer("POST", f"{self.url}/receive_weights", group, seconds)
        try:
            return json.loads(text).get("address") or ""
        except (ValueError, AttributeError) as error:
            raise ServerError(f"{self.url}/receive_weights gives {text[:80]!r}") from error

    def move(self, url: str) -> None:
        """Note that the server runs at another address now."""
        if self.samples_url == self.url:
            self.samples_url = url.rstrip("/")
        self.url = url.rstrip("/")

    async def look(self) -> int | None:
        """Return the version that the server says it has, if it says one.

        Raises:
            ServerError: it is not there, or not well.
        """
        status, text = await self._call("GET", f"{self.url}/health", None, HEALTH_SECONDS)
        if status not in self.dialect.alive:
            refused = BAD_REQUEST <= status < SERVER_ERROR  # a wrong token, or no such server
            raise ServerError(f"GET /health gives {status}", retryable=not refused)
        if not self.dialect.says_versions:
            return self.version
        try:
            return json.loads(text).get("version")
        except (ValueError, AttributeError) as error:
            raise ServerError(f"GET /health gives {text[:80]!r}, which has no version") from error

    async def _answer(self, method: str, url: str, body: Any, seconds: float | None = None) -> str:
        seconds = self.options.timeout_seconds if seconds is None else seconds
        status, text = await self._call(method, url, body, seconds)
        if status >= BAD_REQUEST:
            retryable = status == TOO_MANY or status >= SERVER_ERROR
            message = f"{method} {url} gives {status}: {self._error_message(text)}"
            raise ServerError(message, retryable=retryable, status=status)
        return text

    async def _call(self, method: str, url: str, body: Any, timeout: float) -> tuple[int, str]:
        limit = aiohttp.ClientTimeout(total=timeout, sock_connect=CONNECT_SECONDS)
        try:
            async with self.session.request(method, url, json=body, timeout=limit) as reply:
                text = await reply.text(errors="replace")
                if reply.status == TOO_MANY:
                    wait = _seconds(reply.headers.get("Retry-After"))
                    raise ServerError(
                        f"{method} {url} gives 429: {self._error_message(text)}", wait=wait
                    )
                return reply.status, text
        except aiohttp.ConnectionTimeoutError as error:
            raise ServerError(f"{method} {url}: no connection", broken=True) from error
        except TimeoutError as error:
            raise ServerError(f"{method} {url}: no answer within {timeout:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            what = f"{type(error).__name__}: {error}"
            raise ServerError(f"{method} {url}: {what}", broken=True) from error

    def _error_message(self, text: str) -> str:
        """Return the message of an error in OpenAI's form, or the text itself, without a token."""
        try:
            text = str(json.loads(text)["error"]["message"])
        except (ValueError, KeyError, TypeError):
            text = text[:300]
        return redacted(text, self.options.token or "")


def _seconds(value: str | None) -> float:
    """Return the seconds of a Retry-After, which may be missing, or a date."""
    try:
        return max(float(value or RETRY_SECONDS), 0.0)
    except ValueError:
        return RETRY_SECONDS
