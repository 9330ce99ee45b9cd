"""Steps of a block by themselves."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.rollout.native import decode
from jaxrl.rollout.native.decode import SETTINGS, Rows
from jaxrl.rollout.native.kv_cache import empty_cache
from jaxrl.rollout.native.programs import Prefill, Shape
from tests.rollout.test_native import LLAMA, random_params


def test_rows_that_are_done_or_wait_for_their_prompt_see_no_position(monkeypatch):
    seen, attend = [], decode.write_and_attend

    def note(first, count):
        seen.append((first.tolist(), count.tolist()))

    def noted(*given, **settings):
        jax.debug.callback(note, *given[-2:], ordered=True)
        return attend(*given, **settings)

    monkeypatch.setattr(decode, "write_and_attend", noted)
    zeros = np.zeros(3, np.int32)
    settings = {
        name: np.full(3, 1 if name in ("temperature", "top_p", "repetition_penalty") else 0, kind)
        for kind, names in SETTINGS.items()
        for name in names
    }
    rows = Rows(
        live=jnp.array([True, False, True]),
        table=np.arange(6).reshape(3, 2),
        start=jnp.array([0, 0, 1]),
        last_token=jnp.array([1, 2, 3]),
        position=jnp.array([5, 7, 9]),
        count=zeros,
        keys=np.zeros((3, 2), np.uint32),
        max_tokens=zeros + 8,
        stop_ids=np.full((3, 1), -1),
        **settings,
    )
    page = Shape(page=16, tile=8, tiles=2)
    nothing = Prefill(page, parts=1, chunks=1, columns=2, steps=2).arrays(1)
    cache = empty_cache(LLAMA, 6, page.page, jnp.float32, layout="transposed")

    @jax.jit
    def run(params, *given):
        params = decode.decode_params(LLAMA, params, jnp.float32)
        return decode.decode(LLAMA, params, *given, steps=2)

    _, after, block = run(random_params(LLAMA), cache, rows, nothing)
    jax.effects_barrier()
    # of both layers, at each step
    assert seen == [([5, -1, -1], [1, 0, 0])] * 2 + [([6, -1, 9], [1, 0, 1])] * 2
    assert block.count.tolist() == [2, 0, 1]
    assert after.position.tolist() == [7, 7, 10]
    assert after.last_token.tolist() == [block.tokens[0, 1], 2, block.tokens[2, 0]]
    assert jnp.isfinite(block.log_probs).all()
