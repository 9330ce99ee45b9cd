"""Adapters over HTTP: servers keep the base, and get nothing but a PEFT folder after an update."""

import dataclasses
import json
import threading
from collections import deque
from concurrent.futures import wait

import jax
import numpy as np
import pytest

from jaxrl.models import hf
from jaxrl.models.export import save_pretrained
from jaxrl.models.linear import base, merge
from jaxrl.models.lora import LoraConfig, attach, select_modules, trained
from jaxrl.models.peft_format import save_adapter
from jaxrl.models.transformer import abstract_params
from jaxrl.rollout.remote.engine import RemoteEngine, RemoteEngineError
from jaxrl.rollout.remote.probe import Probe, WeightMismatch, make_score
from jaxrl.rollout.weights.folder import AdapterFolder
from tests.rollout.http_servers import FakeAdapterServer, Router, engine_of
from tests.rollout.test_native import LLAMA, flat, random_params
from tests.rollout.test_remote import QUICK, request, wait_until

BASE = random_params(LLAMA, 0)
LORA = LoraConfig(LLAMA, select_modules(LLAMA, ["q_proj", "v_proj", "down_proj"]), rank=4, alpha=8)
SCORE = make_score(LLAMA, np.float32, None, 16)


def with_adapters(seed):
    rng = np.random.default_rng(seed)
    adapters = jax.tree.map(lambda x: rng.normal(0, 0.5, x.shape), abstract_params(LORA))
    return attach(LORA, BASE, jax.tree.map(np.float32, adapters))


FIRST, SECOND, THIRD = (with_adapters(seed) for seed in (1, 2, 3))


class LocalHost:
    """Starts a `FakeAdapterServer` again, with the folder that it is told."""

    def __init__(self, server):
        self.server, self.folders = server, []

    @property
    def url(self):
        return self.server.url

    async def ensure(self, folder):
        if self.server.thread.is_alive() and self.folders:
            return False
        self.folders.append(folder.name)
        self.server.kill()
        self.server.params = hf.load_params(folder, hf.load_config(folder))
        self.server.start()
        return True

    def stop(self):
        pass


@pytest.fixture
def world(tmp_path):
    """Servers with the base, and an engine that has given them the adapters of version 7."""
    things = []

    def build(count=1, updated=True, local=False, router=False, rank=8):
        servers = [FakeAdapterServer(LLAMA, BASE, number) for number in range(count)]
        routers = [Router(servers)] if router else []
        for server in servers:
            server.max_lora_rank = rank
        hosts = [LocalHost(server) for server in servers] if local else []
        bases = (
            tmp_path / "weights" / "base",
            lambda params, folder: save_pretrained(folder, LLAMA, base(params), overwrite=True),
        )

        def write(params, folder):
            save_adapter(folder, LORA, trained(params), base="a/base", overwrite=True)

        engine = RemoteEngine(
            [server.url for server in servers],
            "vllm_lora",
            weights=AdapterFolder(tmp_path / "sync", write, *(bases if local else ())),
            probe=Probe(SCORE, LLAMA.vocab_size, 1e-3),
            hosts=hosts,
            proxy_url=routers[0].url if router else None,
            options=dataclasses.replace(QUICK, attempts=40),
        )
        things.extend([engine.close, *(server.kill for server in servers)])
        things.extend(router.end for router in routers)
        if updated:
            engine.update_weights(FIRST, 7)
        return engine, servers, hosts or routers

    yield build
    for close in things:
        close()


def drawn(params, *requests):
    """What the engine in this process draws with the adapters merged."""
    engine = engine_of(LLAMA, 9)
    engine.update_weights(merge(params), 7)
    return [sample.tokens for sample in flat(engine.generate(requests))]


def versions(tmp_path):
    return sorted(path.name for path in (tmp_path / "sync").iterdir())


def test_requests_name_the_newest_adapter_and_the_base_stays(world, tmp_path):
    engine, (server,), _ = world()
    samples = flat(engine.generate([request()]))
    assert [s.tokens for s in samples] == drawn(FIRST, request())
    assert versions(tmp_path) == ["version-7"]
    files = sorted(path.name for path in (tmp_path / "sync" / "version-7").iterdir())
    assert files == ["adapter_config.json", "adapter_model.safetensors"]
    engine.update_weights(SECOND, 8)
    samples = flat(engine.generate([request()]))
    assert [s.tokens for s in samples] == drawn(SECOND, request())
    assert {v for s in samples for v in s.versions} == {8}
    assert versions(tmp_path) == ["version-8"]
    assert [name.rpartition("-")[0] for name in server.adapters] == ["version-8"]
    assert server.bodies[-1]["model"] in server.adapters
    assert server.calls["/v1/load_lora_adapter"] == 2
    assert not server.calls["/collective_rpc"]


def test_a_request_under_way_ends_with_the_adapter_that_it_named(world, tmp_path):
    """Its folder stays so long: vLLM reads adapters again that it had put aside."""
    engine, (server,), _ = world()
    go_on = threading.Event()
    server.holds.append(go_on)
    (futures,) = engine.submit([request()])
    wait_until(lambda: not server.holds)
    engine.update_weights(SECOND, 8)
    assert versions(tmp_path) == ["version-7", "version-8"]
    go_on.set()
    samples = [future.result(timeout=60) for future in futures]
    assert [s.tokens for s in samples] == drawn(FIRST, request())
    assert {v for s in samples for v in s.versions} == {7}
    engine.update_weights(THIRD, 9)
    assert versions(tmp_path) == ["version-9"]


def test_a_server_that_lost_the_adapter_gets_it_again(world):
    engine, (server,), _ = world()
    server.adapters.clear()  # started again between two looks
    assert [s.tokens for s in flat(engine.generate([request()]))] == drawn(FIRST, request())
    assert server.calls["/v1/load_lora_adapter"] == 2


def test_behind_a_router_all_who_may_have_lost_it_do(world):
    engine, servers, (router,) = world(2, router=True)
    servers[1].adapters.clear()
    asked = [request(prompt=(5, 6, i)) for i in range(4)]
    samples = flat(engine.generate(asked))
    assert [s.tokens for s in samples] == drawn(FIRST, *asked)
    assert set(router.calls) == {"/v1/completions"}
    assert all(server.adapters for server in servers)


@pytest.mark.slow
def test_a_server_started_here_gets_the_base_and_then_the_newest_adapter(world, tmp_path):
    engine, (server,), (host,) = world(local=True)
    written = (tmp_path / "weights" / "base" / "model.safetensors").stat().st_mtime_ns
    engine.update_weights(SECOND, 8)
    server.kill()
    wait_until(lambda: len(host.folders) == 2 and engine.servers[0].ready)
    assert host.folders == ["base", "base"]
    assert [s.tokens for s in flat(engine.generate([request()]))] == drawn(SECOND, request())
    assert [name.rpartition("-")[0] for name in server.adapters] == ["version-8"]
    assert (tmp_path / "weights" / "base" / "model.safetensors").stat().st_mtime_ns == written


def test_a_request_waits_while_the_only_server_is_started_again(world):
    engine, (server,), (host,) = world(local=True)
    verified = threading.Event()
    server.holds.append(verified)
    host.folders.clear()  # its keeper finds it dead
    wait_until(lambda: not server.holds)  # it runs again, and its probe is being answered
    (futures,) = engine.submit([request()])
    wait(futures, timeout=0.2)  # the time to fail
    verified.set()
    samples = [future.result(timeout=60) for future in futures]
    assert [s.tokens for s in samples] == drawn(FIRST, request())


def test_an_adapter_that_is_not_used_is_found_out(world):
    engine, (server,), _ = world()
    server.stale = True
    with pytest.raises(WeightMismatch, match="stale or wrong weights: after the update to vers"):
        engine.update_weights(SECOND, 8)


@pytest.mark.parametrize("rank", [2, None])
def test_a_server_that_is_well_and_refuses_ends_the_run_at_once(world, tmp_path, rank):
    """vLLM answers 500 where the rank is too large, and 404 without runtime updates."""
    engine, (server,), _ = world(updated=False, rank=rank or 8)
    if rank is None:
        server.faults["/v1/load_lora_adapter"] = deque([404])
    said = r"does not take the weights of .*version-7: .*(rank 4|404).*--max-lora-rank of at least"
    with pytest.raises(RemoteEngineError, match=said):
        engine.update_weights(FIRST, 7)
    settings = json.loads((tmp_path / "sync" / "version-7" / "adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"]) == (4, 8)
