"""Our engines behind JetStream's gRPC service."""

import hmac
import secrets
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from ipaddress import ip_address
from queue import SimpleQueue
from typing import Any

import grpc

from jaxrl.rollout.jetstream.wire import SERVICE, jetstream_pb2 as pb
from jaxrl.rollout.protocol import Completion, Request, Sampler, Sampling

REFUSED = grpc.StatusCode.INVALID_ARGUMENT


def serve_grpc(
    engine: Sampler,
    tokenizer: Any,
    port: int,
    sampling: Sampling,
    *,
    host: str = "127.0.0.1",
    token: str | None = None,
    max_requests: int = 256,
    max_samples: int = 128,
    vocab_size: int | None = None,
) -> grpc.Server:
    """Start to serve, in threads of this process; `stop(grace)` ends it.

    A message of the stream holds a whole sample, not a token. Requests beyond `max_requests` are
    refused with RESOURCE_EXHAUSTED, which says that they may be sent again.

    Args:
        engine: with weights.
        tokenizer: for requests that come as text.
        port: 0 = a free one; `server.bound_port` has its number.
        sampling: of every request, since the wire has only max_tokens; at most its own.
        host: an address of this machine.
        token: what clients must send as metadata `authorization: Bearer TOKEN`.
        max_samples: of one request.
        vocab_size: token ids are below it; None = any.

    Raises:
        ValueError: others could reach the host, and there is no token.
        RuntimeError: the port is taken.
    """
    if token is None and not _is_loopback(host):
        raise ValueError(
            f"host={host!r} can be reached from other machines: set a token, or serve on 127.0.0.1"
        )
    orchestrator = _Orchestrator(engine, tokenizer, sampling, token, max_samples, vocab_size)
    server = grpc.server(
        ThreadPoolExecutor(max_requests),
        maximum_concurrent_rpcs=max_requests,
        options=[("grpc.so_reuseport", 0)],  # a second server on the port is an error
    )
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(SERVICE, orchestrator.handlers()),)
    )
    where = f"[{host}]" if ":" in host and not host.startswith("[") else host
    server.bound_port = server.add_insecure_port(f"{where}:{port}")  # type: ignore[attr-defined]
    server.start()
    return server


def _cancel(futures: Sequence[Future[Completion]]) -> None:
    """Free what is left of slots: the client has gone, or has everything."""
    for future in futures:
        future.cancel()


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True)
class _Orchestrator:
    """Implement the two methods of the service."""

    engine: Sampler
    tokenizer: Any
    sampling: Sampling
    token: str | None
    max_samples: int
    vocab_size: int | None

    def handlers(self) -> dict[str, grpc.RpcMethodHandler]:
        """Return the handlers of the service, by name of the method."""
        return {
            "Decode": grpc.unary_stream_rpc_method_handler(
                self.decode, pb.DecodeRequest.FromString, pb.DecodeResponse.SerializeToString
            ),
            "HealthCheck": grpc.unary_unary_rpc_method_handler(
                self.health_check,
                pb.HealthCheckRequest.FromString,
                pb.HealthCheckResponse.SerializeToString,
            ),
        }

    def health_check(self, request: Any, context: grpc.ServicerContext) -> Any:
        del request
        self._authorize(context)
        return pb.HealthCheckResponse(is_live=True)

    def decode(self, request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        """Yield each sample of the prompt as it ends."""
        self._authorize(context)
        samples = request.num_samples or 1
        try:
            (futures,) = self.engine.submit([self._request(request, samples)])
        except ValueError as error:
            context.abort(REFUSED, str(error))
        except RuntimeError as error:
            context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        numbers = {future: number for number, future in enumerate(futures)}
        ended: SimpleQueue[Future[Completion]] = SimpleQueue()  # as_completed misses cancelled ones
        for future in futures:
            future.add_done_callback(ended.put)
        if not context.add_callback(lambda: _cancel(futures)):  # the client has gone already
            _cancel(futures)
        for _ in futures:
            future = ended.get()
            try:
                completion = future.result()
            except CancelledError:
                return
            if completion.stop_reason == "abort":
                context.abort(grpc.StatusCode.ABORTED, "the engine was told to end all samples")
            content = pb.DecodeResponse.StreamContent()
            for number in range(samples):
                sample = content.samples.add()
                if number == numbers[future]:
                    sample.token_ids.extend(completion.tokens)
                    if request.HasField("text_content"):
                        sample.text = self._text(completion.tokens)
            yield pb.DecodeResponse(stream_content=content)

    def _request(self, request: Any, samples: int) -> Request:
        if not 1 <= samples <= self.max_samples:
            raise ValueError(f"num_samples={samples}: must be 1 to {self.max_samples}")
        if request.lora_adapter_id:
            raise ValueError(f"lora_adapter_id={request.lora_adapter_id!r}: there are no adapters")
        if request.HasField("text_content"):
            text = request.text_content.text
            options = {"add_special_tokens": not request.has_bos}
            prompt = self.tokenizer(text, **options)["input_ids"]
        else:
            prompt = request.token_content.token_ids
            size = max(prompt, default=0) + 1 if self.vocab_size is None else self.vocab_size
            if wrong := [token for token in prompt if not 0 <= token < size][:3]:
                raise ValueError(f"token_ids has {wrong}; ids are 0 to {size - 1}")
        longest = self.sampling.max_tokens
        sampling = replace(self.sampling, max_tokens=min(request.max_tokens or longest, longest))
        keys = tuple((secrets.randbits(32), secrets.randbits(32)) for _ in range(samples))
        return Request(tuple(prompt), keys, sampling)

    def _text(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True)

    def _authorize(self, context: grpc.ServicerContext) -> None:
        if self.token is None:
            return
        header = dict(context.invocation_metadata()).get("authorization", "")
        header = header if isinstance(header, bytes) else header.encode()
        if not hmac.compare_digest(header, f"Bearer {self.token}".encode()):
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "send authorization: Bearer TOKEN")
