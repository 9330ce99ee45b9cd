"""The generalised Jensen-Shannon divergence, and the events that it is taken over."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.array_ops import event_log_probs, top_ids
from jaxrl.losses.distillation import generalized_jsd as eager_jsd

generalized_jsd = jax.jit(eager_jsd, static_argnums=2)
events = jax.jit(event_log_probs)

P, Q = np.array([0.7, 0.2, 0.1]), np.array([0.5, 0.25, 0.25])  # teacher, student


@pytest.mark.parametrize(
    ("beta", "expected"),
    [
        # 0.7 log 1.4 + 0.2 log 0.8 + 0.1 log 0.4 = 0.235531 - 0.044629 - 0.091629
        (0.0, 0.099273),
        # 0.5 log (5/7) + 0.25 log 1.25 + 0.25 log 2.5 = -0.168236 + 0.055786 + 0.229073
        (1.0, 0.116623),
        # m = [0.6, 0.225, 0.175]
        # KL(p || m) = 0.7 log (7/6) + 0.2 log (8/9) + 0.1 log (4/7)
        #            = 0.107905 - 0.023557 - 0.055962 = 0.028387
        # KL(q || m) = 0.5 log (5/6) + 0.25 log (10/9) + 0.25 log (10/7)
        #            = -0.091161 + 0.026340 + 0.089169 = 0.024348
        (0.5, 0.026367),
        # m = [0.55, 0.2375, 0.2125]
        # KL(p || m) = 0.168814 - 0.034370 - 0.075377 = 0.059067
        # KL(q || m) = -0.047655 + 0.012823 + 0.040630 = 0.005798
        # 0.25 x 0.059067 + 0.75 x 0.005798
        (0.25, 0.019115),
    ],
)
def test_values(beta, expected):
    found = generalized_jsd(jnp.log(Q), jnp.log(P), beta)
    assert found == pytest.approx(expected, abs=2e-6)
    assert generalized_jsd(jnp.log(P), jnp.log(P), beta) == pytest.approx(0, abs=1e-7)


# TRL's generalized_jsd_loss of two tokens and four ids at temperature 0.8, summed, its gradient
# for the student's logits beside it (huggingface/trl, commit f2cd577).
OF_TRL = {
    0.0: (
        1.684837,
        [[-0.69017, -0.105841, 0.955871, -0.15986], [0.327343, -0.200741, -0.016478, -0.110124]],
    ),
    0.1: (
        0.149068,
        [[-0.053448, -0.008197, 0.075971, -0.014326], [0.030263, -0.018926, -0.001554, -0.009784]],
    ),
    0.5: (
        0.432845,
        [[-0.113765, -0.017446, 0.171722, -0.04051], [0.098347, -0.065699, -0.005393, -0.027255]],
    ),
    0.9: (
        0.202883,
        [[-0.044609, -0.006841, 0.070372, -0.018922], [0.049546, -0.035126, -0.002883, -0.011537]],
    ),
    1.0: (
        2.740933,
        [[-0.610927, -0.093689, 0.980683, -0.276067], [0.660451, -0.476609, -0.039122, -0.14472]],
    ),
}


@pytest.mark.parametrize("beta", OF_TRL)
def test_values_and_gradients_of_trl(beta):
    student = jnp.array([[0.5, -1.0, 2.0, 0.0], [1.0, 1.5, -0.5, 0.25]])
    teacher = jnp.array([[1.5, 0.0, -1.0, 0.5], [-0.5, 2.0, 0.0, 1.0]])

    def total(z):
        log_q, log_p = (jax.nn.log_softmax(x / 0.8) for x in (z, teacher))
        return generalized_jsd(log_q, log_p, beta).sum()

    value, gradient = jax.jit(jax.value_and_grad(total))(student)
    assert value == pytest.approx(OF_TRL[beta][0], abs=2e-6)
    np.testing.assert_allclose(gradient, OF_TRL[beta][1], atol=2e-6)


def test_a_small_weight_is_the_forward_kl_and_a_large_one_the_reverse():
    with jax.enable_x64(True):
        q, p = jnp.log(jnp.asarray(Q)), jnp.log(jnp.asarray(P))
        assert generalized_jsd(q, p, 1e-6) / 1e-6 == pytest.approx(0.099273, abs=1e-5)
        assert generalized_jsd(q, p, 1 - 1e-6) / 1e-6 == pytest.approx(0.116623, abs=1e-5)


def test_gradients_for_the_students_logits():
    """Forward: q - p. Reverse: q_k (log q_k / p_k - KL), with KL = 0.116623."""

    def of_logits(z, beta):
        return generalized_jsd(jax.nn.log_softmax(z), jnp.log(P), beta)

    gradient = jax.jit(jax.grad(of_logits), static_argnums=1)
    forward, reverse = (gradient(jnp.log(Q), beta) for beta in (0.0, 1.0))
    np.testing.assert_allclose(forward, [-0.2, 0.05, 0.15], atol=1e-6)
    # 0.5 (-0.336472 - 0.116623), 0.25 (0.223144 - 0.116623), 0.25 (0.916291 - 0.116623)
    np.testing.assert_allclose(reverse, [-0.226548, 0.026630, 0.199917], atol=1e-6)


def logits(*shape, scale=2.0):
    return jax.random.normal(jax.random.key(0), shape) * scale


def test_events_are_some_ids_and_all_others_together():
    z = logits(2, 3, 16)
    ids = top_ids(z, 4)
    assert ids.shape == (2, 3, 4) and ids.dtype == jnp.int32
    probs = np.asarray(jax.nn.softmax(z))
    chosen = np.take_along_axis(probs, np.asarray(ids), -1)
    np.testing.assert_allclose(chosen, -np.sort(-probs)[..., :4], rtol=1e-6)
    expected = np.concatenate([chosen, 1 - chosen.sum(-1, keepdims=True)], -1)
    np.testing.assert_allclose(np.exp(events(z, ids)), expected, atol=1e-6)
    some = np.asarray(events(z, np.where(np.arange(4) == 3, -1, ids)))
    np.testing.assert_allclose(np.exp(some[..., 3]), 0)
    np.testing.assert_allclose(np.exp(some[..., 4]), 1 - expected[..., :3].sum(-1), atol=1e-6)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_all_ids_are_the_whole_vocabulary(beta):
    z, teacher = logits(1, 2, 8), logits(1, 2, 8)[..., ::-1]
    ids = top_ids(teacher, 100)
    assert ids.shape[-1] == 8
    log_softmax = jax.jit(jax.nn.log_softmax)
    found = generalized_jsd(events(z, ids), events(teacher, ids), beta)
    expected = generalized_jsd(log_softmax(z), log_softmax(teacher), beta)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_little_that_is_left_has_a_gradient_that_is_right(beta):
    """1 - sum of the others would have no digit left: the event is 3e-8 for the student."""
    z = np.zeros((1, 1, 64), np.float32)
    z[..., 0] = 21.5
    teacher = logits(1, 1, 64)
    ids = np.array(top_ids(teacher, 8))
    ids[..., 0] = 0

    def divergence(z):
        student, other = event_log_probs(z, ids), event_log_probs(teacher, ids)
        return generalized_jsd(student, other.astype(z.dtype), beta).sum()

    gradient = jax.jit(jax.grad(divergence))
    found = gradient(z)
    with jax.enable_x64(True):
        exact = gradient(z.astype(np.float64))
    assert exact.dtype == np.float64
    # the gradient is at most 1: two roundings of a float32 near it
    np.testing.assert_allclose(found, exact, rtol=0, atol=3e-7)


def test_the_reverse_kl_grows_as_the_student_leaves_the_ids_of_its_teacher():
    """Over those ids alone it would fall below 0 as the student leaves them."""
    teacher = np.log(np.float32([0.6, 0.3, 0.1]))  # the last is all others
    leaving = [np.log(np.float32([0.6 * x, 0.3 * x, 1 - 0.9 * x])) for x in (1.0, 0.5, 0.1)]
    values = [float(generalized_jsd(q, teacher, 1.0)) for q in leaving]
    assert values == sorted(values) and values[0] == pytest.approx(0, abs=1e-6)
    alone = [float(np.sum(np.exp(q[:2]) * (q[:2] - teacher[:2]))) for q in leaving]
    assert alone[1] < 0
