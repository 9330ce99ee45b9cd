"""Streams between processes of a job: who knows its secret comes in, nobody else is waited for."""

import contextlib
import secrets
import socket
import threading
import time
from multiprocessing import AuthenticationError

import pytest

from jaxrl.parallel import streams

SECRET = b"s" * 32


@pytest.fixture
def server():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening


def connect(server, number, secret=SECRET):
    end = socket.create_connection(server.getsockname(), timeout=10)
    stream = streams._greeted(end, secret, asks_first=False, seconds=10)
    stream.send(number)
    return stream


def accept(server, others):
    """Begin to accept the others in a thread; return the dict for the streams, and the thread."""
    found = {}
    thread = threading.Thread(target=lambda: found.update(streams._accept(server, SECRET, others)))
    thread.start()
    return found, thread


def test_strangers_who_say_nothing_hold_up_nobody(server, monkeypatch):
    """The job is there while the strangers still have all of their time."""
    monkeypatch.setattr(streams, "GREETING_SECONDS", 3600.0)
    silent = [socket.create_connection(server.getsockname()) for _ in range(streams.STRANGERS)]
    found, accepting = accept(server, [1, 2])
    ours = {number: connect(server, number) for number in (2, 1)}
    accepting.join()
    assert sorted(found) == [1, 2]
    for number, stream in found.items():
        ours[number].send(f"from {number}")
        assert stream.recv() == f"from {number}"
        stream.send_bytes(b"x" * 100_000)  # no time limit is left on it
        assert len(ours[number].recv_bytes()) == 100_000
    for stranger in silent:
        stranger.close()


def test_strangers_in_all_places_are_turned_away(server, monkeypatch):
    monkeypatch.setattr(streams, "GREETING_SECONDS", 0.2)
    monkeypatch.setattr(streams, "STRANGERS", 0)  # one place
    silent = socket.create_connection(server.getsockname(), timeout=10)
    slow = socket.create_connection(server.getsockname(), timeout=10)
    found, accepting = accept(server, [1])
    for _ in range(5):  # each byte in less than the time that it has, all of them in more
        with contextlib.suppress(OSError):
            slow.sendall(b"\0")
        time.sleep(0.1)
    with connect(server, 1):
        accepting.join()
    assert sorted(found) == [1]
    for stranger in (silent, slow):
        with contextlib.suppress(ConnectionResetError):
            while stranger.recv(4096):  # the question, then the end
                pass
        stranger.close()


def test_who_does_not_come_is_named(server, monkeypatch):
    monkeypatch.setattr(streams, "SECONDS", 0.3)
    named = pytest.raises(OSError, match=r"processes \[1, 3\] did not connect to process 0 at .*")
    with socket.create_connection(server.getsockname()), named:
        streams._accept(server, SECRET, [1, 3])


def test_another_secret_is_refused_before_anything_is_unpickled(server, monkeypatch):
    monkeypatch.setattr(streams, "SECONDS", 0.5)
    failure = []

    def stranger():
        try:
            connect(server, 1, secrets.token_bytes(32))
        except (AuthenticationError, EOFError) as error:
            failure.append(type(error))

    thread = threading.Thread(target=stranger)
    thread.start()
    with pytest.raises(OSError, match="did not connect"):
        streams._accept(server, SECRET, [1])
    thread.join()
    assert failure == [AuthenticationError]
