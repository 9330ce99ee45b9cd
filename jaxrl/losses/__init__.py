"""Policy losses: one file per published loss, the file name is the config string.

Every loss maps `(log_probs, old_log_probs, advantages, config, loss_mask, rollout_log_probs)`,
arrays [B, T], to the per-token loss [B, T], unmasked and unreduced, and its metrics. `reduction.py`
holds the only weights that a loss is ever multiplied with, `off_policy.py` what corrects them for
rollouts of another policy, `kl.py` the estimators of the KL term, `value.py` the critic's loss.
"""

from jaxrl.losses.cispo import cispo
from jaxrl.losses.clip_cov import clip_cov
from jaxrl.losses.cross_entropy import cross_entropy
from jaxrl.losses.decoupled_ppo import decoupled_ppo
from jaxrl.losses.dppo import dppo
from jaxrl.losses.dual_clip import dual_clip
from jaxrl.losses.gmpo import gmpo
from jaxrl.losses.gspo import gspo
from jaxrl.losses.importance_sampling import importance_sampling
from jaxrl.losses.kl_cov import kl_cov
from jaxrl.losses.regular import regular
from jaxrl.losses.rollout_is import rollout_is
from jaxrl.losses.sapo import sapo

LOSSES = {
    "regular": regular,  # PPO clip, arXiv:1707.06347
    "dual_clip": dual_clip,  # arXiv:1912.09729
    "gspo": gspo,  # arXiv:2507.18071
    "sapo": sapo,  # arXiv:2511.20347
    "cispo": cispo,  # arXiv:2506.13585
    "rollout_is": rollout_is,  # GLM-5
    "dppo": dppo,  # arXiv:2602.04879
    "decoupled_ppo": decoupled_ppo,  # arXiv:2505.24298
    "clip_cov": clip_cov,  # arXiv:2505.22617
    "kl_cov": kl_cov,  # arXiv:2505.22617
    "gmpo": gmpo,  # arXiv:2507.20673
    "importance_sampling": importance_sampling,
    "cross_entropy": cross_entropy,  # supervised
}

BATCH_STATISTICS = frozenset({"clip_cov", "kl_cov"})
"""Losses that look at the whole minibatch: its means, its highest covariances."""
