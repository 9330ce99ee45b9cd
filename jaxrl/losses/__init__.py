"""Policy losses: one file per published loss, the file name is the config string.

Every loss maps `(log_probs, old_log_probs, advantages, config, loss_mask, rollout_log_probs)`,
arrays [B, T], to the per-token loss [B, T], unmasked and unreduced, and its metrics. `reduction.py`
holds the only weights that a loss is ever multiplied with, `off_policy.py` what corrects them for
rollouts of another policy, `kl.py` the estimators of the KL term, `value.py` the critic's loss.

What is true of one loss is its row, `ROW` at the end of its file; see `row.py`. A new one is a
file, a line here and a test.
"""

from jaxrl.losses.aspo import ROW as ASPO, aspo
from jaxrl.losses.bapo import ROW as BAPO, bapo
from jaxrl.losses.ce_gppo import ROW as CE_GPPO, ce_gppo
from jaxrl.losses.chord import ROW as CHORD, chord
from jaxrl.losses.cispo import ROW as CISPO, cispo
from jaxrl.losses.clip_cov import ROW as CLIP_COV, clip_cov
from jaxrl.losses.cross_entropy import ROW as CROSS_ENTROPY, cross_entropy
from jaxrl.losses.dcpo import ROW as DCPO, dcpo
from jaxrl.losses.decoupled_ppo import ROW as DECOUPLED_PPO, decoupled_ppo
from jaxrl.losses.dppo import ROW as DPPO, dppo
from jaxrl.losses.dro import ROW as DRO, dro
from jaxrl.losses.dual_clip import ROW as DUAL_CLIP, dual_clip
from jaxrl.losses.gmpo import ROW as GMPO, gmpo
from jaxrl.losses.gpg import ROW as GPG, gpg
from jaxrl.losses.gspo import ROW as GSPO, gspo
from jaxrl.losses.importance_sampling import ROW as IMPORTANCE_SAMPLING, importance_sampling
from jaxrl.losses.ipo import ROW as IPO, ipo
from jaxrl.losses.kl_cov import ROW as KL_COV, kl_cov
from jaxrl.losses.luffy import ROW as LUFFY, luffy
from jaxrl.losses.luspo import ROW as LUSPO, luspo
from jaxrl.losses.m2po import ROW as M2PO, m2po
from jaxrl.losses.regular import ROW as REGULAR, regular
from jaxrl.losses.rollout_is import ROW as ROLLOUT_IS, rollout_is
from jaxrl.losses.row import Loss
from jaxrl.losses.sapo import ROW as SAPO, sapo
from jaxrl.losses.topr import ROW as TOPR, topr
from jaxrl.losses.vespo import ROW as VESPO, vespo

__all__ = [
    "BATCH_STATISTICS",
    "LOSSES",
    "ROWS",
    "aspo",
    "bapo",
    "ce_gppo",
    "chord",
    "cispo",
    "clip_cov",
    "cross_entropy",
    "dcpo",
    "decoupled_ppo",
    "dppo",
    "dro",
    "dual_clip",
    "gmpo",
    "gpg",
    "gspo",
    "importance_sampling",
    "ipo",
    "kl_cov",
    "luffy",
    "luspo",
    "m2po",
    "regular",
    "rollout_is",
    "sapo",
    "topr",
    "vespo",
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
        CE_GPPO,
        VESPO,
        LUSPO,
        TOPR,
        GPG,
        DRO,
        M2PO,
        ASPO,
        DCPO,
        BAPO,
        IPO,
        LUFFY,
        CHORD,
    )
}
LOSSES = {name: row.fn for name, row in ROWS.items()}
BATCH_STATISTICS = frozenset(name for name, row in ROWS.items() if row.whole_batch)
"""Losses that look at the whole minibatch: its means, its highest covariances."""
