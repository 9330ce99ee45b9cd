"""The divergence from a teacher through the real update, however a minibatch is cut and spread."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.array_ops import event_log_probs
from jaxrl.config.algorithm import DistillationConfig
from jaxrl.data.prefix_trees import SHARING
from jaxrl.losses.distillation import generalized_jsd
from jaxrl.losses.reduction import reduction_weights
from jaxrl.models.transformer import forward, init_params, unembed
from jaxrl.parallel import Placement, make_mesh
from jaxrl.training.objective import merge_metrics, minibatch_weights
from jaxrl.training.teacher import head_of, with_teacher
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


def log_softmax(x):
    shifted = x - x.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


@functools.partial(jax.jit, static_argnums=0)
def hidden_states(model, params, tokens, lengths):
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    segments = (positions < lengths[:, None]).astype(jnp.int32)
    return forward(model, params, tokens, positions, segments, dtype=jnp.float32, remat="none")


def logits_of(model, params, tokens, lengths):
    """[B, T-1, V], of all but the last place."""
    return unembed(model, params, hidden_states(model, params, tokens, lengths)[:, :-1]) / 0.9


def flattened(tree):
    return np.concatenate([np.ravel(x) for x in jax.tree.leaves(jax.device_get(tree))])


def taught(batch=None, rows=slice(None)):
    """A batch with a random teacher, whose words on `rows` alone are known."""
    batch = make_batch() if batch is None else batch
    shape = batch.tokens.shape
    rng = np.random.default_rng(1)
    # of a token and those before it, as trees have it
    context = np.cumsum(np.asarray(batch.tokens), axis=1) - batch.tokens
    tables = rng.normal(0, 2, (1000, MODEL.vocab_size)).astype(np.float32)
    log_p = log_softmax(tables[context % 1000])
    ids = np.argsort(-log_p, axis=-1)[..., :TOP_K]
    events = np.take_along_axis(log_p, ids, -1)
    others = np.log(1 - np.exp(events).sum(-1, keepdims=True))
    keep = np.zeros(shape[0], bool)
    keep[rows] = True
    said = ids, np.concatenate([events, others], -1)
    taught = np.broadcast_to(keep[:, None], shape).astype(np.float32)
    return with_teacher(batch.replace(taught=taught), said, MODEL.vocab_size)


def algorithm(beta=0.5, alone=True, **settings):
    of_teacher = DistillationConfig(coef=0.7, policy_loss_coef=0.0 if alone else 0.5, beta=beta)
    return algorithm_with(
        policy_loss_type="regular",
        distillation=of_teacher,
        use_kl_loss=not alone,
        use_entropy_loss=not alone,
        **settings,
    )


@jax.jit
@jax.value_and_grad
def whole_divergence(params, batch, weights):
    """0.7 sum w D of [B, T, V] logits."""
    student = logits_of(MODEL, params, batch.tokens, batch.lengths)
    student = event_log_probs(student, batch.teacher_ids[:, 1:])
    divergence = generalized_jsd(student, batch.teacher_log_probs[:, 1:], 0.5)
    return 0.7 * jnp.sum(jnp.where(weights[:, 1:] != 0, divergence * weights[:, 1:], 0))


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean"])
def test_the_gradient_is_that_of_all_logits(reduction):
    """Of 0.7 sum w D, written out with [B, T, V] logits; rows 0 and 2 have no teacher."""
    batch = taught(rows=[1, 3, 4, 5, 6, 7])
    cut = {"microbatch_rows": 4, "widths": (WIDTH,)}
    found, metrics = gradient(algorithm(), batch, reduction=reduction, **cut)
    _, params, _ = make_updater(algorithm(), **cut)
    mask = batch.loss_mask * np.array([0, 1, 0, 1, 1, 1, 1, 1], np.float32)[:, None]
    weights = reduction_weights(jnp.asarray(mask), reduction)
    value, expected = whole_divergence(params, batch, weights)
    flat = flattened(expected)
    np.testing.assert_allclose(found, flat, atol=1e-5 * np.abs(flat).max())
    assert metrics["teacher_divergence"] == pytest.approx(float(value) / 0.7, rel=1e-5)
    assert metrics["final_loss"] == pytest.approx(float(value), rel=1e-5)


TEACHER = dataclasses.replace(MODEL, hidden_size=24, vocab_size=34, tie_embeddings=True)
WHOLE = {
    "8 devices": {"microbatch_rows": 8, "devices": 8},
    "packed": {"microbatch_rows": 1, "packed": True, "packed_length": 32},
    "trees": {"microbatch_rows": 8, "sharing": SHARING["on"]},
    "vocabulary": {"microbatch_rows": 4, "devices": 4, "sizes": (("fsdp", 2), ("tensor", 2))}
    | {"widths": (24,)},
}


def updated(settings, batch, params, teacher, cut):
    """Gradient and metrics with a teacher's states, of a batch that has them."""
    updater, own, _ = make_updater(settings, teacher=teacher, **cut)
    placement = updater.forward_pass.forward.__wrapped__.keywords["placement"]
    one = Placement(make_mesh(devices=jax.devices()[:1]))
    updater.forward_pass.teacher_head = head_of(teacher, params, placement or one)
    weights, _ = minibatch_weights(batch, settings, block_rows=8)
    grads, parts = updater.gradients(own, batch, jax.device_get(weights), jax.random.key(0))
    return flattened(grads), merge_metrics(jax.device_get(parts))


ALL_IDS = algorithm(beta=0.3)


@functools.cache
def of_all_ids(teacher):
    """A batch with a teacher's states and its parameters, and 0.7 sum w D with its gradient.

    They are written out with [B, T, V] logits.
    """
    params, batch = init_params(teacher, 5), branches()
    states = np.asarray(hidden_states(teacher, params, batch.tokens, batch.lengths))
    said = np.pad(states[:, :-1], ((0, 0), (1, 0), (0, 0))) * batch.loss_mask[..., None]
    batch = with_teacher(batch, [said], MODEL.vocab_size)
    weights = reduction_weights(jnp.asarray(batch.loss_mask), "token_mean")[:, 1:]

    @jax.jit
    @jax.value_and_grad
    def objective(own):
        log_p = unembed(teacher, params, states[:, :-1])[..., :32] / 0.9
        log_q = logits_of(MODEL, own, batch.tokens, batch.lengths)
        divergence = generalized_jsd(*(jax.nn.log_softmax(x) for x in (log_q, log_p)), 0.3)
        return 0.7 * jnp.sum(jnp.where(weights != 0, divergence, 0) * weights)

    value, expected = objective(init_params(MODEL, 0))
    return batch, params, float(value), flattened(expected)


@pytest.mark.some(3)
@pytest.mark.parametrize("cut", WHOLE)
def test_a_teacher_of_all_ids_tells_its_states(cut):
    """Gradient of 0.7 sum w D over all ids: written out, and in all cuts.

    The teacher is wider, and has two ids more than the policy but where the vocabulary is split.
    """
    teacher = dataclasses.replace(TEACHER, vocab_size=32) if cut == "vocabulary" else TEACHER
    batch, params, value, expected = of_all_ids(teacher)
    found, metrics = updated(ALL_IDS, batch, params, teacher, WHOLE[cut])
    np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max())
    assert metrics["teacher_divergence"] == pytest.approx(value / 0.7, rel=1e-5)


@pytest.mark.parametrize("packing", [{"widths": (WIDTH,)}, {"packed": True, "packed_length": 32}])
def test_states_are_those_that_the_head_reads(packing):
    batch = make_batch()
    updater, params, _ = make_updater(algorithm_with(), microbatch_rows=4, **packing)
    _, _, states = updater.forward_pass(params, batch, states=True)
    hidden = np.asarray(hidden_states(MODEL, params, batch.tokens, batch.lengths))
    expected = hidden[:, :-1] * batch.loss_mask[:, 1:, None]
    np.testing.assert_allclose(states[:, 1:], expected, atol=1e-5)
    assert (states[:, 0] == 0).all()


CUTS = {  # all rows have one width, so that a cut is one program
    "2 microbatches": {"microbatch_rows": 4, "widths": (24,)},
    "packed": {"microbatch_rows": 1, "packed": True, "packed_length": 32},
    "8 devices": {"microbatch_rows": 8, "devices": 8},
    "vocabulary": {"microbatch_rows": 4, "devices": 4, "sizes": (("fsdp", 2), ("tensor", 2))}
    | {"widths": (24,)},
    "context": {"microbatch_rows": 4, "devices": 2, "sizes": (("context", 2), ("fsdp", 1))}
    | {"widths": (24,)},
}


@pytest.mark.some(3)
@pytest.mark.parametrize("cut", CUTS)
def test_no_cut_changes_the_gradient(cut):
    settings, batch = algorithm(alone=False), taught(branches())
    expected, known = gradient(settings, batch, microbatch_rows=ROWS)
    found, metrics = gradient(settings, batch, **CUTS[cut])
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
    parts, _ = gradient(settings, taught(), microbatch_rows=2, widths=(WIDTH,))
    np.testing.assert_allclose(parts, whole, atol=1e-5 * np.abs(whole).max())


@pytest.mark.parametrize("sizes", [(), (("fsdp", 2), ("tensor", 2))])
def test_a_teacher_says_what_is_likeliest(sizes):
    """On one device, and with the vocabulary split over two."""
    batch, devices = make_batch(), 4 if sizes else 1
    cut = {"microbatch_rows": 4, "devices": devices, "sizes": sizes, "widths": (WIDTH,)}
    updater, params, _ = make_updater(algorithm_with(), **cut)
    _, _, ids, log_probs = updater.forward_pass(params, batch, top_k=TOP_K)
    assert ids.shape == (ROWS, WIDTH, TOP_K) and log_probs.shape == (ROWS, WIDTH, TOP_K + 1)
    host = jax.device_get(params)
    logits = jax.jit(functools.partial(logits_of, MODEL))(host, batch.tokens, batch.lengths)
    log_p = log_softmax(np.asarray(logits))
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
    found = with_teacher(batch, (ids, log_probs), MODEL.vocab_size)
    row, column = 0, 6
    assert found.teacher_ids[row, column].tolist() == [3, -1, 5]
    events = np.exp(found.teacher_log_probs[row, column])
    np.testing.assert_allclose(events, [0.5, 0, 0.1, 0.4], atol=1e-6)
    np.testing.assert_array_equal(found.taught, batch.loss_mask)
