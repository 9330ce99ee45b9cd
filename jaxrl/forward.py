"""Model -> what the losses need: log-probs and entropy, aligned to the predicted token."""

import jax
import jax.numpy as jnp

from jaxrl.array_ops import Array, entropy, token_log_probs
from jaxrl.models.adapter import AdaptedModel
from jaxrl.models.transformer import Params, TransformerConfig, forward, unembed


def log_probs_and_entropy(
    config: TransformerConfig | AdaptedModel,
    params: Params,
    tokens: Array,
    lengths: Array,
    *,
    temperature: float,
    dtype: jnp.dtype,
    remat: bool = False,
    with_entropy: bool = True,
) -> tuple[Array, Array]:
    """Log-prob of every token given those before it, and the entropy it was drawn from.

    Args:
        tokens: [B, T] int, right padded.
        lengths: [B] int, tokens that are not padding.
        temperature: divides the logits, as the sampler's does.
        dtype: compute dtype of the model.
        remat: recompute layers in the backward pass.
        with_entropy: False returns zeros for it; it costs a pass over the vocabulary.

    Returns:
        log_probs [B, T], entropy [B, T], float32: `log_probs[b, t] = log p(tokens[b, t] |
        tokens[b, :t])`. Column 0 is 0: nothing predicts the first token.
    """
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    segment_ids = (positions < lengths[:, None]).astype(jnp.int32)
    hidden = forward(config, params, tokens, positions, segment_ids, dtype=dtype, remat=remat)
    logits = unembed(config, params, hidden[:, :-1]) / temperature
    with jax.named_scope("log_probs"):
        first_column = ((0, 0), (1, 0))
        log_probs = jnp.pad(token_log_probs(logits, tokens[:, 1:]), first_column)
        if not with_entropy:
            return log_probs, jnp.zeros_like(log_probs)
        return log_probs, jnp.pad(entropy(logits), first_column)
