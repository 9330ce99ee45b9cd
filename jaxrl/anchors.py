"""What the loss compares the policy with: the policy before the step, the sampler, their age."""

from typing import TYPE_CHECKING

from jaxrl.config.needs import needs_old_log_probs
from jaxrl.metrics import check_surprise, mismatch_metrics
from jaxrl.staleness import oldest_versions, token_staleness
from jaxrl.types import TrainBatch

if TYPE_CHECKING:
    from jaxrl.trainer import Trainer


def with_anchor(trainer: "Trainer", batch: TrainBatch) -> TrainBatch:
    """The batch with the old log-probs that its step needs, and the age of its tokens if asked for.

    The old log-probs are those of the sampler, or a forward pass gives them; most losses need none
    where a batch has one update. Without log-probs of the sampler the pass is made in any case, and
    its entropy tells whether the sampler is the trainer's policy.

    Raises:
        ValueError: the sampler's log-probs or versions are needed, and the generator gave none.
    """
    settings = trainer.config.trainer
    if "staleness" in trainer.updater.objective.reads and batch.token_versions is not None:
        version = int(trainer.state.step)  # finished steps: the policy is this version
        versions = oldest_versions(batch.token_versions, batch.context_versions)
        age = token_staleness(versions, batch.loss_mask, version)
        batch = batch.replace(staleness=age)
    if settings.algorithm.old_log_probs == "rollout":
        if batch.rollout_log_probs is None:
            raise ValueError(
                "trainer.algorithm.old_log_probs='rollout': the generator gives no "
                "'rollout_logprobs' in its output; give them, or set 'trainer'"
            )
        return batch.replace(old_log_probs=batch.rollout_log_probs)
    blind = batch.rollout_log_probs is None  # the sampler has none
    if needs_old_log_probs(settings) or blind:
        old, entropy = trainer.scorer(trainer.params, batch, with_entropy=blind)
        batch = batch.replace(old_log_probs=old)
        trainer.metrics |= mismatch_metrics(batch, entropy)
        check_surprise(trainer.metrics, trainer.config.generator.sampling_params)
    return batch
