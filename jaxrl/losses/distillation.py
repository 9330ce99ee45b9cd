"""Distillation over distributions: all a teacher knows of a token, not of the sampled one alone."""

from typing import Annotated

import jax.numpy as jnp

from jaxrl.array_ops import Array, at_least_float32

Events = Annotated[Array, "float [..., K]"]  # log-probs of events that exclude each other


def generalized_jsd(student: Events, teacher: Events, beta: float) -> Array:
    """Return how far a student's distribution is from its teacher's, in nats.

        D = beta KL(p || m) + (1 - beta) KL(q || m),  m = beta p + (1 - beta) q     0 < beta < 1
        D = KL(p || q)                                                              beta = 0
        D = KL(q || p)                                                              beta = 1

    of a teacher p and a student q: the generalised Jensen-Shannon divergence, at its ends the
    forward KL, which covers all that the teacher does, and the reverse, which does nothing that he
    does not. Agarwal et al., 2023, https://arxiv.org/abs/2306.13649 (eq. 1). Near the ends D / beta
    and D / (1 - beta) become these two; D itself becomes 0.

    The events are all tokens, or some of them and one that is all others together. The last is what
    keeps a reverse KL over the teacher's likeliest tokens from growing smaller as the student
    leaves them.

    Args:
        student, teacher: [..., K] float, log-probs of the same events; an event of probability 0
            for both may have any very negative number.
        beta: in [0, 1].

    Returns:
        [...] float; the gradient passes to both.
    """
    log_q, log_p = at_least_float32(student), at_least_float32(teacher)
    if beta == 0:
        return kl(log_p, log_q)
    if beta == 1:
        return kl(log_q, log_p)
    log_m = jnp.logaddexp(jnp.log(beta) + log_p, jnp.log1p(-beta) + log_q)
    return beta * kl(log_p, log_m) + (1 - beta) * kl(log_q, log_m)


def kl(log_p: Events, log_q: Events) -> Array:
    """Return KL(p || q) = sum_k p_k (log p_k - log q_k), [..., K] -> [...]."""
    return jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1)
