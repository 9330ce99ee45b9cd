"""Advantage estimators: one file each, the file name is the config string (`++` spelled out).

Every estimator maps `(token_level_rewards, response_mask, index)`, [B, T], [B, T] and [B] group
ids, to `(advantages, returns)`, both [B, T]. All are pure and jittable: groups are segments, not
Python loops. `normalize.py` normalises what any of them returns.

What is true of one estimator is its row, `ROW` at the end of its file; see `row.py`.
"""

from jaxrl.advantages.dr_grpo import ROW as DR_GRPO, dr_grpo
from jaxrl.advantages.gae import ROW as GAE, gae
from jaxrl.advantages.gdpo import ROW as GDPO, gdpo
from jaxrl.advantages.grpo import ROW as GRPO, grpo
from jaxrl.advantages.grpo_token import ROW as GRPO_TOKEN, grpo_token
from jaxrl.advantages.maxrl import ROW as MAXRL, maxrl
from jaxrl.advantages.on_policy_distillation import (
    ROW as ON_POLICY_DISTILLATION,
    on_policy_distillation,
)
from jaxrl.advantages.reinforce_plus_plus import ROW as REINFORCE_PLUS_PLUS, reinforce_plus_plus
from jaxrl.advantages.rloo import ROW as RLOO, rloo
from jaxrl.advantages.row import Estimator

__all__ = [
    "ESTIMATORS",
    "ROWS",
    "dr_grpo",
    "gae",
    "gdpo",
    "grpo",
    "grpo_token",
    "maxrl",
    "on_policy_distillation",
    "reinforce_plus_plus",
    "rloo",
]

ROWS: dict[str, Estimator] = {
    row.fn.__name__.replace("_plus_plus", "++"): row
    for row in (
        GRPO,
        GRPO_TOKEN,
        DR_GRPO,
        RLOO,
        MAXRL,
        REINFORCE_PLUS_PLUS,
        GDPO,
        ON_POLICY_DISTILLATION,
        GAE,
    )
}
ESTIMATORS = {name: row.fn for name, row in ROWS.items()}
