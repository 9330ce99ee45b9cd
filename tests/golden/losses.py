"""What jaxrl's losses, corrections and reductions make of a golden case, beside SkyRL's.

A check maps a case and 32 or 64 to `{output: (ours, SkyRL's, tolerance)}`, output named without
the number of bits. It runs eagerly, as compiling takes longer than running.
"""

import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.advantages.normalize import normalize_advantages
from jaxrl.array_ops import masked_mean, masked_sum
from jaxrl.config import AlgorithmConfig, TrainConfig, resolve
from jaxrl.data.packing import empty_batch
from jaxrl.losses import LOSSES
from jaxrl.losses.kl import adaptive_kl_coef, approximate_kl, penalized_rewards
from jaxrl.losses.off_policy import correction_enabled, off_policy_correction
from jaxrl.losses.reduction import reduction_weights
from jaxrl.losses.value import value_loss
from jaxrl.registry.bind import make_policy_loss
from jaxrl.training.objective import make_objective, minibatch_weights, reduce_metric
from jaxrl.types import TrainBatch
from tests.golden import Case
from tests.golden.arrays import (
    BITS,
    EXACT,
    FLOAT32_MEAN,
    SHAPE,
    Outputs,
    floats,
    metrics_within,
    namespace,
    pad,
    within,
)

ALGORITHM = resolve(TrainConfig()).trainer.algorithm
WEIGHTS = jax.jit(  # rows differ from case to case
    reduction_weights, static_argnames=("kind", "max_seq_len", "microbatch_rows")
)
ROW_FRACTIONS = ("outlier_seq", "geo_sequence", "product_sequence", "tis_seq")


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

    kind = (case["config"]["policy_loss_type"], case["config"]["loss_reduction"])
    if kind in (("importance_sampling", "token_mean"), ("cross_entropy", "token_mean")):
        case = divided_by_tokens(case)
    return policy(case, bits, weigh=weigh)


def divided_by_tokens(case: Case) -> Case:
    """The token mean of a loss that SkyRL always sums, whatever loss_reduction says."""
    tokens = max(case.i.get("loss_mask", np.ones_like(case.i["log_probs"])).sum(), 1)
    out = {k: v / tokens if k.startswith(("loss", "grad")) else v for k, v in case.o.items()}
    return Case(case, arrays={"in": case.i, "out": out})


def gmpo(case: Case, bits: int) -> Outputs:
    if bits == 32:
        return {}
    x, config = floats(case, bits), namespace(case["config"], ALGORITHM)
    weights = padded_weights(case, x, config.loss_reduction)

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


def padded_weights(case: Case, x: Any, kind: str) -> Any:
    """Weights of the minibatch without padding rows, then padded as the inputs are."""
    mask = case.i.get("loss_mask", np.ones_like(next(iter(case.i.values()))))
    weights = np.asarray(reduction_weights(mask.astype(next(iter(vars(x).values())).dtype), kind))
    return jnp.asarray(pad(weights) if "loss_mask" in case.i else weights)


def value(case: Case, bits: int) -> Outputs:
    x = floats(case, bits)
    mask = getattr(x, "loss_mask", jnp.ones_like(x.values))
    weights = padded_weights(case, x, "sequence_mean")

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
    algorithm, batch = AlgorithmConfig(**case["config"]), worker_minibatch(case)
    weights, _ = minibatch_weights(batch, algorithm, block_rows=1)
    policy_loss = make_policy_loss(algorithm)
    grads, metrics = jax.grad(make_objective(policy_loss), (0, 1), has_aux=True)(
        case.i["log_probs"], case.i["entropy"], batch, weights, jax.random.key(0)
    )
    ours = {"grad_log_probs": grads[0], "grad_entropy": grads[1]}
    compared = metrics_within(case, bits, metrics, BITS[32])
    skipped = ("response_length", "policy_lr", "minibatch_rollout_logprobs")  # not the objective
    return within(case, bits, ours) | {
        k: v for k, v in compared.items() if not k.removeprefix("metric:").startswith(skipped)
    }


def worker_minibatch(case: Case) -> TrainBatch:
    return empty_batch(*case.i["loss_mask"].shape).replace(
        loss_mask=case.i["loss_mask"],
        rollout_log_probs=case.i["rollout_logprobs"],
        old_log_probs=case.i["old_log_probs"],
        ref_log_probs=case.i["base_log_probs"],
        advantages=case.i["advantages_raw"],
    )


def off_policy(case: Case, bits: int) -> Outputs:
    x = floats(case, bits)
    config = namespace(case["config"], ALGORITHM.off_policy_correction)
    weights, mask, metrics = correct(case, x, x.loss_mask, config)
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
    weights = padded_weights(case, x, "sequence_mean")

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
    average = masked_sum(kl, padded_weights(case, x, "sequence_mean"))
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
    wide = np.pad(x.loss_mask, [(0, 0), (0, SHAPE[1] - x.loss_mask.shape[1])])  # one length
    weights = np.concatenate(
        [
            WEIGHTS(
                wide[start:end],
                kind,
                max_seq_len=case.get("max_seq_len"),
                group_ids=groups[start:end] - groups[start],
                microbatch_rows=case.get("micro_batch_size"),
            )
            for start, end in boundaries
        ]
    )[:, : x.loss_mask.shape[1]]
    advantages = x.advantages
    if case.get("advantage_batch_normalize"):
        advantages = np.asarray(jax.jit(normalize_advantages)(advantages, x.response_mask))
    valid = x.loss_mask != 0  # SkyRL scales masked tokens too
    total = (advantages * weights).sum()
    found = within(case, bits, {"loss": -total, "seed_loss": -total})
    expected = case.o[f"scaled{bits}"][valid]
    return found | {
        "scaled": ((advantages * weights)[valid], expected, BITS[bits].scaled(expected))
    }
