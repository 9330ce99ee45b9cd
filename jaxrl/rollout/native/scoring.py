"""The log-probs of a prompt's own tokens, beside the samples of an engine.

A prompt goes chunk by chunk through the layers, as one does that is prefilled, and here through the
vocabulary head, too. Its keys and values are in pages of its own: so no sample has less room, and
samples go on between two chunks.
"""

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import numpy as np

from jaxrl.data.packing import length_bucket
from jaxrl.rollout.native.programs import Prefill, Programs
from jaxrl.rollout.protocol import PromptScores


class Scorer:
    """Score prompts with the weights of an engine, one after the other.

    The program is compiled when the first prompt is scored, while samples go on.

    Args:
        programs: have the weights.
        held: holds the engine's lock, under which chunks begin as blocks do.
        version: of the weights.
    """

    def __init__(
        self,
        programs: Programs,
        held: Callable[[], AbstractContextManager[None]],
        version: Callable[[], int],
    ) -> None:
        self.programs, self._held, self._version = programs, held, version
        self._compiled: dict[int, Any] = {}  # by the columns of a table
        self._alone = threading.Lock()  # pages of one prompt are there at a time

    def score(self, tokens: Sequence[int]) -> PromptScores:
        """Return the scores of all tokens of a prompt but the first.

        All are of one version of the weights: where these change meanwhile, it begins anew.

        Raises:
            RuntimeError: the engine has no weights.
        """
        with self._alone:
            while (found := self._try(np.array(tokens, np.int32))) is None:
                pass
        return found

    def _try(self, tokens: np.ndarray) -> PromptScores | None:
        """Return the scores of a prompt; None: the weights have changed."""
        programs, page = self.programs, self.programs.shape.page
        longest = max(length_bucket(len(tokens)), programs.length)
        columns = -(-longest // page) + 1
        chunks = -(-len(tokens) // (programs.shape.tiles * programs.shape.tile))
        states = {"states": 1} if programs.states else {}
        sizes = {"parts": programs.parts, "chunks": chunks, "columns": columns, "steps": 1}
        plan, targets = Prefill(programs.shape, **sizes, **states), np.append(tokens[1:], 0)
        plan.add(0, np.arange(columns), 0, tokens, 0 if states else None)
        prompts = plan.arrays(1)
        # where the places of a chunk are in the row; those of no token are behind its end
        at = prompts.first[..., None] + np.arange(programs.shape.tile)
        real = (np.arange(programs.shape.tile) < prompts.count[..., None]) & (at >= 0)
        at = np.where(real, at, len(tokens) - 1)
        of_places = prompts.tokens, prompts.table, prompts.first, prompts.count, targets[at]
        given = [
            jax.tree.map(lambda x, chunk=chunk: x[chunk], (*of_places, prompts.states))
            for chunk in range(chunks)
        ]
        of_parts = {name: programs.parts * n for name, n in {"pages": columns, **states}.items()}
        cache = programs.functions.empty(**of_parts, size=page)
        with self._held():  # of which nothing is kept outside: others may come
            shapes = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
                self._weights(),
            )
        placed = [programs.of_rows(chunk) for chunk in given]
        if columns not in self._compiled:
            program = programs.functions.score.lower(shapes, cache, *placed[0])
            self._compiled[columns] = program.compile()
        found, versions = [], set[int]()
        for chunk in placed:
            with self._held():
                scored, cache = self._compiled[columns](self._weights(), cache, *chunk)
                versions.add(self._version())
            found.append(jax.device_get(scored))
        if len(versions) > 1:
            return None
        real[at == len(tokens) - 1] = False  # nothing follows the last
        whole = jax.tree.map(
            lambda *x: np.concatenate([y[r] for y, r in zip(x, real, strict=True)]), *found
        )
        return PromptScores(*whole)

    def _weights(self) -> Any:
        if self.programs.params is None:
            raise RuntimeError("the engine has no weights: call update_weights first")
        return self.programs.params
