"""Advantage estimators: one file each, the file name is the config string (`++` spelled out).

Every estimator maps `(token_level_rewards, response_mask, index)`, [B, T], [B, T] and [B] group
ids, to `(advantages, returns)`, both [B, T]. All are pure and jittable: groups are segments, not
Python loops. `normalize.py` normalises what any of them returns.
"""

from jaxrl.advantages.dr_grpo import dr_grpo
from jaxrl.advantages.gae import gae
from jaxrl.advantages.grpo import grpo
from jaxrl.advantages.grpo_token import grpo_token
from jaxrl.advantages.maxrl import maxrl
from jaxrl.advantages.on_policy_distillation import on_policy_distillation
from jaxrl.advantages.reinforce_plus_plus import reinforce_plus_plus
from jaxrl.advantages.rloo import rloo

ESTIMATORS = {
    "grpo": grpo,  # arXiv:2402.03300
    "grpo_token": grpo_token,  # arXiv:2402.03300, rewards per token
    "dr_grpo": dr_grpo,  # arXiv:2503.20783
    "rloo": rloo,  # arXiv:2402.14740
    "maxrl": maxrl,  # arXiv:2602.02710
    "reinforce++": reinforce_plus_plus,  # arXiv:2501.03262
    "on_policy_distillation": on_policy_distillation,  # arXiv:2306.13649, needs a teacher
    "gae": gae,  # arXiv:1506.02438, needs a critic
}
