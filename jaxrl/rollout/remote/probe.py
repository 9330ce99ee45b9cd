"""Does an engine hold the weights that the trainer gave it?

After an update the engine continues a short prompt, drawn as the run draws its samples, and the
trainer scores the same tokens with the new weights, after the same temperature and filters. So they
agree but for rounding; an engine that reports log-probs of the distribution before these does not.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl.array_ops import FILTERED, Array, keep_only
from jaxrl.models.transformer import Params, TransformerConfig, forward, unembed
from jaxrl.parallel import Placement
from jaxrl.parallel.jit_once import Bound, jit_once
from jaxrl.rollout.native.sampling import sample
from jaxrl.rollout.protocol import Completion, Request, Sampling

PROMPT_STRIDE = 7919  # a prime: the ids of the prompt are spread over the vocabulary


class Scores(NamedTuple):
    """Hold the trainer's view of a sample of n tokens."""

    log_probs: list[float]  # [n] of its tokens
    of_all: np.ndarray  # [n, V] of every token at their places


Score = Callable[[Params, Sequence[int], int], Scores]  # params, prompt and sample, prompt length


class WeightMismatch(RuntimeError):
    """Signal that a server does not sample from the weights that it was given."""


@dataclass(frozen=True)
class Probe:
    """Hold a prompt, and how far two computations of its continuation may be apart.

    Attributes:
        score: the trainer's forward.
        vocab_size: the prompt's ids lie below it.
        sampling: its temperature and filters are those of the run; temperature 0 = greedy.
        bound: largest difference of log-probs. Rounding alone: below 1e-3 where both compute in
            float32, 0.02 to 0.2 with bfloat16 on either side.
        length: of the prompt, and of its continuation.
    """

    score: Score
    vocab_size: int
    bound: float = 0.05
    length: int = 8
    sampling: Sampling = Sampling(max_tokens=8, temperature=0.0)

    @property
    def request(self) -> Request:
        """Return the request to continue the prompt; nothing stops it."""
        prompt = tuple(PROMPT_STRIDE * (i + 1) % self.vocab_size for i in range(self.length))
        sampling = Sampling(
            self.length,
            temperature=self.sampling.temperature,
            top_k=self.sampling.top_k,
            top_p=self.sampling.top_p,
            min_p=self.sampling.min_p,
        )
        return Request(prompt, ((0, 0),), sampling)

    def expect(self, params: Params, completion: Completion) -> "Expected":
        """Score what a server said."""
        tokens = [*self.request.prompt_tokens, *completion.tokens]
        scores = self.score(params, tokens, self.length)
        of_all = np.asarray(after_filters(scores.of_all, self.request.sampling))
        log_probs = of_all[np.arange(len(completion.tokens)), completion.tokens]
        return Expected(completion.tokens, Scores(log_probs.tolist(), of_all))

    def check(
        self, server: str, version: int, completion: Completion, expected: "Expected"
    ) -> float:
        """Return the largest difference of log-probs; raise where it is beyond the bound.

        Raises:
            WeightMismatch: names server, version and difference.
        """
        difference = expected.difference(completion)
        if not difference <= self.bound:
            raise WeightMismatch(
                f"{server} has stale or wrong weights: after the update to version {version} its "
                f"log-probs of a probe are {difference:.4g} away from the trainer's, more than "
                f"generator.inference_engine.probe_bound={self.bound}. If the server computes in "
                "another precision than the trainer, raise the bound; if not, see that it reads "
                "the folder of the weights and reports log-probs after temperature and filters "
                "(vLLM: --logprobs-mode processed_logprobs)"
            )
        return difference


@dataclass(frozen=True)
class Expected:
    """Hold a continuation of the probe, and what the trainer thinks of it."""

    tokens: list[int]
    scores: Scores = field(repr=False)

    def difference(self, completion: Completion) -> float:
        """Return how far another continuation is from this one, in log-prob.

        Two samples of one model may part where rounding decides, but up to there, and at that
        place, what came before is the same. An engine that reports no log-probs is asked greedily
        and measured by how much less probable its tokens are than the trainer's best ones; that
        needs its own tokens here.
        """
        if not completion.tokens:
            return math.inf
        pairs = zip(completion.tokens, self.tokens, strict=False)
        shared = next((i for i, (a, b) in enumerate(pairs) if a != b), len(self.tokens) - 1) + 1
        if not completion.log_probs:
            alike = completion.tokens == self.tokens
            gaps = self.scores.of_all.max(-1) - self.scores.log_probs
            return float(gaps.max()) if alike else math.inf
        theirs = np.array(completion.log_probs[:shared])
        ours = self.scores.of_all[np.arange(len(theirs)), completion.tokens[:shared]]
        return float(np.abs(theirs - ours).max())


@functools.partial(jax.jit, static_argnames="sampling")
def after_filters(log_probs: Array, sampling: Sampling) -> Array:
    """Return log-probs [n, V] under the distribution that tokens are drawn from; see `sample`.

    A token that the filters drop has the log-prob it would have if they kept it beside the others:
    rounding may move a token over their edge.

    Args:
        log_probs: [n, V] of the model.
    """
    tempered = log_probs / (sampling.temperature or 1.0)
    if not sampling.temperature or (sampling.top_k, sampling.top_p, sampling.min_p) == (-1, 1, 0):
        return jax.nn.log_softmax(tempered)
    rows, vocab = tempered.shape
    _, _, sampling_mask_ids = sample(
        tempered,
        jnp.zeros(rows),
        temperature=jnp.ones(rows),
        top_k=jnp.full(rows, sampling.top_k),
        top_p=jnp.full(rows, sampling.top_p),
        min_p=jnp.full(rows, sampling.min_p),
        filtered=True,
        keep=vocab,
    )
    left = keep_only(tempered[None], sampling_mask_ids[None])[0]
    dropped = jnp.where(left > FILTERED, -jnp.inf, tempered)
    return tempered - jnp.logaddexp(jax.nn.logsumexp(left, -1, keepdims=True), dropped)


def make_score(
    config: TransformerConfig, dtype: Any, placement: Placement | None, length: int
) -> Score:
    """Return a function that scores one short row by the model's forward.

    Args:
        config: architecture.
        dtype: compute dtype of the trainer.
        placement: of the parameters; None = one device.
        length: tokens of prompt and continuation, at most.
    """

    # every process of the job reads them
    everywhere = None if placement is None else NamedSharding(placement.mesh, PartitionSpec())

    run = jit_once(
        Bound(_log_probs_of_row, config, dtype=dtype, placement=placement),
        out_shardings=everywhere,
    )
    # every device holds a row, all alike
    rows = 1 if placement is None else placement.size(placement.rules.batch)
    return functools.partial(_score, run, rows, length)


def _log_probs_of_row(
    config: TransformerConfig,
    params: Params,
    tokens: jax.Array,
    size: jax.Array,
    *,
    dtype: Any,
    placement: Placement | None,
) -> jax.Array:
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    segments = (positions < size).astype(jnp.int32)
    hidden = forward(config, params, tokens, positions, segments, dtype=dtype, placement=placement)
    return jax.nn.log_softmax(unembed(config, params, hidden)[0, :-1])


def _score(
    run: Any, rows: int, length: int, params: Params, tokens: Sequence[int], prompt: int
) -> Scores:
    row = np.zeros((rows, length), np.int32)
    row[:, : len(tokens)] = tokens
    of_all = jax.device_get(run(params, row, len(tokens)))[prompt - 1 : len(tokens) - 1]
    log_probs = of_all[np.arange(len(of_all)), tokens[prompt:]]
    return Scores(log_probs.tolist(), of_all)
