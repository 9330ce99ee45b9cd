"""Config of the objective: advantages, policy loss, reduction, KL, entropy, corrections."""

from dataclasses import dataclass, field
from typing import Annotated, Any

from jaxrl.config import given
from jaxrl.config.constraints import between, not_negative, one_in, one_of, positive, positive_or
from jaxrl.config.dataclass_config import BaseConfig
from jaxrl.config.status import implemented, later, mapped, new

_OVER_MINIBATCH = implemented("averages over the whole minibatch")
_WEIGHT_BOUND = "SkyRL's later default; 0 and 5 would bound the weight to [1, 6]"


@dataclass
class KLCtrlConfig(BaseConfig):
    """Hold the settings of the controller of the KL coefficient in the reward."""

    type: Annotated[str, one_of("fixed", "adaptive")] = "fixed"
    """"fixed" or "adaptive"."""
    kl_target: float = 0.1
    """KL that the adaptive controller aims at."""
    horizon: int = 10000
    """Rows over which the adaptive controller corrects."""


@dataclass
class EntropyCtrlConfig(BaseConfig):
    """Hold the settings of the controller of entropy_loss_coef."""

    type: Annotated[str, one_of("fixed", "adaptive")] = "fixed"
    """"fixed", or "adaptive": after a step the coefficient rises by delta where the entropy is at
    most its target, else it falls, and the term counts below the target alone."""
    target: Annotated[float, not_negative] = 0.2
    """Entropy to hold, in nats per sampled token."""
    delta: Annotated[float, not_negative] = 0.005
    """Change of the coefficient in a step."""
    max_coef: Annotated[float, not_negative] = 1.0
    """Largest value that the coefficient of the entropy is raised to."""


@dataclass
class SAPOConfig(BaseConfig):
    """Hold the settings of the policy loss sapo."""

    tau_pos: float = 1.0
    """Gate temperature where the advantage is positive."""
    tau_neg: float = 1.05
    """Gate temperature elsewhere."""


@dataclass
class DynamicSamplingConfig(BaseConfig):
    """Hold the settings of sampling until enough prompts have rewards that differ."""

    type: Annotated[str | None, one_of(None, "filter", "replace")] = None
    """"filter", "replace" or None."""
    max_sample_batches: Annotated[int, positive_or(-1, "never give up")] = 30
    """Give up after this many batches; -1 = never."""
    min_replace_ratio: Annotated[float, between("[0, 1]", "e.g. 0.3")] = 0.3
    """"replace": least fraction of good prompts to copy from."""


@dataclass
class ClipCovConfig(BaseConfig):
    """Hold the settings of the policy loss clip_cov."""

    clip_ratio: float = 0.0002
    """Fraction of tokens whose gradient is dropped."""
    clip_cov_lb: float = 1.0
    """Lower bound of the covariance of a candidate token."""
    clip_cov_ub: float = 5.0
    """Upper bound of the covariance of a candidate token."""


@dataclass
class KLCovConfig(BaseConfig):
    """Hold the settings of the policy loss kl_cov."""

    kl_cov_frac: float = 0.2
    """Fraction of tokens, of highest covariance, with a KL penalty."""
    ppo_kl_coef: float = 1.0
    """Coefficient of that penalty."""


@dataclass
class CISPOConfig(BaseConfig):
    """Hold the settings of the policy loss cispo."""

    cispo_eps_clip_low: Annotated[float, implemented(_WEIGHT_BOUND, skyrl_default=0.0)] = 1.0
    """The importance weight is clipped below at 1 - this."""
    cispo_eps_clip_high: Annotated[float, implemented(_WEIGHT_BOUND, skyrl_default=5.0)] = 4.0
    """The importance weight is clipped above at 1 + this."""
    cispo_anchor: Annotated[str, one_of("old", "rollout"), later()] = "old"
    """Policy that the weight is relative to: "old" or "rollout"."""


@dataclass
class DPPOConfig(BaseConfig):
    """Hold the settings of the policy loss dppo."""

    dppo_type: Annotated[str, one_of("binary_tv", "binary_kl")] = "binary_tv"
    """Divergence: "binary_tv" or "binary_kl" (then about 0.05 for the bounds)."""
    delta_low: float = 0.2
    """Bound of the divergence where the advantage is negative."""
    delta_high: float = 0.2
    """Bound of the divergence where the advantage is positive."""


@dataclass
class DecoupledPPOConfig(BaseConfig):
    """Hold the settings of the policy loss decoupled_ppo."""

    proximal: Annotated[str, one_of("forward", "log_linear")] = "forward"
    """Policy that the ratio is clipped around: "forward" is the one at the start of the step,
    "log_linear" lies between sampler and policy by the age of the token; no forward pass."""
    behave_cap: float = 5.0
    """Tokens whose weight, proximal policy / sampler, is above this are not learnt from."""


@dataclass
class OverlongBufferConfig(BaseConfig):
    """Hold the settings of soft overlong punishment, https://arxiv.org/abs/2503.14476 (eq. 13)."""

    len: int = 4096
    """Tokens before max_generate_length over which the punishment grows."""
    penalty_factor: Annotated[float, not_negative] = 1.0
    """Punishment of a response of full length."""


@dataclass
class OffPolicyCorrectionConfig(BaseConfig):
    """Hold the settings of corrections by w = exp(old_log_probs - rollout_log_probs)."""

    preset: Annotated[
        str | None, one_in("jaxrl.losses.off_policy:PRESETS", or_none=True), new()
    ] = None
    """A correction by its name in the field, such as "icepop", "seq_mis" or "geo_rs_token_tis",
    which stands for values of the fields below: docs/off_policy.md has the table."""
    tis_ratio_type: Annotated[str | None, one_of(None, "token", "sequence")] = None
    """Truncated importance weights: "token", "sequence" or None."""
    token_tis_ratio_clip_high: float = 2.0
    """Upper bound of a token's weight."""
    sequence_tis_ratio_clip_high: float = 5.0
    """Upper bound of a sequence's weight."""
    sequence_mask_metric: Annotated[str | None, one_of(None, "geometric", "product")] = None
    """Drop sequences by the "geometric" mean or the "product" of w; None = keep all."""
    geo_mask_high: float = 1.01
    """Upper bound of the geometric mean."""
    geo_mask_low: float = 0.99
    """Lower bound of the geometric mean."""
    product_mask_high: float = 2.0
    """Upper bound of the product."""
    product_mask_low: float = 0.5
    """Lower bound of the product."""
    outlier_token_is_threshold_low: float | None = None
    """Drop sequences with any w below this."""
    outlier_token_is_threshold_high: float | None = None
    """Drop sequences with any w above this."""
    token_mask_is_threshold_low: Annotated[float | None, implemented("both bounds or neither")] = (
        None
    )
    """Drop tokens with w below this."""
    token_mask_is_threshold_high: Annotated[float | None, implemented("both bounds or neither")] = (
        None
    )
    """Drop tokens with w above this."""
    rollout_is_batch_normalize: Annotated[bool, new()] = False
    """Divide the weights by their mean over the minibatch, after they are bounded."""
    rollout_rs: Annotated[str | None, new()] = None
    """Drop tokens or sequences by verl's grid, e.g. "token_k1" or "seq_mean_k3,seq_max_k2"."""
    rollout_rs_threshold: Annotated[str | float | None, new()] = None
    """For each of rollout_rs, with commas: bounds of the ratio for k1, "0.5_2.0", else an upper
    one, "0.01"."""
    renormalize: Annotated[bool, new()] = False
    """Count only the tokens that are left in the mean; false keeps the weight of each token."""


@dataclass
class DistillationConfig(BaseConfig):
    """Hold the settings of learning a teacher's distributions, token by token."""

    coef: Annotated[float, not_negative] = 0.0
    """Weight of the divergence from the teacher in the objective, e.g. 1.0; 0.0 = there is no
    teacher."""
    policy_loss_coef: Annotated[float, not_negative] = 1.0
    """Weight of the policy loss beside it; 0.0 = the teacher is all that is learnt from."""
    beta: Annotated[float, between("[0, 1]", "0.5 is the Jensen-Shannon divergence")] = 0.5
    """Chooses among generalised Jensen-Shannon divergences: 0.0 is the forward KL(teacher ||
    student), 1.0 the reverse."""
    top_k: Annotated[int | None, positive_or(None, "all ids")] = 64
    """Ids that the teacher finds likeliest, each an event; all others together are one more. None =
    all ids, from the teacher's last states and its head."""
    teacher: Annotated[str, one_of("ref", "hindsight")] = "ref"
    """"ref", trainer.ref.model; "hindsight", the policy at the start of the step, after it has read
    what became of its answer, https://arxiv.org/abs/2601.20802 (SDPO)."""
    solution_hint: str = "\n\nA correct answer:\n\n{solution}\n\nAnswer the question."
    """hindsight: what it reads behind the user's words if another sample of the prompt is right;
    "" = nothing."""
    feedback_hint: str = "\n\nOf an earlier answer it was said:\n\n{feedback}\n"
    """hindsight: what it reads if the environment's step gives metadata["feedback"], a text; "" =
    nothing."""
    right_reward: float = 1.0
    """hindsight: a sample is right if its rewards sum up to this or more."""
    max_hint_tokens: Annotated[int, positive] = 1024
    """hindsight: what is longer is cut off behind this many tokens."""


@dataclass
class AlgorithmConfig(BaseConfig):
    """Hold the objective; policy losses and advantage estimators receive this config."""

    advantage_estimator: Annotated[str, given.function, implemented('also "module:function"')] = (
        "grpo"
    )
    """A built-in or registered name, or "my_pkg.my_module:my_estimator"."""
    advantage_kwargs: Annotated[dict[str, Any], new()] = field(default_factory=dict)
    """Keyword-only hyperparameters of the advantage estimator."""
    kl_ctrl: Annotated[KLCtrlConfig, implemented("the coefficient is in the checkpoint")] = field(
        default_factory=KLCtrlConfig
    )
    """Controller of the KL coefficient in the reward."""
    kl_estimator_type: Annotated[str, one_in("jaxrl.losses.kl:KL_ESTIMATORS"), _OVER_MINIBATCH] = (
        "k3"
    )
    """"k1", "k2", "k3", "k3+" (value of k3, gradient of k2) or "abs",
    http://joschu.net/blog/kl-approx.html."""
    use_kl_in_reward: Annotated[bool, implemented("excludes use_kl_loss")] = False
    """Subtract the KL to the reference model from the rewards."""
    use_kl_loss: Annotated[bool, _OVER_MINIBATCH] = True
    """Add the KL to the reference model to the loss."""
    kl_loss_coef: Annotated[float, not_negative, _OVER_MINIBATCH] = 0.001
    """Coefficient of the KL term."""
    use_unbiased_kl: Annotated[bool, new()] = False
    """Multiply the KL in the loss by the ratio to the old policy, so that its value and gradient
    are those of the KL on tokens of that policy, https://arxiv.org/abs/2512.02556 (eq. 7)."""
    kl_loss_reduction: Annotated[str, one_of("sequence_mean", "loss"), new()] = "sequence_mean"
    """How the KL in the loss is averaged: "sequence_mean", as in SkyRL, or "loss", as
    loss_reduction says."""
    use_entropy_loss: Annotated[bool, _OVER_MINIBATCH] = False
    """Subtract the policy's entropy from the loss."""
    entropy_loss_coef: Annotated[float, not_negative, _OVER_MINIBATCH] = 0.01
    """Coefficient of the entropy term; with an adaptive entropy_ctrl the first one."""
    entropy_ctrl: Annotated[EntropyCtrlConfig, new()] = field(default_factory=EntropyCtrlConfig)
    """Controller of the coefficient of the entropy, https://arxiv.org/abs/2505.22312."""
    router_balance_loss_coef: Annotated[float, not_negative, new()] = 0.0
    """Coefficient of the balance of each trajectory's load over the experts of a layer, which is 1
    where all have the same."""
    router_z_loss_coef: Annotated[float, not_negative, new()] = 0.0
    """Coefficient of the squared logsumexp of a router's logits."""
    temperature: Annotated[
        float | None, implemented("also applied to the reference model's logits")
    ] = None
    """Logits are divided by this before every log-softmax; None = the sampling temperature."""
    advantage_batch_normalize: Annotated[bool, implemented("over sampled tokens, not padding")] = (
        False
    )
    """Shift and scale the advantages of a batch to mean 0 and variance 1."""
    value_head_prefix: str = "value_head"
    """Name of the critic's head."""
    policy_loss_type: Annotated[str, given.function, implemented('also "module:function"')] = (
        "regular"
    )
    """A built-in or registered name, or "my_pkg.my_module:my_loss"."""
    policy_loss_kwargs: Annotated[dict[str, Any], new()] = field(default_factory=dict)
    """Keyword-only hyperparameters of the policy loss function."""
    top_entropy_quantile: Annotated[float, between("(0, 1]", "1.0 is all tokens"), new()] = 1.0
    """Share of a minibatch's sampled tokens that have a policy loss: those of highest entropy, e.g.
    0.2, https://arxiv.org/abs/2506.01939."""
    opsm_delta: Annotated[float | None, new()] = None
    """Off-policy sequence masking: rows of negative advantage have no policy loss where the policy
    finds them less likely than the sampler did, by more than this per token on average, e.g. 0.5,
    https://arxiv.org/abs/2512.02556 (eq. 9); None = off."""
    positive_nll_coef: Annotated[float, not_negative, new()] = 0.0
    """Coefficient of the negative log-likelihood of rows with a reward above 0, averaged over their
    tokens, e.g. 0.1, https://arxiv.org/abs/2504.05118."""
    distillation: Annotated[DistillationConfig, new()] = field(default_factory=DistillationConfig)
    """Divergence from the distributions of a teacher, https://arxiv.org/abs/2306.13649."""
    loss_reduction: Annotated[
        str,
        one_in("jaxrl.losses.reduction:REDUCTIONS"),
        implemented("counts of the minibatch, not of the microbatch"),
    ] = "token_mean"
    """"token_mean", "token_mean_legacy", "sequence_mean", "seq_mean_token_sum_norm" or
    "prompt_mean"."""
    old_log_probs: Annotated[str, one_of("trainer", "rollout"), new()] = "trainer"
    """What old_log_probs are: "trainer", of the policy at the start of the step, by a forward pass
    where they are needed; "rollout", the sampler's, as it recorded them."""
    grpo_norm_by_std: bool = True
    """grpo: divide by the group's standard deviation; false gives Dr. GRPO."""
    zero_variance_filter: Annotated[bool, implemented("also of rewards per token")] = False
    """Mask the prompts whose samples all have the same reward."""
    zero_variance_filter_tol: Annotated[float, not_negative, later()] = 1e-6
    """Rewards that differ by at most this are the same."""
    lambd: Annotated[float, between("[0, 1]", "1.0 is no discount")] = 1.0
    """GAE lambda, passed to the advantage estimator."""
    gamma: Annotated[float, between("[0, 1]", "1.0 is no discount")] = 1.0
    """Discount, passed to the advantage estimator."""
    eps_clip_low: Annotated[float, not_negative] = 0.2
    """The ratio is clipped below at 1 - this."""
    eps_clip_high: Annotated[float, not_negative] = 0.2
    """The ratio is clipped above at 1 + this."""
    clip_ratio_c: float = 3.0
    """dual_clip: bound of the loss for negative advantages, > 1."""
    tis_imp_ratio_cap: Annotated[float, mapped("off_policy_correction; deprecated")] = -1.0
    """Deprecated cap of the importance weights."""
    use_tis: Annotated[bool, mapped("off_policy_correction; deprecated")] = False
    """Deprecated switch of token importance weights."""
    off_policy_correction: OffPolicyCorrectionConfig = field(
        default_factory=OffPolicyCorrectionConfig
    )
    """Corrections for rollouts that another policy sampled."""
    sapo: SAPOConfig = field(default_factory=SAPOConfig)
    """Policy loss sapo."""
    value_clip: Annotated[float | None, implemented("rounding is no clip")] = 0.2
    """Clip range of the critic's values around those before the step; None = no clip."""
    dynamic_sampling: Annotated[
        DynamicSamplingConfig, implemented("a prompt drawn twice is two groups")
    ] = field(default_factory=DynamicSamplingConfig)
    """Sampling until enough prompts have rewards that differ."""
    clip_cov: ClipCovConfig = field(default_factory=ClipCovConfig)
    """Policy loss clip_cov."""
    kl_cov: KLCovConfig = field(default_factory=KLCovConfig)
    """Policy loss kl_cov."""
    cispo: CISPOConfig = field(default_factory=CISPOConfig)
    """Policy loss cispo."""
    dppo: Annotated[DPPOConfig, later()] = field(default_factory=DPPOConfig)
    """Policy loss dppo."""
    decoupled_ppo: Annotated[DecoupledPPOConfig, new()] = field(default_factory=DecoupledPPOConfig)
    """Policy loss decoupled_ppo."""
    overlong_buffer: Annotated[OverlongBufferConfig | None, new()] = None
    """Punish responses near max_generate_length; None = do not."""
    max_seq_len: Annotated[int | None, implemented("must be set when max_turns > 1")] = None
    """Constant of seq_mean_token_sum_norm; None = max_input_length + max_generate_length."""
