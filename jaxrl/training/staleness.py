"""How old rollouts are: training steps between the policy of a token and the trainer's.

All of it is numpy on the host, a function of the versions that the sampler recorded.
"""

import numpy as np

from jaxrl.types import IntBT, MaskBT, TrainBatch


def oldest_versions(token_versions: IntBT, context_versions: IntBT | None) -> np.ndarray:
    """Return the version [B, T] that each token counts as: the older of its two.

    Keys and values of older weights make a token a sample of neither policy, so its age is that of
    the oldest. Where no oldest version is recorded (None, or -1 of a sampled token: vLLM says none,
    and files written before there was such a column) it is the one that drew the token.

    Args:
        token_versions: [B, T] int, of the policy that drew each token.
        context_versions: [B, T] int or None, the oldest that computed keys and values it was drawn
            from.
    """
    versions = np.asarray(token_versions, np.int32)
    if context_versions is None:
        return versions
    contexts = np.asarray(context_versions, np.int32)
    return np.where(contexts < 0, versions, np.minimum(versions, contexts))


def token_staleness(versions: IntBT, loss_mask: MaskBT, version: int) -> np.ndarray:
    """Return staleness [B, T] int32: `version` less the version of each token, 0 where masked.

    It is computed on the host and goes to the devices with the batch: as an array it compiles
    nothing anew, as a number in the loss the step would be a constant of the program.

    Args:
        versions: [B, T] int, of `oldest_versions`.
        loss_mask: [B, T].
        version: of the trainer's policy when the step began, the number of finished steps.

    Raises:
        ValueError: a sampled token has no version.
    """
    versions, sampled = np.asarray(versions, np.int32), np.asarray(loss_mask) != 0
    if (versions[sampled] < 0).any():
        raise ValueError(
            "the generator gives 'token_versions' for some sampled tokens only (-1 = not sampled); "
            "give them for all"
        )
    return np.where(sampled, version - versions, 0).astype(np.int32)


def with_staleness(batch: TrainBatch, version: int) -> TrainBatch:
    """Return the batch with the age of its tokens, where their versions are known.

    Args:
        version: see `token_staleness`.

    Raises:
        ValueError: a sampled token has no version.
    """
    if batch.token_versions is None:
        return batch
    versions = oldest_versions(batch.token_versions, batch.context_versions)
    return batch.replace(staleness=token_staleness(versions, batch.loss_mask, version))


def staleness_metrics(
    versions: IntBT, loss_mask: MaskBT, version: int, max_staleness_steps: int
) -> dict[str, float]:
    """Return `async/staleness_*` of a batch; none without a sampled token.

    mean, max, min: over the sampled tokens, which in one trajectory can have several versions.
    ratio: share of them that are of an earlier policy than `version`. violation_count: rows
    with a token older than max_staleness_steps. SkyRL counts prompt groups, by the step in which
    each was begun.

    Args:
        versions, loss_mask, version: see `token_staleness`.
        max_staleness_steps: the limit of the run.
    """
    sampled = np.asarray(loss_mask) != 0
    if not sampled.any():
        return {}
    age = token_staleness(versions, loss_mask, version)
    sampled_age = age[sampled]
    return {
        "async/staleness_mean": float(sampled_age.mean()),
        "async/staleness_max": int(sampled_age.max()),
        "async/staleness_min": int(sampled_age.min()),
        "async/staleness_ratio": float((sampled_age > 0).mean()),
        "async/staleness_violation_count": int((age > max_staleness_steps).any(-1).sum()),
    }
