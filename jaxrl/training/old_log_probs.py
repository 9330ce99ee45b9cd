"""What the loss compares the policy with: the policy before the step, or the sampler."""

from collections.abc import Callable

import jax
import numpy as np

from jaxrl.config.generator import SamplingParams
from jaxrl.config.objective_requirements import (
    needs_old_log_probs,
    sampled_are_exact,
    wants_old_log_probs,
)
from jaxrl.config.trainer import TrainerConfig
from jaxrl.training.metrics import Metrics, check_surprise, mismatch_metrics
from jaxrl.types import FloatBT, TrainBatch


def with_old_log_probs(
    batch: TrainBatch,
    forward: Callable[[TrainBatch, bool], tuple[FloatBT, ...]],
    *,
    settings: TrainerConfig,
    sampling: SamplingParams,
) -> tuple[TrainBatch, Metrics]:
    """Return the batch with the old log-probs that its step needs, and what the pass has shown.

    They are those of the sampler, or a forward pass gives them; most losses need none where a batch
    has one update. Without log-probs of the sampler the pass is made in any case, and its entropy
    tells whether the sampler is the trainer's policy. In the exact mode a pass over the first
    `exact_checked_rows` tells that, to the last bit.

    Of demonstrations (`TrainBatch.demonstrated`), which nobody sampled, the old log-probs are the
    sampler's, too: wherever the two are compared they are alike.

    Args:
        forward: (batch, with entropy) -> log-probs and entropy [B, T] of the policy.
        sampling: how the responses were sampled.

    Raises:
        ValueError: the sampler's log-probs are needed, and the generator gave none.
    """
    if settings.algorithm.old_log_probs == "rollout":
        if batch.rollout_log_probs is None:
            raise ValueError(
                "trainer.algorithm.old_log_probs='rollout': the generator gives no "
                "'rollout_logprobs' in its output; give them, or set 'trainer'"
            )
        return batch.replace(old_log_probs=batch.rollout_log_probs), {}
    blind = batch.rollout_log_probs is None  # the sampler has none
    if sampled_are_exact(settings) and wants_old_log_probs(settings) and not blind:
        some = settings.exact_checked_rows
        found = {"exact/tokens_not_scored": float(np.asarray(batch.lengths)[some:].sum())}
        if some:
            checked = jax.tree.map(lambda x: x[:some], batch)
            old, entropy = forward(checked, False)
            found |= mismatch_metrics(checked.replace(old_log_probs=old), entropy)
        return batch.replace(old_log_probs=batch.rollout_log_probs), found
    given = batch.demonstrated
    if not (needs_old_log_probs(settings) or blind or given is not None):
        return batch, {}
    old, entropy = forward(batch, blind)
    batch = batch.replace(old_log_probs=old)
    if given is not None and not blind:
        sampled = np.where(given[:, None], old, batch.rollout_log_probs)
        batch = batch.replace(rollout_log_probs=sampled)
    metrics = mismatch_metrics(batch, entropy)
    check_surprise(metrics, sampling)
    return batch, metrics
