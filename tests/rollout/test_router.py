"""`external_proxy_url`: a router before two servers."""

import numpy as np
import pytest

from jaxrl.config.rollouts import server_urls
from jaxrl.models.export import save_pretrained
from jaxrl.rollout.remote.engine import RemoteEngine
from jaxrl.rollout.remote.probe import Probe, WeightMismatch
from jaxrl.rollout.weights.folder import WeightFolder
from tests.config.test_rollouts import config_of
from tests.rollout.http_servers import FakeServer, Router
from tests.rollout.test_native import LLAMA, flat, random_params
from tests.rollout.test_remote import NEW, OLD, QUICK, SCORE, expected, request

ASKED = [request(prompt=(5, 6, i), first=10 * i) for i in range(4)]


@pytest.fixture
def world(tmp_path):
    """A router, two servers behind it, and the engine of a config that names the router."""
    servers = [FakeServer("vllm", LLAMA, OLD, number) for number in range(2)]
    router, engines = Router(servers), []

    def build(urls):
        config = config_of(
            backend="vllm",
            run_engines_locally=False,
            external_server_urls=urls,
            external_proxy_url=router.url,
        )
        engine = RemoteEngine(
            server_urls(config),
            "vllm",
            weights=WeightFolder(
                tmp_path, lambda params, folder: save_pretrained(folder, LLAMA, params)
            ),
            probe=Probe(SCORE, LLAMA.vocab_size, 1e-3),
            proxy_url=config.generator.inference_engine.external_proxy_url,
            options=QUICK,
        )
        engines.append(engine)
        engine.update_weights(NEW, 7)
        return engine

    yield build, router, servers
    for engine in engines:
        engine.close()
    router.end()
    for server in servers:
        server.kill()


def check_samples(engine, servers):
    samples = flat(engine.generate(ASKED))
    for sample, same in zip(samples, expected(*ASKED), strict=True):
        assert sample.tokens == same.tokens
        np.testing.assert_allclose(sample.log_probs, same.log_probs, atol=1e-5)
        assert sample.versions == [7] * len(sample.tokens)
    assert sum(server.served for server in servers) >= 16


def test_requests_go_through_the_router_and_weights_past_it(world):
    build, router, servers = world
    engine = build([server.url for server in servers])
    assert not router.calls  # weights and probes know whom they are for
    check_samples(engine, servers)
    assert router.calls == {"/v1/completions": 4}
    # its own probe, and two of the four: the router decides
    assert [server.calls["/v1/completions"] for server in servers] == [3, 3]
    assert [server.calls["/collective_rpc"] for server in servers] == [1, 1]


def test_a_stale_server_behind_a_router_is_found_and_named(world):
    build, _, servers = world
    engine = build([server.url for server in servers])
    servers[1].stale = True
    with pytest.raises(WeightMismatch, match=f"{servers[1].url} has stale or wrong weights"):
        engine.update_weights(random_params(LLAMA, 2), 8)


def test_a_router_alone_is_the_server(world):
    """It has to pass on to all servers whatever is no request for samples."""
    build, router, servers = world
    engine = build(None)
    assert [server.url for server in engine.servers] == [router.url]
    check_samples(engine, servers)
    assert router.calls["/v1/completions"] == 5  # and the probe
    assert router.calls["/collective_rpc"] == 1
    assert [server.calls["/collective_rpc"] for server in servers] == [1, 1]
