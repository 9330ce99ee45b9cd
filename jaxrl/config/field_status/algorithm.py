"""The rows of `trainer.algorithm`."""

from jaxrl.config.field_status.row import LATER, NEW, implemented, mapped

_ALGORITHM = "trainer.algorithm"
_CORRECTION = "trainer.algorithm.off_policy_correction"

ROWS = (
    implemented(
        _ALGORITHM,
        "advantage_estimator policy_loss_type",
        'also "module:function"',
    ),
    implemented(_ALGORITHM, "policy_loss_kwargs", NEW, skyrl_only=False),
    implemented(_ALGORITHM, "advantage_kwargs", NEW, skyrl_only=False),
    implemented(
        _ALGORITHM,
        "kl_estimator_type use_kl_loss kl_loss_coef use_entropy_loss entropy_loss_coef",
        "averages over the whole minibatch",
    ),
    implemented(_ALGORITHM, "temperature", "also applied to the reference model's logits"),
    implemented(_ALGORITHM, "loss_reduction", "counts of the minibatch, not of the microbatch"),
    implemented(_ALGORITHM, "max_seq_len", "must be set when max_turns > 1"),
    implemented(_ALGORITHM, "grpo_norm_by_std eps_clip_low eps_clip_high clip_ratio_c gamma lambd"),
    implemented(_ALGORITHM, "use_kl_in_reward", "excludes use_kl_loss"),
    implemented(_ALGORITHM, "kl_ctrl.*", "the coefficient is in the checkpoint"),
    implemented(_ALGORITHM, "advantage_batch_normalize", "over sampled tokens, not padding"),
    implemented(_ALGORITHM, "zero_variance_filter", "also of rewards per token"),
    implemented(_ALGORITHM, "zero_variance_filter_tol", LATER, skyrl_only=False),
    implemented(_ALGORITHM, "overlong_buffer", NEW, skyrl_only=False),
    implemented(_ALGORITHM, "value_clip", "rounding is no clip"),
    implemented(_ALGORITHM, "value_head_prefix"),
    mapped(_ALGORITHM, "use_tis tis_imp_ratio_cap", "off_policy_correction; deprecated"),
    implemented(_CORRECTION, "renormalize", NEW, skyrl_only=False),
    implemented(_CORRECTION, "token_mask_*", "both bounds or neither"),
    implemented(_CORRECTION, "tis_* sequence_* outlier_* token_tis_* geo_* product_*"),
    implemented(_ALGORITHM, "sapo.* clip_cov.* kl_cov.*"),
    implemented(_ALGORITHM, "dppo.*", LATER, skyrl_only=False),
    implemented(_ALGORITHM, "decoupled_ppo.* old_log_probs", NEW, skyrl_only=False),
    implemented(f"{_ALGORITHM}.cispo", "cispo_anchor", LATER, skyrl_only=False),
    *(
        implemented(
            f"{_ALGORITHM}.cispo",
            name,
            "SkyRL's later default; 0 and 5 would bound the weight to [1, 6]",
            skyrl_default=default,
        )
        for name, default in (("cispo_eps_clip_low", 0.0), ("cispo_eps_clip_high", 5.0))
    ),
    implemented(f"{_ALGORITHM}.dynamic_sampling", "*", "a prompt drawn twice is two groups"),
)
