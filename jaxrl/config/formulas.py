"""The parts of the objective as formulas, with the numbers of a config in them."""

from jaxrl.advantages import ROWS
from jaxrl.config.algorithm import AlgorithmConfig, OffPolicyCorrectionConfig
from jaxrl.config.objective_requirements import (
    corrects_for_sampler,
    distills,
    distills_hindsight,
    entropy_is_adaptive,
    loss_row,
    needs_old_log_probs,
    needs_reference,
    ratio_anchor,
    reduces_by_itself,
    sampled_are_exact,
    wants_old_log_probs,
)
from jaxrl.config.rollouts import carries
from jaxrl.config.train_config import TrainConfig
from jaxrl.config.trainer import TrainerConfig
from jaxrl.losses import LOSSES
from jaxrl.losses.off_policy import correction_enabled, rejection_bounds

_KL = {
    "k1": "d",
    "k2": "d^2 / 2",
    "k3": "exp(-d) + d - 1",
    "k3+": "d^2 / 2 - sg[d^2 / 2] + sg[exp(-d) + d - 1]",
    "abs": "|d|",
}
_KL_GRADIENT = {  # of the estimate as a loss, in expectation over the policy's own tokens
    "k1": ["its gradient is 0 in expectation: it does not know ref"],
    "k2": ["its gradient is that of KL(policy | ref)"],
    "k3": ["its gradient is that of KL(ref | policy)"],
    "k3+": ["its gradient is that of KL(policy | ref)"],
    "abs": [],
}


_STATISTICS = {"k1": "-log v", "k2": "(log v)^2 / 2", "k3": "v - 1 - log v"}
_REJECTED = {
    "token": "tokens with {}",
    "seq_sum": "rows with sum_t {}",
    "seq_mean": "rows with mean_t {}",
    "seq_max": "rows with max_t {}",
}


def loss_lines(trainer: TrainerConfig) -> list[str]:
    """Return the loss of a token, its ratio, and the policy that the ratio is relative to."""
    algorithm = trainer.algorithm
    name, anchor, row = algorithm.policy_loss_type, ratio_anchor(algorithm), loss_row(algorithm)
    if row is None or name not in LOSSES:
        kwargs = ", ".join(f"{k}={v!r}" for k, v in algorithm.policy_loss_kwargs.items())
        settings = f"with {kwargs or 'its default hyperparameters'}"
        return [f"custom function {name}", settings, f"offered {_anchor(trainer)}"]
    loss = f"{name}: l = {row.formula(algorithm)}"
    if anchor is None:
        return [loss]
    ratio = [line.format(anchor=anchor) for line in row.ratio(algorithm)]
    return [loss, *ratio] if len(ratio) > 1 else [loss, *ratio, _anchor(trainer)]


def _anchor(trainer: TrainerConfig) -> str:
    algorithm = trainer.algorithm
    if algorithm.old_log_probs == "rollout":
        return "old_log_probs: the sampler's, as it recorded them; no forward pass"
    if sampled_are_exact(trainer) and wants_old_log_probs(trainer):
        return "old_log_probs: the sampler's, to the bit the policy's; no forward pass"
    if ratio_anchor(algorithm) == "rollout":
        return "rollout_log_probs: the sampler's, as it recorded them"
    if needs_old_log_probs(trainer):
        return "old_log_probs: the policy's at the start of the step, recomputed by the trainer"
    return "old_log_probs: the policy's own, since a batch has one update; r = 1"


def advantage_line(algorithm: AlgorithmConfig, samples: int) -> str:
    """Return the advantage of a token, from R, the sum of its row's rewards r_t."""
    if ratio_anchor(algorithm) is None:
        return "not used by the loss"
    name, group = algorithm.advantage_estimator, f"G = the {samples} samples of a prompt"
    row = ROWS.get(name)
    if row is None:
        values = {"gamma": algorithm.gamma, "lambd": algorithm.lambd, **algorithm.advantage_kwargs}
        numbers = [
            f"{k}={v:g}" if isinstance(v, float) else f"{k}={v!r}" for k, v in values.items()
        ]
        return f"custom function {name}, {', '.join(numbers)}"
    settings = {
        **row.hyperparameters({}),
        "gamma": algorithm.gamma,
        "lambd": algorithm.lambd,
        "grpo_norm_by_std": algorithm.grpo_norm_by_std,
        "epsilon": "1e-6",
        **algorithm.advantage_kwargs,
    }
    return f"{name}: {row.formula(settings, group)}"


def reduction_line(config: TrainConfig) -> str:
    """Return the weight of a token in the minibatch."""
    trainer = config.trainer
    if reduces_by_itself(config):
        return f"the loss reduces by itself; {trainer.algorithm.loss_reduction} has no effect"
    algorithm, block = trainer.algorithm, trainer.micro_train_batch_size_per_gpu
    formula = {
        "token_mean": "w_bt = m_bt / sum m",
        "token_mean_legacy": f"w_bt = m_bt / (blocks x sum of m in the block of {block} rows)",
        "sequence_mean": "w_bt = m_bt / (B sum_t m_bt)",
        "seq_mean_token_sum_norm": f"w_bt = m_bt / (B {algorithm.max_seq_len})",
        "prompt_mean": "w_bt = m_bt / (prompts x sum of m over the prompt's samples)",
    }[algorithm.loss_reduction]
    return f"{algorithm.loss_reduction}: {formula}"


def sampler_lines(config: TrainConfig) -> list[str]:
    """Say how the sampler is not the policy, and what is not known of it."""
    lines = [*_eight_bits(config), *_carried(config)]
    if config.generator.sampling_params.logprobs is not None:
        return lines
    return [
        *lines,
        "gives no log-probs: all log-probs are of the trainer's own forward, and how far the two "
        "are apart is not known",
    ]


def _eight_bits(config: TrainConfig) -> list[str]:
    """Say what the sampler has in 8 bits, and what corrects for it."""
    engine, algorithm = config.generator.inference_engine, config.trainer.algorithm
    parts = [f"weights {engine.quantization}"] if engine.quantization else []
    parts += ["keys and values fp8"] if engine.kv_cache_dtype == "fp8" else []
    if not parts:
        return []
    if correction_enabled(algorithm.off_policy_correction):
        corrected = "corrected by c, the off-policy correction"
    elif ratio_anchor(algorithm) == "rollout":
        corrected = "corrected by r, which is against its log-probs"
    elif corrects_for_sampler(algorithm):
        corrected = f"corrected by the loss, {algorithm.policy_loss_type}"
    else:
        corrected = "not corrected"
    return [f"computes in 8 bits ({', '.join(parts)}): {corrected}"]


def _carried(config: TrainConfig) -> list[str]:
    """Say what it means for a batch that samples go on in the next step."""
    if not carries(config):
        return []
    settings, size = config.generator.partial_rollouts, config.trainer.train_batch_size
    return [
        f"carries samples of more than {settings.max_tokens_per_step} tokens into the next step: "
        f"of {size + settings.extra_prompts} groups under way the {size} oldest that are at their "
        "end are trained, so long answers later than short ones, on tokens of several policies"
    ]


def correction_lines(correction: OffPolicyCorrectionConfig) -> list[str]:
    """Say what c, the off-policy correction, is made of; one line for each active part."""
    lines = []
    low, high = (
        correction.outlier_token_is_threshold_low,
        correction.outlier_token_is_threshold_high,
    )
    if low is not None or high is not None:
        limits = [
            f"v < {low:g}" if low is not None else "",
            f"v > {high:g}" if high is not None else "",
        ]
        lines.append(f"c = 0 for rows with any {' or '.join(filter(None, limits))}")
    low, high = correction.token_mask_is_threshold_low, correction.token_mask_is_threshold_high
    if low is not None:
        lines.append(f"c = 0 for tokens with v outside [{low:g}, {high:g}]")
    if correction.tis_ratio_type == "token":
        lines.append(f"c = min(v, {correction.token_tis_ratio_clip_high:g})")
    if correction.tis_ratio_type == "sequence":
        lines.append(f"c = min(prod_t v, {correction.sequence_tis_ratio_clip_high:g}), per row")
    if correction.sequence_mask_metric == "geometric":
        bounds = f"[{correction.geo_mask_low:g}, {correction.geo_mask_high:g}]"
        lines.append(f"c = 0 for rows with geometric mean of v outside {bounds}")
    if correction.sequence_mask_metric == "product":
        bounds = f"[{correction.product_mask_low:g}, {correction.product_mask_high:g}]"
        lines.append(f"c = 0 for rows with product of v outside {bounds}")
    if correction.rollout_is_batch_normalize:
        lines.append("c is divided by its mean")
    for option, (low, high) in rejection_bounds(correction).items():
        where, statistic = _REJECTED[option.rsplit("_", 1)[0]], _STATISTICS[option[-2:]]
        within = f"[log {low:g}, log {high:g}]" if option.endswith("k1") else f"[0, {high:g}]"
        lines.append(f"c = 0 for {where.format(statistic)} outside {within}")
    if lines:
        counted = "left" if correction.renormalize else "of m, dropped or not"
        lines.insert(
            0, f"v = exp(old_log_probs - rollout_log_probs); w counts the tokens {counted}"
        )
    return lines or ["off"]


def kl_lines(config: TrainConfig) -> list[str]:
    """Describe the KL to the reference, in the loss or in the rewards."""
    algorithm = config.trainer.algorithm
    kind, coef = algorithm.kl_estimator_type, algorithm.kl_loss_coef
    if algorithm.use_kl_loss and coef:
        estimate = f"{kind} = {_KL[kind]}, d = log_probs - ref_log_probs"
        mean = "sum_bt w_bt" if algorithm.kl_loss_reduction == "loss" else "mean_b mean_t"
        if not algorithm.use_unbiased_kl:
            return [f"KL = {mean} {kind}, {estimate}", *_KL_GRADIENT[kind]]
        ratio = "r = exp(log_probs - old_log_probs)"
        return [f"KL = {mean} r {kind}, {estimate}, {ratio}", *_KL_GRADIENT["k2"]]
    if not (algorithm.use_kl_in_reward and coef):
        return ["off"]
    return [
        f"in the rewards: r_t - beta {kind}_t, {kind} = {_KL[kind]}, "
        "d = old_log_probs - ref_log_probs"
    ]


def token_lines(algorithm: AlgorithmConfig) -> list[str]:
    """Say which tokens have no policy loss, beside those that the correction drops."""
    lines = []
    if (delta := algorithm.opsm_delta) is not None:
        lines.append(
            f"l = 0 where A < 0 and mean_t (rollout_log_probs - log_probs) > {delta:g}, per row"
        )
    if (share := algorithm.top_entropy_quantile) < 1:
        lines.append(f"l = 0 but for the {share:g} of the minibatch's tokens of highest entropy")
    return lines


def teacher_lines(algorithm: AlgorithmConfig) -> list[str]:
    """Describe the divergence from a teacher in the objective."""
    if not distills(algorithm):
        return []
    settings = algorithm.distillation
    beta, b = settings.beta, f"{settings.beta:g}"
    mixed = f"{b} KL(p | m) + {1 - beta:g} KL(q | m), m = {b} p + {1 - beta:g} q"
    divergence = {0.0: "KL(p | q)", 1.0: "KL(q | p)"}.get(beta, mixed)
    who = "trainer.ref.model"
    if distills_hindsight(algorithm):
        who = "the policy at the start of the step, told what became of the answer"
    events = "all ids"
    if settings.top_k is not None:
        events = f"the teacher's {settings.top_k} likeliest ids and of all others together"
    return [
        f"D = sum_bt w_bt D_bt over tokens with a teacher, D_bt = {divergence}",
        f"p teacher, q policy, of {events}; teacher: {who}",
    ]


def entropy_lines(algorithm: AlgorithmConfig) -> list[str]:
    """Describe the entropy in the loss, and its coefficient where that is adaptive."""
    if not algorithm.use_entropy_loss:
        return ["off"]
    line, control = "H = sum_bt m_bt H_bt / sum m", algorithm.entropy_ctrl
    if not entropy_is_adaptive(algorithm):
        return [line]
    return [
        f"{line}; e = {algorithm.entropy_loss_coef:g} at first",
        f"after each step e + {control.delta:g} if H <= {control.target:g}, else e - "
        f"{control.delta:g}, in [0, {control.max_coef:g}]; the term counts where H of the step "
        f"before is <= {control.target:g}",
    ]


def controller_lines(config: TrainConfig) -> list[str]:
    """Describe the coefficient of the KL in the rewards."""
    algorithm = config.trainer.algorithm
    if not (algorithm.use_kl_in_reward and algorithm.kl_loss_coef):
        return []
    coef, control = f"beta = {algorithm.kl_loss_coef:g}", algorithm.kl_ctrl
    if control.type == "fixed":
        return [f"{coef}, fixed"]
    rows = config.trainer.train_batch_size * config.generator.n_samples_per_prompt
    target = f"clip(KL / {control.kl_target:g} - 1, -0.2, 0.2)"
    update = f"beta (1 + {target} {rows} / {control.horizon})"
    return [f"{coef} at first; after each step {update}"]


def reference_lines(trainer: TrainerConfig) -> list[str]:
    """Say what becomes of the reference in a run."""
    if not (trainer.update_ref_every_epoch and needs_reference(trainer.algorithm)):
        return []
    return ["ref is the policy at the end of the last epoch; in the first one the given model"]


def value_lines(algorithm: AlgorithmConfig) -> list[str]:
    """Say what the critic minimises."""
    clip, target = algorithm.value_clip, "y_t = G_t + V_old,t, the returns"
    if clip is None:
        return [f"minimise mean_b mean_t (V - y)^2 / 2, {target}"]
    return [
        "minimise mean_b mean_t max((V - y)^2, (c - y)^2) / 2, "
        f"c = V_old + clip(V - V_old, -{clip:g}, {clip:g})",
        target,
    ]
