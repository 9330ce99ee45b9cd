"""Errors as OpenAI's clients know them."""

import json
from typing import Any, NoReturn

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    500: "server_error",
    501: "server_error",
    502: "server_error",
    503: "server_error",
    504: "timeout_error",
}


class ApiError(RuntimeError):
    """Signal that a request is answered with an error.

    Args:
        status: of HTTP.
        message: names the thing, the value and the fix.
        param: field of the body that is wrong.
        code: short name of the error.
        retry_after: seconds after which the client may come again.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code
        self.headers = {} if retry_after is None else {"Retry-After": str(retry_after)}

    @property
    def body(self) -> dict[str, Any]:
        """Return the JSON of the answer."""
        kind = _TYPES.get(self.status, "invalid_request_error")
        return {
            "error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        }


def parse_json(raw: bytes) -> dict[str, Any]:
    """Return the object in a request's body; an empty body is an empty object.

    Raises:
        ApiError: 400, it is none.
    """
    try:
        body = json.loads(raw or b"{}")
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {error}", code="invalid_json") from error
    if not isinstance(body, dict):
        raise ApiError(400, f"the body must be a JSON object, not {type(body).__name__}")
    return body


def refuse(name: str, value: Any, fix: str) -> NoReturn:
    """Raise the answer 400 for a field of a body."""
    raise ApiError(400, f"{name}={shown(value)}: {fix}", param=name)


def shown(value: Any) -> str:
    """Return a value as errors show it: cut where it is long."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
