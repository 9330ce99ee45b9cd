"""The driver over an engine of another make, written in JetStream's style."""

import threading
from concurrent.futures import CancelledError
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.rollout.jetstream.driver import JetStreamDriver
from jaxrl.rollout.protocol import Request, Sampling


class Counter:
    """The next token is the last one plus the weight.

    No log-probs, no bulk_insert, no free_resource; inserting uses up prefix and state, as engines
    that donate them do.
    """

    max_concurrent_decodes, max_prefill_length, samples_per_slot = 2, 16, 1

    def __init__(self):
        self.steps, self.gate = 0, threading.Event()
        self.gate.set()
        self.reached = threading.Event()

    def load_params(self, params=None):
        return params

    def init_decode_state(self):
        return {"last": jnp.zeros(2, jnp.int32), "drawn": jnp.zeros(2, jnp.int32)}

    def prefill(self, *, params, padded_tokens, true_length):
        assert padded_tokens.shape == (16,)
        first = padded_tokens[true_length - 1] + params
        row = np.array([[first, 1, 1]], np.int32)
        return {"first": jnp.int32(first)}, result(row)

    def insert(self, prefix, decode_state, slot, request_id=None):
        first = int(prefix["first"])
        state = {
            "last": decode_state["last"].at[slot].set(first),
            "drawn": decode_state["drawn"].at[slot].set(1),
        }
        for used in jax.tree.leaves((prefix, decode_state)):
            used.delete()
        return state

    def generate(self, params, decode_state):
        self.steps += 1
        if self.steps == 3:
            self.reached.set()
            self.gate.wait(30)
        last, drawn = decode_state["last"] + params, decode_state["drawn"] + 1
        for used in jax.tree.leaves(decode_state):
            used.delete()
        data = np.stack([last, np.ones_like(last), drawn], axis=1)
        return {"last": last, "drawn": drawn}, result(data)


def result(data):
    """As a third party's class: nothing but the fields that JetStream's has."""
    return SimpleNamespace(
        data=jnp.asarray(data),
        tokens_idx=(0, 1),
        valid_idx=(1, 2),
        length_idx=(2, 3),
        samples_per_slot=1,
        copy_to_host_async=lambda: None,
    )


def make(engine=None, **options):
    driver = JetStreamDriver(engine or Counter(), **options)
    driver.update_weights(1, 7)
    return driver


def ask(last, samples=1, **sampling):
    options = {"max_tokens": 5, **sampling}
    return Request((4, last), tuple((0, n) for n in range(samples)), Sampling(**options))


def test_an_engine_without_log_probs_and_bulk_insert():
    driver = make()
    found = driver.generate([ask(10, 3), ask(20, 1, stop_token_ids=(23,))])
    assert [[c.tokens for c in group] for group in found] == [
        [[11, 12, 13, 14, 15]] * 3,  # 10 + 1, + 1, ...; three samples over two slots
        [[21, 22, 23]],
    ]
    assert [c.stop_reason for group in found for c in group] == ["length"] * 3 + ["stop"]
    assert all(c.log_probs == [] and set(c.versions) == {7} for group in found for c in group)
    assert driver.prefills == 4  # one for each sample: its prefix holds its first token


def test_stop_strings_are_looked_for_on_the_host():
    driver = make(decode_text=lambda ids: ",".join(map(str, ids)))
    (completion,) = driver.generate([ask(10, stop=("12,13",))])[0]
    assert (completion.tokens, completion.stop_string) == ([11, 12, 13], "12,13")


def test_weights_are_swapped_in_mid_run():
    engine = Counter()
    driver = make(engine)
    engine.gate.clear()
    ((future,),) = driver.submit([ask(10, max_tokens=7)])
    assert engine.reached.wait(30)  # in its third step, which draws the fourth token
    swap = threading.Thread(target=driver.update_weights, args=(100, 8))
    swap.start()
    while not driver._door.locked():  # until the swap waits for this turn to end
        pass
    engine.gate.set()
    swap.join(30)
    completion = future.result(30)
    assert completion.tokens == [11, 12, 13, 14, 114, 214, 314]
    assert completion.versions == [7, 7, 7, 7, 8, 8, 8]
    assert completion.context_versions == [7] * 7  # it goes on with its cache


def test_cancelling_frees_the_slot():
    class Freeing(Counter):
        def free_resource(self, slot):
            freed.append(slot)

    freed, engine = [], Freeing()
    driver = make(engine)
    engine.gate.clear()
    (cancelled,), (kept,) = driver.submit([ask(10, max_tokens=9), ask(20, max_tokens=9)])
    assert engine.reached.wait(30)
    cancelled.cancel()
    engine.gate.set()
    assert driver.generate([ask(30)])[0][0].tokens == [31, 32, 33, 34, 35]
    assert freed[0] == 0 and engine.steps < 20
    assert kept.result(30).tokens == list(range(21, 30))
    with pytest.raises(CancelledError):
        cancelled.result(1)


def test_a_failed_step_reaches_who_waits_and_the_next_request_is_served():
    class Failing(Counter):
        def generate(self, params, decode_state):
            if self.steps == 1:
                self.steps += 1
                jax.tree.map(lambda x: x.delete(), decode_state)
                raise RuntimeError("out of memory")
            return super().generate(params, decode_state)

    driver = make(Failing())
    with pytest.raises(RuntimeError, match="out of memory"):
        driver.generate([ask(10)])
    assert driver.generate([ask(10)])[0][0].tokens == [11, 12, 13, 14, 15]


def test_what_the_driver_refuses():
    driver = make(sampling={"top_k": 5})
    assert driver.generate([ask(10, top_k=5)])
    with pytest.raises(ValueError, match=r"top_k=-1: this JetStream engine .* top_k=5; ask for"):
        driver.submit([ask(10)])
    with pytest.raises(ValueError, match="min_tokens=2"):
        driver.submit([ask(10, top_k=5, min_tokens=2)])
    with pytest.raises(ValueError, match="raw_log_probs=True: .*; leave it at that"):
        driver.submit([ask(10, top_k=5, raw_log_probs=True)])
    with pytest.raises(ValueError, match="17 tokens is longer than the engine's max_prefill"):
        driver.submit([Request((1,) * 17, ((0, 0),), Sampling(5, top_k=5))])
    with pytest.raises(ValueError, match="SimpleNamespace is no JetStream engine: it has no load"):
        JetStreamDriver(SimpleNamespace())

    class Fixed(Counter):
        def load_params(self):
            return 1

    with pytest.raises(ValueError, match="Fixed.load_params takes no parameters"):
        JetStreamDriver(Fixed())
    converted = make(Fixed(), convert_params=lambda params: jnp.int32(10 * params))
    assert converted.generate([ask(10)])[0][0].tokens == [20, 30, 40, 50, 60]


def test_sleep_drops_the_weights():
    driver = make()
    driver.sleep()
    with pytest.raises(RuntimeError, match="no weights"):
        driver.submit([ask(10)])
    driver.update_weights(2, 9)
    assert driver.generate([ask(10)])[0][0].tokens == [12, 14, 16, 18, 20]
