"""The gRPC port of `jaxrl.serve`: the same engine and weights as over HTTP."""

import dataclasses

import grpc
import pytest

from jaxrl.rollout.jetstream.wire import SERVICE, jetstream_pb2 as pb
from jaxrl.rollout.jetstream.wire.client import JetStreamClient
from jaxrl.rollout.protocol import Request, Sampling
from jaxrl.rollout.server.build import serve_jetstream
from tests.rollout.server.conftest import serve_config

GREEDY = {"generator.sampling_params.temperature": 0.0}
REQUEST = Request((3, 1, 4, 2, 13), ((7, 0), (7, 1)), Sampling(max_tokens=6, temperature=0.0))


@pytest.fixture
def port(server, folder):
    config = serve_config(folder, **GREEDY, **{"serve.grpc_port": 0})
    running = serve_jetstream(config, server)
    yield running.bound_port
    running.stop(0)


def test_a_jetstream_client_gets_the_tokens_of_the_engine(server, port):
    stops = server.served.eos_token_ids
    sampling = Sampling(max_tokens=6, temperature=0.0, stop_token_ids=stops)
    request = dataclasses.replace(REQUEST, sampling=sampling)
    client = JetStreamClient([f"127.0.0.1:{port}"], sampling={"temperature": 0.0})
    client.update_weights(None, 0)
    (found,), (expected,) = client.generate([request]), server.host.generate([request])
    assert [c.tokens for c in found] == [c.tokens for c in expected]


def test_without_weights_clients_are_told_to_come_again(server, port, monkeypatch):
    monkeypatch.setattr(server.host.guests, "version", None)
    client = JetStreamClient([f"127.0.0.1:{port}"], sampling={"temperature": 0.0}, patience=0.2)
    client.update_weights(None, 0)
    with pytest.raises(RuntimeError, match="UNAVAILABLE, .*no weights now"):
        client.generate([REQUEST])


def test_a_port_in_use_is_named(server, folder, port):
    config = serve_config(folder, **{"serve.grpc_port": port})
    with pytest.raises(ValueError, match=f"serve.grpc_port={port}: .*choose another one"):
        serve_jetstream(config, server)


@pytest.mark.parametrize(
    ("ids", "samples", "said"),
    [
        ([3, 1], 2**31 - 1, "num_samples=2147483647: must be 1 to 8"),
        ([3, 10**9], 1, r"token_ids has \[1000000000\]; ids are 0 to 47"),
    ],
)
def test_limits_are_those_of_http(port, ids, samples, said):
    content = pb.DecodeRequest.TokenContent(token_ids=ids)
    asked = pb.DecodeRequest(token_content=content, max_tokens=2, num_samples=samples)
    with (
        grpc.insecure_channel(f"127.0.0.1:{port}") as channel,
        pytest.raises(grpc.RpcError, match=said) as error,
    ):
        decode = channel.unary_stream(
            f"/{SERVICE}/Decode", pb.DecodeRequest.SerializeToString, pb.DecodeResponse.FromString
        )
        list(decode(asked, timeout=20))
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
