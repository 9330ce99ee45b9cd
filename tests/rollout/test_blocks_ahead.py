"""Blocks that begin before the one before is fetched: the same tokens, and a busy device."""

import dataclasses
import gc
import threading
import weakref
from concurrent.futures import Future

import jax
import numpy as np
import pytest

from jaxrl.rollout.native.decode import Block
from tests.rollout.test_engine import PROMPT, by_hand, make, request, shared, until_idle, update
from tests.rollout.test_native import flat

STEPS = 8  # of a block


def pair(slots=4, **options):
    """An engine that fetches each block before the next, and one that does not."""
    options = {"max_model_len": 96, **options}
    return [make(slots, ahead=ahead, **options) for ahead in (False, True)]


def words(tokens):
    return " ".join(map(str, tokens))


# of requests that ask for more: blocks with one of them are of one program, all others of another
MORE = {"logprobs": 2, "raw_log_probs": True, "stop_token_ids": tuple(range(40, 56))}
MORE |= {"top_k": 3, "repetition_penalty": 1.4}


def demands():
    """More samples than slots, all that ends one, and all that a program is asked for."""
    free = flat(shared().generate([request(keys=(1,), max_tokens=30)]))[0].tokens
    stop = {"stop": (words(free[9:11]),), "max_tokens": 30}
    return [
        request(keys=(1, 2, 3), max_tokens=30),
        request(keys=(1, 4), stop_token_ids=tuple(free[10:12]), max_tokens=30),
        request(keys=(1,), **stop),  # found within the second block, drawn on in the third
        request(PROMPT[:7], (6, 7), max_tokens=8),  # ends with a block
        request(PROMPT[:9], (8, 9), max_tokens=9),
        request(PROMPT[:5], (10,), **{**MORE, "top_k": 30}, max_tokens=25),
        request(PROMPT[:4], (11,), **{**MORE, "repetition_penalty": 0.9}, max_tokens=21),
        request(
            PROMPT[:3],
            (12,),
            min_tokens=12,
            **{**MORE, "top_k": 31, "stop_token_ids": tuple(range(16))},
            max_tokens=20,
        ),
    ]


@pytest.mark.some(1)
@pytest.mark.parametrize("slots", [2, 5, 16])
def test_they_change_no_bit(slots):
    plain, ahead = pair(slots, decode_text=words)
    for one, other in zip(
        flat(plain.generate(demands())), flat(ahead.generate(demands())), strict=True
    ):
        assert one == other  # tokens, log-probs, stop reasons, alternatives
    assert ahead._flight is None


def test_a_penalty_sees_what_a_block_under_way_draws():
    asked = [request(keys=(k,), repetition_penalty=5.0, max_tokens=30) for k in (1, 2)]
    plain, ahead = pair()
    assert flat(ahead.generate(asked)) == flat(plain.generate(asked))


def test_a_longer_request_may_lengthen_the_cache_meanwhile():
    completions = []
    for ahead in (False, True):
        engine = make(ahead=ahead, room=0)
        turn = by_hand(engine)
        settings = {"repetition_penalty": 5.0, "max_tokens": 20}
        first = engine.submit([request(PROMPT[:9], **settings)])[0][0]
        turn()
        before = engine.programs.length
        later = engine.submit([request([*PROMPT, *PROMPT[:20]], (2,), **settings)])[0][0]
        assert engine.programs.length > before
        for _ in range(6):
            turn()
        completions.append([future.result(timeout=0).tokens for future in (first, later)])
    assert completions[0] == completions[1]


def test_a_conversation_goes_on_in_its_pages():
    completions = []
    for engine in pair(2):
        over, told = Future(), list(PROMPT[:20])
        for turn in range(3):
            asked = request(told, (turn,), max_tokens=5 + 6 * turn)
            asked = asked.__class__(**{**vars(asked), "conversations": (over,)})
            (found,) = flat(engine.generate([asked, request(PROMPT[turn:], (50 + turn,))])[:1])
            completions.append(found)
            told += [*found.tokens, 3, 1]
        over.set_result(None)
    assert completions[:3] == completions[3:]


def test_a_cancelled_sample_leaves_its_slot_to_another():
    _, engine = pair(1)
    turn = by_hand(engine)
    gone, kept = (engine.submit([request(keys=(key,), max_tokens=20)])[0][0] for key in (1, 2))
    turn()  # a block of the first
    gone.cancel()
    for _ in range(5):
        turn()
    alone = flat(shared().generate([request(keys=(2,), max_tokens=20)]))[0]
    assert kept.result(timeout=0).tokens == alone.tokens
    assert engine.decoded_tokens == 20  # none of the first were taken for the second's


def test_new_weights_and_an_abort_have_the_block_under_way():
    _, engine = pair()
    turn = by_hand(engine)
    ((future,),) = engine.submit([request(max_tokens=40)])
    turn()
    turn()  # two blocks have begun, one is fetched
    update(engine, 2)
    turn()
    engine.abort()
    found = future.result(timeout=60)
    assert found.versions == [1] * 2 * STEPS + [2] * STEPS
    engine.sleep()


def test_nobody_is_told_within_a_call_of_the_engine():
    """What a call finds to be over is told by the engine's thread, behind what came before."""
    _, engine = pair()
    turn, told = by_hand(engine), []

    def tell(number, found):
        told.append((threading.current_thread().name, number, len(found.tokens)))

    def asked(key, tokens):
        whole = request(keys=(key,), max_tokens=tokens)
        return dataclasses.replace(whole, on_tokens=lambda _, found: tell(key, found))

    for key, group in enumerate(engine.submit([asked(0, 2 * STEPS), asked(1, 40)])):
        group[0].add_done_callback(lambda future, key=key: tell(key, future.result()))
    turn()
    turn()  # two blocks have begun, one is fetched
    update(engine, 2)  # fetches the other, with which the first sample ends
    engine.abort()
    until_idle(engine)
    assert {thread for thread, *_ in told} == {"jaxrl-engine"}
    parts = [(0, STEPS), (1, STEPS), (0, 2 * STEPS), (1, STEPS), (1, 2 * STEPS)]
    assert [tuple(what) for _, *what in told] == parts


def test_who_keeps_a_finished_future_does_not_keep_the_engine():
    engine = make()
    ((future,),) = engine.submit([request()])
    future.result()
    kept = weakref.ref(engine)
    del engine
    for thread in threading.enumerate():
        if thread.name == "jaxrl-engine":
            thread.join()
    gc.collect()
    assert kept() is None
    assert len(future.result().tokens) == 12


def test_nothing_compiles_after_the_warm_up():
    engine = make(4, ahead=True, max_model_len=96)
    kinds = [request(PROMPT[:9], top_k=k, repetition_penalty=p) for k, p in ((-1, 1), (3, 2.0))]
    engine.warm_up(kinds)
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, *_, **__: compiled.append(name) if "backend_compile" in name else None
    )
    for asked in ([kinds[0]], [kinds[1]], kinds * 4):
        engine.generate(asked)
    assert not compiled


class Device:
    """A device whose blocks take 20 ms, beside a host that needs 3 for each; no time passes."""

    block, host = 20.0, 3.0

    def __init__(self, programs):
        self.now, self.free, self.gaps = 0.0, None, []
        self.decode, programs.decode = programs.decode, self.begin
        self.fetch, programs.fetch = programs.fetch, self.end

    def begin(self, *given):
        if self.free is not None:
            self.gaps.append(max(self.now - self.free, 0.0))
        self.free = max(self.now, self.free or 0.0) + self.block
        after, block = self.decode(*given)
        return after, (self.free, block)

    def end(self, timed: tuple[float, Block]):
        ends, block = timed
        self.now = max(self.now, ends) + self.host
        return self.fetch(block)


def test_the_device_does_not_wait_for_the_host():
    """But at the end, where what is under way must be the last of all."""
    asked = [request(PROMPT[:n], (n,), max_tokens=5 * STEPS) for n in range(3, 7)]
    gaps = []
    for engine in pair():
        device = Device(engine.programs)
        engine.generate(asked)
        gaps.append(device.gaps)
    assert gaps == [[Device.host] * 4, [0.0] * 4]  # five blocks of eight tokens


def test_of_a_cpu_each_block_is_fetched_before_the_next():
    assert not make(ahead=None).programs.ahead
    assert make(ahead=None, platform="tpu", room=0).programs.ahead
    shrinks = make(ahead=None, platform="tpu", shrink=True, room=0)
    assert np.array_equal(shrinks.programs.sizes(), [4])
