"""Our model as an engine of JetStream's protocol, on the trainer's layer functions.

What `NativeEngine` runs, behind explicit state: a JetStream orchestrator can serve it, and a loop
of prefill, insert and generate can be written by hand. The same keys draw the same tokens.

The cache is a pool of pages (see kv_cache.py) in which each slot has its own for good, beside each
other; a prefix has a pool of its own, with a copy on each part of the batch, so that it is inserted
into any slot without leaving the part.

Shape legend: S slots, L positions and C pages of a slot, G parts of the batch, n samples of a
prompt, k tokens of a call.
"""

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import Mesh

from jaxrl.data.packing import round_up
from jaxrl.models.architecture import keeps_states
from jaxrl.models.transformer import Params, TransformerConfig
from jaxrl.parallel import ShardingRules
from jaxrl.parallel.rules import Placement, batch_devices
from jaxrl.rollout.jetstream.protocol import ResultTokens, prefill_length
from jaxrl.rollout.native.decode import SETTINGS, Block, Features, Prompts, Rows
from jaxrl.rollout.native.kv_cache import Cache
from jaxrl.rollout.native.programs import Prefill, compiled, prompt_shardings, shape_of
from jaxrl.rollout.protocol import Sampling
from jaxrl.types import Array


@dataclass(frozen=True)
class Sampler:
    """Describe how the samples of a prompt are drawn: the `sampler` of prefill.

    Args:
        keys: PRNG key data of each sample; () = the engine's next ones.
    """

    sampling: Sampling
    keys: tuple[tuple[int, int], ...] = ()


class ParamsRef:
    """Hold parameters that can be swapped while others hold the reference.

    JetStream's orchestrator calls `load_params` once and passes the result at each call ever
    after; what it holds must therefore not be the weights themselves.
    """

    def __init__(self, value: Params | None = None) -> None:
        self.value = value

    def get(self) -> Params:
        """Return the parameters as they are now.

        Raises:
            RuntimeError: there are none yet.
        """
        if self.value is None:
            raise RuntimeError("the engine has no weights: call load_params(params) first")
        return self.value


class Slots(struct.PyTreeNode):
    """Hold samples in the middle of decoding: of a prefix, which share its pages, or all slots."""

    cache: Cache
    rows: Rows
    tokens: Array  # [rows, L] prompt and response


class PaddingTokenizer:
    """Wrap a Hugging Face tokenizer as JetStream's orchestrator calls it: prompts come out padded.

    Args:
        stop_token_ids: besides the end-of-sequence token.
    """

    def __init__(self, tokenizer: Any, stop_token_ids: Sequence[int] = ()) -> None:
        self.tokenizer = tokenizer
        self.eos_id: int = tokenizer.eos_token_id
        self.bos_id: int | None = tokenizer.bos_token_id
        self.pad_id: int = 0 if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        self.stop_tokens = {self.eos_id, *stop_token_ids}

    def encode(self, s: str, **kwargs: Any) -> tuple[np.ndarray, int]:
        """Return the padded tokens [P] of a text, and how many of them are real."""
        ids = self.tokenizer(s, add_special_tokens=False)["input_ids"]
        if kwargs.get("is_bos") and self.bos_id is not None:
            ids = [self.bos_id, *ids]
        padded = np.full(prefill_length(len(ids)), self.pad_id, np.int32)
        padded[: len(ids)] = ids
        return padded, len(ids)

    def decode(self, token_ids: Sequence[int], **kwargs: Any) -> str:
        """Return the text of tokens."""
        del kwargs
        return self.tokenizer.decode(token_ids)


class TransformerEngine:
    """Run our model as an engine of JetStream's protocol.

    Args:
        config: architecture.
        mesh: slots are spread over its batch axes, weights over "tensor".
        dtype: compute and cache dtype.
        slots: samples decoded together.
        max_prefill_length: most tokens of a prompt; rounded up to one of `PREFILL_LENGTHS`.
        max_target_length: most tokens of prompt and response.
        sampling: of prompts that come without a `Sampler`.
        seed: of the keys of samples that come without one.
        tokens_per_call: of `generate`. JetStream's orchestrator wants 1, as it drops a whole call
            that reaches beyond max_tokens.
        tokenizer: for `build_tokenizer`; a Hugging Face one.
        kernel, experts_kernel: of `PAGED_ATTENTION` and `GROUPED_PRODUCT`; None = the fastest that
            can.
    """

    samples_per_slot = 1
    colocated_cpus = None
    use_chunked_prefill = False
    make_sampler = Sampler  # so that the driver can say how a prompt is sampled

    def __init__(
        self,
        config: TransformerConfig,
        mesh: Mesh,
        *,
        slots: int,
        max_prefill_length: int,
        max_target_length: int,
        dtype: jnp.dtype = jnp.float32,
        sampling: Sampling | None = None,
        seed: int = 0,
        tokens_per_call: int = 1,
        tokenizer: Any = None,
        kernel: str | None = None,
        experts_kernel: str | None = None,
    ) -> None:
        if keeps_states(config):
            raise ValueError(
                "the model has layers without attention, whose states this engine does not keep; "
                "set generator.inference_engine.backend='native'"
            )
        self.mesh, self.tokenizer = mesh, tokenizer
        self.max_prefill_length = prefill_length(max_prefill_length)
        self.max_target_length = max_target_length
        placement = Placement(mesh, ShardingRules(embed=None))
        self.parts = batch_devices(mesh, placement.rules)
        self.max_concurrent_decodes = round_up(slots, self.parts)
        self.shape = shape_of(placement.platform)
        self.pages = -(-max_target_length // self.shape.page)  # of a slot
        self.prefill_chunk_size = self.shape.tiles * self.shape.tile
        self.tokens_per_call = tokens_per_call
        self.sampling = Sampling(max_target_length) if sampling is None else sampling
        self.params = ParamsRef()
        self._rng = np.random.default_rng(seed)
        self._freed: set[int] = set()
        self._functions = compiled(config, placement, jnp.dtype(dtype), kernel, experts_kernel)
        self._by_prompt = prompt_shardings(placement)
        # rows always lie so: each place that they come from would have programs of its own
        self._by_row = placement.sharding((self.parts,), ("batch",))
        self._nothing = self._place(self._prompts(1, tokens_per_call).arrays(1))

    # ---- weights

    def load_params(self, params: Params | None = None) -> ParamsRef:
        """Return the reference that the other calls take.

        Args:
            params: the trainer's; a copy of them is behind the reference from now on. None: what
                was there stays.
        """
        if params is not None:
            self.params.value = None  # two decode copies never live together
            self.params.value = self._functions.load(params)
        return self.params

    def unload_params(self) -> None:
        """Free the memory of the parameters; `load_params` brings others."""
        self.params.value = None

    # ---- prefill

    def prefill(
        self,
        *,
        params: ParamsRef,
        padded_tokens: Array,
        true_length: int,
        existing_prefix: Any = None,
        sampler: Sampler | None = None,
        request_id: Any = None,
    ) -> tuple[Slots, ResultTokens]:
        """Return the prefix of a prompt, and its first token; see `prefill_multisampling`."""
        del request_id
        return self.prefill_multisampling(
            params=params,
            padded_tokens=padded_tokens,
            true_length=true_length,
            existing_prefix=existing_prefix,
            sampler=sampler,
        )

    def prefill_multisampling(
        self,
        *,
        params: ParamsRef,
        padded_tokens: Array,
        true_length: int,
        existing_prefix: Any = None,
        sampler: Sampler | None = None,
        rng: Array | None = None,
        num_samples: int = 1,
    ) -> tuple[Slots, ResultTokens]:
        """Return the prefix of a prompt, and the first tokens of several samples of it.

        Args:
            padded_tokens: [P] the prompt, then anything.
            true_length: of the prompt.
            existing_prefix: with `cache`, a prefix of this engine, and `common_prefix_tokens`,
                those that it holds; the prompt goes on from there.
            rng: [2] key data, names the samples' keys if `sampler` has none.

        Raises:
            ValueError: an empty prompt, or one that leaves no room for a response.
            TypeError: a `sampler` that is no `Sampler`.
        """
        tokens = np.asarray(padded_tokens)[:true_length].tolist()
        before = [] if existing_prefix is None else existing_prefix.common_prefix_tokens
        prompt = [*np.asarray(before).tolist(), *tokens]
        if not tokens or len(prompt) >= self.max_target_length:
            raise ValueError(
                f"a prompt of {len(prompt)} tokens: at least 1, and fewer than max_target_length="
                f"{self.max_target_length}"
            )
        sampler = self._sampler(sampler, rng, num_samples)
        weights = params.get()
        if existing_prefix is None:
            cache = self._empty(self.parts)
        else:
            cache = jax.tree.map(jnp.copy, existing_prefix.cache.cache)
        state = Slots(cache, *self._rows(prompt, sampler))
        freed = np.zeros(len(state.tokens), bool)
        new = self._place(self._fill(prompt, len(before)))
        prefix, result = self._draw(weights, state, freed, new, steps=1)
        n = len(sampler.keys)
        rows, tokens, result = first_rows((prefix.rows, prefix.tokens, result), n)
        return Slots(prefix.cache, rows, tokens), result.replace(samples_per_slot=n)

    def _fill(self, prompt: list[int], start: int) -> Prompts:
        """Prefill all from `start` on but the last token, which the first decode step takes."""
        # one program serves prompts of all lengths
        new = self._prompts(-(-self.max_target_length // self.prefill_chunk_size), 1)
        (table,) = self._tables(np.zeros(1, int))
        for part in range(self.parts):
            new.add(part, table, start, np.array(prompt[start:-1], np.int32))
        return new.arrays(max(new.chunks, 1))

    def _prompts(self, chunks: int, steps: int) -> Prefill:
        """Return an empty collection of what a call of `steps` steps prefills."""
        columns = self.pages + 1  # a tile may reach over the end of a row
        return Prefill(self.shape, parts=self.parts, chunks=chunks, columns=columns, steps=steps)

    def _place(self, prompts: Prompts) -> Prompts:
        return jax.device_put(prompts, self._by_prompt)

    def _sampler(self, sampler: Any, rng: Array | None, samples: int) -> Sampler:
        """Return a sampler with as many keys as there are samples."""
        if sampler is not None and not isinstance(sampler, Sampler):
            raise TypeError(
                f"sampler={sampler!r}: this engine takes a jaxrl.rollout.jetstream.engine.Sampler"
            )
        sampler = Sampler(self.sampling) if sampler is None else sampler
        if not sampler.keys:
            source = self._rng if rng is None else np.random.default_rng(np.asarray(rng).ravel())
            drawn = source.integers(0, 2**32, (samples, 2), np.uint32)
            sampler = dataclasses.replace(sampler, keys=tuple(map(tuple, drawn.tolist())))
        return sampler

    def _rows(self, prompt: Sequence[int], sampler: Sampler) -> tuple[Rows, Array]:
        """Return the samples of one prompt, before their first token; padded to the devices.

        All have the pages of the first slot of their part. Padding draws, too: so each part gets
        the keys and values of the last token.
        """
        s, n = sampler.sampling, len(sampler.keys)
        rows = round_up(n, self.parts)
        keys = np.zeros((rows, 2), np.uint32)
        keys[:n] = sampler.keys
        room = self.max_target_length - len(prompt)
        features = Features().including(s)
        stop_ids = np.full((rows, features.stop_ids), -1, np.int32)
        stop_ids[:, : len(s.stop_token_ids)] = s.stop_token_ids
        columns = {
            name: np.full(rows, getattr(s, name), kind)
            for kind, names in SETTINGS.items()
            for name in names
        }
        tokens = np.zeros((rows, self.max_target_length), np.int32)
        tokens[:, : len(prompt)] = prompt
        return Rows(
            live=np.ones(rows, bool),
            table=self._tables(np.zeros(rows, int)),
            start=np.zeros(rows, np.int32),
            last_token=np.full(rows, prompt[-1], np.int32),
            position=np.full(rows, len(prompt) - 1, np.int32),
            count=np.zeros(rows, np.int32),
            keys=keys,
            max_tokens=np.full(rows, min(s.max_tokens, room), np.int32),
            stop_ids=stop_ids,
            features=features,
            **columns,
        ), tokens

    def _tables(self, numbers: np.ndarray) -> np.ndarray:
        """Return the tables [n, C + 1] of slots, called by their number [n] on their part."""
        pages = numbers[:, None] * self.pages + np.arange(self.pages)
        return np.pad(pages, ((0, 0), (0, 1))).astype(np.int32)

    def _empty(self, slots: int) -> Cache:
        """Make a cache of the pages of `slots` slots, on all parts together."""
        return self._functions.empty(pages=slots * self.pages, size=self.shape.page)

    # ---- decode

    def init_decode_state(self) -> Slots:
        """Return the state of decoding before the first prompt: all slots are empty."""
        slots = self.max_concurrent_decodes
        rows, tokens = self._rows([0], Sampler(self.sampling, ((0, 0),) * slots))
        tables = self._tables(np.arange(slots) % (slots // self.parts))
        rows = rows.replace(live=np.zeros(slots, bool), table=tables)
        return Slots(self._empty(slots), *jax.device_put((rows, tokens), self._by_row))

    def insert(
        self, prefix: Slots, decode_state: Slots, slot: int, request_id: Any = None
    ) -> Slots:
        """Return the state with a prefix in a slot; the state that was given is used up."""
        del request_id
        return self.bulk_insert(prefix, decode_state, [slot])

    def bulk_insert(self, prefix: Slots, decode_state: Slots, slots: Sequence[int]) -> Slots:
        """Return the state with the samples of one prefix in as many slots.

        Raises:
            ValueError: more slots than the prefix has samples.
        """
        if len(slots) > len(prefix.rows.live):
            raise ValueError(
                f"{len(slots)} slots for a prefix of {len(prefix.rows.live)} samples: give "
                "prefill_multisampling num_samples"
            )
        self._freed -= set(slots)
        cache = decode_state.cache
        for slot in slots:
            cache = self._functions.put(cache, self._pages_of(slot), prefix.cache)
        given = with_stop_ids(decode_state.rows, prefix.rows), decode_state.tokens
        new = with_stop_ids(prefix.rows, decode_state.rows), prefix.tokens
        after = insert_rows(given, new, np.array(slots, np.int32))
        return Slots(cache, *jax.device_put(after, self._by_row))

    def _pages_of(self, slot: int) -> np.ndarray:
        """Return where the pages of a prefix [G C] go to be a slot's, as ids of `put_pages`."""
        each = self.max_concurrent_decodes // self.parts
        part, number = divmod(slot, each)
        ids = np.full((self.parts, self.pages), each * self.pages, np.int32)  # nowhere
        ids[part] = number * self.pages + np.arange(self.pages)
        return ids.ravel()

    def free_resource(self, slot: int) -> None:
        """Draw nothing more in a slot."""
        self._freed.add(slot)

    def generate(
        self, params: ParamsRef, decode_state: Slots, sampler: Any = None
    ) -> tuple[Slots, ResultTokens]:
        """Draw the next `tokens_per_call` tokens of every slot that has a sample.

        A token is not valid where the slot is free, or its sample had ended before: by a stop
        token, by max_tokens or by max_target_length. The state that was given is used up.

        Raises:
            ValueError: a sampler; each slot has its own, from prefill.
        """
        if sampler is not None:
            raise ValueError(f"sampler={sampler!r}: give it to prefill, each slot has its own")
        freed = np.isin(np.arange(self.max_concurrent_decodes), list(self._freed))
        self._freed.clear()
        steps = self.tokens_per_call
        return self._draw(params.get(), decode_state, freed, self._nothing, steps=steps)

    def _draw(
        self, weights: Params, state: Slots, freed: np.ndarray, new: Prompts, *, steps: int
    ) -> tuple[Slots, ResultTokens]:
        """Prefill, and decode `steps` steps.

        Args:
            freed: [rows] bool.
            new: what is prefilled before the first step.
        """
        rows = for_decode(state.rows, state.tokens, freed)
        cache, after, block = self._functions.decode(weights, state.cache, rows, new, steps=steps)
        seen, result = advance(rows.position, after.count, state.tokens, block)
        seen = jax.device_put(seen, self._by_row)
        return Slots(cache, after.replace(history=None), seen), result

    # ---- the rest of the protocol

    def get_prefix_destination_sharding(self) -> Any:
        """Return None: a prefix is put nowhere, since prefill and decode share the devices."""
        return None

    def get_tokenizer(self) -> Any:
        """Return what `build_tokenizer` takes."""
        return self.tokenizer

    def build_tokenizer(self, metadata: Any) -> PaddingTokenizer:
        """Return the tokenizer in the form that JetStream's orchestrator calls.

        Raises:
            ValueError: the engine was made without a tokenizer.
        """
        if metadata is None:
            raise ValueError("the engine has no tokenizer: give TransformerEngine one")
        return PaddingTokenizer(metadata, self.sampling.stop_token_ids)


# ---- what happens to samples in the middle of decoding


def with_stop_ids(rows: Rows, other: Rows) -> Rows:
    """Return rows with room for the stop ids, and with the features, of others too."""
    features = rows.features.union(other.features)
    if wider := features.stop_ids - rows.stop_ids.shape[1]:
        padded = jnp.pad(rows.stop_ids, ((0, 0), (0, wider)), constant_values=-1)
        rows = rows.replace(stop_ids=padded)
    return rows.replace(features=features)


@functools.partial(jax.jit, static_argnums=1)
def first_rows(tree: Any, n: int) -> Any:
    """Return the first n rows of all arrays."""
    return jax.tree.map(lambda x: x[:n], tree)


@jax.jit
def for_decode(rows: Rows, tokens: Array, freed: Array) -> Rows:
    """Return rows as `decode` takes them."""
    seen = jnp.arange(tokens.shape[1]) <= rows.position[:, None]
    history = jnp.where(seen, tokens, -1) if rows.features.penalised else None
    return rows.replace(live=rows.live & ~freed, history=history)


@jax.jit
def advance(
    position: Array, count: Array, tokens: Array, block: Block
) -> tuple[Array, ResultTokens]:
    """Return tokens after a block, and what it drew.

    Args:
        position: [rows] of the last token before.
        count: [rows] of the tokens drawn so far, those of the block too.
    """
    size, k = block.tokens.shape
    drawn = jnp.arange(k) < block.count[:, None]
    at = jnp.where(drawn, position[:, None] + 1 + jnp.arange(k), tokens.shape[1])
    tokens = tokens.at[jnp.arange(size)[:, None], at].set(block.tokens, mode="drop")
    data = jnp.concatenate([block.tokens, drawn.astype(jnp.int32), count[:, None]], axis=1)
    result = ResultTokens(
        data=data,
        tokens_idx=(0, k),
        valid_idx=(k, 2 * k),
        length_idx=(2 * k, 2 * k + 1),
        samples_per_slot=1,
        log_prob=block.log_probs,
    )
    return tokens, result


@jax.jit
def insert_rows(
    given: tuple[Rows, Array], new: tuple[Rows, Array], slots: Array
) -> tuple[Rows, Array]:
    """Put sample i of a prefix into slots[i], each with its tokens; the slots keep their pages."""
    samples, tokens = jax.tree.map(lambda x: x[: len(slots)], new)
    samples = samples.replace(table=given[0].table[slots])
    return jax.tree.map(lambda old, x: old.at[slots].set(x), given, (samples, tokens))
