"""The engine over HTTP, against servers with real engines: each sample comes once, whole."""

import contextlib
import dataclasses
import threading
import time
from collections import deque

import numpy as np
import pytest

from jaxrl.models.export import save_pretrained
from jaxrl.rollout.protocol import Request, Sampling
from jaxrl.rollout.remote.dialects import DIALECTS, InvalidAnswer
from jaxrl.rollout.remote.engine import RemoteEngine, RemoteEngineError
from jaxrl.rollout.remote.http_client import RemoteOptions
from jaxrl.rollout.remote.probe import Probe, WeightMismatch, make_score
from jaxrl.rollout.weights.folder import WeightFolder
from tests.rollout.http_servers import FakeServer, engine_of
from tests.rollout.test_native import LLAMA, flat, random_params

PROMPT = (3, 1, 4, 1, 5)
QUICK = RemoteOptions(
    timeout_seconds=60.0, attempts=4, backoff_seconds=0.01, recovery_seconds=30.0, poll_seconds=0.05
)
SCORE = make_score(LLAMA, np.float32, None, 16)
GREEDY = Sampling(8, temperature=0.0)
NEW, OLD = random_params(LLAMA, 1), random_params(LLAMA, 0)


def request(samples=4, prompt=PROMPT, first=0, **sampling):
    keys = tuple((7, first + i) for i in range(samples))
    return Request(prompt, keys, Sampling(**{"max_tokens": 8, "temperature": 0.9, **sampling}))


@pytest.fixture
def world(tmp_path):
    """Servers, and engines that close at the end."""
    servers, engines = [], []

    def build(count=1, dialect="vllm", bound=0.05, updated=True, drawn=GREEDY, **options):
        servers.extend(FakeServer(dialect, LLAMA, OLD, i) for i in range(count))

        def write(params, folder):
            save_pretrained(folder, LLAMA, params, overwrite=True)

        engine = RemoteEngine(
            [server.url for server in servers],
            dialect,
            weights=WeightFolder(tmp_path / "weights", write),
            probe=Probe(SCORE, LLAMA.vocab_size, bound, sampling=drawn),
            options=dataclasses.replace(QUICK, **options),
        )
        engines.append(engine)
        if updated:
            engine.update_weights(NEW, 7)
        return engine, servers

    yield build
    for engine in engines:
        engine.close()
    for server in servers:
        server.kill()


def wait_until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def expected(*requests):
    """What the engine in this process draws; our seed's low half numbers the samples, as vLLM's."""
    engine = engine_of(LLAMA, 9)
    engine.update_weights(NEW, 7)
    return flat(engine.generate(requests))


@pytest.mark.parametrize("dialect", ["vllm", "native"])
def test_samples_are_those_of_the_engine_behind_the_server(world, dialect):
    engine, (server,) = world(dialect=dialect)
    asked = [request(), request(1, prompt=(9, 2, 6), first=5, stop_token_ids=(4, 5, 6))]
    samples = flat(engine.generate(asked))
    for sample, same in zip(samples, expected(*asked), strict=True):
        assert (sample.tokens, sample.stop_reason) == (same.tokens, same.stop_reason)
        np.testing.assert_allclose(sample.log_probs, same.log_probs, atol=1e-5)
        assert sample.versions == [7] * len(sample.tokens)
    assert server.bodies[-1]["ignore_eos"] and server.bodies[-1]["n"] in (1, 4)


def test_a_server_says_both_versions_of_a_token_or_the_first():
    dialect, asked = DIALECTS["native"], request(1)
    choice = {
        **{"index": 0, "token_ids": [3, 4], "versions": [6, 7], "finish_reason": "length"},
        "logprobs": {"token_logprobs": [-1.0, -2.0]},
    }
    for said, contexts in (({}, []), ({"context_versions": [6, 6]}, [6, 6])):
        (sample,) = dialect.completions({"choices": [choice | said]}, asked, 9)
        assert (sample.versions, sample.context_versions) == ([6, 7], contexts)
    with pytest.raises(InvalidAnswer, match="2 tokens, 1 context_versions"):
        dialect.completions({"choices": [choice | {"context_versions": [6]}]}, asked, 9)


def test_alternatives_of_a_token_come_by_id(world):
    engine, _ = world()
    ((sample,),) = engine.generate([request(1, logprobs=2)])
    (same,) = expected(request(1, logprobs=2))
    assert [list(place) for place in sample.top_log_probs] == [
        list(place) for place in same.top_log_probs
    ]


def test_folders_of_old_versions_go_and_new_weights_are_sampled_from(world, tmp_path):
    engine, (server,) = world()
    assert [p.name for p in (tmp_path / "weights").iterdir()] == ["version-7"]
    before = flat(engine.generate([request()]))
    engine.update_weights(OLD, 8)
    assert [p.name for p in (tmp_path / "weights").iterdir()] == ["version-8"]
    after = flat(engine.generate([request()]))
    assert [s.tokens for s in before] != [s.tokens for s in after]
    assert {v for s in after for v in s.versions} == {8}
    paths = ["/pause", "/collective_rpc", "/reset_prefix_cache", "/resume"]
    assert [server.calls[path] for path in paths] == [2, 2, 2, 2]
    assert "version 8" in engine.describe()


# ------------------------------------------------------------------ faults


@pytest.mark.parametrize("fault", [429, 500, 503, "truncated", "drop"])
def test_a_failed_call_is_made_again(world, fault):
    engine, (server,) = world()
    server.faults["/v1/completions"] = deque([fault, fault])
    samples = flat(engine.generate([request()]))
    assert [s.tokens for s in samples] == [s.tokens for s in expected(request())]


def test_429_is_waited_out(world):
    """Six refusals, and four attempts: those refused so are none."""
    engine, (server,) = world()
    server.faults["/v1/completions"] = deque([429] * 6)
    assert len(flat(engine.generate([request()]))) == 4


def test_a_hanging_call_is_given_up(world):
    expected(request())  # nothing is compiled below, and a call takes far less than its time
    engine, (server,) = world(timeout_seconds=2.0)
    server.faults["/v1/completions"] = deque(["hang"])
    assert len(flat(engine.generate([request()]))) == 4


def test_the_error_after_all_attempts_names_server_request_and_cause(world):
    engine, (server,) = world()
    server.faults["/v1/completions"] = deque([500] * 4)
    said = rf"{server.url}: 4 attempts at a request of 4 samples .* \[3, 1, 4, 1, 5\].*planted"
    with pytest.raises(RemoteEngineError, match=said):
        engine.generate([request()])


def test_what_a_server_refuses_is_not_asked_again(world):
    engine, (server,) = world()
    server.faults["/v1/completions"], before = deque([400]), server.calls["/v1/completions"]
    with pytest.raises(RemoteEngineError, match="refuses a request of 4 samples"):
        engine.generate([request()])
    assert server.calls["/v1/completions"] == before + 1


def test_a_server_killed_in_mid_generation(world):
    """Its requests go to the other; when it is back it has the newest weights, not its old ones."""
    engine, (dies, lives) = world(2)
    dies.engine.pause()
    asked = [request(prompt=(*PROMPT, i), first=10 * i) for i in range(6)]
    futures = engine.submit(asked)
    wait_until(lambda: dies.calls["/v1/completions"] >= 3 and lives.served >= 8)
    dies.kill()
    samples = [future.result(timeout=60) for group in futures for future in group]
    assert [s.tokens for s in samples] == [s.tokens for s in expected(*asked)]
    dies.start()
    wait_until(lambda: all(server.ready for server in engine.servers))
    assert dies.calls["/collective_rpc"] == 2
    before = dies.served
    engine.generate([request(prompt=(*PROMPT, i)) for i in range(20, 24)])
    assert dies.served > before


def test_a_server_killed_in_mid_update(world):
    engine, (dies, lives) = world(2)
    dies.faults["/collective_rpc"] = deque(["drop"])
    dies.faults["/health"] = deque([200, *["drop"] * 3])
    engine.update_weights(OLD, 8)
    (group,) = engine.generate([request()])
    assert {v for s in group for v in s.versions} == {8}
    wait_until(lambda: all(server.ready for server in engine.servers))
    assert [server.version for server in engine.servers] == [8, 8]


def test_without_any_server_the_update_waits_for_one(world):
    engine, (server,) = world(updated=False)
    server.kill()
    back = threading.Timer(0.5, server.start)
    back.start()
    engine.update_weights(NEW, 3)
    back.join()
    assert engine.servers[0].version == 3


def test_nobody_comes_back(world):
    engine, (server,) = world(recovery_seconds=0.3)
    server.kill()
    with pytest.raises(
        RemoteEngineError, match=r"no server was ready for 0.3 s: http.*Cannot connect"
    ):
        engine.generate([request()])


def test_a_cancelled_request_is_given_up_and_others_go_on(world):
    engine, (server,) = world()
    server.engine.pause()
    first, second = engine.submit([request(2), request(1, first=50)])
    wait_until(lambda: server.calls["/v1/completions"] == 3)  # and the probe
    for future in first:
        assert future.cancel()
    server.engine.resume()
    assert len(second[0].result(timeout=60).tokens) == 8
    assert not engine.servers[0].in_flight


# ------------------------------------------------------------------ which server


def test_samples_are_spread_and_conversations_stay(world):
    engine, servers = world(2)
    for server in servers:
        server.engine.pause()
    probes = sum(server.calls["/v1/completions"] for server in servers)
    futures = engine.submit([request(2, prompt=(5, 6, i)) for i in range(8)])
    wait_until(lambda: sum(s.calls["/v1/completions"] for s in servers) == 8 + probes)
    assert [server.in_flight for server in engine.servers] == [8, 8]
    for server in servers:
        server.engine.resume()
    samples = [[future.result(timeout=60) for future in group] for group in futures]
    first = {tuple(b["prompt"]): s for s in servers for b in s.bodies}
    turns = [request(1, prompt=(5, 6, i, *samples[i][0].tokens, 9)) for i in range(8)]
    engine.generate(turns)
    later = {tuple(b["prompt"]): s for s in servers for b in s.bodies}
    assert all(later[turn.prompt_tokens] is first[turn.prompt_tokens[:3]] for turn in turns)


# ------------------------------------------------------------------ stale weights, refusals


@pytest.mark.parametrize("dialect", ["vllm", "native"])
def test_a_server_with_stale_weights_is_found_out(world, dialect):
    engine, servers = world(2, dialect)
    servers[1].stale = True
    said = rf"{servers[1].url} has stale or wrong weights: after the update to version 8"
    with pytest.raises(WeightMismatch, match=said):
        engine.update_weights(random_params(LLAMA, 2), 8)


def test_log_probs_of_another_distribution_are_found_out(world):
    engine, (server,) = world()
    server.log_prob_error = -0.1
    with pytest.raises(WeightMismatch, match=r"are 0\.1 away .*probe_bound=0\.05"):
        engine.update_weights(NEW, 8)


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("drawn", "found_out"),
    [
        (Sampling(8, temperature=0.5), True),
        (Sampling(8, temperature=1.0, top_k=4), True),
        (Sampling(8, temperature=1.0), False),  # there is no difference
    ],
)
def test_log_probs_before_temperature_and_filters_are_found_out(world, drawn, found_out):
    """vLLM without --logprobs-mode processed_logprobs; greedily both kinds are the same numbers."""
    engine, (server,) = world(drawn=drawn)
    assert server.bodies[0]["temperature"] == drawn.temperature  # updated, and the probe passed
    server.raw = True
    if found_out:
        with pytest.raises(WeightMismatch, match="--logprobs-mode processed_logprobs"):
            engine.update_weights(NEW, 8)
    else:
        engine.update_weights(NEW, 8)


def test_a_server_that_comes_back_with_wrong_weights_ends_the_run(world):
    engine, (server,) = world()
    server.kill()
    wait_until(lambda: not engine.servers[0].ready)
    server.stale = True
    server.start()
    with pytest.raises(WeightMismatch, match="stale or wrong"):
        for _ in range(100):
            engine.generate([request()])


def test_what_the_protocol_cannot_ask_for_is_refused(world):
    engine, _ = world()
    with pytest.raises(ValueError, match=r"Sampling\.raw_log_probs is not available from a vllm"):
        engine.submit([request(raw_log_probs=True)])
    with pytest.raises(ValueError, match=r"Sampling\.keep_sampling_mask"):
        engine.submit([request(keep_sampling_mask=True, top_k=4)])
    with pytest.raises(ValueError, match="empty prompt"):
        engine.submit([request(prompt=())])


def test_no_samples_before_weights(world):
    engine, _ = world(updated=False)
    with pytest.raises(RuntimeError, match="call update_weights first"):
        engine.submit([request()])


def test_a_server_that_lacks_the_update_call_is_named(world):
    engine, (server,) = world(updated=False)
    server.faults["/collective_rpc"] = deque([404] * 1000)  # whoever asks, and however often
    with pytest.raises(RemoteEngineError, match=r"does not take the weights of .*version-7.*404"):
        engine.update_weights(NEW, 7)


@pytest.mark.parametrize("dialect", ["vllm", "native"])
def test_servers_that_keep_their_weights_are_only_asked(world, dialect):
    _, servers = world(2, dialect=dialect, updated=False)
    inside = engine_of(LLAMA, 9)
    inside.update_weights(OLD, -1)
    same = [sample.tokens for sample in flat(inside.generate([request()]))]
    urls = [server.url for server in servers]
    with contextlib.closing(
        RemoteEngine(urls, dialect, weights=None, probe=None, options=QUICK)
    ) as engine:
        assert [sample.tokens for sample in flat(engine.generate([request()]))] == same
        with pytest.raises(RuntimeError, match="keep their own weights"):
            engine.update_weights(NEW, 1)
        servers[0].kill()
        assert [sample.tokens for sample in flat(engine.generate([request()]))] == same
    for server in servers:
        assert not server.calls["/update_weights"] + server.calls["/collective_rpc"]
    with pytest.raises(ConnectionError, match=f"{servers[0].url} does not answer as a {dialect}"):
        RemoteEngine(urls, dialect, weights=None, probe=None, options=QUICK)
