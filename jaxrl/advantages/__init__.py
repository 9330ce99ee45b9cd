"""Advantage estimators: one file each, the file name is the config string.

Every estimator maps `(token_level_rewards, response_mask, index)`, [B, T], [B, T] and [B] group
ids, to `(advantages, returns)`, both [B, T]. All are pure and jittable: groups are segments, not
Python loops.
"""

from jaxrl.advantages.grpo import grpo
from jaxrl.advantages.grpo_token import grpo_token
from jaxrl.advantages.rloo import rloo

ESTIMATORS = {
    "grpo": grpo,  # arXiv:2402.03300
    "grpo_token": grpo_token,  # arXiv:2402.03300, rewards per token
    "rloo": rloo,  # arXiv:2402.14740
}
