"""JetStream's gRPC over loopback: our server, our client, and a server that dies."""

import threading
import time
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor

import grpc
import pytest

from jaxrl.rollout.jetstream.wire import SERVICE, jetstream_pb2 as pb
from jaxrl.rollout.jetstream.wire.client import JetStreamClient
from jaxrl.rollout.jetstream.wire.server import serve_grpc
from jaxrl.rollout.protocol import Sampling
from tests.rollout.test_native import PROMPTS, engine_of, flat, request

GREEDY = Sampling(max_tokens=10, temperature=0.0, stop_token_ids=(1000,))


class Words:
    """A tokenizer: digits are their own ids."""

    def __call__(self, text, add_special_tokens=True):
        return {"input_ids": [int(x) for x in text.split()]}

    def decode(self, ids, skip_special_tokens=True):
        return " ".join(map(str, ids))


@pytest.fixture(scope="module")
def server():
    server = serve_grpc(engine_of("qwen2"), Words(), 0, GREEDY)
    yield f"127.0.0.1:{server.bound_port}"
    server.stop(None)


def client(*addresses, **options):
    made = JetStreamClient(addresses, sampling={"temperature": 0.0}, **options)
    made.update_weights(None, 3)
    return made


def greedy(prompt, samples=1, **options):
    return request(prompt, *range(samples), temperature=0.0, **options)


def decode(address, message, **options):
    channel = grpc.insecure_channel(address)
    method = channel.unary_stream(
        f"/{SERVICE}/Decode", pb.DecodeRequest.SerializeToString, pb.DecodeResponse.FromString
    )
    return list(method(message, timeout=60, **options))


def test_sixteen_parallel_requests_come_back_as_they_would_in_process(server):
    prompts = [[*PROMPTS[n % 3], n] for n in range(16)]
    wanted = engine_of("qwen2").generate([greedy(p) for p in prompts])
    found = client(server).generate([greedy(p) for p in prompts])
    assert [c.tokens for c in flat(found)] == [c.tokens for c in flat(wanted)]
    assert all(not c.log_probs and c.versions == [3] * 10 for c in flat(found))
    assert {c.stop_reason for c in flat(found)} == {"length"}


@pytest.mark.parametrize("multi_sampling", [False, True])
def test_groups_and_stop_tokens(server, multi_sampling):
    whole = flat(engine_of("qwen2").generate([greedy([3, 1, 4])]))[0].tokens
    stop = whole[2]
    assert whole.index(stop) == 2
    asked = greedy([3, 1, 4], 3, stop=(stop,))
    for completion in client(server, multi_sampling=multi_sampling).generate([asked])[0]:
        assert completion.tokens == whole[: whole.index(stop) + 1]
        assert completion.stop_reason == "stop"


def test_text_goes_in_and_comes_out(server):
    message = pb.DecodeRequest(max_tokens=4, num_samples=2)
    message.text_content.text = "3 1 4"
    texts = ["", ""]
    for response in decode(server, message):
        for number, sample in enumerate(response.stream_content.samples):
            texts[number] += sample.text
    whole = flat(engine_of("qwen2").generate([greedy([3, 1, 4])]))[0].tokens
    assert texts == [" ".join(map(str, whole[:4]))] * 2


def test_what_the_server_refuses(server):
    with pytest.raises(grpc.RpcError, match="empty prompt") as caught:
        decode(server, pb.DecodeRequest(max_tokens=4))
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    with pytest.raises(grpc.RpcError, match="lora_adapter_id='x': there are no adapters"):
        decode(server, pb.DecodeRequest(max_tokens=4, lora_adapter_id="x"))
    with pytest.raises(ValueError, match="host='0.0.0.0' can be reached from other machines"):
        serve_grpc(engine_of("qwen2"), Words(), 0, GREEDY, host="0.0.0.0")


def test_a_token_is_asked_for():
    server = serve_grpc(engine_of("qwen2"), Words(), 0, GREEDY, token="secret")
    address = f"127.0.0.1:{server.bound_port}"
    with pytest.raises(RuntimeError, match="UNAUTHENTICATED"):
        client(address, token="guess").generate([greedy([3])])
    assert flat(client(address, token="secret").generate([greedy([3])]))[0].tokens
    server.stop(None)


def test_what_the_client_refuses(server):
    engine = client(server)
    with pytest.raises(ValueError, match=r"temperature=0.7: this JetStream engine cannot be told"):
        engine.submit([request([3], 1)])
    with pytest.raises(ValueError, match="logprobs=2"):
        engine.submit([greedy([3], logprobs=2)])
    with pytest.raises(RuntimeError, match="version 4 cannot reach the JetStream servers"):
        engine.update_weights(None, 4)
    with pytest.raises(ValueError, match="needs the address of a server"):
        JetStreamClient([])


def test_weights_go_through_publish(server):
    published = []
    engine = client(server, publish=lambda params, version: published.append((params, version)))
    engine.update_weights("params", 4)
    assert published == [(None, 3), ("params", 4)]
    assert flat(engine.generate([greedy([3])]))[0].versions == [4] * 10


# ------------------------------------------------------------------ servers that misbehave


class Fake:
    """A server that says what it is told to, in JetStream's way: a token in each message."""

    def __init__(self, answer, port=0):
        self.answer, self.calls, self.active = answer, 0, threading.Event()
        self.cancelled = threading.Event()
        handler = grpc.unary_stream_rpc_method_handler(
            self.decode, pb.DecodeRequest.FromString, pb.DecodeResponse.SerializeToString
        )
        self.server = grpc.server(ThreadPoolExecutor(20))
        handlers = grpc.method_handlers_generic_handler(SERVICE, {"Decode": handler})
        self.server.add_generic_rpc_handlers((handlers,))
        self.address = f"127.0.0.1:{self.server.add_insecure_port(f'127.0.0.1:{port}')}"
        self.server.start()

    def decode(self, message, context):
        self.calls += 1
        self.active.set()
        context.add_callback(self.cancelled.set)
        for token in self.answer:
            if token is None:  # hang
                self.cancelled.wait(60)
                return
            response = pb.DecodeResponse()
            response.stream_content.samples.add().token_ids.append(token)
            yield response


def test_a_server_that_keeps_its_stop_token_to_itself():
    fake = Fake([4, 5])
    (completion,) = flat(client(fake.address).generate([greedy([3], stop=(9,))]))
    assert (completion.tokens, completion.stop_reason) == ([4, 5, 9], "stop")
    with pytest.raises(ValueError, match="which of the stop ids"):
        client(fake.address).generate([greedy([3], stop=(8, 9))])
    (chosen,) = flat(client(fake.address, stop_token_id=8).generate([greedy([3], stop=(8, 9))]))
    assert chosen.tokens == [4, 5, 8]
    fake.server.stop(None)


def test_a_server_without_multi_sampling_is_named():
    fake = Fake([4, 5])
    with pytest.raises(ValueError, match="gave 1 of 2 samples: it runs without multi-sampling"):
        client(fake.address, multi_sampling=True).generate([greedy([3], 2)])
    fake.server.stop(None)


def test_groups_are_complete_after_a_server_died_in_mid_stream():
    dying, living = Fake([4, None]), Fake(list(range(10)))
    engine = client(dying.address, living.address, patience=60)
    groups = engine.submit([greedy([3], 4), greedy([5], 4)])
    assert dying.active.wait(30)
    dying.server.stop(None)
    found = [[f.result(60) for f in group] for group in groups]
    assert [[c.tokens for c in group] for group in found] == [[list(range(10))] * 4] * 2
    living.server.stop(None)


def test_patience_ends():
    with pytest.raises(RuntimeError, match="JetStream server 127.0.0.1:1: .*UNAVAILABLE"):
        client("127.0.0.1:1", patience=0.3).generate([greedy([3])])


class SilentEngine:
    """Takes requests and never answers."""

    def __init__(self):
        self.futures, self.asked = [], threading.Event()

    def submit(self, requests):
        groups = [[Future() for _ in r.keys] for r in requests]
        self.futures += flat(groups)
        self.asked.set()
        return groups


def test_a_client_that_goes_away_holds_no_thread():
    """The only one of the pool is free for the next call, and for the end of the process."""
    engine = SilentEngine()
    server = serve_grpc(engine, Words(), 0, GREEDY, max_requests=1)
    channel = grpc.insecure_channel(f"127.0.0.1:{server.bound_port}")
    stream = channel.unary_stream(
        f"/{SERVICE}/Decode", pb.DecodeRequest.SerializeToString, pb.DecodeResponse.FromString
    )
    content = pb.DecodeRequest.TokenContent(token_ids=[1, 2])
    call = stream(pb.DecodeRequest(token_content=content, num_samples=2), timeout=60)
    assert engine.asked.wait(30)
    call.cancel()
    for future in engine.futures:
        with pytest.raises(CancelledError):
            future.result(30)
    health = channel.unary_unary(
        f"/{SERVICE}/HealthCheck",
        pb.HealthCheckRequest.SerializeToString,
        pb.HealthCheckResponse.FromString,
    )
    for _ in range(400):
        try:
            assert health(pb.HealthCheckRequest(), timeout=20).is_live
            break
        except grpc.RpcError as error:  # the cancelled call still counts for a moment
            assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
            time.sleep(0.05)
    else:
        pytest.fail("the cancelled call still holds the thread")
    server.stop(None)


def test_cancelling_ends_the_call():
    fake = Fake([4, None])
    ((future,),) = client(fake.address).submit([greedy([3])])
    assert fake.active.wait(30)
    future.cancel()
    assert fake.cancelled.wait(30)
    with pytest.raises(CancelledError):
        future.result(1)
    fake.server.stop(None)
