"""Policy losses: one file per published loss, the file name is the config string.

Every loss maps `(log_probs, old_log_probs, advantages, config, loss_mask, rollout_log_probs)`,
arrays [B, T], to the per-token loss [B, T], unmasked and unreduced, and its metrics. `reduction.py`
holds the only weights that a loss is ever multiplied with, `off_policy.py` what corrects them for
rollouts of another policy, `kl.py` the estimators of the KL term, `value.py` the critic's loss.

What is true of one loss is its row, `ROW` at the end of its file; see `row.py`. A new one is a
file, a line here and a test.
"""

from jaxrl.losses.cispo import ROW as CISPO, cispo
from jaxrl.losses.clip_cov import ROW as CLIP_COV, clip_cov
from jaxrl.losses.cross_entropy import ROW as CROSS_ENTROPY, cross_entropy
from jaxrl.losses.decoupled_ppo import ROW as DECOUPLED_PPO, decoupled_ppo
from jaxrl.losses.dppo import ROW as DPPO, dppo
from jaxrl.losses.dual_clip import ROW as DUAL_CLIP, dual_clip
from jaxrl.losses.gmpo import ROW as GMPO, gmpo
from jaxrl.losses.gspo import ROW as GSPO, gspo
from jaxrl.losses.importance_sampling import ROW as IMPORTANCE_SAMPLING, importance_sampling
from jaxrl.losses.kl_cov import ROW as KL_COV, kl_cov
from jaxrl.losses.regular import ROW as REGULAR, regular
from jaxrl.losses.rollout_is import ROW as ROLLOUT_IS, rollout_is
from jaxrl.losses.row import Loss
from jaxrl.losses.sapo import ROW as SAPO, sapo

__all__ = [
    "BATCH_STATISTICS",
    "LOSSES",
    "ROWS",
    "cispo",
    "clip_cov",
    "cross_entropy",
    "decoupled_ppo",
    "dppo",
    "dual_clip",
    "gmpo",
    "gspo",
    "importance_sampling",
    "kl_cov",
    "regular",
    "rollout_is",
    "sapo",
]

ROWS: dict[str, Loss] = {
    row.fn.__name__: row
    for row in (
        REGULAR,
        DUAL_CLIP,
        GSPO,
        SAPO,
        CISPO,
        ROLLOUT_IS,
        DPPO,
        DECOUPLED_PPO,
        CLIP_COV,
        KL_COV,
        GMPO,
        IMPORTANCE_SAMPLING,
        CROSS_ENTROPY,
    )
}
LOSSES = {name: row.fn for name, row in ROWS.items()}
BATCH_STATISTICS = frozenset(name for name, row in ROWS.items() if row.whole_batch)
"""Losses that look at the whole minibatch: its means, its highest covariances."""
