"""Policy losses: one file per published loss, the file name is the config string.

Every loss maps `(log_probs, old_log_probs, advantages, config, loss_mask, rollout_log_probs)`,
arrays [B, T], to the per-token loss [B, T], unmasked and unreduced, and its metrics. `reduction.py`
holds the only weights that a loss is ever multiplied with, `kl.py` the estimators of the KL term.
"""

from jaxrl.losses.cross_entropy import cross_entropy
from jaxrl.losses.dual_clip import dual_clip
from jaxrl.losses.gspo import gspo
from jaxrl.losses.regular import regular

LOSSES = {
    "regular": regular,  # PPO clip, arXiv:1707.06347
    "dual_clip": dual_clip,  # arXiv:1912.09729
    "gspo": gspo,  # arXiv:2507.18071
    "cross_entropy": cross_entropy,  # supervised
}
BATCH_STATISTICS: frozenset[str] = frozenset()  # these look at the whole minibatch
