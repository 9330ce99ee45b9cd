"""Requests that are wrong, or mean harm: each is answered 4xx with a reason, and no more."""

import json
import random
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest

from jaxrl.tools.tinker import app
from jaxrl.tools.tinker.keys import Keys, read_keys
from jaxrl.tools.tinker.wire import tinker_pb2 as wire
from tests.tools.tinker.serving import BASE, KEY, OTHER_KEY, client, datum, serving, trainer

JUNK = [None, True, -1, 2**70, 1e400, float("nan"), [], {}, [[[]]], {"a": {"b": []}}]
JUNK += ["", "x" * 5000, "../../etc", "a/b", "\x00", "'; DROP", "tinker://../../x/y", "💥"]
JUNK += [["a"] * 300]
DEEP = b'{"a":' * 20000 + b"1" + b"}" * 20000
RAW = [b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", DEEP, b'{"session_id": 1e999}']
RAW += [b"0" * 100_000]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("tinker"), serve__max_body_bytes=2**20) as running:
        yield running


def ask(server, path, raw=None, method="POST", **headers):
    """Return the status and the body; what is sent is what stands here."""
    sent = {"X-API-Key": KEY, "Content-Type": "application/json"} | {
        name.replace("_", "-"): value for name, value in headers.items()
    }
    request = urllib.request.Request(
        f"{server.url}{path}", data=raw, method=method, headers={k: v for k, v in sent.items() if v}
    )
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def body_of(model, sampler, session, name):
    """A right body of each call."""
    of_model = {"model_id": model, "seq_id": 10**6}
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]}
    return {
        "create_session": {"tags": [], "user_metadata": {}, "sdk_version": "0"},
        "session_heartbeat": {"session_id": session},
        "create_model": {
            "session_id": session,
            "model_seq_id": 10**6,
            "base_model": BASE,
            "lora_config": {"rank": 4},
        },
        "get_info": {"model_id": model},
        "optim_step": of_model | {"adam_params": {"learning_rate": 1e-3}},
        "save_weights": of_model | {"path": "name"},
        "save_weights_for_sampler": of_model | {"path": "name"},
        "load_weights": of_model | {"path": "tinker://a/weights/b", "optimizer": True},
        "create_sampling_session": {
            "session_id": session,
            "sampling_session_seq_id": 10**6,
            "base_model": BASE,
        },
        "join_sampling_session": {"sampling_session_id": sampler},
        "asample": {
            "sampling_session_id": sampler,
            "seq_id": 10**6,
            "prompt": prompt,
            "sampling_params": {"max_tokens": 2},
        },
        "retrieve_future": {"request_id": f"{model}:999"},
        "create_custom_loss": {
            "session_id": session,
            "custom_loss_seq_id": 10**6,
            "name": "mine",
            "inputs": [{"name": "logprobs", "rank": 1}],
            "graph": {
                "format": 1,
                "nodes": [
                    {"op": "placeholder", "name": "x", "target": "logprobs"},
                    {"op": "call_method", "name": "s", "target": "sum", "args": [{"ref": "x"}]},
                    {
                        "op": "output",
                        "name": "output",
                        "target": "output",
                        "args": [{"tuple": [{"ref": "s"}, {"dict": {}}]}],
                    },
                ],
            },
        },
        "weights_info": {"tinker_path": "tinker://a/weights/b"},
    }[name]


NAMES = (
    *("create_session", "session_heartbeat", "create_model", "get_info", "optim_step"),
    *("save_weights", "save_weights_for_sampler", "load_weights", "create_sampling_session"),
    *("join_sampling_session", "asample", "retrieve_future", "create_custom_loss", "weights_info"),
)


def spoilt(body, draw):
    """A body with one thing that is wrong, at any depth."""
    body = json.loads(json.dumps(body))
    at, path = body, []
    while True:
        key = draw.choice(list(at) if isinstance(at, dict) else range(len(at)))
        path.append(key)
        inner = at[key]
        if not isinstance(inner, dict | list) or not inner or draw.random() < 0.4:
            break
        at = inner
    if isinstance(at, dict) and draw.random() < 0.3:
        at[f"{key}_"] = at.pop(key)
    else:
        at[key] = draw.choice(JUNK)
    return body


def graph_with(op, target, args):
    node = {"op": op, "name": "y", "target": target, "args": args}
    return lambda nodes: [nodes[0], node, *nodes[1:]]


HARMFUL_GRAPHS = {
    "builtins.eval": graph_with("call_function", "builtins.eval", ["1"]),
    "os.system": graph_with("call_function", "os.system", ["true"]),
    "__reduce__": graph_with("call_method", "__reduce__", [{"ref": "x"}]),
    "builtins.getattr": graph_with("call_function", "builtins.getattr", [{"ref": "x"}, "shape"]),
    "torch.load": graph_with("call_function", "torch.load", ["/etc/passwd"]),
    "call_module": graph_with("call_module", "torch.nn.Linear", []),
    "no earlier node": graph_with("call_method", "exp", [{"ref": "later"}]),
}


def test_500_wrong_requests(server):
    draw = random.Random(0)
    with client(server) as service:
        model, session = trainer(service), service.holder.get_session_id()
        sampler = service.create_sampling_client(base_model=BASE).result()._sampling_session_id
        before = model.forward([datum([1, 2, 3], weights=[1.0, 1.0])], "cross_entropy").result()
        codes, accepted = [], 0
        for number in range(500):
            name = NAMES[number % len(NAMES)]
            right = body_of(model.model_id, sampler, session, name)
            if number % 10 == 0:
                raw = draw.choice(RAW)
            else:
                raw = json.dumps(spoilt(right, draw)).encode()
            status, answer = ask(server, f"/api/v1/{name}", raw)
            if status == 200:  # what was spoilt means nothing there
                accepted += 1
                continue
            codes.append(status)
            assert 400 <= status < 500, (name, raw[:200], status, answer)
            told = json.loads(answer)
            assert told.get("error") or told.get("type") == "try_again"
            assert KEY not in answer.decode()
            assert "Traceback" not in answer.decode()
        assert len(codes) > 400, accepted
        after = model.forward([datum([1, 2, 3], weights=[1.0, 1.0])], "cross_entropy").result()
        assert after.metrics == before.metrics


@pytest.mark.parametrize("what", HARMFUL_GRAPHS)
def test_a_graph_runs_nothing_but_what_stands_in_the_table(server, what):
    with client(server) as service:
        body = body_of("", "", service.holder.get_session_id(), "create_custom_loss")
        body["graph"]["nodes"] = HARMFUL_GRAPHS[what](body["graph"]["nodes"])
        status, answer = ask(server, "/api/v1/create_custom_loss", json.dumps(body).encode())
    assert status == 400
    assert "error" in json.loads(answer)


def test_wrong_protobuf(server):
    draw = random.Random(1)
    with client(server) as service:
        model = trainer(service)
        right = wire.ForwardBackwardRequest(model_id=model.model_id, seq_id=1, loss_fn="ppo")
        one = right.data.add()
        one.model_input.add().encoded_text.tokens = b"\x01\x00\x00\x00"
        for name in ("target_tokens", "logprobs", "advantages"):
            tensor = one.loss_fn_inputs[name]
            tensor.dense, tensor.dtype = b"\x01\x00\x00\x00", wire.DTYPE_INT32
        raw = right.SerializeToString()
        kind = {"Content_Type": "application/x-protobuf"}
        path = "/api/v1/forward_backward"
        for _ in range(100):
            broken = bytearray(raw)
            for _ in range(draw.randint(1, 4)):
                broken[draw.randrange(len(broken))] = draw.randrange(256)
            cut = bytes(broken[: draw.randint(0, len(broken))])
            status, _ = ask(server, path, cut, **kind)
            assert status == 200 or 400 <= status < 500
        assert ask(server, path, raw)[0] == 400  # said to be JSON
        assert ask(server, path, b"\x00" * (2**20 + 1), **kind)[0] == 413
        again = trainer(service)
        assert again.forward([datum([1, 2], weights=[1.0])], "cross_entropy").result().metrics


def test_a_number_is_used_once(server):
    with client(server) as service:
        model = trainer(service)
        body = {"model_id": model.model_id, "seq_id": 1, "adam_params": {"learning_rate": 1e-3}}
        first = ask(server, "/api/v1/optim_step", json.dumps(body).encode())
        assert ask(server, "/api/v1/optim_step", json.dumps(body).encode()) == first
        body["adam_params"]["learning_rate"] = 1.0
        status, answer = ask(server, "/api/v1/optim_step", json.dumps(body).encode())
    assert (first[0], status) == (200, 400)
    assert b"was another call" in answer


def test_who_may_ask(server, tmp_path):
    for headers, status in (
        ({"X_API_Key": None}, 401),
        ({"Origin": "https://example.com"}, 403),
        ({"Host": "example.com"}, 403),
        ({}, 200),
    ):
        found, _ = ask(server, "/api/v1/healthz", method="GET", **headers)
        assert found == status, headers
    keys = tmp_path / "keys"
    keys.write_text(f"# two users\n{KEY}\n\n{OTHER_KEY}\n")
    known = Keys(read_keys(str(keys), "0.0.0.0"))
    owners = {known.owner({"X-API-Key": key}, "example.com") for key in (KEY, OTHER_KEY)}
    assert len(owners) == 2
    assert not any(key in owner for key in (KEY, OTHER_KEY) for owner in owners)
    with pytest.raises(RuntimeError, match="wrong or missing key"):
        known.owner({"X-API-Key": "tml-third-key-cccccccc"}, "example.com")
    with pytest.raises(ValueError, match="can be reached from other machines"):
        read_keys(None, "0.0.0.0")
    keys.write_text("secret\n")
    with pytest.raises(ValueError, match="must begin with 'tml-'"):
        read_keys(str(keys), "127.0.0.1")


def test_limits_of_a_key(tmp_path_factory):
    changes = {"tinker__max_models": 2, "tinker__max_waiting": 3}
    with serving(tmp_path_factory.mktemp("tinker"), **changes) as server, client(server) as service:
        model = trainer(service)
        trainer(service)
        session = service.holder.get_session_id()
        body = body_of("", "", session, "create_model")
        status, answer = ask(server, "/api/v1/create_model", json.dumps(body).encode())
        assert (status, b"2 models of this key are there" in answer) == (403, True)
        codes = []
        for number in range(2, 7):  # the call with number 1 never comes
            body = {"model_id": model.model_id, "seq_id": number, "adam_params": {}}
            codes.append(ask(server, "/api/v1/optim_step", json.dumps(body).encode())[0])
        assert codes == [200, 200, 200, 429, 429]
        with client(server, OTHER_KEY) as other:
            trainer(other)


def test_a_number_that_is_left_out_is_named(server, monkeypatch):
    """Until it comes those after it wait; one that leaves too many out is refused."""
    monkeypatch.setattr(app, "PATIENCE", 0.05)

    def step(number):
        body = {"model_id": model.model_id, "seq_id": number, "adam_params": {}}
        return ask(server, "/api/v1/optim_step", json.dumps(body).encode())

    def result(number):
        body = json.dumps({"request_id": f"{model.model_id}:{number}"}).encode()
        status, answer = ask(server, "/api/v1/retrieve_future", body)
        return status, json.loads(answer)

    with client(server) as service:
        model = trainer(service)
        assert step(2)[0] == 200
        status, answer = result(2)
        assert (status, answer["queue_state"]) == (408, "paused_capacity")
        assert answer["queue_state_reason"].startswith("call 1 of the model has not come")
        for number in (2**62, 1026):  # more than 1024, tinker.max_waiting, after the first
            status, answer = step(number)
            assert status == 400 and b"far ahead of the next call, 1" in answer
        assert step(1025)[0] == 200
        assert step(1)[0] == 200
        monkeypatch.setattr(app, "PATIENCE", 20.0)
        assert [result(number)[0] for number in (1, 2)] == [200, 200]


def test_a_stranger_who_asks_for_a_result_takes_nothing(server, monkeypatch):
    """The owner, who waits, is woken when the call is done."""
    monkeypatch.setattr(app, "PATIENCE", 3600.0)

    def retrieve(key):
        body = json.dumps({"request_id": f"{model.model_id}:2"}).encode()
        return ask(server, "/api/v1/retrieve_future", body, X_API_Key=key)

    def step(number):
        body = {"model_id": model.model_id, "seq_id": number, "adam_params": {}}
        return ask(server, "/api/v1/optim_step", json.dumps(body).encode())

    with client(server) as service, ThreadPoolExecutor(1) as thread:
        model = trainer(service)
        step(2)
        waits = thread.submit(retrieve, KEY)
        while not server.routes._waiting:
            time.sleep(0.01)
        assert retrieve(OTHER_KEY)[0] == 404
        step(1)
        assert waits.result()[0] == 200
        assert not server.routes._waiting
