"""The divergence from a teacher through the real update, however a minibatch is cut and spread."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.array_ops import event_log_probs
from jaxrl.config.algorithm import DistillationConfig
from jaxrl.data.prefix_trees import SHARING
from jaxrl.losses.distillation import generalized_jsd
from jaxrl.losses.reduction import reduction_weights
from jaxrl.models.transformer import forward, unembed
from jaxrl.training.teacher import with_teacher
from tests.training.test_prefix_trees import branches
from tests.training.test_update import (
    MODEL,
    ROWS,
    WIDTH,
    algorithm_with,
    gradient,
    make_batch,
    make_updater,
)

TOP_K = 5


def taught(batch=None, rows=slice(None)):
    """A batch with a random teacher, whose words on `rows` alone are known."""
    batch = make_batch() if batch is None else batch
    shape = batch.tokens.shape
    rng = np.random.default_rng(1)
    # of a token and those before it, as trees have it
    context = np.cumsum(np.asarray(batch.tokens), axis=1) - batch.tokens
    tables = rng.normal(0, 2, (1000, MODEL.vocab_size)).astype(np.float32)
    log_p = np.asarray(jax.nn.log_softmax(tables[context % 1000]))
    ids = np.argsort(-log_p, axis=-1)[..., :TOP_K]
    events = np.take_along_axis(log_p, ids, -1)
    others = np.log(1 - np.exp(events).sum(-1, keepdims=True))
    keep = np.zeros(shape[0], bool)
    keep[rows] = True
    ids = np.where(keep[:, None, None], ids, -1)
    return with_teacher(batch, ids, np.concatenate([events, others], -1), MODEL.vocab_size)


def algorithm(beta=0.5, alone=True, **settings):
    of_teacher = DistillationConfig(coef=0.7, policy_loss_coef=0.0 if alone else 0.5, beta=beta)
    return algorithm_with(
        policy_loss_type="regular",
        distillation=of_teacher,
        use_kl_loss=not alone,
        use_entropy_loss=not alone,
        **settings,
    )


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean"])
def test_the_gradient_is_that_of_all_logits(reduction):
    """Of 0.7 sum w D, written out with [B, T, V] logits; rows 0 and 2 have no teacher."""
    batch = taught(rows=[1, 3, 4, 5, 6, 7])
    found, metrics = gradient(algorithm(), batch, reduction=reduction, microbatch_rows=4)
    updater, params, _ = make_updater(algorithm(), microbatch_rows=4)
    mask = batch.loss_mask * (batch.teacher_ids[..., 0] >= 0)
    weights = reduction_weights(jnp.asarray(mask), reduction)
    positions = np.broadcast_to(np.arange(WIDTH), batch.tokens.shape)
    segments = (positions < batch.lengths[:, None]).astype(np.int32)

    def objective(params):
        hidden = forward(
            MODEL, params, batch.tokens, positions, segments, dtype=jnp.float32, remat="none"
        )
        logits = unembed(MODEL, params, hidden)[:, :-1] / 0.9
        student = event_log_probs(logits, batch.teacher_ids[:, 1:])
        divergence = generalized_jsd(student, batch.teacher_log_probs[:, 1:], 0.5)
        return 0.7 * jnp.sum(jnp.where(mask[:, 1:] != 0, divergence, 0) * weights[:, 1:])

    value, expected = jax.value_and_grad(objective)(params)
    flat = np.concatenate([np.ravel(g) for g in jax.tree.leaves(jax.device_get(expected))])
    np.testing.assert_allclose(found, flat, atol=1e-5 * np.abs(flat).max())
    assert metrics["teacher_divergence"] == pytest.approx(float(value) / 0.7, rel=1e-5)
    assert metrics["final_loss"] == pytest.approx(float(value), rel=1e-5)


CUTS = {
    "2 microbatches": {"microbatch_rows": 4},
    "packed": {"microbatch_rows": 1, "packed": True, "packed_length": 32},
    "8 devices": {"microbatch_rows": 8, "devices": 8},
    "vocabulary": {"microbatch_rows": 4, "devices": 4, "sizes": (("fsdp", 2), ("tensor", 2))},
    "context": {"microbatch_rows": 4, "devices": 2, "sizes": (("context", 2), ("fsdp", 1))},
}


@pytest.mark.some(3)
@pytest.mark.parametrize("cut", CUTS)
def test_no_cut_changes_the_gradient(cut):
    settings = algorithm(alone=False)
    expected, known = gradient(settings, taught(), microbatch_rows=ROWS)
    found, metrics = gradient(settings, taught(), **CUTS[cut])
    np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max())
    assert metrics["teacher_divergence"] == pytest.approx(known["teacher_divergence"], rel=1e-5)


def test_shared_prefixes_have_the_gradient_of_flat_rows():
    batch = taught(branches())
    settings = algorithm(alone=False)
    flat, _ = gradient(settings, batch, microbatch_rows=ROWS)
    trees, _ = gradient(settings, batch, microbatch_rows=ROWS, sharing=SHARING["on"])
    np.testing.assert_allclose(trees, flat, atol=1e-5 * np.abs(flat).max())


def test_a_loss_of_the_whole_minibatch_goes_along():
    """The divergence is one more output, whose cotangent is pulled back with the others."""
    settings = dataclasses.replace(algorithm(alone=False), top_entropy_quantile=0.5)
    whole, _ = gradient(settings, taught(), microbatch_rows=ROWS)
    parts, _ = gradient(settings, taught(), microbatch_rows=2)
    np.testing.assert_allclose(parts, whole, atol=1e-5 * np.abs(whole).max())


@pytest.mark.parametrize("sizes", [(), (("fsdp", 2), ("tensor", 2))])
def test_a_teacher_says_what_is_likeliest(sizes):
    """On one device, and with the vocabulary split over two."""
    batch, devices = make_batch(), 4 if sizes else 1
    updater, params, _ = make_updater(
        algorithm_with(), microbatch_rows=4, devices=devices, sizes=sizes
    )
    _, _, ids, log_probs = updater.forward_pass(params, batch, top_k=TOP_K)
    assert ids.shape == (ROWS, WIDTH, TOP_K) and log_probs.shape == (ROWS, WIDTH, TOP_K + 1)
    positions = np.broadcast_to(np.arange(WIDTH), batch.tokens.shape)
    segments = (positions < batch.lengths[:, None]).astype(np.int32)
    given = batch.tokens, positions, segments
    host = jax.device_get(params)
    hidden = forward(MODEL, host, *given, dtype=jnp.float32, remat="none")
    log_p = np.asarray(jax.nn.log_softmax(unembed(MODEL, host, hidden)[:, :-1] / 0.9))
    sampled = batch.loss_mask[:, 1:] != 0
    expected = -np.sort(-log_p)[..., :TOP_K]
    np.testing.assert_allclose(log_probs[:, 1:, :TOP_K][sampled], expected[sampled], atol=1e-5)
    named = np.take_along_axis(log_p, ids[:, 1:], -1)
    np.testing.assert_allclose(named[sampled], expected[sampled], atol=1e-5)
    total = np.exp(log_probs[:, 1:][sampled]).sum(-1)
    np.testing.assert_allclose(total, 1, atol=1e-5)


def test_ids_that_the_policy_lacks_are_among_the_others():
    """A teacher of 34 ids: 0.5 of id 3, 0.2 of id 33, 0.1 of id 5, and 0.2 of the others."""
    batch = make_batch()
    shape = batch.tokens.shape
    ids = np.broadcast_to(np.array([3, 33, 5]), (*shape, 3))
    log_probs = np.broadcast_to(np.log(np.float32([0.5, 0.2, 0.1, 0.2])), (*shape, 4))
    found = with_teacher(batch, ids, log_probs, MODEL.vocab_size)
    row, column = 0, 6
    assert found.teacher_ids[row, column].tolist() == [3, -1, 5]
    events = np.exp(found.teacher_log_probs[row, column])
    np.testing.assert_allclose(events, [0.5, 0, 0.1, 0.4], atol=1e-6)
    assert (found.teacher_ids[row, :4] == -1).all()  # the prompt
