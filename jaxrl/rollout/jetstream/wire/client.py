"""Servers that speak JetStream's gRPC as an `Engine`.

The wire carries token ids, max_tokens and the number of samples, and nothing else: how the server
samples is its own affair, it gives no log-probs, and weights go another way.
"""

import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import grpc

from jaxrl.rollout.jetstream.driver import check_sampling
from jaxrl.rollout.jetstream.wire import SERVICE, jetstream_pb2 as pb
from jaxrl.rollout.native.slots import Sample
from jaxrl.rollout.protocol import Completion, Request, Sampling

FATAL = {  # sending it again would not help
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNIMPLEMENTED,
}
FIRST_WAIT, LONGEST_WAIT = 0.1, 10.0  # seconds between two attempts


class JetStreamClient:
    """Serve as an `Engine` over JetStream servers with the same weights.

    Each call goes to the server with the fewest in flight; one that fails is made again, elsewhere
    if there is another server, and what it had brought is dropped: a sample is delivered once.

    Args:
        addresses: "host:port" of each server.
        sampling: how the servers sample, at the user's word: fields of `Sampling`.
        publish: brings parameters of a version to the servers and returns when they have them; None
            = they stay as they are, so nothing can be trained.
        stop_token_id: the token that ends a response whose server keeps it to itself; None = the
            only stop id of the request.
        multi_sampling: the servers run with it, so the samples of a prompt are one call.
        has_bos: prompts are complete; False = the server puts its first token before them.
        decode_text: token ids to text, for stop strings.
        max_model_len: most tokens of a row.
        concurrency: most calls in flight.
        patience: seconds until a call that fails again and again is given up; a server that does
            not answer has half of them, so that another one can.
        token: sent as `authorization: Bearer TOKEN`.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        sampling: Mapping[str, Any] | None = None,
        publish: Callable[[Any, int], None] | None = None,
        stop_token_id: int | None = None,
        multi_sampling: bool = False,
        has_bos: bool = True,
        decode_text: Callable[[Sequence[int]], str] | None = None,
        max_model_len: int | None = None,
        concurrency: int = 64,
        patience: float = 300.0,
        token: str | None = None,
    ) -> None:
        if not addresses:
            raise ValueError("a JetStream client needs the address of a server, 'host:port'")
        self.declared, self.publish = Sampling(max_tokens=1, **(sampling or {})), publish
        self.stop_token_id, self.multi_sampling = stop_token_id, multi_sampling
        self.has_bos, self.decode_text = has_bos, decode_text
        self.max_model_len, self.patience = max_model_len, patience
        self.version = -1
        self._metadata = () if token is None else (("authorization", f"Bearer {token}"),)
        self._decode = {address: _decode_method(address) for address in addresses}
        self._in_flight, self._lock = dict.fromkeys(addresses, 0), threading.Lock()
        self._pool = ThreadPoolExecutor(concurrency, thread_name_prefix="jaxrl-jetstream")

    # ---- weights

    def update_weights(self, params: Any, version: int) -> None:
        """Bring the servers to a version.

        The first one is taken to be what they hold if there is no `publish`.

        Raises:
            RuntimeError: there is no `publish`, and this is another version.
        """
        if self.publish is not None:
            self.publish(params, version)
        elif self.version not in (-1, version):
            raise RuntimeError(
                f"version {version} cannot reach the JetStream servers, which hold version "
                f"{self.version}: JetStream's wire has no weight update. Give the client a publish "
                "function (engine_init_kwargs['control']), or sample with another backend"
            )
        self.version = version

    def sleep(self) -> None:
        """Do nothing: the memory is the servers'."""

    def wake(self) -> None:
        """Do nothing: `sleep` did nothing, either."""

    # ---- requests

    def check(self, request: Request) -> None:
        """Refuse what the servers cannot be told; ValueError names it."""
        request.check(self.max_model_len, self.decode_text is not None)
        check_sampling(request.sampling, self.declared)

    def warm_up(self, requests: Sequence[Request]) -> None:
        """Check the requests; there is nothing to compile."""
        for request in requests:
            self.check(request)

    def describe(self) -> str:
        """Describe the servers, and how they are said to sample."""
        return f"JetStream servers {', '.join(self._decode)}, which are said to sample with " + (
            f"temperature {self.declared.temperature:g}, top_k {self.declared.top_k}, top_p "
            f"{self.declared.top_p:g}"
        )

    def submit(self, requests: Sequence[Request]) -> list[list[Future[Completion]]]:
        """Send requests; see `protocol.Engine`."""
        for request in requests:
            self.check(request)
        if self.version < 0:
            raise RuntimeError("no version of the weights yet: call update_weights first")
        groups = [
            [Sample(request, n, key, request.sampling.max_tokens) for key in request.keys]
            for n, request in enumerate(requests)
        ]
        for group in groups:
            for call in [group] if self.multi_sampling else [[sample] for sample in group]:
                self._pool.submit(self._serve, call)
        return [[sample.future for sample in group] for group in groups]

    def generate(self, requests: Sequence[Request]) -> list[list[Completion]]:
        """Return the samples of each request, in order."""
        return [[future.result() for future in group] for group in self.submit(requests)]

    def _serve(self, samples: list[Sample]) -> None:
        """Bring samples of one prompt to their end, and hand them over."""
        try:
            version = self.version  # if weights come in meanwhile, the older one is what is sure
            for sample, tokens in zip(samples, self._call_until_it_works(samples), strict=True):
                self._finish(sample, tokens, version)
        except BaseException as error:  # whoever waits must learn of it
            for sample in samples:
                sample.outcome = error
        for sample in samples:
            sample.hand_over()

    def _call_until_it_works(self, samples: list[Sample]) -> list[list[int]]:
        """Return the tokens of each sample; raise the last error when patience is at its end."""
        give_up, wait = time.monotonic() + self.patience, FIRST_WAIT
        failed: set[str] = set()
        while not all(sample.future.cancelled() for sample in samples):
            address = self._enter(failed)
            try:
                return self._call(address, samples)
            except grpc.RpcError as error:
                code = error.code()  # type: ignore[attr-defined]
                if code in FATAL or time.monotonic() + wait > give_up:
                    details = error.details()  # type: ignore[attr-defined]
                    raise RuntimeError(
                        f"JetStream server {address}: {code.name}, {details}"
                    ) from error
                failed.add(address)
            finally:
                self._leave(address)
            time.sleep(wait * random.uniform(0.5, 1.0))
            wait = min(2 * wait, LONGEST_WAIT)
        return [[] for _ in samples]  # nobody waits for them

    def _call(self, address: str, samples: list[Sample]) -> list[list[int]]:
        request = pb.DecodeRequest(
            max_tokens=samples[0].max_tokens,
            token_content=pb.DecodeRequest.TokenContent(token_ids=samples[0].request.prompt_tokens),
            num_samples=len(samples),
            has_bos=self.has_bos,
        )
        call = self._decode[address](request, metadata=self._metadata, timeout=self.patience / 2)

        def cancel(_: Any) -> None:
            if all(sample.future.cancelled() for sample in samples):
                call.cancel()

        for sample in samples:
            sample.future.add_done_callback(cancel)
        tokens: list[list[int]] = [[] for _ in samples]
        for response in call:
            for drawn, new in zip(tokens, response.stream_content.samples, strict=False):
                drawn.extend(new.token_ids)
        if not all(tokens) and len(samples) > 1:
            raise ValueError(
                f"JetStream server {address} gave {sum(map(bool, tokens))} of {len(samples)} "
                "samples: it runs without multi-sampling; set "
                "engine_init_kwargs['multi_sampling']=False"
            )
        return tokens

    def _finish(self, sample: Sample, tokens: list[int], version: int) -> None:
        if sample.future.cancelled() or sample.take(tokens, [], version, self.decode_text):
            return
        stops = sample.request.sampling.stop_token_ids
        stop = stops[0] if self.stop_token_id is None and len(stops) == 1 else self.stop_token_id
        if stop is None:
            raise ValueError(
                f"a JetStream server ended a response after {len(tokens)} tokens without saying by "
                f"which of the stop ids {stops}; set engine_init_kwargs['stop_token_id']"
            )
        sample.extend([stop], [], version)
        sample.finish("stop")

    def _enter(self, failed: set[str]) -> str:
        """Return the server with the fewest calls, any of several, and count one call more there.

        Args:
            failed: servers that are tried again only once all have failed.
        """
        with self._lock:
            if failed.issuperset(self._in_flight):
                failed.clear()
            load = {a: n for a, n in self._in_flight.items() if a not in failed}
            address = random.choice([a for a, n in load.items() if n == min(load.values())])
            self._in_flight[address] += 1
            return address

    def _leave(self, address: str) -> None:
        with self._lock:
            self._in_flight[address] -= 1


def _decode_method(address: str) -> Callable[..., Any]:
    # A call that grpc sends once more by itself, and cannot, may never end, past its deadline, too
    # (seen in 1.76 to 1.85): it has its status, but its message is waited for. We call again.
    channel = grpc.insecure_channel(address, options=[("grpc.enable_retries", 0)])
    return channel.unary_stream(
        f"/{SERVICE}/Decode",
        request_serializer=pb.DecodeRequest.SerializeToString,
        response_deserializer=pb.DecodeResponse.FromString,
    )
