"""Built-in losses, KL estimators and reductions against SkyRL's own numbers."""

import functools
import json
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jaxrl.array_ops import entropy, masked_mean, masked_sum, token_log_probs
from jaxrl.losses import LOSSES
from jaxrl.losses.kl import approximate_kl
from jaxrl.losses.reduction import REDUCTIONS, reduction_weights
from tests.golden import cases


def policy_cases():
    for name in LOSSES:
        for case in cases(f"policy_{name}"):
            if ".none." in case["id"]:  # the off-policy variants come with the correction itself
                yield pytest.param(name, case, id=f"{name}-{case['id']}")
    for case in cases("policy_edge_cases"):
        name = case["config"]["policy_loss_type"]
        if name in LOSSES:
            yield pytest.param(name, case, id=case["id"])


@functools.cache
def evaluate_sum(name, config_json):
    """Jitted loss (SkyRL's contract: the plain masked sum), gradient and metrics.

    Cached, so that cases with the same loss, config and shapes share their compilation.
    """
    config = SimpleNamespace(**json.loads(config_json))

    def objective(log_probs, old_log_probs, advantages, mask):
        loss, metrics = LOSSES[name](log_probs, old_log_probs, advantages, config, loss_mask=mask)
        return masked_sum(loss, mask), {k: masked_mean(m, mask) for k, m in metrics.items()}

    return jax.jit(jax.value_and_grad(objective, has_aux=True))


@pytest.mark.parametrize(("name", "case"), policy_cases())
def test_policy_loss_equals_skyrl(name, case):
    for bits, rtol in ((32, 1e-4), (64, 1e-9)):
        with jax.enable_x64(bits == 64):
            (loss, metrics), grad = evaluate_sum(name, json.dumps(case["config"]))(
                *(
                    np.asarray(case.i[k], f"float{bits}") if k in case.i else None
                    for k in ("log_probs", "old_log_probs", "advantages", "loss_mask")
                )
            )
            expected = case.o[f"grad{bits}"]
            atol = max(1e-6 if bits == 32 else 1e-12, rtol * np.abs(expected).max())
            np.testing.assert_allclose(loss, case.o[f"loss{bits}"], rtol=rtol, atol=1e-6)
            np.testing.assert_allclose(grad, expected, rtol=rtol, atol=atol)
            if "metric64:clip_ratio" in case.o and "clip_ratio" in metrics:
                np.testing.assert_allclose(
                    metrics["clip_ratio"], case.o[f"metric{bits}:clip_ratio"], atol=1e-6
                )


@functools.partial(jax.jit, static_argnums=3)
def kl_and_gradient(log_probs, base, mask, kind):
    kl = approximate_kl(log_probs, base, mask, kind)
    return kl, jax.grad(lambda x: approximate_kl(x, base, mask, kind).sum())(log_probs)


@pytest.mark.parametrize("case", cases("kl_estimators"), ids=lambda case: case["id"])
def test_kl_equals_skyrl(case):
    with jax.enable_x64(True):
        log_probs, base, mask = (
            np.asarray(case.i[k], "float64") if k in case.i else None
            for k in ("log_probs", "log_probs_base", "loss_mask")
        )
        kind = case["kl_estimator_type"]
        kl, grad = kl_and_gradient(log_probs, base, mask, kind)
        expected = case.o["grad64"]
        if "snan" in case["id"]:  # SkyRL's k2 gradient is NaN under a masked NaN; ours is 0
            expected = np.nan_to_num(expected)
        np.testing.assert_allclose(kl, case.o["kl64"], rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(grad, expected, rtol=1e-9, atol=1e-12)
        if mask is not None:
            weights = reduction_weights(mask, "sequence_mean")
            np.testing.assert_allclose((kl * weights).sum(), case.o["seqmean64"], rtol=1e-9)


REDUCTION_CASES = [
    c
    for c in cases("reductions")  # trainer.z.*: with the batch z-score
    if c.get("loss_reduction") in REDUCTIONS and not c["id"].startswith("trainer.z.")
]


@pytest.mark.parametrize("case", REDUCTION_CASES, ids=lambda case: case["id"])
def test_reduction_equals_skyrl(case):
    with jax.enable_x64(True):
        advantages = np.asarray(case.i["advantages"], "float64")
        mask = np.asarray(case.i["loss_mask"], "float64")
        rows = 2 if case["id"].startswith("trainer.") else mask.shape[0]  # minibatches of 2 rows
        minibatches = [mask[k : k + rows] for k in range(0, mask.shape[0], rows)]
        weights = np.concatenate(
            [
                reduction_weights(m, case["loss_reduction"], max_seq_len=case.get("max_seq_len"))
                for m in minibatches
            ]
        )
        expected = np.where(mask != 0, case.o["scaled64"], 0)  # SkyRL scales masked tokens too
        np.testing.assert_allclose(advantages * weights, expected * mask, rtol=1e-9, atol=1e-15)


SEED_CASES = [
    c
    for c in cases("seed_policy_reduced")  # cross_entropy always summed then; here it is reduced
    if c["loss"] in LOSSES and ".none." in c["id"] and c["loss"] != "cross_entropy"
]


@functools.cache
def evaluate_reduced(name, config_json):
    """Jitted reduced loss and its gradient."""
    config = SimpleNamespace(**json.loads(config_json))

    def objective(log_probs, old_log_probs, advantages, mask):
        weights = reduction_weights(mask, config.loss_reduction, max_seq_len=config.max_seq_len)
        loss, _ = LOSSES[name](log_probs, old_log_probs, advantages, config, loss_mask=mask)
        return masked_sum(loss, weights)

    return jax.jit(jax.value_and_grad(objective))


@pytest.mark.parametrize("case", SEED_CASES, ids=lambda case: case["id"])
def test_reduced_loss_equals_the_documents_release(case):
    """Loss times weights = the March 2026 losses, which reduced inside."""
    with jax.enable_x64(True):
        inputs = {k: np.asarray(v, "float64") for k, v in case.i.items()}
        loss, grad = evaluate_reduced(case["loss"], json.dumps(case["config"]))(
            inputs["log_probs"],
            inputs["old_log_probs"],
            inputs["advantages"],
            inputs.get("loss_mask", np.ones_like(inputs["log_probs"])),
        )
        np.testing.assert_allclose(loss, case.o["loss64"], rtol=1e-8, atol=1e-12)
        np.testing.assert_allclose(grad, case.o["grad64"], rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("case", cases("logprobs_entropy"), ids=lambda case: case["id"])
def test_token_distribution_equals_skyrl(case):
    with jax.enable_x64(True):
        logits = np.asarray(case.i["logits"], "float64") / case["temperature"]
        labels = np.roll(case.i["sequences"], -1, axis=1)
        np.testing.assert_allclose(
            token_log_probs(logits, labels), case.o["logprobs64"], rtol=1e-9, atol=1e-12
        )
        attended = case.i["attention_mask"]
        np.testing.assert_allclose(
            entropy(logits) * attended, case.o["entropy64"] * attended, rtol=1e-9
        )
