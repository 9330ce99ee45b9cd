"""Loss on the tokens of highest entropy alone."""

import jax
import jax.numpy as jnp

from jaxrl.array_ops import FloatBT, IntB, MaskBT, assert_per_token, top_tokens, zero_masked


def top_entropy_mask(
    entropy: FloatBT, loss_mask: MaskBT, share: float, row_ids: IntB | None = None
) -> MaskBT:
    """Mark the tokens at which the policy decides: those of highest entropy in the minibatch.

        M_t = 1  for the max(1, floor(share n)) of the n sampled tokens with the largest H_t

    Wang et al., 2025, https://arxiv.org/abs/2506.01939 with share 0.2: a minority of
    tokens, at forks, does the learning. The loss is still divided by all tokens. Of equal entropies
    the first count, by row id and position, so that order, padding and cut change nothing.

    Args:
        entropy: [B, T] float of the policy, the whole minibatch; the gradient does not pass.
        loss_mask: [B, T]; what is masked may be NaN.
        share: in (0, 1].
        row_ids: [B] int32, number of the row in its minibatch; None = 0, 1, 2 ...

    Returns:
        [B, T] of 0 and 1.
    """
    assert_per_token(entropy, mask=loss_mask)
    row_ids = jnp.arange(len(entropy)) if row_ids is None else row_ids
    (entropy,) = zero_masked(loss_mask, jax.lax.stop_gradient(entropy))
    count = jnp.maximum(jnp.floor(share * loss_mask.sum()), 1)
    return top_tokens(entropy, loss_mask > 0, count, row_ids).astype(entropy.dtype)
