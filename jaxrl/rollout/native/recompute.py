"""A sampler for any model: the full forward for every token, no cache.

Simple, correct and slow: n tokens cost n forwards of the whole row. The same key draws the same
token as `NativeEngine` would with the same model.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxrl.data.packing import length_bucket, round_up
from jaxrl.models.transformer import Params, forward, unembed
from jaxrl.parallel import ShardingRules, batch_sharding, replicated
from jaxrl.parallel.jit_once import Bound, jit_once
from jaxrl.parallel.rules import batch_devices
from jaxrl.rollout.native.sampling import sample, uniforms
from jaxrl.rollout.protocol import Completion, Request, Sampling
from jaxrl.types import Array

# fields of Sampling that this engine does not know
ONLY_NATIVE = "repetition_penalty", "min_tokens", "logprobs", "raw_log_probs", "keep_sampling_mask"


class RecomputeEngine:
    """Sample as an `Engine` that needs nothing of a model but its forward.

    Args:
        model: an `AdaptedModel` or a `TransformerConfig`.
        mesh: rows are spread over its batch axes; weights stay as the trainer has them, or are
            whole on every device where these are not the trainer's.
        dtype: compute dtype.
        max_num_seqs: rows sampled together.
    """

    def __init__(
        self, model: Any, mesh: Mesh, *, dtype: jnp.dtype = jnp.float32, max_num_seqs: int = 1024
    ) -> None:
        self.mesh, self.max_num_seqs = mesh, max_num_seqs
        self.rows = batch_sharding(mesh, ShardingRules())
        self.row_multiple = batch_devices(mesh, ShardingRules())
        self.params: Params | None = None
        self.version = -1
        self._next = jit_once(Bound(next_token, model, dtype))

    def update_weights(self, params: Params, version: int) -> None:
        """Sample from these parameters from now on; they are copied."""
        if jax.tree.leaves(params)[0].sharding.device_set != self.rows.device_set:
            params = jax.device_put(params, replicated(self.mesh))
        else:
            params = jax.tree.map(jnp.copy, params)
        self.params, self.version = params, version

    def sleep(self) -> None:
        """Drop the copy of the weights."""
        self.params = None

    def wake(self) -> None:
        """Do nothing: `update_weights` brings back what `sleep` let go."""

    def describe(self) -> str:
        """Describe what the engine does for a token."""
        return f"the full forward for every token, {self.max_num_seqs} rows at most"

    def submit(self, requests: Sequence[Request]) -> list[list[Future[Completion]]]:
        """Run `generate`, and return its samples as futures that are done."""

        def done(completion: Completion) -> Future[Completion]:
            future: Future[Completion] = Future()
            future.set_result(completion)
            return future

        return [[done(c) for c in samples] for samples in self.generate(requests)]

    def generate(self, requests: Sequence[Request]) -> list[list[Completion]]:
        """Return the samples of each request, in order.

        Raises:
            ValueError: an empty prompt, a non-positive max_tokens, or sampling that only
                `NativeEngine` knows.
            RuntimeError: no weights yet.
        """
        if self.params is None:
            raise RuntimeError("the engine has no weights: call update_weights first")
        for request in requests:
            request.check(None, has_text=False)
            for name in ONLY_NATIVE:
                if (value := getattr(request.sampling, name)) != getattr(Sampling, name):
                    raise ValueError(
                        f"{name}={value}: a flax module is sampled without it; leave it at "
                        f"{getattr(Sampling, name)}"
                    )
        done: list[list[Completion]] = []
        for wave in waves(requests, self.max_num_seqs):
            done += self._generate_wave(wave)
        return done

    def warm_up(self, requests: Sequence[Request]) -> None:
        """Compile for the shapes of these requests; one token is drawn and forgotten."""
        for wave in waves(requests, self.max_num_seqs):
            source = [request for request in wave for _ in request.keys]
            self._next(self.params, *jax.device_put(self._arrange(source, wave), self.rows))

    def _generate_wave(self, requests: Sequence[Request]) -> list[list[Completion]]:
        source = [request for request in requests for _ in request.keys]
        tokens, lengths, keys, sampling = self._arrange(source, requests)
        drawn: list[list[int]] = [[] for _ in source]
        log_probs: list[list[float]] = [[] for _ in source]
        active = list(range(len(source)))
        while active:
            arrays = jax.device_put((tokens, lengths, keys, sampling), self.rows)
            token, log_prob = jax.device_get(self._next(self.params, *arrays))
            for row in active:
                tokens[row, lengths[row]] = token[row]
                lengths[row] += 1
                drawn[row].append(int(token[row]))
                log_probs[row].append(float(log_prob[row]))
            active = [row for row in active if not _ends(drawn[row], source[row])]
        rows = (
            Completion(
                sample_tokens,
                scores,
                _stop_reason(sample_tokens, request),
                [self.version] * len(sample_tokens),
            )
            for sample_tokens, scores, request in zip(drawn, log_probs, source, strict=True)
        )
        return [[next(rows) for _ in request.keys] for request in requests]

    def _arrange(
        self, source: Sequence[Request], requests: Sequence[Request]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, dict[str, np.ndarray]]:
        """Pad rows to the devices, as arrays: tokens [B, T], lengths [B], keys, sampling."""
        rows = round_up(len(source), self.row_multiple)
        padded = [*source, *[source[-1]] * (rows - len(source))]
        prompt = length_bucket(max(len(r.prompt_tokens) for r in requests))
        width = length_bucket(prompt + max(r.sampling.max_tokens for r in requests))
        tokens = np.zeros((rows, width), np.int32)
        for row, request in enumerate(padded):
            tokens[row, : len(request.prompt_tokens)] = request.prompt_tokens
        keys = np.zeros((rows, 2), np.uint32)
        keys[: len(source)] = [key for request in requests for key in request.keys]
        kinds = {"temperature": "f4", "top_k": "i4", "top_p": "f4", "min_p": "f4"}
        sampling = {
            name: np.asarray([getattr(r.sampling, name) for r in padded], kind)
            for name, kind in kinds.items()
        }
        return tokens, np.array([len(r.prompt_tokens) for r in padded], np.int32), keys, sampling


def waves(requests: Sequence[Request], limit: int) -> Iterator[list[Request]]:
    """Yield consecutive requests with at most `limit` samples together; a larger one runs alone."""
    wave: list[Request] = []
    for request in requests:
        if wave and sum(len(r.keys) for r in wave) + len(request.keys) > limit:
            yield wave
            wave = []
        wave.append(request)
    if wave:
        yield wave


def next_token(
    model: Any,
    dtype: jnp.dtype,
    params: Params,
    tokens: Array,
    lengths: Array,
    keys: Array,
    sampling: dict[str, Array],
) -> tuple[Array, Array]:
    """Draw one more token for every row; return the tokens and their log-probs [B].

    Tokens [B, T] are right padded, lengths are [B].
    """
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    segment_ids = (positions < lengths[:, None]).astype(jnp.int32)
    hidden = forward(model, params, tokens, positions, segment_ids, dtype=dtype)
    last = jnp.take_along_axis(hidden, (lengths - 1)[:, None, None], axis=1)[:, 0]
    logits = unembed(model, params, last)
    token, log_prob, _ = sample(logits, uniforms(keys, lengths), **sampling, filtered=True)
    return token, log_prob


def _stop_reason(tokens: Sequence[int], request: Request) -> str:
    return "stop" if tokens[-1] in request.sampling.stop_token_ids else "length"


def _ends(tokens: Sequence[int], request: Request) -> bool:
    return _stop_reason(tokens, request) == "stop" or len(tokens) >= request.sampling.max_tokens
