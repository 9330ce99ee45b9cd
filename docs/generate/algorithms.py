"""Generate docs/algorithms.md from the docstrings and rows of losses and estimators."""

import inspect
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from docs.generate.grpo_variants import GRPO_VARIANTS, GRPOVariant
from jaxrl.advantages import ESTIMATORS
from jaxrl.advantages.normalize import normalize_advantages
from jaxrl.config.algorithm import AlgorithmConfig
from jaxrl.config.dataclass_config import flatten
from jaxrl.config.objective_requirements import allowed_reductions, ratio_anchor
from jaxrl.data.selection import soft_overlong_punishment
from jaxrl.losses import ROWS
from jaxrl.losses.adaptive_entropy import adaptive_entropy_coef
from jaxrl.losses.distillation import generalized_jsd
from jaxrl.losses.kl import adaptive_kl_coef, approximate_kl, penalized_rewards, unbiased_kl
from jaxrl.losses.off_policy import off_policy_correction, rejection_bounds
from jaxrl.losses.opsm import off_policy_sequence_mask
from jaxrl.losses.reduction import REDUCTIONS, reduction_weights
from jaxrl.losses.row import Loss
from jaxrl.losses.top_entropy import top_entropy_mask
from jaxrl.losses.value import value_loss
from jaxrl.registry.contracts import ESTIMATOR_DATA

PAGE = Path(__file__).parents[2] / "docs" / "algorithms.md"

_INTRODUCTION = """# Algorithms

<!-- Written by `python -m docs.generate`; edit the docstrings, not this page. -->

After this page you can find the formula, the paper and the settings of every loss and estimator,
and say what "GRPO" means in eight systems.

The objective of a minibatch is a sum over its rows b and tokens t,

```
sum_bt w_bt c_bt L_bt + kl_loss_coef sum_bt k_bt KL_bt - entropy_loss_coef sum_bt e_bt H_bt
- positive_nll_coef sum_bt p_bt log_probs_bt + distillation.coef sum_bt d_bt D_bt
```

with the loss L of a token, the weights w of `loss_reduction`, the off-policy correction c, and for
KL, entropy and the likelihood of right rows weights of their own (mean over sequences, or that of
the loss with `kl_loss_reduction = "loss"`; mean over tokens; mean over the tokens of rows with a
reward above 0); the divergence D from a teacher is weighed as the loss is, over the tokens that
have one. Nothing else divides by a count. Corrections by their names in other systems:
[off_policy.md](off_policy.md). Every run prints the objective that its config means. All settings
are fields of `trainer.algorithm`. Functions of your own:
[custom_algorithms.md](custom_algorithms.md). What they learn of small tasks, with intervals:
[baselines.md](baselines.md).

A_t advantage, r_t ratio, m mask of the tokens that the policy sampled, sg[] no gradient.
"""
_SHARED = {
    "Reductions": [("loss_reduction", reduction_weights)],
    "KL to the reference model": [
        ("use_kl_loss, kl_estimator_type", approximate_kl),
        ("use_unbiased_kl", unbiased_kl),
        ("use_kl_in_reward", penalized_rewards),
        ('kl_ctrl.type = "adaptive"', adaptive_kl_coef),
    ],
    "Off-policy correction": [
        ("off_policy_correction", off_policy_correction),
        ("off_policy_correction.rollout_rs", rejection_bounds),
        ("opsm_delta", off_policy_sequence_mask),
    ],
    "Around the loss": [
        ("distillation", generalized_jsd),
        ("top_entropy_quantile", top_entropy_mask),
        ('entropy_ctrl.type = "adaptive"', adaptive_entropy_coef),
        ("advantage_batch_normalize", normalize_advantages),
        ("overlong_buffer", soft_overlong_punishment),
        ("value_clip", value_loss),
    ],
}
_GRPO = """
## What "GRPO" means in eight systems

The name stands for eight objectives. These are the defaults of each system:

| system | advantage | ratio against | clip | mean | KL |
|---|---|---|---|---|---|
"""
_GRPO_SETTINGS = (
    "\nTo get them here, or as near as the note of each says, from the defaults of "
    "`trainer.algorithm`:\n"
)


class Docstring(NamedTuple):
    """Hold the parts of a public docstring."""

    summary: str
    formula: str
    source: str  # papers, and what differs from them
    arguments: str


def page() -> str:
    """Return the text of docs/algorithms.md."""
    losses = [_function(name, row.fn, _loss_facts(name, row)) for name, row in ROWS.items()]
    estimators = [_function(n, f, _estimator_facts(f)) for n, f in ESTIMATORS.items()]
    parts = [_INTRODUCTION, _overview(), "\n## Policy losses\n\n`policy_loss_type`\n", *losses]
    parts += ["\n## Advantage estimators\n\n`advantage_estimator`; rewards r_t, scores s.\n"]
    parts += estimators
    for title, functions in _SHARED.items():
        parts.append(f"\n## {title}\n")
        parts += [_function(name, func, {}) for name, func in functions]
    parts += [_GRPO, *map(_row, GRPO_VARIANTS), _GRPO_SETTINGS, *map(_variant, GRPO_VARIANTS)]
    return "".join(parts)


def parse_docstring(func: Callable[..., Any]) -> Docstring:
    """Return summary, formula (the indented block), the text after it, and the section Args."""
    doc = inspect.getdoc(func) or ""
    body, *sections = re.split(r"\n(?=(?:Args|Returns|Raises):\n)", doc)
    arguments = next((section for section in sections if section.startswith("Args:")), "")
    summary, _, body = body.partition("\n\n")
    formula = re.match(r"(?: {4}.*\n|\n)+", body + "\n")
    block = formula.group() if formula else ""
    return Docstring(summary, textwrap.dedent(block).strip(), body[len(block) :].strip(), arguments)


def _overview() -> str:
    """Return a table of what each loss allows, at a glance."""
    lines = ["\n| loss | ratio against | off-policy correction | reductions |", "|---|---|---|---|"]
    for name, row in ROWS.items():
        facts = _loss_facts(name, row)
        cells = (facts[key] for key in ("ratio against", "off-policy correction", "reductions"))
        lines.append(f"| [`{name}`](#{name}) | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _function(name: str, func: Callable[..., Any], facts: dict[str, str]) -> str:
    doc = parse_docstring(func)
    file = Path(inspect.getsourcefile(func) or "").relative_to(PAGE.parents[1])
    lines = [f"\n### {name}\n", _prose(doc.summary), f"\n```\n{doc.formula}\n```\n"]
    lines += [_prose(doc.source), ""] if doc.source else []
    facts = {**facts, "code": f"[{file}](../{file})"}
    lines += [_wrapped(f"- {key}: {value}", indent="  ") for key, value in facts.items()]
    return "\n".join(lines) + "\n"


def _loss_facts(name: str, row: Loss) -> dict[str, str]:
    anchor = ratio_anchor(AlgorithmConfig(policy_loss_type=name))
    against = {"old": "the policy before the step", "rollout": "the sampler", None: "nothing"}
    reductions = allowed_reductions(name)
    correction = (
        "masks only: the ratio is against the sampler already" if anchor == "rollout" else "yes"
    )
    if row.corrects_itself:
        correction = "masks only: it weighs against the sampler itself"
    if row.anchor_setting:
        correction += f"; with `{row.anchor_setting.replace('=', ' = ')}` masks only"
    facts = {
        "ratio against": against[anchor],
        "off-policy correction": f"no: {row.uncorrected}" if row.uncorrected else correction,
        "reductions": "all"
        if reductions == REDUCTIONS
        else ", ".join(f"`{r}`" for r in reductions),
    }
    settings = [_settings(parse_docstring(row.fn).arguments), *_hyperparameters(row.fn)]
    if defaults := ", ".join(filter(None, settings)):
        facts["defaults"] = defaults
    if row.demonstrations:
        facts["demonstrations"] = f"`generator.demonstrations`, {row.demonstrations}"
    if row.whole_batch:
        facts["needs"] = "the whole minibatch at once, which costs one more forward pass"
    return facts


def _settings(arguments: str) -> str:
    """Return the config fields that the entry "config" of a docstring names, with defaults."""
    entry = re.search(r"^ {4}config: (.*(?:\n {8}.*)*)", arguments, re.MULTILINE)
    words = re.findall(r"[a-z_]+(?:\.[a-z_]+)*", entry.group(1)) if entry else []
    defaults = flatten(AlgorithmConfig())
    return ", ".join(f"`{w} = {defaults[w]!r}`" for w in dict.fromkeys(words) if w in defaults)


def _hyperparameters(func: Callable[..., Any]) -> list[str]:
    """Return the keyword-only parameters of a loss, with defaults where there are any."""
    return [
        f"`policy_loss_kwargs.{p.name}"
        + ("` (none: to be set)" if p.default is p.empty else f" = {p.default!r}`")
        for p in inspect.signature(func).parameters.values()
        if p.kind is p.KEYWORD_ONLY
    ]


def _estimator_facts(func: Callable[..., Any]) -> dict[str, str]:
    defaults, in_kwargs, facts = flatten(AlgorithmConfig()), " (in `advantage_kwargs`)", {}
    settings = [
        f"`{p.name} = {defaults.get(p.name, p.default)!r}`{in_kwargs * (p.name not in defaults)}"
        for p in inspect.signature(func).parameters.values()
        if p.kind is p.KEYWORD_ONLY and p.name not in ESTIMATOR_DATA
    ]
    if settings:
        facts["defaults"] = ", ".join(settings)
    if re.search(r"^ {4}values: ", parse_docstring(func).arguments, re.MULTILINE):
        facts["needs"] = "the values of a critic"
    if "ref_log_probs" in inspect.signature(func).parameters:
        facts["needs"] = "a teacher: `trainer.ref.model.path`, see [sft.md](sft.md)"
    return facts


def _row(variant: GRPOVariant) -> str:
    v = variant
    return "| " + " | ".join((v.system, v.advantage, v.ratio, v.clip, v.aggregation, v.kl)) + " |\n"


def _variant(variant: GRPOVariant) -> str:
    settings = "\n".join(
        f"config.trainer.algorithm.{field} = {value!r}".replace("'", '"')
        for field, value in variant.settings.items()
    )
    note = f"{_wrapped(variant.note)}\n\n" if variant.note else ""
    return f"\n### {variant.system}\n\n{note}```python\n{settings or '# the defaults'}\n```\n"


def _wrapped(text: str, indent: str = "") -> str:
    """Return a paragraph in lines of 100 columns, its code in one piece."""
    text = re.sub(r"`[^`]*`", lambda code: code[0].replace(" ", "\0"), text)
    lines = textwrap.wrap(
        text, 100, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return "\n".join(lines).replace("\0", " ")


def _prose(text: str) -> str:
    """Return the paragraphs of a docstring with clickable links."""
    return re.sub(r"(?<![<(])(https?://[^\s,;()]+[^\s,;().:])", r"<\1>", text)
