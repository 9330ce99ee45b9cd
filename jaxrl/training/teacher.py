"""What a teacher says of sampled tokens: another model, or the policy itself in hindsight.

In hindsight the policy reads, before an answer that it gave, what became of it: a right answer of
its group, or what the environment had to say. What it would have said then, token by token, is what
it learns: self-distillation from feedback (SDPO), https://arxiv.org/abs/2601.20802.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jaxrl.array_ops import FILTERED
from jaxrl.config.algorithm import DistillationConfig
from jaxrl.data.packing import empty_batch
from jaxrl.data.tokenizer import after_user
from jaxrl.models.linear import merge
from jaxrl.models.transformer import Params, TransformerConfig, head_axes
from jaxrl.parallel import Placement
from jaxrl.types import Array, GeneratorOutput, TrainBatch


def asks_for(settings: DistillationConfig) -> dict[str, Any]:
    """Return the options of a teacher's forward pass, which name what it says."""
    return {"states": True} if settings.top_k is None else {"top_k": settings.top_k}


def head_of(model: TransformerConfig, params: Params, placement: Placement) -> Params:
    """Return a copy of the weights of a teacher's head, on the devices of the policy.

    A copy, as the policy's own are donated to its updates.

    Args:
        model, params: of the teacher; placement: of the policy.
    """
    axes = head_axes(model)
    weights = merge({name: params[name] for name in axes})
    shardings = {
        name: NamedSharding(placement.mesh, placement.spec(w.shape, axes[name]))
        for name, w in weights.items()
    }
    return jax.device_put(jax.tree.map(jnp.copy, weights), shardings)


def with_teacher(batch: TrainBatch, said: Sequence[np.ndarray], vocabulary: int) -> TrainBatch:
    """Return the batch with a teacher's distributions at its sampled tokens.

    An id that the policy lacks, of the padding of a larger teacher's vocabulary, is one of the
    others.

    Args:
        said: ids [B, T, K] and log-probs [B, T, K + 1], the others last; or states [B, T, D].
        vocabulary: ids that the policy has.
    """
    taught = (np.asarray(batch.loss_mask) != 0).astype(np.float32)
    batch = batch.replace(taught=taught if batch.taught is None else batch.taught * taught)
    if len(said) == 1:
        return batch.replace(teacher_states=said[0])
    ids, log_probs = said
    lacks = ids >= vocabulary
    if lacks.any():
        probs = np.exp(log_probs[..., :-1], where=lacks, out=np.zeros(ids.shape, np.float32))
        events = np.where(lacks, np.float32(FILTERED), log_probs[..., :-1])
        others = np.logaddexp(log_probs[..., -1:], np.log(probs.sum(-1, keepdims=True) + 1e-30))
        log_probs = np.concatenate([events, others], axis=-1).astype(np.float32)
    ids = np.where(lacks, -1, ids).astype(np.int32)
    return batch.replace(teacher_ids=ids, teacher_log_probs=log_probs)


class Hindsight:
    """Tell the policy what became of its answers, and ask it again what it would have said.

    Args:
        tokenizer: of the policy, with a chat template.
        settings: words of the hints.
        variables: of the template.
        vocabulary: ids that the policy has.
    """

    def __init__(
        self,
        tokenizer: Any,
        settings: DistillationConfig,
        variables: Mapping[str, Any],
        vocabulary: int,
    ) -> None:
        self.vocabulary = vocabulary
        self.tokenizer, self.settings = tokenizer, settings
        self.end_of_user = after_user(tokenizer, **variables)

    def hints(self, output: GeneratorOutput, groups: np.ndarray) -> np.ndarray:
        """Return what is said to the policy after its prompts, [B, H] tokens, then -1.

        Nothing where there is nothing to say: no other sample of the prompt was right, and the
        environment gave no feedback.

        Args:
            output: with per-token rewards.
            groups: [B] prompt of each row.
        """
        settings, rows = self.settings, len(output["response_ids"])
        right = [sum(cast(list, r)) >= settings.right_reward for r in output["rewards"]]
        feedback = output.get("feedback", [""] * rows)

        @functools.cache  # the samples of a prompt are told the same
        def solution(row: int) -> str:
            tokens = output["response_ids"][row]
            text = self.tokenizer.decode(tokens, skip_special_tokens=True)
            return settings.solution_hint.replace("{solution}", text)

        @functools.cache
        def encoded(words: str) -> list[int]:
            # what is quoted must not end the user's turn
            options = {"add_special_tokens": False, "split_special_tokens": True}
            return self.tokenizer(words, **options)["input_ids"][: settings.max_hint_tokens]

        hints: list[list[int]] = []
        for row in range(rows):
            others = np.flatnonzero(right & (groups == groups[row]) & (np.arange(rows) != row))
            words = solution(int(others[0])) if others.size and settings.solution_hint else ""
            if feedback[row] and settings.feedback_hint:
                words += settings.feedback_hint.replace("{feedback}", feedback[row])
            hints.append(encoded(words) if words else [])
        width = max(map(len, hints), default=0)
        return np.array([[*x, *[-1] * (width - len(x))] for x in hints], np.int32)

    def ask(
        self,
        batch: TrainBatch,
        score: Callable[[TrainBatch], Sequence[np.ndarray]],
        width_of: Callable[[int], int],
        blank: Sequence[np.ndarray],
    ) -> TrainBatch:
        """Return the batch with what the policy says in hindsight; the hints are left out.

        Args:
            batch: with hints; without any nothing is asked.
            score: rows -> what the policy says of their sampled tokens, see `with_teacher`.
            width_of: tokens of the longest row -> columns.
            blank: what it says of no token, [K], [K + 1] or [D].

        Raises:
            ValueError: a prompt does not end with a user's words.
        """
        rows, length = batch.tokens.shape
        hints = np.zeros((rows, 0)) if batch.hints is None else np.asarray(batch.hints)
        told = np.flatnonzero((hints >= 0).any(1) & (np.asarray(batch.loss_mask) != 0).any(1))
        said = [np.tile(x, (rows, length, 1)) for x in blank]
        taught = np.zeros((rows, length), np.float32)
        if told.size:
            asked, moved = self._told(batch, hints, told, width_of)
            found = score(asked)
            for place, (row, by) in enumerate(zip(told, moved, strict=True)):
                end = int(batch.lengths[row])
                begin = int(np.argmax(np.asarray(batch.response_mask[row]) != 0))
                taught[row, begin:end] = 1
                for whole, part in zip(said, found, strict=True):
                    whole[row, begin:end] = part[place, begin + by : end + by]
        return with_teacher(batch.replace(hints=None, taught=taught), said, self.vocabulary)

    def _told(
        self,
        batch: TrainBatch,
        hints: np.ndarray,
        told: np.ndarray,
        width_of: Callable[[int], int],
    ) -> tuple[TrainBatch, list[int]]:
        """Return the rows that are told something, and by how many tokens each is longer."""
        end, rows, masks = self.end_of_user, [], []
        moved = [int((hints[row] >= 0).sum()) for row in told]
        for row, more in zip(told, moved, strict=True):
            length = int(batch.lengths[row])
            prompt = int(np.argmax(np.asarray(batch.response_mask[row]) != 0))
            tokens, at = np.asarray(batch.tokens[row, :length]), prompt - len(end)
            if at < 0 or tokens[at:prompt].tolist() != end:
                raise ValueError(
                    "trainer.algorithm.distillation.teacher='hindsight' puts what became of an "
                    f"answer behind the user's words, and the prompt of row {row} does not end "
                    "with those; let the last message be a user's, or set 'ref'"
                )
            rows.append(np.concatenate([tokens[:at], hints[row, :more], tokens[at:]]))
            mask = np.asarray(batch.loss_mask[row, :length])
            masks.append(np.concatenate([mask[:at], np.zeros(more, mask.dtype), mask[at:]]))
        width = width_of(max(map(len, rows)))

        def padded(values: list[np.ndarray], dtype: Any) -> Array:
            return np.array([np.pad(x, (0, width - len(x))) for x in values], dtype)

        lengths = np.array([len(x) for x in rows], np.int32)
        asked = empty_batch(len(rows), width).replace(
            tokens=padded(rows, np.int32), lengths=lengths, loss_mask=padded(masks, np.float32)
        )
        return asked, moved
