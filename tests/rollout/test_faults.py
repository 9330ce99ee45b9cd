"""What happens to the engine in the middle of its work: nothing is lost, nothing comes twice."""

import random
import threading

import numpy as np
import pytest

from jaxrl.rollout.native.programs import Shape
from tests.rollout.test_engine import (
    PROMPT,
    between_turns,
    make,
    request,
    scores,
    shared,
    until_idle,
)
from tests.rollout.test_native import LLAMA, flat, random_params


@pytest.mark.parametrize("recompute", [True, False])
def test_weights_change_in_the_middle_of_a_prefill(recompute, monkeypatch):
    """A prompt of 40 in chunks of 8, one a turn; new weights after two of them."""
    monkeypatch.setattr("jaxrl.rollout.native.programs.SHAPES", {"cpu": Shape(16, 8, 1)})
    engine = make(recompute_kv_on_update=recompute, max_num_batched_tokens=8)
    new = random_params(LLAMA, 1)
    between_turns(engine, 2, lambda: engine.update_weights(new, 2))
    (completion,) = flat(engine.generate([request(max_tokens=20)]))
    assert completion.versions == [2] * 20
    difference = np.abs(completion.log_probs - scores(PROMPT, completion, seed=1)).max()
    assert (difference <= 1e-4) == recompute
    # all but the last token, and the 16 of two turns again
    assert engine.prefilled_tokens == len(PROMPT) - 1 + (16 if recompute else 0)


def test_a_storm_of_aborts_loses_and_repeats_nothing():
    """Eight threads submit, a ninth aborts; every sample ends once, with the tokens it would have
    had."""
    engine = make(4)
    asked = [
        request(PROMPT[n % 20 :], (n, n + 1000), max_tokens=1 + n % 24, temperature=0.9)
        for n in range(160)
    ]
    expected = flat(shared().generate(asked))
    ends = [[] for _ in range(2 * len(asked))]
    over = threading.Event()

    def submit(numbers):
        for n in numbers:
            for i, future in enumerate(engine.submit([asked[n]])[0]):
                future.add_done_callback(lambda f, at=2 * n + i: ends[at].append(f.result()))

    def abort():
        pauses = random.Random(0)
        while not over.wait(pauses.uniform(0.001, 0.02)):
            engine.abort()

    storm = threading.Thread(target=abort)
    threads = [threading.Thread(target=submit, args=(range(k, 160, 8),)) for k in range(8)]
    for thread in [storm, *threads]:
        thread.start()
    for thread in threads:
        thread.join()
    over.set()
    storm.join()
    engine.abort()
    until_idle(engine)
    assert [len(end) for end in ends] == [1] * 320
    reasons = {end.stop_reason for (end,) in ends}
    assert reasons <= {"abort", "length"} and "abort" in reasons
    for (end,), whole in zip(ends, expected, strict=True):
        assert end.tokens == whole.tokens[: len(end.tokens)]
        assert end.stop_reason == "abort" or len(end.tokens) == len(whole.tokens)
        assert len(end.tokens) == len(end.log_probs) == len(end.versions)
    assert not list(engine.table.live()) and not engine._queue
    (after,) = flat(engine.generate([request()]))  # and the engine lives
    assert after.tokens == flat(shared().generate([request()]))[0].tokens


def test_weights_change_again_and_again():
    """Each token agrees with the version that it says it is of."""
    engine = make(4, recompute_kv_on_update=True)
    over = threading.Event()

    def update():
        version = 1
        while not over.wait(0.01):
            version += 1
            engine.update_weights(random_params(LLAMA, version % 2), version)

    thread = threading.Thread(target=update)
    engine.update_weights(random_params(LLAMA, 1), 1)
    thread.start()
    samples = flat(engine.generate([request(keys=range(12), max_tokens=40)]))
    over.set()
    thread.join()
    for completion in samples:
        assert completion.versions == sorted(completion.versions)
        even, odd = (scores(PROMPT, completion, seed) for seed in (0, 1))
        theirs = np.where(np.array(completion.versions) % 2, odd, even)
        np.testing.assert_allclose(completion.log_probs, theirs, atol=1e-4)
    assert len({v for c in samples for v in c.versions}) > 2
