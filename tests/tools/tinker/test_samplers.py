"""Calls of more models than the engine has places for: each is drawn once, with its own adapter."""

import functools
import time
from concurrent.futures import Future

from jaxrl.rollout.protocol import Adapter, Completion, Request, Sampling
from jaxrl.tools.tinker import bodies
from jaxrl.tools.tinker.journal import Call
from jaxrl.tools.tinker.samplers import Prompt, Samplers, _key, sample_response
from tests.rollout.test_adapters import MODEL, drawn, engine

STEPS = 8  # of a block
PROMPT = (3, 1, 4, 2, 13)
SEEDS = {"X": 3, "Y": 7, "A": 8, "B": 9}  # of adapters
DONE = Completion([1], [0.0], "length", [0])


class Asking:
    """Ask for samples, and keep what is answered and what the engine is asked for."""

    def __init__(self, made, places):
        self.samplers = Samplers(made, places, (), MODEL.vocab_size, 128)
        self.answers, self.submitted, self._submit = [], [], made.submit
        made.submit = self.submit

    def submit(self, requests):
        self.submitted += [request.keys for request in requests]
        return self._submit(requests)

    def __call__(self, name, tokens):
        number = len(self.answers)
        chunks = [{"type": "encoded_text", "tokens": PROMPT}]
        body = {"prompt": {"chunks": chunks}, "sampling_params": {"max_tokens": tokens}}
        call = Call(f"call {number}", "owner", "sampler", number, "sample", b"")
        self.answers.append([])
        load = functools.partial(self.load, name)
        answered = self.answers[number].append
        body = bodies.Sample.model_validate(body)
        self.samplers.submit(call, body, name, load, Prompt(), answered)

    def load(self, name):
        return {"adapters": drawn(SEEDS[name]), "scale": 0.5}

    def wait(self):
        for _ in range(6_000):
            if all(self.answers):
                return
            time.sleep(0.01)
        raise AssertionError("a call is not answered")


def keys_of(number):
    return (_key(f"call {number}", 0),)


def test_each_call_is_drawn_once_with_its_own_adapter_where_blocks_begin_ahead():
    options = {"places": 3, "steps_per_dispatch": STEPS}
    made, alone = engine.__wrapped__(ahead=True, **options), engine.__wrapped__(**options)
    asked = Asking(made, places=3)  # of the base, and two
    calls = [("X", STEPS), ("Y", 2 * STEPS), ("X", STEPS), *((name, STEPS) for name in "ABA")]
    made.pause()
    for call in calls:
        asked(*call)
    # X has its tokens with the first block. Y has its own in the second, which is under way when A
    # is put where X was: the call that puts it has that block.
    made.resume()
    asked.wait()
    assert sorted(asked.submitted) == sorted(keys_of(number) for number in range(len(calls)))
    for number, (name, tokens) in enumerate(calls):
        alone.put_adapter(1, drawn(SEEDS[name]), 0.5)
        (found,) = alone.generate(
            [Request(PROMPT, keys_of(number), Sampling(tokens), adapter=Adapter(name, 1))]
        )
        assert asked.answers[number] == [sample_response(found, Prompt(), 0)], name


class AtOnce:
    """An engine whose samples are over when it returns them, but the first, which the test ends."""

    def __init__(self):
        self.first, self.at, self.drawn = Future(), {}, []

    def check(self, request):
        pass

    def put_adapter(self, place, adapters, scale):
        self.at[place] = adapters

    def submit(self, requests):
        (request,) = requests
        self.drawn.append((request.adapter.name, self.at[request.adapter.place]))
        if len(self.drawn) == 1:
            return [[self.first]]
        future = Future()
        future.set_result(DONE)
        return [[future]]


def test_a_call_that_is_over_at_once_begins_no_other_twice():
    made = AtOnce()
    asked = Asking(made, places=2)
    asked.load = lambda name: {"adapters": name, "scale": 1.0}
    for name in "XXAABA":
        asked(name, 1)
    assert made.drawn == [("X", "X")] * 2  # A waits for its place
    made.first.set_result(DONE)
    assert made.drawn == [(name, name) for name in "XXAABA"]
    assert [len(answers) for answers in asked.answers] == [1] * 6


def test_who_asks_for_an_adapter_while_another_takes_its_place_waits_for_it():
    made = AtOnce()
    made.first.set_result(DONE)
    asked = Asking(made, places=2)

    def load(name):
        if len(asked.answers) == 2:  # as another thread may
            asked("X", 1)
        return {"adapters": name, "scale": 1.0}

    asked.load = load
    for name in "XA":
        asked(name, 1)
    assert made.drawn == [("X", "X"), ("A", "A"), ("X", "X")]
    assert [len(answers) for answers in asked.answers] == [1] * 3
