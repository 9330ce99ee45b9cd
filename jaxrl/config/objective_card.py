"""The objective of a run in plain text, printed before its first step."""

from jaxrl.config.algorithm import AlgorithmConfig
from jaxrl.config.train_config import TrainConfig, resolve

_KL = {
    "k1": "d",
    "k2": "d^2 / 2",
    "k3": "exp(-d) + d - 1",
    "abs": "|d|",
}


def objective_card(config: TrainConfig, num_devices: int = 1) -> str:
    """The resolved objective with its numbers, and the batch arithmetic.

    Args:
        config: is not changed; derived defaults are filled in by `resolve`.
        num_devices: devices that the run will use.
    """
    config = resolve(config)
    algorithm, optimizer = config.trainer.algorithm, config.trainer.policy.optimizer_config
    kl = f" + {algorithm.kl_loss_coef:g} KL" if _kl_counts(algorithm) else ""
    entropy = f" - {algorithm.entropy_loss_coef:g} H" if algorithm.use_entropy_loss else ""
    rows = [
        (
            "minimise",
            f"sum_bt w_bt l_bt{kl}{entropy}      (minibatch of B rows b, tokens t, loss mask m)",
        ),
        *(("policy loss" if i == 0 else "", line) for i, line in enumerate(_loss(algorithm))),
        ("advantage", _advantage(algorithm, config.generator.n_samples_per_prompt)),
        ("reduction", _reduction(algorithm)),
        ("KL", _kl(algorithm)),
        ("entropy", "H = sum_bt m_bt H_bt / sum m" if algorithm.use_entropy_loss else "off"),
        ("temperature", f"{algorithm.temperature:g}, of sampling and of every log-softmax"),
        ("masked rows", _masked(config)),
        (
            "optimizer",
            f"AdamW, lr {optimizer.lr:g} {optimizer.scheduler}, {optimizer.num_warmup_steps} "
            f"warm-up updates, gradient norm <= {optimizer.max_grad_norm:g}",
        ),
        *(("batch" if i == 0 else "", line) for i, line in enumerate(_batch(config, num_devices))),
    ]
    return "\n".join(["objective"] + [f"  {label:<12} {text}" for label, text in rows])


def _loss(algorithm: AlgorithmConfig) -> list[str]:
    name = algorithm.policy_loss_type
    low, high = 1 - algorithm.eps_clip_low, 1 + algorithm.eps_clip_high
    surrogate = f"-min(r A, clip(r, {low:g}, {high:g}) A)"
    token_ratio = "r = exp(log_probs - old_log_probs)"
    if name == "regular":
        return [f"regular: l = {surrogate}", token_ratio]
    if name == "dual_clip":
        bound = f"l = min(l, -{algorithm.clip_ratio_c:g} A) where A < 0"
        return [f"dual_clip: l = {surrogate}, {bound}", token_ratio]
    if name == "gspo":
        return [f"gspo: l = {surrogate}", "r = exp(mean_t (log_probs - old_log_probs)), per row"]
    if name == "cross_entropy":
        return ["cross_entropy: l = -log_probs"]
    kwargs = ", ".join(f"{k}={v!r}" for k, v in algorithm.policy_loss_kwargs.items())
    return [f"custom function {name}", f"with {kwargs or 'its default hyperparameters'}"]


def _advantage(algorithm: AlgorithmConfig, samples: int) -> str:
    group = f"G = the {samples} samples of a prompt"
    if algorithm.policy_loss_type == "cross_entropy":
        return "not used by the loss"
    name = algorithm.advantage_estimator
    if name in ("grpo", "grpo_token"):
        relative = "R - mean_G R"
        if algorithm.grpo_norm_by_std:
            relative = f"({relative}) / (std_G R + 1e-6)"
        to_go = f"R = r_t + {algorithm.gamma:g} R_t+1, " if name == "grpo_token" else ""
        return f"{name}: A = {relative}, {to_go}{group}"
    if name == "rloo":
        return f"rloo: A = R - mean of the others in G, {group}"
    numbers = f"gamma={algorithm.gamma:g}, lambd={algorithm.lambd:g}"
    return f"custom function {name}, {numbers}"


def _reduction(algorithm: AlgorithmConfig) -> str:
    formula = {
        "token_mean": "w_bt = m_bt / sum m",
        "sequence_mean": "w_bt = m_bt / (B sum_t m_bt)",
        "seq_mean_token_sum_norm": f"w_bt = m_bt / (B {algorithm.max_seq_len})",
    }[algorithm.loss_reduction]
    return f"{algorithm.loss_reduction}: {formula}"


def _kl(algorithm: AlgorithmConfig) -> str:
    if not _kl_counts(algorithm):
        return "off"
    estimate = _KL[algorithm.kl_estimator_type]
    kind = algorithm.kl_estimator_type
    return f"KL = mean_b mean_t {kind}, {kind} = {estimate}, d = log_probs - ref_log_probs"


def _masked(config: TrainConfig) -> str:
    generator = config.generator
    parts = []
    if generator.zero_reward_on_non_stop:
        parts.append("reward 0 unless stop_reason is 'stop'")
    if generator.apply_overlong_filtering:
        parts.append("loss mask 0 unless stop_reason is 'stop'")
    return "; ".join(parts) or "none"


def _batch(config: TrainConfig, num_devices: int) -> list[str]:
    trainer, samples = config.trainer, config.generator.n_samples_per_prompt
    rows, mini = trainer.train_batch_size * samples, trainer.policy_mini_batch_size
    mini_rows = mini * samples
    per_device = min(trainer.micro_train_batch_size_per_gpu, -(-mini_rows // num_devices))
    micro = per_device * num_devices
    count = trainer.train_batch_size // mini
    passes = trainer.update_epochs_per_batch
    padding = -mini_rows % micro
    padded = f", the last with {_count(padding, 'empty row')}" if padding else ""
    return [
        f"{_count(trainer.train_batch_size, 'prompt')} x {_count(samples, 'sample')} = "
        f"{_count(rows, 'row')} per step",
        f"-> {_count(count, 'minibatch')} x {_count(passes, 'pass')} = "
        f"{_count(count * passes, 'optimizer update')} of {_count(mini, 'prompt')} = "
        f"{_count(mini_rows, 'row')}",
        f"-> {_count(-(-mini_rows // micro), 'microbatch')} of "
        f"{_count(per_device, 'row')} on each of "
        f"{_count(num_devices, 'device')}{padded}",
    ]


def _count(number: int, noun: str) -> str:
    plural = "es" if noun.endswith(("s", "ch")) else "s"
    return f"{number} {noun}{'' if number == 1 else plural}"


def _kl_counts(algorithm: AlgorithmConfig) -> bool:
    return algorithm.use_kl_loss and algorithm.kl_loss_coef != 0
