"""What the engine's owner does, while clients leave in the middle of it."""

import http.client
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.rollout.bpe import bpe_tokenizer
from tests.rollout.server.scripted import TypingEngine, serving
from tests.rollout.server.test_server import ask, until, waiting

TOKENIZER = bpe_tokenizer()


class Forgetful:
    """Receives nothing."""

    def forget(self):
        pass


class Loader:
    """Reads a folder when it is let; `running` are the loads at work, `most` of them at a time."""

    def __init__(self):
        self.go, self.running, self.most, self.fails = threading.Event(), [], 0, False

    def __call__(self, folder):
        self.running.append(folder.name)
        self.most = max(self.most, len(self.running))
        assert self.go.wait(60)
        self.running.remove(folder.name)
        if self.fails:
            raise ValueError("not this model")
        return folder.name


@pytest.fixture
def loader(tmp_path):
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
    return Loader()


@pytest.fixture
def engine():
    return TypingEngine([1, 2, 3])


@pytest.fixture
def server(engine, loader, tmp_path):
    root = str(tmp_path)
    weights = loader, tmp_path / "a", Forgetful()
    with serving(engine, TOKENIZER, weights, weights_root=root) as server:
        yield server
        loader.go.set()


def leave(server, path, body="", after=lambda: True):
    """Ask, and hang up when the condition holds."""
    _, _, address = server.url.removesuffix("/v1").partition("//")
    connection = http.client.HTTPConnection(address)
    connection.request("POST", path, body)
    until(after)
    connection.sock.shutdown(socket.SHUT_RDWR)
    connection.close()


def test_a_version_is_one_set_of_weights_when_its_client_leaves(server, engine, loader):
    leave(server, "/update_weights", '{"path": "b"}', lambda: loader.running == ["b"])
    with ThreadPoolExecutor(2) as pool:
        third = pool.submit(ask, server, "/update_weights", {"path": "c"})
        asleep = pool.submit(ask, server, "/sleep")
        until(lambda: loader.running == ["b"])
        loader.go.set()
        assert third.result() == (200, {"status": "updated", "version": 2})
        assert asleep.result()[0] == 200
    assert loader.most == 1  # one model in memory beside the engine's
    engine.updates.remove("asleep")  # before or after the third
    assert engine.updates == [("first", 0), ("b", 1), ("c", 2)]


def test_the_folder_goes_with_the_weights_when_the_client_leaves(server, engine, loader):
    leave(server, "/update_weights", '{"path": "b"}', lambda: loader.running == ["b"])
    loader.go.set()
    until(lambda: ask(server, "/health", method="GET")[1]["version"] == 1)
    assert ask(server, "/sleep")[0] == ask(server, "/wake_up")[0] == 200
    assert engine.updates == [("first", 0), ("b", 1), "asleep", ("b", 1)]


def test_a_client_that_leaves_before_its_turn_changes_nothing(server, engine, loader):
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(ask, server, "/update_weights", {"path": "b"})
        until(lambda: loader.running == ["b"])
        leave(server, "/update_weights", '{"path": "c"}')
        loader.go.set()
        assert first.result()[1]["version"] == 1
    assert ask(server, "/sleep")[0] == 200  # it waits for what was asked for before
    assert engine.updates in (
        [("first", 0), ("b", 1), "asleep"],
        [("first", 0), ("b", 1), ("c", 2), "asleep"],  # its leaving was learnt too late
    )


def test_a_load_that_fails_leaves_version_and_folder(server, engine, loader):
    loader.go.set()
    loader.fails = True
    assert ask(server, "/update_weights", {"path": "b", "version": 7})[0] == 400
    loader.fails = False
    assert ask(server, "/wake_up")[0] == 200
    assert ask(server, "/update_weights", {"path": "c"})[1]["version"] == 1
    assert engine.updates == [("first", 0), ("a", 0), ("c", 1)]


@pytest.mark.parametrize("version", [-1, 2**31, 10**400, 1.5, True, "1"])
def test_a_version_is_a_number_that_fits(server, engine, version):
    status, answer = ask(server, "/update_weights", {"path": "b", "version": version})
    assert (status, answer["error"]["param"]) == (400, "version")
    assert engine.updates == [("first", 0)]


def test_the_end_of_the_server_waits_for_a_load(server, engine, loader):
    leave(server, "/update_weights", '{"path": "b"}', lambda: loader.running == ["b"])
    with ThreadPoolExecutor(1) as pool:
        stopped = pool.submit(server.stop)
        loader.go.set()
        stopped.result()
    assert engine.updates == [("first", 0), ("b", 1)]


# ---- pause


def request(server):
    return ask(server, "/v1/completions", {"prompt": "one", "max_tokens": 3})


def is_paused(server):
    return ask(server, "/is_paused", method="GET")[1]["is_paused"]


def test_a_pause_whose_client_leaves_while_it_waits_is_none(server, engine):
    engine.halted = True
    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(request, server)
        until(lambda: len(engine.open) == 1)
        leave(server, "/pause?mode=wait", after=lambda: is_paused(server))
        until(lambda: not is_paused(server))
        second = pool.submit(request, server)
        until(lambda: len(engine.open) == 2)  # it is not held back
        engine.resume()
        assert running.result()[0] == second.result()[0] == 200


def test_one_that_leaves_does_not_end_the_pause_of_another(server, engine):
    engine.halted = True
    with ThreadPoolExecutor(3) as pool:
        running = pool.submit(request, server)
        until(lambda: len(engine.open) == 1)
        patient = pool.submit(ask, server, "/pause?mode=wait")
        until(lambda: is_paused(server))
        leave(server, "/pause?mode=wait")
        held = pool.submit(request, server)
        until(lambda: waiting(server) == 2)
        engine.resume()
        assert running.result()[0] == patient.result()[0] == 200
        assert engine.halted and is_paused(server)
        assert engine.open == []
        assert ask(server, "/resume")[0] == held.result()[0] == 200
        assert not is_paused(server)


def test_resume_ends_a_pause_that_waits(server, engine):
    engine.halted = True
    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(request, server)
        until(lambda: len(engine.open) == 1)
        pausing = pool.submit(ask, server, "/pause?mode=wait")
        until(lambda: is_paused(server))
        assert ask(server, "/resume")[0] == running.result()[0] == 200
        assert pausing.result()[0] == 409
    assert not engine.halted
    assert request(server)[0] == 200
