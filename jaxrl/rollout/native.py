"""The in-process engine: prefill once per prompt, then decode all samples together.

It runs the trainer's own `decoder_layer`; only `attend` differs: keys and values go to a cache of S
slots, one per position. Decoding runs `steps_per_dispatch` tokens
per dispatch in one jitted loop that also samples and checks stop tokens.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import Mesh

from jaxrl.data.packing import length_bucket, round_up
from jaxrl.models.attention import attention, causal_mask, layer_views
from jaxrl.models.decode_attention import decode_attention
from jaxrl.models.linear import merge
from jaxrl.models.transformer import (
    Params,
    TransformerConfig,
    decoder_layer,
    embed,
    fuse_projections,
    sliding_flags,
    unembed,
)
from jaxrl.parallel import ShardingRules, batch_sharding, replicated
from jaxrl.parallel.rules import batch_devices
from jaxrl.rollout.protocol import Completion, Request
from jaxrl.rollout.sampling import sample, uniforms
from jaxrl.types import Array


class RowSampling(struct.PyTreeNode):
    """Sampling parameters by row, [B] each but `keys` [B, 2] and `stop_ids` [B, n]."""

    keys: Array
    stop_ids: Array
    max_tokens: Array
    temperature: Array
    top_k: Array
    top_p: Array
    min_p: Array
    filtered: bool = struct.field(pytree_node=False)


class DecodeState(struct.PyTreeNode):
    """Rows in flight."""

    cache: tuple  # per layer keys [B, K, h, S] and values [B, K, S, h]
    last_token: Array  # [B]
    position: Array  # [B] position of last_token
    count: Array  # [B] tokens generated
    done: Array  # [B] bool
    stopped: Array  # [B] bool, ended by a stop token
    tokens: Array  # [B, N]
    log_probs: Array  # [B, N]


def decode_params(config: TransformerConfig, params: Params, dtype: jnp.dtype) -> Params:
    """The decode layout: adapters merged, cast, layers as a tuple and fused, the head as [D, V].

    An unrolled loop over layers updates each cache in place, where a scan would restack them.
    """
    cast = jax.tree.map(lambda x: x.astype(dtype), merge(params)) | {
        "final_norm": params["final_norm"]
    }
    layers = [
        fuse_projections(jax.tree.map(lambda x, i=i: x[i], cast["layers"]))
        for i in range(config.num_layers)
    ]
    head = cast["unembed"] if "unembed" in cast else cast["embed"].T
    return {**cast, "layers": tuple(layers), "unembed": head}


class NativeEngine:
    """Batched generation with the trainer's model on the trainer's mesh.

    Args:
        config: architecture.
        mesh: rows are spread over its batch axes, weights are whole on every device.
        dtype: compute and cache dtype.
        max_num_seqs: rows decoded together; more requests run one wave after the other.
        steps_per_dispatch: decode steps between two looks at the host.
    """

    def __init__(
        self,
        config: TransformerConfig,
        mesh: Mesh,
        *,
        dtype: jnp.dtype = jnp.float32,
        max_num_seqs: int = 1024,
        steps_per_dispatch: int = 32,
    ) -> None:
        if steps_per_dispatch < 1 or max_num_seqs < 1:
            raise ValueError(
                f"steps_per_dispatch={steps_per_dispatch} and max_num_seqs={max_num_seqs} must be "
                "at least 1"
            )
        rules = ShardingRules()
        self.config, self.max_num_seqs = config, max_num_seqs
        self.steps_per_dispatch = steps_per_dispatch
        self.rows = batch_sharding(mesh, rules)
        self.row_multiple = batch_devices(mesh, rules)
        self.whole = replicated(mesh)
        self.params: Params | None = None
        self.version = -1
        self._to_decode = jax.jit(
            functools.partial(decode_params, config, dtype=dtype), out_shardings=self.whole
        )
        self._prefill = jax.jit(
            functools.partial(prefill, config), static_argnames=("slots", "steps")
        )
        self._decode = jax.jit(
            functools.partial(decode, config), static_argnames="steps", donate_argnames="state"
        )

    def update_weights(self, params: Params, version: int) -> None:
        """Sample from these parameters from now on.

        `params` is copied, the caller may donate it.
        """
        self.params = None  # two decode copies never live together
        self.params = self._to_decode(params)
        self.version = version

    def sleep(self) -> None:
        """Drop the decode copy of the weights; `update_weights` brings the next one."""
        self.params = None

    def wake(self) -> None:
        """Nothing to do: the cache lives only inside `generate`."""

    def generate(self, requests: Sequence[Request]) -> list[list[Completion]]:
        """The samples of each request, in order.

        Raises:
            ValueError: an empty prompt or a non-positive max_tokens.
            RuntimeError: no weights yet.
        """
        if self.params is None:
            raise RuntimeError("the engine has no weights: call update_weights first")
        for request in requests:
            if not request.prompt_tokens or request.sampling.max_tokens < 1:
                raise ValueError(f"empty prompt or max_tokens < 1 in {request}")
        done: list[list[Completion]] = []
        for wave in waves(requests, self.max_num_seqs):
            done += self._generate_wave(wave)
        return done

    def warm_up(self, requests: Sequence[Request]) -> None:
        """Compile prefill and decode for the shapes of these requests; nothing is decoded."""
        for wave in waves(requests, self.max_num_seqs):
            state, sampling, _ = self._prefill_wave(wave)
            self._decode(
                self.params,
                state=state.replace(done=state.done | True),
                sampling=sampling,
                steps=self.steps_per_dispatch,
            )

    def _prefill_wave(self, requests: Sequence[Request]) -> tuple[DecodeState, RowSampling, int]:
        prompts, lengths, source, sampling = self._arrange(requests)
        longest = max(r.sampling.max_tokens for r in requests)
        steps = length_bucket(longest)
        slots = prompts.shape[1] + steps
        state = self._prefill(
            self.params, prompts, lengths, source, sampling, slots=slots, steps=steps
        )
        return state, sampling, longest

    def _generate_wave(self, requests: Sequence[Request]) -> list[list[Completion]]:
        state, sampling, longest = self._prefill_wave(requests)
        for _ in range(0, longest - 1, self.steps_per_dispatch):
            state = self._decode(
                self.params, state=state, sampling=sampling, steps=self.steps_per_dispatch
            )
            if bool(state.done.all()):
                break
        tokens, log_probs, count, stopped = jax.device_get(
            (state.tokens, state.log_probs, state.count, state.stopped)
        )
        rows = iter(range(len(count)))
        return [
            [
                Completion(
                    tokens=tokens[row, : count[row]].tolist(),
                    log_probs=log_probs[row, : count[row]].tolist(),
                    stop_reason="stop" if stopped[row] else "length",
                    versions=[self.version] * int(count[row]),
                )
                for _, row in zip(request.keys, rows, strict=False)  # keys first: a row is not lost
            ]
            for request in requests
        ]

    def _arrange(self, requests: Sequence[Request]) -> tuple[Array, Array, Array, RowSampling]:
        """Requests as arrays: prompts [P, S0], lengths [P], the prompt of each row [B], sampling.

        P and B are padded to the devices; padding rows repeat the last request and stop at once.
        """
        source = [p for p, r in enumerate(requests) for _ in r.keys]
        padding = -len(source) % self.row_multiple
        prompt_rows = round_up(len(requests), self.row_multiple)
        width = length_bucket(max(len(r.prompt_tokens) for r in requests))
        prompts = np.zeros((prompt_rows, width), np.int32)
        lengths = np.ones(prompt_rows, np.int32)
        for p, request in enumerate(requests):
            lengths[p] = len(request.prompt_tokens)
            prompts[p, : lengths[p]] = request.prompt_tokens
        by_row = [requests[p] for p in source] + [requests[-1]] * padding
        keys = [key for r in requests for key in r.keys] + [(0, 0)] * padding
        longest_stop = max(len(r.sampling.stop_token_ids) for r in requests)
        stops = [r.sampling.stop_token_ids for r in by_row]
        stop_ids = [(*ids, *(-1,) * (longest_stop - len(ids))) for ids in stops]
        max_tokens = [r.sampling.max_tokens for r in by_row[: len(source)]] + [1] * padding
        sampling = RowSampling(
            keys=np.asarray(keys, np.uint32),
            stop_ids=np.asarray(stop_ids, np.int32).reshape(len(by_row), longest_stop),
            max_tokens=np.asarray(max_tokens, np.int32),
            temperature=np.asarray([r.sampling.temperature for r in by_row], np.float32),
            top_k=np.asarray([r.sampling.top_k for r in by_row], np.int32),
            top_p=np.asarray([r.sampling.top_p for r in by_row], np.float32),
            min_p=np.asarray([r.sampling.min_p for r in by_row], np.float32),
            filtered=any(
                r.sampling.top_k > 0 or r.sampling.top_p < 1 or r.sampling.min_p > 0
                for r in requests
            ),
        )
        row_source = np.asarray(source + [len(requests) - 1] * padding, np.int32)
        return jax.device_put((prompts, lengths, row_source, sampling), self.rows)


def waves(requests: Sequence[Request], limit: int) -> Iterator[list[Request]]:
    """Consecutive requests with at most `limit` samples together; a larger one runs alone."""
    wave: list[Request] = []
    for request in requests:
        if wave and sum(len(r.keys) for r in wave) + len(request.keys) > limit:
            yield wave
            wave = []
        wave.append(request)
    if wave:
        yield wave


def prefill(
    config: TransformerConfig,
    params: Params,
    prompts: Array,
    lengths: Array,
    source: Array,
    sampling: RowSampling,
    *,
    slots: int,
    steps: int,
) -> DecodeState:
    """Run the prompts once, copy their cache to the rows that continue them, draw the first token.

    prompts [P, S0] right padded, lengths [P], source [B] = the prompt of each row.
    """
    positions = jnp.broadcast_to(jnp.arange(prompts.shape[1]), prompts.shape)
    mask = causal_mask((positions < lengths[:, None]).astype(jnp.int32))
    view = layer_views(config, mask, positions, positions)
    free = ((0, 0), (0, 0), (0, slots - prompts.shape[1]), (0, 0))
    cache: list[tuple[Array, Array]] = []

    def attend(q: Array, k: Array, v: Array, mask: Array) -> Array:
        keys, values = jnp.pad(k[source], free), jnp.pad(v[source], free)
        cache.append((keys.swapaxes(2, 3), values))
        return attention(config, q, k, v, mask)

    x = embed(config, params, prompts, params["unembed"].dtype)
    for layer, sliding in zip(params["layers"], sliding_flags(config), strict=True):
        x = decoder_layer(config, layer, x, view(sliding), attend)
    last = jnp.take_along_axis(x, (lengths - 1)[:, None, None], axis=1)[:, 0]
    logits = unembed(config, params, last)[source]
    rows = source.shape[0]
    state = DecodeState(
        cache=tuple(cache),
        last_token=jnp.zeros(rows, jnp.int32),
        position=lengths[source] - 1,
        count=jnp.zeros(rows, jnp.int32),
        done=jnp.zeros(rows, bool),
        stopped=jnp.zeros(rows, bool),
        tokens=jnp.zeros((rows, steps), jnp.int32),
        log_probs=jnp.zeros((rows, steps), jnp.float32),
    )
    return draw(state, logits, sampling)


def draw(state: DecodeState, logits: Array, sampling: RowSampling) -> DecodeState:
    """Sample the next token of every row that is not done, and note which rows end with it."""
    position = state.position + 1
    token, log_prob = sample(
        logits,
        uniforms(sampling.keys, position),
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        filtered=sampling.filtered,
    )
    rows = jnp.arange(token.shape[0])
    # a finished row writes out of bounds, which drops the write
    slot = jnp.where(state.done, state.tokens.shape[1], state.count)
    count = jnp.where(state.done, state.count, state.count + 1)
    hit = (token[:, None] == sampling.stop_ids).any(-1) & ~state.done
    return state.replace(
        last_token=jnp.where(state.done, state.last_token, token),
        position=jnp.where(state.done, state.position, position),
        count=count,
        done=state.done | hit | (count >= sampling.max_tokens),
        stopped=state.stopped | hit,
        tokens=state.tokens.at[rows, slot].set(token, mode="drop"),
        log_probs=state.log_probs.at[rows, slot].set(log_prob, mode="drop"),
    )


def decode(
    config: TransformerConfig,
    params: Params,
    *,
    state: DecodeState,
    sampling: RowSampling,
    steps: int,
) -> DecodeState:
    """Up to `steps` tokens for every row; ends early when all rows are done."""

    def unfinished(carry: tuple[Array, DecodeState]) -> Array:
        step, state = carry
        return (step < steps) & ~state.done.all()

    def one_token(carry: tuple[Array, DecodeState]) -> tuple[Array, DecodeState]:
        step, state = carry
        logits, cache = decode_step(config, params, state)
        return step + 1, draw(state.replace(cache=cache), logits, sampling)

    return jax.lax.while_loop(unfinished, one_token, (jnp.int32(0), state))[1]


def decode_step(
    config: TransformerConfig, params: Params, state: DecodeState
) -> tuple[Array, tuple[Any, ...]]:
    """Logits [B, V] after `last_token`, and the cache with its keys and values written."""
    rows = jnp.arange(state.last_token.shape[0])
    positions = state.position[:, None]
    slots = jnp.arange(state.cache[0][1].shape[2])[None]  # slot s holds position s
    view = layer_views(config, (slots <= positions)[:, None], positions, slots)
    x = embed(config, params, state.last_token[:, None], params["unembed"].dtype)
    cache: list[tuple[Array, Array]] = []

    def attend(q: Array, k: Array, v: Array, mask: Array) -> Array:
        keys, values = state.cache[len(cache)]  # of the layer that is being run
        keys = keys.at[rows, :, :, state.position].set(k[:, :, 0])
        values = values.at[rows, :, state.position].set(v[:, :, 0])
        cache.append((keys, values))
        return decode_attention(config, q, keys, values, mask[:, 0])

    for layer, sliding in zip(params["layers"], sliding_flags(config), strict=True):
        x = decoder_layer(config, layer, x, view(sliding), attend)
    return unembed(config, params, x[:, 0]), tuple(cache)
