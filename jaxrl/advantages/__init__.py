"""Advantage estimators: one file each, the file name is the config string (`++` spelled out).

Every estimator maps `(token_level_rewards, response_mask, index)`, [B, T], [B, T] and [B] group
ids, to `(advantages, returns)`, both [B, T]. All are pure and jittable: groups are segments, not
Python loops. `normalize.py` normalises what any of them returns.

What is true of one estimator is its row, `ROW` at the end of its file; see `row.py`.
"""

from jaxrl.advantages.dr_grpo import ROW as DR_GRPO, dr_grpo
from jaxrl.advantages.gae import ROW as GAE, gae
from jaxrl.advantages.gdpo import ROW as GDPO, gdpo
from jaxrl.advantages.gfpo import ROW as GFPO, gfpo
from jaxrl.advantages.gigpo import ROW as GIGPO, gigpo
from jaxrl.advantages.gpg import ROW as GPG, gpg
from jaxrl.advantages.grpo import ROW as GRPO, grpo
from jaxrl.advantages.grpo_batch_std import ROW as GRPO_BATCH_STD, grpo_batch_std
from jaxrl.advantages.grpo_loo import ROW as GRPO_LOO, grpo_loo
from jaxrl.advantages.grpo_token import ROW as GRPO_TOKEN, grpo_token
from jaxrl.advantages.maxrl import ROW as MAXRL, maxrl
from jaxrl.advantages.on_policy_distillation import (
    ROW as ON_POLICY_DISTILLATION,
    on_policy_distillation,
)
from jaxrl.advantages.opo import ROW as OPO, opo
from jaxrl.advantages.pass_at_k import ROW as PASS_AT_K, pass_at_k
from jaxrl.advantages.reinforce_plus_plus import ROW as REINFORCE_PLUS_PLUS, reinforce_plus_plus
from jaxrl.advantages.reinforce_plus_plus_baseline import (
    ROW as REINFORCE_PLUS_PLUS_BASELINE,
    reinforce_plus_plus_baseline,
)
from jaxrl.advantages.remax import ROW as REMAX, remax
from jaxrl.advantages.rloo import ROW as RLOO, rloo
from jaxrl.advantages.row import Estimator
from jaxrl.advantages.vapo import ROW as VAPO, vapo
from jaxrl.advantages.w_reinforce import ROW as W_REINFORCE, w_reinforce

__all__ = [
    "ESTIMATORS",
    "ROWS",
    "dr_grpo",
    "gae",
    "gdpo",
    "gfpo",
    "gigpo",
    "gpg",
    "grpo",
    "grpo_batch_std",
    "grpo_loo",
    "grpo_token",
    "maxrl",
    "on_policy_distillation",
    "opo",
    "pass_at_k",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
    "rloo",
    "vapo",
    "w_reinforce",
]

ROWS: dict[str, Estimator] = {
    row.fn.__name__.replace("_plus_plus", "++"): row
    for row in (
        GRPO,
        GRPO_TOKEN,
        GRPO_LOO,
        GRPO_BATCH_STD,
        DR_GRPO,
        GPG,
        OPO,
        RLOO,
        REMAX,
        MAXRL,
        PASS_AT_K,
        GFPO,
        GDPO,
        GIGPO,
        W_REINFORCE,
        REINFORCE_PLUS_PLUS,
        REINFORCE_PLUS_PLUS_BASELINE,
        ON_POLICY_DISTILLATION,
        GAE,
        VAPO,
    )
}
ESTIMATORS = {name: row.fn for name, row in ROWS.items()}
