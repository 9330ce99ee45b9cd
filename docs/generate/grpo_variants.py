"""List what eight systems call GRPO, and the settings that come nearest to each objective."""

from typing import Any, NamedTuple


class GRPOVariant(NamedTuple):
    """Hold the defaults of a system, in words and as fields of `trainer.algorithm`."""

    system: str
    advantage: str
    ratio: str
    clip: str
    aggregation: str
    kl: str
    settings: dict[str, Any]  # what differs from our defaults, as near as they come
    note: str = ""


_ZSCORE = "(r - mean) / (std + 1e-6) of the group"
_OLD = "the recomputed old policy"

GRPO_VARIANTS = (
    GRPOVariant(
        "verl",
        _ZSCORE,
        _OLD,
        "0.2 / 0.2, and dual clip 3 always",
        "over all tokens",
        "off",
        {"policy_loss_type": "dual_clip", "clip_ratio_c": 3.0, "use_kl_loss": False},
    ),
    GRPOVariant(
        "SkyRL", _ZSCORE, _OLD, "0.2 / 0.2", "over all tokens", "k3, 0.001, in the loss", {}
    ),
    GRPOVariant(
        "TRL",
        "(r - mean) / (std + 1e-4) of the group",
        _OLD,
        "0.2 / 0.2",
        "over all tokens",
        "off",
        {
            "advantage_kwargs": {"epsilon": 1e-4},
            "use_kl_loss": False,
            "off_policy_correction.tis_ratio_type": "sequence",
            "off_policy_correction.sequence_tis_ratio_clip_high": 3.0,
            "off_policy_correction.sequence_mask_metric": "product",
            "off_policy_correction.product_mask_low": 0.0,
            "off_policy_correction.product_mask_high": 3.0,
        },
        'Its "sequence_mask": sequences are weighted by their importance ratio against the '
        "sampler, and dropped where it exceeds 3.",
    ),
    GRPOVariant(
        "prime-rl",
        "r - mean of the group",
        "the sampler",
        "none: DPPO-TV with 0.2",
        "over all tokens",
        "none",
        {
            "advantage_estimator": "dr_grpo",
            "policy_loss_type": "dppo",
            "dppo.dppo_type": "binary_tv",
            "dppo.delta_low": 0.2,
            "dppo.delta_high": 0.2,
            "use_kl_loss": False,
        },
        "Its further term, 1e-3 times the squared log ratio to the sampler, is not built in.",
    ),
    GRPOVariant(
        "AReaL",
        "normalised in the group, then over the batch",
        "a recomputed policy, itself weighted against the sampler (decoupled)",
        "0.4 / 0.4",
        "over all tokens",
        "in the reward, 0",
        {
            "advantage_batch_normalize": True,
            "policy_loss_type": "decoupled_ppo",
            "eps_clip_low": 0.4,
            "eps_clip_high": 0.4,
            "use_kl_loss": False,
        },
        "These are the values of its GSM8K example. Tokens whose weight is above 5 are dropped, "
        "`decoupled_ppo.behave_cap`.",
    ),
    GRPOVariant(
        "slime",
        _ZSCORE,
        "the old policy of the trainer, or the sampler",
        "0.2 / 0.2",
        "over the tokens of a sample, then over samples",
        "0",
        {"loss_reduction": "sequence_mean", "use_kl_loss": False},
    ),
    GRPOVariant(
        "OpenRLHF",
        "(r - mean) / (std + 1e-9) of the group, then less the KL of each token",
        _OLD,
        "0.2 / 0.2",
        "over all tokens",
        "k1, 0.01, in the reward",
        {
            "advantage_kwargs": {"epsilon": 1e-9},
            "use_kl_loss": False,
            "use_kl_in_reward": True,
            "kl_estimator_type": "k1",
            "kl_loss_coef": 0.01,
        },
        'Near to its estimator "group_norm", which normalises the scores first and takes the '
        "KL off the result; here the KL is in the rewards that are normalised.",
    ),
    GRPOVariant(
        "NeMo-RL",
        "r - mean of the others of the group, / std where it is positive",
        _OLD,
        "0.2 / 0.2",
        "over all tokens",
        "k3, 0.01, in the loss",
        {"advantage_estimator": "grpo_loo", "kl_loss_coef": 0.01},
        "Its KL is averaged over all tokens, as its loss, ours over each sequence and then over "
        "sequences: rows of 1 and 9 tokens, a KL of 1 on the short one's, are 0.1 there and 0.5 "
        "here.",
    ),
)
