"""Clients that begin and do not go on: they are waited for, but not without end."""

import asyncio
import contextlib
import json
import resource
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPResponse

import pytest

from jaxrl.rollout.server import app, listening, service
from tests.rollout.bpe import bpe_tokenizer
from tests.rollout.server.scripted import TypingEngine, serving
from tests.rollout.server.test_server import ask, until, waiting

TOKENIZER = bpe_tokenizer()


@pytest.fixture
def running(monkeypatch):
    monkeypatch.setattr(app, "CLIENT_SECONDS", 0.3)
    monkeypatch.setattr(listening, "IDLE_SECONDS", 0.3)
    with serving(TypingEngine([1] * 4000, piece=1), TOKENIZER, request_seconds=1.0) as running:
        yield running


def connect(running):
    host, _, port = running.url.removesuffix("/v1").partition("//")[2].partition(":")
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(60)
    connection.connect((host, int(port)))
    return connection


def post(connection, path, body, length=None):
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {length or len(body)}\r\n"
    connection.sendall(head.encode() + b"\r\n" + body)


def rest(connection):
    """All that comes until the server closes."""
    said = b""
    while more := connection.recv(65536):
        said += more
    return said


PATHS = ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/abort"]


@pytest.mark.some(2)
@pytest.mark.parametrize("path", PATHS)
def test_a_body_that_does_not_come(running, path):
    with connect(running) as connection, HTTPResponse(connection) as answer:
        post(connection, path, b'{"prompt": ', length=100)
        answer.begin()  # the server waits 10 s longer for the rest, and then closes
        error = json.loads(answer.read())["error"]
    assert (answer.status, answer.reason) == (408, "Request Timeout")
    assert error["message"] == "the body had not come after 0.3 seconds"


@pytest.mark.parametrize("head", [b"", b"POST /tokenize HTTP/1.1\r\nHost: 127.0"])
def test_half_a_header(running, head):
    with connect(running) as connection:
        connection.sendall(head)
        assert rest(connection) == b""


def handlers(running):
    """Connections that the server waits for."""
    names = [task.get_coro().__qualname__ for task in asyncio.all_tasks(running._loop)]
    return names.count("RequestHandler.start")


@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_that_is_not_read(running, stream):
    body = {"prompt": "one", "max_tokens": 4000, "n": 16, "stream": stream, "logprobs": 0}
    with connect(running) as connection:
        post(connection, "/v1/completions", json.dumps(body).encode())
        until(lambda: handlers(running) == 1)
        until(lambda: handlers(running) == 0)
    assert ask(running, "/health", method="GET")[0] == 200
    assert waiting(running) == 0


def health(running):
    """The status that a new connection gets."""
    with connect(running) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
        with contextlib.suppress(ConnectionResetError):  # it was closed before it was read
            return int(rest(connection).split()[1])
    return 503


def test_more_connections_than_are_taken():
    """Those beyond the bound are sent away; a place that is free again is given to the next."""
    with serving(TypingEngine([1, 2]), TOKENIZER, max_connections=3) as running:
        assert health(running) == 200
        silent = [connect(running) for _ in range(3)]
        until(lambda: health(running) == 503)
        silent.pop().close()
        until(lambda: health(running) == 200)
        for connection in silent:
            connection.close()


@pytest.mark.parametrize(
    ("limits", "most", "raised"),
    [
        ((1024, 20000), 1000, [(1256, 20000)]),
        ((1024, 2000), 1744, [(2000, 2000)]),  # of the 1900 that are wanted
        ((2156, 2156), 1900, []),
        ((1024, resource.RLIM_INFINITY), 1900, [(2156, resource.RLIM_INFINITY)]),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), 1900, []),
        ((100, 100), 1, []),
    ],
)
def test_more_connections_than_open_files(monkeypatch, limits, most, raised):
    found = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: found.append(limits))
    assert listening._most_of(1000 if most == 1000 else 1900) == most
    assert found == raised


def test_a_long_text_keeps_no_short_one_waiting(monkeypatch):
    """It is refused by its characters where no tokens could make it fit; else it waits apart."""
    begun, go_on = threading.Event(), threading.Event()
    with serving(TypingEngine([1, 2]), TOKENIZER) as running:
        longest = running.served.most_characters
        assert longest == 4096 * max(map(len, TOKENIZER.get_vocab()))
        status, answer = ask(running, "/v1/completions", {"prompt": "a" * (longest + 1)})
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
        said = [{"role": "user", "content": "a" * (longest + 1)}]
        assert ask(running, "/v1/chat/completions", {"messages": said})[0] == 400

        tokenize = type(TOKENIZER).__call__

        def slow(self, text, **options):
            if len(text) > service.LONG_BYTES:
                begun.set()
                assert go_on.wait(60)
            return tokenize(self, text[:8], **options)

        monkeypatch.setattr(type(TOKENIZER), "__call__", slow)
        monkeypatch.setitem(vars(running.served), "most_characters", 10**6)
        with ThreadPoolExecutor(1) as thread:
            long = {"prompt": "a" * (service.LONG_BYTES + 1), "max_tokens": 2}
            waits = thread.submit(ask, running, "/v1/completions", long)
            assert begun.wait(60)
            assert ask(running, "/v1/completions", {"prompt": "one", "max_tokens": 2})[0] == 200
            assert ask(running, "/tokenize", {"prompt": "one"})[0] == 200
            assert not waits.done()
            go_on.set()
            assert waits.result()[0] == 200
