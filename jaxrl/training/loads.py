"""What the experts of a mixture have had to do in a step, from sums to metrics."""

from collections.abc import Mapping

import numpy as np


def load_metrics(sums: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Return the metrics of a step from the `Load` [Lx, ...] of its tokens; none without a token.

    expert_load_max, expert_load_min: tokens of the busiest and of the idlest expert of any layer,
    in shares of those that it would have if all had the same. expert_weight_max: the same of the
    tokens' weights. expert_load_entropy: that of the load over its most, mean over layers; 1 where
    all have the same. tokens_dropped: share of ids that no expert had, 0 unless ids that are
    replayed are of no expert.
    """
    tokens, weight, sent = (sums[name].astype(np.float64) for name in ("tokens", "weight", "sent"))
    if not sent.all():
        return {}
    load = tokens / tokens.sum(axis=-1, keepdims=True)
    share = weight / weight.sum(axis=-1, keepdims=True)
    experts = load.shape[-1]
    entropy = -(load * np.log(np.where(load > 0, load, 1))).sum(axis=-1)
    return {
        "expert_load_max": float(experts * load.max()),
        "expert_load_min": float(experts * load.min()),
        "expert_load_entropy": float(np.mean(entropy) / np.log(experts)),
        "expert_weight_max": float(experts * share.max()),
        "tokens_dropped": float(1 - tokens.sum() / sent.sum()),
    }
