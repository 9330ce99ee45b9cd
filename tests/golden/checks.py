"""What jaxrl makes of a golden case, beside what SkyRL made of it.

A check maps a case and 32 or 64 to `{output: (ours, SkyRL's, tolerance)}`, output named without
the number of bits. It runs eagerly, and pads what has a mask to one shape: padding must change
nothing, and what takes long is compiling operations for ever new shapes.
"""

import dataclasses
import importlib
import json
import os
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.advantages import ESTIMATORS
from jaxrl.advantages.normalize import normalize_advantages
from jaxrl.array_ops import entropy, masked_mean, masked_sum, token_log_probs
from jaxrl.config import TrainConfig, resolve
from jaxrl.config.dataclass_config import flatten
from jaxrl.data.packing import collate, token_level
from jaxrl.data.selection import (
    filter_rows,
    replace_rows,
    soft_overlong_punishment,
    zero_variance_groups,
)
from jaxrl.losses import LOSSES
from jaxrl.losses.kl import adaptive_kl_coef, approximate_kl, penalized_rewards
from jaxrl.losses.off_policy import correction_enabled, off_policy_correction
from jaxrl.losses.reduction import reduction_weights
from jaxrl.losses.value import value_loss
from jaxrl.metrics import advantage_metrics, score_metrics
from jaxrl.objective import reduce_metric
from jaxrl.types import TrainBatch
from tests.golden import Case


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """Relative, and absolute as a share of `scale`, the largest number involved."""

    relative: float
    absolute: float
    scale: float = 1.0

    def scaled(self, array: Any) -> "Tolerance":
        finite = np.abs(np.asarray(array, float))
        largest = np.max(finite, initial=1.0, where=np.isfinite(finite))
        return dataclasses.replace(self, scale=max(self.scale, float(largest)))


BITS = {32: Tolerance(1e-4, 1e-6), 64: Tolerance(1e-9, 1e-14)}
FLOAT32_MEAN = Tolerance(1e-4, 1e-6)  # a mean of bool.float() is float32 in the 64-bit numbers too
EXACT = Tolerance(0.0, 0.0)
Outputs = dict[str, tuple[Any, Any, Tolerance]]
CONFIG = resolve(TrainConfig())
ALGORITHM, FLAT_CONFIG = CONFIG.trainer.algorithm, flatten(CONFIG)
SHAPE = (8, 33)
ROW_FRACTIONS = ("outlier_seq", "geo_sequence", "product_sequence", "tis_seq")


def namespace(value: Any, default: Any = None) -> Any:
    """JSON objects as objects with attributes, with those of the default that are missing."""
    if not isinstance(value, dict):
        return value
    missing = vars(default) if default is not None else {}
    given = {k: namespace(v, missing.get(k)) for k, v in value.items()}
    return SimpleNamespace(**{**missing, **given})


def floats(case: Case, bits: int) -> SimpleNamespace:
    """The case's inputs.

    Floating ones with the given bits, padded to `SHAPE` if there is a mask.
    """
    fits = {"loss_mask", "response_mask"} & set(case.i)
    kinds = {k: f"float{bits}" if v.dtype.kind == "f" else v.dtype for k, v in case.i.items()}
    arrays = {k: v.astype(kinds[k]) for k, v in case.i.items()}
    return SimpleNamespace(**{k: jnp.asarray(pad(v) if fits else v) for k, v in arrays.items()})


def pad(array: np.ndarray) -> np.ndarray:
    """[B, T] -> `SHAPE` if it fits, with zeros."""
    if array.ndim != 2 or any(n > most for n, most in zip(array.shape, SHAPE, strict=True)):
        return array
    return np.pad(array, [(0, most - n) for n, most in zip(array.shape, SHAPE, strict=True)])


def unpadded(ours: Any, like: np.ndarray) -> np.ndarray:
    """Ours in SkyRL's shape; padding, unless it is 0, is left for the comparison to find."""
    ours = np.asarray(ours)
    if ours.ndim != 2 or ours.shape != SHAPE:
        return ours
    rows, columns = like.shape
    rest = np.concatenate([ours[rows:].ravel(), ours[:, columns:].ravel()])
    return ours if np.any(rest != 0) else ours[:rows, :columns]


def within(
    case: Case, bits: int, ours: dict[str, Any], tolerance: Tolerance | None = None
) -> Outputs:
    """Each of our outputs beside SkyRL's of the same name, as far as the case has it."""
    expected = {k: case.o[f"{k}{bits}"] for k in ours if f"{k}{bits}" in case.o}
    return {
        k: (unpadded(ours[k], v), v, tolerance or BITS[bits].scaled(v)) for k, v in expected.items()
    }


def metrics_within(case: Case, bits: int, ours: dict[str, Any], tolerance: Tolerance) -> Outputs:
    """Each of SkyRL's metrics beside ours; one that we lack is not a number."""
    found = {}
    for key, value in case.o.items():
        prefix, _, name = key.partition(":")
        if prefix == f"metric{bits}":
            mine = ours.get(name.replace("|", "/"), "missing")
            found[f"metric:{name.replace('|', '/')}"] = (mine, value, tolerance.scaled(value))
    return found


# ---------------------------------------------------------------- losses


def policy(case: Case, bits: int, *, weigh: Callable[..., Any] | None = None) -> Outputs:
    """Loss, gradient and metrics; by default the objective is the plain sum over masked tokens."""
    x, config = floats(case, bits), namespace(case["config"], ALGORITHM)
    mask = getattr(x, "loss_mask", None)
    everything = jnp.ones_like(x.log_probs) if mask is None else mask
    rollout = getattr(x, "rollout_logprobs", None)
    weights, corrected, metrics = jnp.ones_like(everything), everything, {}
    correction = getattr(config, "off_policy_correction", None)
    if rollout is not None and correction is not None and correction_enabled(correction):
        weights, corrected, metrics = correct(case, x, everything, correction)
    rows, columns = case.i["log_probs"].shape
    reduced = corrected
    if weigh is not None:
        reduced = weigh(np.asarray(corrected)[:rows, :columns], config)
        reduced = jnp.asarray(pad(reduced) if x.log_probs.shape == SHAPE else reduced)
    token_mean = reduction_weights(everything, "token_mean")

    def objective(log_probs: Any) -> tuple[Any, Any]:
        loss, own = loss_of(case, config)(
            log_probs, x.old_log_probs, x.advantages, config, mask, rollout
        )
        total = masked_sum(loss, weights * reduced)
        return total, {k: reduce_metric(k, v, everything, token_mean) for k, v in own.items()}

    (loss, own), grad = jax.value_and_grad(objective, has_aux=True)(x.log_probs)
    if not {f"loss{bits}", f"grad{bits}"} <= set(case.o):
        return {}
    scale = BITS[bits].scaled(case.o[f"grad{bits}"])
    found = within(case, bits, {"loss": loss, "grad": grad}, scale)
    rounded = FLOAT32_MEAN if mask is None else BITS[bits]
    return found | metrics_within(case, bits, metrics | own, rounded)


def correct(case: Case, x: Any, mask: Any, config: Any) -> tuple[Any, Any, dict[str, Any]]:
    """The correction; fractions of rows are those of the rows without padding."""
    weights, mask, metrics = off_policy_correction(
        x.old_log_probs, x.rollout_logprobs, mask, config
    )
    share = len(mask) / len(case.i["old_log_probs"])
    scales = {k: share if k.startswith(ROW_FRACTIONS) else 1 for k in metrics}
    return weights, mask, {k: v * scales[k] for k, v in metrics.items()}


def loss_of(case: Case, config: Any) -> Callable[..., Any]:
    """The loss by name; clip_cov drops the tokens that torch drew."""
    name = config.policy_loss_type
    if name != "clip_cov":
        return LOSSES[name]
    dropped = pad(case.o["corr"] == 0)

    def clip_cov(*arguments: Any) -> Any:
        module = importlib.import_module("jaxrl.losses.clip_cov")
        with mock.patch.object(module, "draw", lambda *_: dropped):
            return LOSSES[name](*arguments, key=jax.random.key(0))

    return clip_cov


def clip_cov_draw(case: Case, bits: int) -> Outputs:
    """Who may be dropped, and how many; and that our own draw takes that many of them."""
    drawn = {}
    module = importlib.import_module("jaxrl.losses.clip_cov")

    def spy(candidates: Any, count: Any, key: Any, row_ids: Any) -> Any:
        drawn.update(candidates=candidates, count=count)
        drawn["dropped"] = draw(candidates, count, key, row_ids)
        return drawn["dropped"]

    draw, x = module.draw, floats(case, bits)
    with mock.patch.object(module, "draw", spy):
        LOSSES["clip_cov"](
            x.log_probs,
            x.old_log_probs,
            x.advantages,
            namespace(case["config"], ALGORITHM),
            x.loss_mask,
            key=jax.random.key(0),
        )
    expected = np.zeros(x.log_probs.shape, bool)
    expected[tuple(case.o["candidates"].T)] = True  # indices hold for padded arrays too
    number = min(int(case.o["clip_num"]), int(expected.sum()))
    return {
        "candidates": (drawn["candidates"], expected, EXACT),
        "clip_num": (drawn["count"], case.o["clip_num"], EXACT),
        "dropped": ((drawn["dropped"] & expected).sum(), number, EXACT),
    }


def policy_loss(case: Case, bits: int) -> Outputs:
    found = policy(case, bits)
    if case["config"]["policy_loss_type"] == "clip_cov":
        found |= clip_cov_draw(case, bits)
    return found


def seed_policy_reduced(case: Case, bits: int) -> Outputs:
    """Reduced; what the correction drops is not counted."""

    def weigh(mask: Any, config: Any) -> Any:
        return np.asarray(
            reduction_weights(mask, config.loss_reduction, max_seq_len=config.max_seq_len)
        )

    return policy(case, bits, weigh=weigh)


def gmpo(case: Case, bits: int) -> Outputs:
    if bits == 32:
        return {}
    x, config = floats(case, bits), namespace(case["config"], ALGORITHM)
    weights = minibatch_weights(case, x, config.loss_reduction)

    def objective(log_probs: Any) -> tuple[Any, Any]:
        loss, metrics = LOSSES["gmpo"](
            log_probs, x.old_log_probs, x.advantages, config, x.loss_mask
        )
        return masked_sum(loss, weights), (loss, metrics)

    (total, (loss, metrics)), grad = jax.value_and_grad(objective, has_aux=True)(x.log_probs)
    means = {f"review_{k}": masked_mean(v, x.loss_mask) for k, v in metrics.items()}
    scaled = masked_sum(x.advantages, weights, -1)[: len(case.i["advantages"])]
    rewritten = -(case.o["seq_ratio64"] * scaled).sum()
    return within(case, bits, {"loss": total, "grad": grad}) | {
        "loss from seq_ratio": (total, rewritten, BITS[64].scaled(rewritten)),
        **{k: v for k, v in metrics_within(case, bits, means, BITS[64]).items() if "pr_" not in k},
    }


def minibatch_weights(case: Case, x: Any, kind: str) -> Any:
    """Weights of the minibatch without padding rows, then padded as the inputs are."""
    mask = case.i.get("loss_mask", np.ones_like(next(iter(case.i.values()))))
    weights = np.asarray(reduction_weights(mask.astype(next(iter(vars(x).values())).dtype), kind))
    return jnp.asarray(pad(weights) if "loss_mask" in case.i else weights)


def value(case: Case, bits: int) -> Outputs:
    x = floats(case, bits)
    mask = getattr(x, "loss_mask", jnp.ones_like(x.values))
    weights = minibatch_weights(case, x, "sequence_mean")

    def objective(values: Any) -> tuple[Any, Any]:
        loss, metrics = value_loss(values, x.old_values, x.returns, case["value_clip"], mask)
        return masked_sum(loss, weights), metrics["clipfrac"]

    (loss, clipped), grad = jax.value_and_grad(objective, has_aux=True)(x.values)
    rounded = FLOAT32_MEAN if "loss_mask" not in case.i else BITS[bits]
    return within(case, bits, {"loss": loss, "grad": grad}) | within(
        case, bits, {"clipfrac": masked_mean(clipped, mask)}, rounded
    )


def worker_total_loss(case: Case, bits: int) -> Outputs:
    """Policy, KL and entropy term of a whole minibatch, whatever its cut."""
    if bits == 64:
        return {}
    x, config = floats(case, bits), namespace(case["config"], ALGORITHM)
    kinds = (config.loss_reduction, "sequence_mean", "token_mean")
    policy_weights, kl_weights, mean = (reduction_weights(x.loss_mask, kind) for kind in kinds)

    def objective(log_probs: Any, entropies: Any) -> tuple[Any, Any]:
        loss, own = LOSSES[config.policy_loss_type](
            log_probs,
            x.old_log_probs,
            x.advantages_raw,
            config,
            x.loss_mask,
            x.rollout_logprobs,
        )
        kl = approximate_kl(log_probs, x.base_log_probs, x.loss_mask, config.kl_estimator_type)
        metrics = {
            "policy_loss": masked_sum(loss, policy_weights),
            "policy_kl": masked_sum(kl, kl_weights),
            "policy_entropy": masked_sum(entropies, mean),
        }
        total = metrics["policy_loss"]
        if config.use_kl_loss:
            total += config.kl_loss_coef * metrics["policy_kl"]
        if config.use_entropy_loss:
            total -= config.entropy_loss_coef * metrics["policy_entropy"]
        own = {f"loss_metrics/{k}": reduce_metric(k, v, x.loss_mask, mean) for k, v in own.items()}
        return total, metrics | own | {"final_loss": total}

    (_, metrics), grads = jax.value_and_grad(objective, (0, 1), has_aux=True)(
        x.log_probs, x.entropy
    )
    ours = {"grad_log_probs": grads[0], "grad_entropy": grads[1]}
    compared = metrics_within(case, bits, metrics, BITS[32])
    skipped = ("response_length", "policy_lr", "minibatch_rollout_logprobs")  # not the objective
    return within(case, bits, ours) | {
        k: v for k, v in compared.items() if not k.removeprefix("metric:").startswith(skipped)
    }


def off_policy(case: Case, bits: int) -> Outputs:
    x = floats(case, bits)
    weights, mask, metrics = correct(case, x, x.loss_mask, namespace(case["config"], ALGORITHM))
    found = within(case, bits, {"loss_mask": mask})
    if f"tis_ratio{bits}" in case.o:
        valid = case.i["loss_mask"] != 0  # SkyRL's weights of masked tokens are of no meaning
        expected = np.broadcast_to(case.o[f"tis_ratio{bits}"], valid.shape)
        ours = np.asarray(weights)[: valid.shape[0], : valid.shape[1]]
        found["tis_ratio"] = (ours[valid], expected[valid], BITS[bits])
    else:
        found["tis_ratio"] = (weights, np.ones_like(weights), EXACT)
    return found | metrics_within(case, bits, metrics, BITS[bits])


def kl_estimators(case: Case, bits: int) -> Outputs:
    x, kind = floats(case, bits), case["kl_estimator_type"]
    mask = getattr(x, "loss_mask", None)
    weights = minibatch_weights(case, x, "sequence_mean")

    def mean(log_probs: Any) -> Any:
        return masked_sum(estimate(log_probs), weights)

    def estimate(log_probs: Any) -> Any:
        return approximate_kl(log_probs, x.log_probs_base, mask, kind)

    ours = {
        "kl": estimate(x.log_probs),
        "grad": jax.grad(lambda y: estimate(y).sum())(x.log_probs),
        "seqmean": mean(x.log_probs),
        "grad_seqmean": jax.grad(mean)(x.log_probs),
    }
    return within(case, bits, ours)


def kl_controller(case: Case, bits: int) -> Outputs:
    x = floats(case, bits)
    if "current" in case.i:
        coefficients = [case["init"]]
        for kl, rows in zip(case.i["current"], case.i["n_steps"], strict=True):
            coefficients.append(
                adaptive_kl_coef(
                    coefficients[-1],
                    kl,
                    kl_target=case["target"],
                    horizon=case["horizon"],
                    rows=int(rows),
                )
            )
        return {
            "values": (
                jnp.stack([jnp.asarray(c) for c in coefficients]),
                case.o["values"],
                BITS[bits],
            )
        }
    kl = approximate_kl(x.log_probs, x.base_log_probs, x.loss_mask, case["kl_estimator_type"])
    coefficient = case["kl_loss_coef"]
    rewards = penalized_rewards(x.rewards, kl, x.loss_mask, coefficient)
    average = masked_sum(kl, minibatch_weights(case, x, "sequence_mean"))
    rows = len(case.i["rewards"])
    metrics = {
        "loss/avg_kl": average,
        "loss/avg_kl_max": jnp.abs(kl * x.loss_mask)[:rows].max(-1).mean(),
        "loss/kl_loss_coef": coefficient,
    }
    after = coefficient
    if case["controller"] == "adaptive":
        after = adaptive_kl_coef(
            coefficient,
            average,
            kl_target=case["kl_target"],
            horizon=case["horizon"],
            rows=rows,
        )
    found = within(case, bits, {"rewards": rewards, "coef_after": after})
    return found | metrics_within(case, bits, metrics, BITS[bits])


def reductions(case: Case, bits: int) -> Outputs:
    """Weights times advantages at the tokens that count, and their sum."""
    x = SimpleNamespace(**{k: v.astype(f"float{bits}") for k, v in case.i.items()})
    kind = case["loss_reduction"]
    boundaries = case.get("mini_batch_boundaries", [[0, len(x.advantages)]])
    groups = np.zeros(len(x.advantages), int)
    for number, (start, end) in enumerate(case["prompt_boundaries"]):
        groups[start:end] = number
    weights = jnp.concatenate(
        [
            reduction_weights(
                x.loss_mask[start:end],
                kind,
                max_seq_len=case.get("max_seq_len"),
                group_ids=groups[start:end] - groups[start],
                microbatch_rows=case.get("micro_batch_size"),
            )
            for start, end in boundaries
        ]
    )
    advantages = x.advantages
    if case.get("advantage_batch_normalize"):
        advantages = normalize_advantages(advantages, x.response_mask)
    valid = x.loss_mask != 0  # SkyRL scales masked tokens too
    total = masked_sum(advantages, weights)
    found = within(case, bits, {"loss": -total, "seed_loss": -total})
    expected = case.o[f"scaled{bits}"][valid]
    return found | {
        "scaled": ((advantages * weights)[valid], expected, BITS[bits].scaled(expected))
    }


# ---------------------------------------------------------------- advantages


def estimate(case: Case, x: Any, index: Any, **keywords: Any) -> tuple[Any, Any]:
    return ESTIMATORS[case["estimator"]](
        x.rewards, x.response_mask, index, values=x.values, **keywords
    )


def advantages(case: Case, bits: int) -> Outputs:
    x = floats(case, bits)
    x.rewards = x.token_level_rewards
    index = np.unique(case.i["index"], return_inverse=True)[1]
    index = np.concatenate([index, np.arange(len(index), len(x.rewards))])  # padding: own groups
    ours = estimate(case, x, jnp.asarray(index), **case.get("kwargs", {}))
    if "raises" in case:  # ours has no error: nothing can be raised under jit
        silent = (ours[0], np.zeros_like(ours[0]), EXACT)
        return {"raises": ("no error", case["raises"], EXACT), "adv": silent}
    return estimates_within(case, bits, ours, case.i["response_mask"])


def estimates_within(case: Case, bits: int, ours: Any, mask: np.ndarray) -> Outputs:
    """Advantages and returns; padding is 0, where SkyRL leaves numbers that are never used."""
    found = {}
    for name, mine in zip(("adv", "ret"), ours, strict=True):
        expected = np.where(mask != 0, case.o[f"{name}{bits}"], 0)
        found[name] = (unpadded(mine, expected), expected, BITS[bits].scaled(expected))
    return found


def trainer_advantages(case: Case, bits: int) -> Outputs:
    if case["step_wise"]:
        return {"step_wise": ("no counterpart", "advantage of the last step", EXACT)}
    real = len(case["uids"]) - case["pad_size"]  # there are no rows of padding here
    names = ("rewards", "response_mask", "values")
    x = SimpleNamespace(**{k: jnp.asarray(case.i[k][:real], f"float{bits}") for k in names})
    index = np.unique(case["uids"][:real], return_inverse=True)[1]
    ours = estimate(case, x, jnp.asarray(index))
    case = Case(case, arrays={"in": case.i, "out": cut_rows(case.o, real)})
    batch = TrainBatch(
        tokens=None,
        lengths=None,
        response_mask=np.asarray(x.response_mask),
        loss_mask=None,
        rewards=np.asarray(x.rewards),
        rollout_log_probs=None,
        index=index,
        policy_versions=None,
        advantages=np.asarray(ours[0]),
    )
    found = estimates_within(case, bits, ours, np.asarray(x.response_mask))
    return found | metrics_within(case, bits, advantage_metrics(batch), BITS[bits])


def cut_rows(arrays: dict[str, np.ndarray], rows: int) -> dict[str, np.ndarray]:
    return {k: v[:rows] if v.ndim else v for k, v in arrays.items()}


# ---------------------------------------------------------------- batches, tokens, config


def logprobs_entropy(case: Case, bits: int) -> Outputs:
    x = floats(case, bits)
    labels = jnp.roll(x.sequences, -1, axis=1)
    action = slice(-case["num_actions"] - 1, -1)

    def log_probs(logits: Any) -> Any:
        return token_log_probs(logits / case["temperature"], labels)

    def entropies(logits: Any) -> Any:
        return entropy(logits / case["temperature"]) * x.attention_mask

    ours = {"logprobs": log_probs(x.logits), "entropy": entropies(x.logits)}
    ours |= {f"action_{k}": v[:, action] for k, v in ours.items()}
    ours["grad_logprob"] = jax.grad(lambda y: (log_probs(y)[:, action] * x.weights).sum())(x.logits)
    ours["grad_entropy"] = jax.grad(lambda y: (entropies(y)[:, action] * x.weights).sum())(x.logits)
    return within(case, bits, ours)


def batch_tensors(case: Case, bits: int) -> Outputs:
    """Ours is left-aligned: each row is compared where SkyRL's left-padded one has it."""
    rows = range(len(case["prompts"]))
    log_probs = case["logprobs"] or [[0.0] * len(r) for r in case["responses"]]
    batch = collate(
        {
            "prompt_token_ids": case["prompts"],
            "response_ids": case["responses"],
            "rewards": case["rewards"],
            "loss_masks": case["loss_masks"],
            "rollout_logprobs": log_probs,
            "stop_reasons": ["stop" for _ in rows],
            "policy_versions": [0 for _ in rows],
            "rollout_metrics": {},
        },
        index=list(rows),
    )
    ours = {
        "sequences": batch.tokens,
        "response_mask": batch.response_mask,
        "rewards": batch.rewards,
        "loss_mask": batch.loss_mask,
        "rollout_logprobs": batch.rollout_log_probs,
    }
    found = {}
    for name, array in ours.items():
        if name not in case.o:
            continue
        expected, moved = case.o[name], np.zeros_like(case.o[name])
        for row in rows:
            length = len(case["prompts"][row]) + len(case["responses"][row])
            start = 0 if name == "sequences" else len(case["prompts"][row])
            moved[row, expected.shape[1] - (length - start) :] = array[row, start:length]
        found[name] = (moved, expected, BITS[32])
    return found


def config_defaults(case: Case, bits: int) -> Outputs:
    home = os.path.expanduser("~")
    expected = json.loads(json.dumps(case["default"]).replace("/HOME", home))
    return {"default": (FLAT_CONFIG.get(case["id"], "missing"), expected, EXACT)}


def python_utils(case: Case, bits: int) -> Outputs:
    if case["function"] not in PYTHON_UTILS:
        return {"result": ("no counterpart", "", EXACT)}
    return dict(PYTHON_UTILS[case["function"]](case))


def generator_metrics(case: Case) -> Iterator[tuple[str, tuple]]:
    kind = "token" if isinstance(case["rewards"][0], list) else "sequence"
    expected = dict(case["out"])
    ours = score_metrics(case["rewards"], case["uids"], 1)
    yield f"{kind}.pass_at_n", (ours["pass_at_1"], expected.pop("pass_at_n"), BITS[64])
    for name, value in expected.items():
        yield f"{kind}.{name}", (ours[name], value, BITS[64])


def overlong_filtering(case: Case) -> Iterator[tuple[str, tuple]]:
    masks = case["loss_masks"]
    output = {
        "response_ids": masks,
        "loss_masks": masks,
        "rewards": [0.0 for _ in masks],
        "stop_reasons": case["stop_reasons"],
    }
    ours = token_level(output, zero_reward_on_non_stop=False, apply_overlong_filtering=True)
    yield "out", (ours["loss_masks"], case["out"], EXACT)


def zero_variance(case: Case) -> Iterator[tuple[str, tuple]]:
    same = zero_variance_groups(case["rewards"], case["uids"], case["loss_masks"], case["tol"])
    yield "out", (np.flatnonzero(~same).tolist(), case["out"], EXACT)


def replacement(case: Case) -> Iterator[tuple[str, tuple]]:
    """By structure, as the choice is random: whole good groups at their place, good stand-ins."""
    same = zero_variance_groups(case["rewards"], case["uids"])
    chosen = replace_rows(same, case["uids"], case["min_replace_ratio"], np.random.default_rng(0))
    yield "keep_sampling", (chosen is None, case["keep_sampling"], EXACT)
    if chosen is not None:
        rows, groups = chosen
        yield "size", (len(rows), len(case["out_uids"]), EXACT)
        yield "stand-ins are good", (bool(same[rows].any()), False, EXACT)
        kept = [row for row in range(len(same)) if not same[row]]
        yield "good groups stay", (rows[kept].tolist(), kept, EXACT)
        sources = [{case["uids"][r] for r in rows[groups == g]} for g in range(max(groups) + 1)]
        yield "whole groups", ([len(s) for s in sources], [1] * len(sources), EXACT)


def filtering(case: Case) -> Iterator[tuple[str, tuple]]:
    wanted, samples = case["train_batch_size"], case["n_samples_per_prompt"]
    uids, rewards = [], []
    for number, step in enumerate(case["steps"]):
        same = zero_variance_groups(step["rewards"], step["uids"])
        rows = filter_rows(same, step["uids"], wanted - len(uids) // samples)
        uids += [step["uids"][r] for r in rows]
        rewards += [step["rewards"][r] for r in rows]
        done = len(uids) == wanted * samples
        yield f"{number}.keep_sampling", (not done, step["keep_sampling"], EXACT)
        if done:
            yield f"{number}.uids", (uids, step["out_uids"], EXACT)
            yield f"{number}.rewards", (rewards, step["out_rewards"], EXACT)
        elif step["collected"] is not None:
            yield f"{number}.collected", (len(uids) // samples, step["collected"], EXACT)


def overlong_punishment(case: Case) -> Iterator[tuple[str, tuple]]:
    longest = case["max_generate_length"]
    lengths = np.array(case["response_lengths"])
    ours = np.array(case["rewards_in"]) - soft_overlong_punishment(
        lengths, longest, case["overlong_buffer_len"], case["penalty_factor"]
    )
    fits = lengths <= longest
    expected = np.array(case["rewards_out"])
    yield "within the limit", (ours[fits], expected[fits], BITS[64])
    yield "beyond the limit", (ours[~fits], expected[~fits], BITS[64])


PYTHON_UTILS = {
    "get_metrics_from_generator_output": generator_metrics,
    "apply_overlong_filtering": overlong_filtering,
    "zero_variance_filter": zero_variance,
    "handle_replace_sampling": replacement,
    "handle_filter_sampling": filtering,
    "dapo_soft_overlong_punishment": overlong_punishment,
}
CHECKS: dict[str, Callable[[Case, int], Outputs]] = {
    **{f"policy_{name}": policy_loss for name in (*LOSSES, "edge_cases") if name != "gmpo"},
    "policy_gmpo_DERIVED": gmpo,
    "seed_policy_reduced": seed_policy_reduced,
    "advantages": advantages,
    "kl_estimators": kl_estimators,
    "kl_controller": kl_controller,
    "off_policy_correction": off_policy,
    "reductions": reductions,
    "value_loss": value,
    "logprobs_entropy": logprobs_entropy,
    "worker_total_loss": worker_total_loss,
    "trainer_advantages": trainer_advantages,
    "batch_tensors": batch_tensors,
    "python_utils": python_utils,
    "config_defaults_seed": config_defaults,
    "config_defaults_head": config_defaults,
}
ONCE = {"batch_tensors", "python_utils", "config_defaults_seed", "config_defaults_head"}
"""Files whose numbers have one precision."""
