"""A step of decoding by itself."""

import jax.numpy as jnp

from jaxrl.rollout.native import decode
from jaxrl.rollout.native.kv_cache import empty_cache
from tests.rollout.test_native import LLAMA, random_params


def test_rows_that_are_done_see_no_position(monkeypatch):
    masks, attention = [], decode.decode_attention

    def noted(config, q, keys, values, mask, placement, kernel, *, transposed):
        masks.append(mask.sum(1).tolist())
        given = config, q, keys, values, mask, placement, kernel
        return attention(*given, transposed=transposed)

    monkeypatch.setattr(decode, "decode_attention", noted)
    run = decode.Run(
        cache=empty_cache(LLAMA, 3, 64, jnp.float32, "cpu"),
        last_token=jnp.array([1, 2, 3]),
        position=jnp.array([5, 7, 9]),
        done=jnp.array([False, True, False]),
        seen=None,
        history=None,
        block=None,
    )
    params = decode.decode_params(LLAMA, random_params(LLAMA), jnp.float32)
    logits, _ = decode.decode_step(LLAMA, params, run, None)
    assert masks == [[6, 0, 10]] * 2  # positions 0 to 5, none, 0 to 9, in two layers
    assert jnp.isfinite(logits).all()
