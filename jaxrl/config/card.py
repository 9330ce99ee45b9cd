"""The objective of a run in plain text, printed before its first step."""

import html
import textwrap
from collections.abc import Sequence

from jaxrl.config.algorithm import AlgorithmConfig
from jaxrl.config.formulas import (
    advantage_line,
    controller_lines,
    correction_lines,
    entropy_lines,
    kl_lines,
    loss_lines,
    reduction_line,
    reference_lines,
    sampler_lines,
    teacher_lines,
    token_lines,
    value_lines,
)
from jaxrl.config.microbatching import longest_trajectory, update_microbatching
from jaxrl.config.model import OptimizerConfig
from jaxrl.config.objective_requirements import (
    distills,
    entropy_is_adaptive,
    has_critic,
    kl_in_loss,
    reduces_by_itself,
)
from jaxrl.config.placement import batch_groups, fewest_devices
from jaxrl.config.train_config import TrainConfig, resolve
from jaxrl.config.trainer import TrainerConfig
from jaxrl.data.microbatches import MAX_PER_ROW
from jaxrl.losses.off_policy import correction_enabled

LABELS, WIDTH = 15, 85  # columns of the labels, and of the text beside them
Parts = list[tuple[str, list[str]]]


class Card(str):
    """Hold a card as text; a notebook shows it as a table."""

    parts: Sequence[tuple[str, Sequence[str]]] = ()  # labels and lines

    def _repr_html_(self) -> str:
        rows = "".join(
            f'<tr><th style="text-align: left">{label}</th><td style="text-align: left">'
            f"{'<br>'.join(map(html.escape, lines))}</td></tr>"
            for label, lines in self.parts
            if lines
        )
        return f"<table>{rows}</table>"


def objective_card(
    config: TrainConfig, num_devices: int | None = None, platform: Sequence[str] = ()
) -> Card:
    """Return the resolved objective with its numbers, and the batch arithmetic.

    Args:
        config: is not changed; derived defaults are filled in by `resolve`.
        num_devices: devices that the run will use; None = the fewest that its meshes allow.
        platform: what was chosen for fields that were "auto", and why.
    """
    return format_card(_parts(resolve(config), num_devices, platform))


def folded_card(config: TrainConfig, num_devices: int | None = None, width: int = WIDTH) -> Card:
    """Return of the objective card what is minimised, the batch, and what no default run has.

    What is minimised is a sum of l: the line that says what l is stays, too.

    Args:
        width: columns of the terminal.
    """
    parts = _parts(resolve(config), num_devices, ())
    usual = _parts(resolve(TrainConfig()), 1, ())
    always = ("minimise", "policy loss", "batch")
    shown = [
        (label, lines[:1] if label == "policy loss" and (label, lines) in usual else lines)
        for label, lines in parts
        if label in always or (label, lines) not in usual
    ]
    return format_card(shown, width - LABELS)


def _parts(config: TrainConfig, num_devices: int | None, platform: Sequence[str]) -> Parts:
    num_devices = fewest_devices(config) if num_devices is None else num_devices
    trainer, samples = config.trainer, config.generator.n_samples_per_prompt
    algorithm = trainer.algorithm
    return [
        ("minimise", [_minimise(config)]),
        ("policy loss", [*loss_lines(trainer), *token_lines(algorithm)]),
        ("advantage", [advantage_line(algorithm, samples), *_normalised(algorithm)]),
        ("reduction", [reduction_line(config)]),
        ("correction", correction_lines(algorithm.off_policy_correction)),
        ("sampler", sampler_lines(config)),
        ("KL", [*kl_lines(config), *controller_lines(config), *reference_lines(trainer)]),
        ("entropy", entropy_lines(algorithm)),
        ("right rows", _positive(algorithm)),
        ("teacher", teacher_lines(algorithm)),
        ("router", _router(algorithm)),
        ("temperature", [f"{algorithm.temperature:g}, of sampling and of every log-softmax"]),
        ("filters", _filters(config)),
        ("optimizer", [optimizer_line(trainer.policy.optimizer_config)]),
        ("batch", _batch(config, num_devices)),
        ("ahead", _ahead(trainer)),
        ("critic", _critic(trainer)),
        ("platform", list(platform)),
    ]


def _ahead(trainer: TrainerConfig) -> list[str]:
    settings = trainer.fully_async
    if not settings.enabled:
        return []
    steps = settings.max_staleness_steps
    if settings.schedule == "lockstep" or steps == 0:
        behind = f" - {steps}" if steps else ""
        return [f"batch t is sampled by the policy after max(0, t - 1{behind}) steps"]
    workers = settings.num_parallel_generation_workers
    return [
        f"sampling is up to {steps} steps ahead, {workers} prompts at a time; weights change in "
        "flight"
    ]


def format_card(parts: Sequence[tuple[str, Sequence[str]]], width: int = WIDTH) -> Card:
    """Format labels and lines in two columns, the second of `width` characters."""
    rows = [
        (label if number == 0 else "", line)
        for label, lines in parts
        for number, line in enumerate(
            part for x in lines for part in textwrap.wrap(x, max(width, 20))
        )
    ]
    card = Card("\n".join(["objective"] + [f"  {label:<12} {text}" for label, text in rows]))
    card.parts = parts
    return card


def _minimise(config: TrainConfig) -> str:
    algorithm = config.trainer.algorithm
    weight = "c_bt w_bt" if correction_enabled(algorithm.off_policy_correction) else "w_bt"
    kl = f" + {algorithm.kl_loss_coef:g} KL" if kl_in_loss(algorithm) else ""
    coef = "e" if entropy_is_adaptive(algorithm) else f"{algorithm.entropy_loss_coef:g}"
    entropy = f" - {coef} H" if algorithm.use_entropy_loss else ""
    positive = f" + {nll:g} NLL" if (nll := algorithm.positive_nll_coef) else ""
    router = "".join(
        f" + {coef:g} {name}"
        for coef, name in (
            (algorithm.router_balance_loss_coef, "balance"),
            (algorithm.router_z_loss_coef, "z"),
        )
        if coef
    )
    shapes = "(minibatch of B rows b, tokens t, loss mask m)"
    loss = "l" if reduces_by_itself(config) else f"sum_bt {weight} l_bt"
    if distills(algorithm):
        of_teacher = algorithm.distillation
        loss = f"{of_teacher.policy_loss_coef:g} {loss} + {of_teacher.coef:g} D"
    return f"{loss}{kl}{entropy}{positive}{router}      {shapes}"


def _positive(algorithm: AlgorithmConfig) -> list[str]:
    if not algorithm.positive_nll_coef:
        return []
    return ["NLL = mean of -log_probs over the tokens of rows with sum_t r_t > 0"]


def _router(algorithm: AlgorithmConfig) -> list[str]:
    formulas = []
    if algorithm.router_balance_loss_coef:
        formulas.append("balance = E / (k n^2) sum_i (sum_t 1[i chosen]) (sum_t s_ti), s = scores")
    if algorithm.router_z_loss_coef:
        formulas.append("z = 1 / n sum_t logsumexp(logits)^2")
    return [*formulas, "of each trajectory of n tokens, mean over layers"] if formulas else []


def _normalised(algorithm: AlgorithmConfig) -> list[str]:
    if not algorithm.advantage_batch_normalize:
        return []
    return ["then (A - mean A) / std A over the sampled tokens of the batch"]


def _filters(config: TrainConfig) -> list[str]:
    """Say what changes rewards, or keeps rows from being learnt from."""
    generator, algorithm = config.generator, config.trainer.algorithm
    sampling, buffer = algorithm.dynamic_sampling, algorithm.overlong_buffer
    tol, longest = algorithm.zero_variance_filter_tol, generator.sampling_params.max_generate_length
    lines = []
    if sampling.type is not None:
        outcome = "those that differ are collected"
        if sampling.type == "replace":
            ratio = sampling.min_replace_ratio
            outcome = f"if {ratio:g} of the prompts differ, they replace the others"
        most = sampling.max_sample_batches
        limit = "" if most == -1 else f", at most {most}"
        lines.append(f"{sampling.type}: batches are drawn until rewards differ; {outcome}{limit}")
    if generator.zero_reward_on_non_stop:
        lines.append("reward 0 unless stop_reason is 'stop'")
    if generator.apply_overlong_filtering:
        lines.append("loss mask 0 unless stop_reason is 'stop'")
    if buffer is not None:
        lines.append(
            f"reward less {buffer.penalty_factor:g} (length - {longest - buffer.len}) / "
            f"{buffer.len} beyond {longest - buffer.len} of {longest} tokens"
        )
    if algorithm.zero_variance_filter:
        lines.append(f"loss mask 0 for prompts whose rewards differ by at most {tol:g}")
    return lines or ["none"]


def optimizer_line(settings: OptimizerConfig) -> str:
    """Describe the optimizer of the policy, or of the critic."""
    rest = f", moments in {settings.state_dtype}" if settings.state_dtype != "float32" else ""
    return (
        f"AdamW, lr {settings.lr:g} {settings.scheduler}, {settings.num_warmup_steps} "
        f"warm-up updates, weight decay {settings.weight_decay:g}, gradient norm <= "
        f"{settings.max_grad_norm:g}{rest}"
    )


def _critic(trainer: TrainerConfig) -> list[str]:
    """Say what the critic minimises, and how; nothing without one."""
    if not has_critic(trainer):
        return []
    mini, passes = trainer.critic_mini_batch_size, trainer.update_epochs_per_batch
    count = trainer.train_batch_size // mini
    return [
        *value_lines(trainer.algorithm),
        optimizer_line(trainer.critic.optimizer_config),
        f"{_count(count, 'minibatch')} x {_count(passes, 'pass')} = "
        f"{_count(count * passes, 'optimizer update')} of {_count(mini, 'prompt')}, before the "
        "policy's",
    ]


def _batch(config: TrainConfig, num_devices: int) -> list[str]:
    trainer, samples = config.trainer, config.generator.n_samples_per_prompt
    rows, mini = trainer.train_batch_size * samples, trainer.policy_mini_batch_size
    mini_rows = mini * samples
    count = trainer.train_batch_size // mini
    passes = trainer.update_epochs_per_batch
    return [
        f"{_count(trainer.train_batch_size, 'prompt')} x {_count(samples, 'sample')} = "
        f"{_count(rows, 'row')} per step",
        f"-> {_count(count, 'minibatch')} x {_count(passes, 'pass')} = "
        f"{_count(count * passes, 'optimizer update')} of {_count(mini, 'prompt')} = "
        f"{_count(mini_rows, 'row')}",
        *microbatch_lines(config, mini_rows, num_devices, longest_trajectory(config)),
    ]


def microbatch_lines(config: TrainConfig, rows: int, num_devices: int, longest: int) -> list[str]:
    """Say how a minibatch of so many rows of at most `longest` tokens is cut."""
    groups = batch_groups(config, num_devices)
    context = config.trainer.policy.mesh.context
    settings = update_microbatching(config, groups, longest=longest, context=context)
    width = settings.width(longest)
    micro, length = settings.row_counts(width)[-1], settings.length(width)
    size = num_devices // groups
    each = f"on each of {_count(groups, 'device' if size == 1 else 'group')}"
    each += f" of {size} devices" if size > 1 else ""
    per_device = _count(micro // groups, "row")
    if settings.packed:
        return [
            f"-> packed into microbatches of at most {_count(micro, 'row')} of {length} tokens "
            f"= {micro * length} tokens, {per_device} {each}; at most {MAX_PER_ROW} trajectories "
            "per row"
        ]
    if settings.max_tokens is not None:
        return [
            f"-> microbatches of at most {settings.max_tokens} tokens: {per_device} of "
            f"{length} tokens {each}, more where they are shorter"
        ]
    padding = -rows % micro
    padded = f", the last with {_count(padding, 'empty row')}" if padding else ""
    return [f"-> {_count(-(-rows // micro), 'microbatch')} of {per_device} {each}{padded}"]


def _count(number: int, noun: str) -> str:
    plural = "es" if noun.endswith(("s", "ch")) else "s"
    return f"{number} {noun}{'' if number == 1 else plural}"
