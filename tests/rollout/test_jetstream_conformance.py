"""Against the last package of JetStream, in an environment of its own: its client, its mock server.

JETSTREAM_PYTHON names an interpreter that has google-jetstream==0.2.2.
"""

import os
import socket
import subprocess

import pytest

from jaxrl.rollout.jetstream.wire.client import JetStreamClient
from jaxrl.rollout.jetstream.wire.server import serve_grpc
from jaxrl.rollout.protocol import Request, Sampling
from tests.rollout.test_jetstream_wire import GREEDY, Words, greedy
from tests.rollout.test_native import engine_of, flat

PYTHON = os.environ.get("JETSTREAM_PYTHON")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PYTHON is None, reason="JETSTREAM_PYTHON is not set"),
]
CLIENT = """
import sys, grpc
from jetstream.core.proto import jetstream_pb2, jetstream_pb2_grpc
stub = jetstream_pb2_grpc.OrchestratorStub(grpc.insecure_channel(sys.argv[1]))
assert stub.HealthCheck(jetstream_pb2.HealthCheckRequest()).is_live
content = jetstream_pb2.DecodeRequest.TokenContent(token_ids=[3, 1, 4])
for response in stub.Decode(jetstream_pb2.DecodeRequest(token_content=content, max_tokens=6)):
    for sample in response.stream_content.samples:
        print(*sample.token_ids)
"""
SERVER = """
import sys, jax
jax.tree_map = jax.tree_util.tree_map  # what 0.2.2 calls, and JAX has removed
from jetstream.core import server_lib
from jetstream.core.implementations.mock import config
devices = server_lib.get_devices()
settings = config.get_server_config("InterleavedCPUTestServer")
server = server_lib.run(port=int(sys.argv[1]), config=settings, devices=devices)
server.wait_for_termination()
"""
ENVIRONMENT = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}


def test_its_client_calls_our_server():
    server = serve_grpc(engine_of("qwen2"), Words(), 0, GREEDY)
    address = f"127.0.0.1:{server.bound_port}"
    found = subprocess.run(
        [PYTHON, "-c", CLIENT, address],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    server.stop(None)
    (expected,) = flat(engine_of("qwen2").generate([greedy([3, 1, 4], max_tokens=6)]))
    assert found.stdout.split() == [str(t) for t in expected.tokens], found.stderr


def test_our_client_calls_its_mock_server():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = subprocess.Popen([PYTHON, "-c", SERVER, str(port)], env=ENVIRONMENT)
    try:
        client = JetStreamClient([f"127.0.0.1:{port}"], patience=240, stop_token_id=0)
        client.update_weights(None, 0)
        requests = [Request((3, n), ((0, 1), (0, 2)), Sampling(max_tokens=6)) for n in (5, 6, 7)]
        groups = client.generate(requests)
    finally:
        server.kill()
        server.wait()
    for group in groups:  # its next token is a sum over those before: the same for each sample
        assert len(group) == 2 and group[0].tokens == group[1].tokens
        assert 1 <= len(group[0].tokens) <= 6
    assert len({tuple(group[0].tokens) for group in groups}) == 3
