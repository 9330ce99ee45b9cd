"""Does an engine hold the weights that the trainer gave it?

After an update the engine continues a short prompt greedily and the trainer scores the same tokens
with the new weights. Both are the model's log-probs at temperature 1, so they agree but for
rounding.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.models.transformer import Params, TransformerConfig, forward, unembed
from jaxrl.parallel import Placement
from jaxrl.rollout.protocol import Completion, Request, Sampling

PROMPT_STRIDE = 7919  # a prime: the ids of the prompt are spread over the vocabulary


class Scores(NamedTuple):
    """The trainer's view of a greedy sample, each [n] for its n tokens."""

    log_probs: list[float]  # of the token
    best: list[float]  # of the most probable token at its place


Score = Callable[[Params, Sequence[int], int], Scores]  # params, prompt and sample, prompt length


class WeightMismatch(RuntimeError):
    """A server does not sample from the weights that it was given."""


@dataclass(frozen=True)
class Probe:
    """A prompt, and how far two computations of its continuation may be apart.

    Attributes:
        score: the trainer's forward.
        vocab_size: the prompt's ids lie below it.
        bound: largest difference of log-probs. Rounding alone: below 1e-3 where both compute in
            float32, 0.02 to 0.2 with bfloat16 on either side.
        length: of the prompt, and of its continuation.
    """

    score: Score
    vocab_size: int
    bound: float = 0.05
    length: int = 8

    @property
    def request(self) -> Request:
        """The prompt, to be continued greedily; nothing stops it."""
        prompt = tuple(PROMPT_STRIDE * (i + 1) % self.vocab_size for i in range(self.length))
        return Request(prompt, ((0, 0),), Sampling(max_tokens=self.length, temperature=0.0))

    def expect(self, params: Params, completion: Completion) -> "Expected":
        """Score what a server said."""
        tokens = [*self.request.prompt_tokens, *completion.tokens]
        scores = self.score(params, tokens, self.length)
        return Expected(completion.tokens, scores)

    def check(
        self, server: str, version: int, completion: Completion, expected: "Expected"
    ) -> float:
        """The largest difference; raises where it is beyond the bound.

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
    """A continuation of the probe, and what the trainer thinks of it."""

    tokens: list[int]
    scores: Scores = field(repr=False)

    def difference(self, completion: Completion) -> float:
        """How far another continuation is from it, in log-prob.

        Two greedy samples of one model may part at a tie, but up to there, and at that place, the
        log-prob of the most probable token is the same. An engine that reports no log-probs is
        measured by how much less probable its tokens are than the trainer's best ones; that needs
        its own tokens here.
        """
        if not completion.tokens:
            return math.inf
        pairs = zip(completion.tokens, self.tokens, strict=False)
        shared = next((i for i, (a, b) in enumerate(pairs) if a != b), len(self.tokens) - 1) + 1
        if not completion.log_probs:
            alike = completion.tokens == self.tokens
            gaps = [best - x for x, best in zip(*self.scores, strict=True)]
            return max(gaps) if alike else math.inf
        theirs = np.array(completion.log_probs[:shared])
        if completion.tokens == self.tokens:
            return float(np.abs(theirs - self.scores.log_probs).max())
        return float(np.abs(theirs - self.scores.best[: len(theirs)]).max())


def make_score(
    config: TransformerConfig, dtype: Any, placement: Placement | None, length: int
) -> Score:
    """The model's forward over one short row.

    Args:
        config: architecture.
        dtype: compute dtype of the trainer.
        placement: of the parameters; None = one device.
        length: tokens of prompt and continuation, at most.
    """

    @jax.jit
    def run(params: Params, tokens: jax.Array, size: jax.Array) -> tuple[jax.Array, jax.Array]:
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        segments = (positions < size).astype(jnp.int32)
        options = {"dtype": dtype, "placement": placement}
        hidden = forward(config, params, tokens, positions, segments, **options)
        log_probs = jax.nn.log_softmax(unembed(config, params, hidden)[0, :-1])
        said = jnp.take_along_axis(log_probs, tokens[0, 1:, None], axis=-1)[:, 0]
        return said, log_probs.max(-1)

    # every device holds a row, all alike
    rows = 1 if placement is None else placement.size(placement.rules.batch)
    return functools.partial(_score, run, rows, length)


def _score(
    run: Any, rows: int, length: int, params: Params, tokens: Sequence[int], prompt: int
) -> Scores:
    row = np.zeros((rows, length), np.int32)
    row[:, : len(tokens)] = tokens
    said, best = jax.device_get(run(params, row, len(tokens)))
    kept = slice(prompt - 1, len(tokens) - 1)
    return Scores(said[kept].tolist(), best[kept].tolist())
