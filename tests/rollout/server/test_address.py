"""An address that cannot be had: one line that names the field, the value and the fix."""

import socket
from types import SimpleNamespace

import pytest

from jaxrl import config as cfg, serve, train
from jaxrl.rollout.server.server import AddressError, HttpServer


def server_at(running, host, port):
    return HttpServer(running.host.engine, running.served, cfg.ServeConfig(), host=host, port=port)


@pytest.fixture
def taken():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def test_a_port_in_use_beside_training(server, taken, monkeypatch, capsys):
    def build(run):
        run.server = server_at(server, "127.0.0.1", taken)
        return SimpleNamespace(recorder=SimpleNamespace(close=lambda: None))

    monkeypatch.setattr(train.BasePPOExp, "build", build)
    assert train.main(["--config=configs/quickstart.py"]) == 2
    assert capsys.readouterr().err == (
        f"error: generator.inference_engine.http_endpoint_port={taken}: in use on 127.0.0.1; "
        "choose another, or 0 for any that is free\n"
    )


def test_a_port_in_use_of_the_server_alone(server, taken, monkeypatch, capsys):
    monkeypatch.setattr(serve, "make_server", lambda _: server_at(server, "127.0.0.1", taken))
    assert serve.main(["--config=configs/quickstart.py"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: generator.inference_engine.http_endpoint_port={taken}: in use")
    assert said.count("\n") == 1


def test_a_host_that_is_not_here(server, monkeypatch):
    monkeypatch.setenv("JAXRL_SERVE_TOKEN", "secret")
    stranger = server_at(server, "192.0.2.1", 0)  # TEST-NET-1, RFC 5737: nobody's
    said = r"http_endpoint_host='192\.0\.2\.1': cannot listen there .*e\.g\. '127\.0\.0\.1'"
    with pytest.raises(AddressError, match=said):
        stranger.start()
