"""Many models on few places of an engine that draws ahead; clients that retry; a service that dies.

Without HTTP: a service is asked by its `accept`, as its app does. A kill closes its journal, so
that nothing of what it does from there on is known to the next one.
"""

import collections
import dataclasses
import json
import random
import sqlite3
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from jaxrl.rollout.protocol import Adapter
from jaxrl.tools.tinker import bodies, states
from jaxrl.tools.tinker.build import make_server
from jaxrl.tools.tinker.journal import DONE, WAITS, Call, Reused
from jaxrl.tools.tinker.samplers import Prompt, _key, sample_response
from jaxrl.tools.tinker.wire import tinker_pb2 as wire
from tests.tools.tinker.serving import config

SNAPSHOT = 4  # calls of a model after which it is written
LATER = 1e12  # seconds: after all that is done here
LORA = {"rank": 4, "train_unembed": True, "train_mlp": True, "train_attn": True}
IN_FLIGHT = 6  # calls of a client


def keys_of(name, samples):
    return [_key(name, number) for number in range(samples)]


class Lives:
    """A service that is killed and begun again, as its clients know it.

    Attributes:
        lives: of each, the calls that were answered before, and the keys that its engine was asked
            to draw with.
    """

    def __init__(self, root, **changes):
        ahead = {"generator__inference_engine__engine_init_kwargs": {"ahead": True}}
        self.config = config(root, tinker__snapshot_calls=SNAPSHOT, **ahead, **changes)
        self.lives = []
        self.begin()

    def begin(self):
        service, asked = make_server(self.config).service, []
        engine, submit = service.samplers.engine, service.samplers.engine.submit
        assert engine.programs.ahead

        def noted(requests):
            asked.extend(key for request in requests for key in request.keys)
            return submit(requests)

        engine.submit = noted
        sql = "SELECT id FROM calls WHERE kind = 'sample' AND state != 0"
        self.lives.append(({name for (name,) in service.journal.rows(sql)}, asked))
        service.start(lambda name: None)
        self.service = service

    def end(self):
        def dead(requests):
            raise RuntimeError("the service is dead")

        service = self.service
        service.journal.close()
        service.stop()
        service.samplers.engine.submit = dead
        service.samplers.engine.abort()

    def whoever_lives(self, ask):
        """What the service says, or the next one where it is killed meanwhile."""
        while True:
            try:
                return ask(self.service)
            except sqlite3.ProgrammingError:  # its journal is closed
                time.sleep(0.01)

    def answer(self, call):
        for _ in range(60_000):
            found = self.whoever_lives(lambda one: one.journal.answer(call.id, call.owner))
            if found[1] != WAITS:
                assert found[1] == DONE, found
                return found[2]
            time.sleep(0.01)
        raise AssertionError(f"{call.id} is not answered")


class Client:
    """A client with models of its own, which it updates and samples from.

    Attributes:
        told: each call for samples that it made, the sampler's checkpoint, and the answer.
    """

    def __init__(self, lives, number, models):
        self.lives, self.owner, self.draw = lives, f"owner-{number}", random.Random(number)
        self.models = [f"session-{number}:train:{n}" for n in range(models)]
        self.numbers = collections.Counter()  # calls of each target
        self.opened, self.samplers = 0, {}  # of each model, the newest
        self.told, self.answered = [], 0

    def ask(self, kind, target, body, about=None):
        number = self.numbers[target]
        self.numbers[target] += 1
        call = Call(f"{target}:{number}", self.owner, target, number, kind, body(number))
        for _ in range(1 if self.draw.random() < 0.7 else 3):  # it has not heard, and asks again
            self.lives.whoever_lives(lambda one: one.accept(call, about))
        if self.draw.random() < 0.1:
            with pytest.raises(Reused, match="was another call"):
                other = call._replace(body=b"another")
                self.lives.whoever_lives(lambda one: one.accept(other, about))
        return call

    def create(self, model, seed):
        about = {"lora": LORA | {"seed": seed}, "metadata": {}}
        self.ask("create_model", model, lambda _: b"{}", about)
        self.update(model)

    def update(self, model):
        """Train a model, and open a sampler of what it is then."""

        def data(number):
            ids = np.array(self.draw.choices(range(40), k=9), "<i4")
            message = wire.ForwardBackwardRequest(model_id=model, seq_id=number)
            message.loss_fn = "cross_entropy"
            one = message.data.add()
            one.model_input.add().encoded_text.tokens = ids[:-1].tobytes()
            targets = one.loss_fn_inputs["target_tokens"]
            targets.dense, targets.dtype = ids[1:].astype("<i8").tobytes(), wire.DTYPE_INT64
            return message.SerializeToString()

        def named(**fields):
            fields["model_id"] = model
            return lambda number: json.dumps(fields | {"seq_id": number}).encode()

        self.opened += 1
        where = {"sampling_session_seq_id": self.opened}
        self.ask("forward_backward", model, data)
        self.ask("optim_step", model, named(adam_params={"learning_rate": 0.03}))
        saved = self.ask("save_weights_for_sampler", model, named(**where))
        name = json.loads(self.lives.answer(saved))["sampling_session_id"]
        self.samplers[model] = name
        self.answered += 3

    def sample(self, model):
        prompt = self.draw.choices(range(40), k=self.draw.randint(1, 20))
        count, tokens = self.draw.randint(1, 2), self.draw.randint(1, 70)
        name = self.samplers[model]

        def body(number):
            chunks = [{"type": "encoded_text", "tokens": prompt}]
            asked = {"prompt": {"chunks": chunks}, "num_samples": count}
            asked |= {"sampling_params": {"max_tokens": tokens}}
            return json.dumps(asked | {"sampling_session_id": name, "seq_id": number}).encode()

        return self.ask("sample", name, body)

    def work(self, calls):
        """Make so many calls, some of them at a time."""
        for seed, model in enumerate(self.models):
            self.create(model, 100 * int(self.owner.partition("-")[2]) + seed)
        waiting = collections.deque()
        while sum(self.numbers[model] for model in self.models) + len(self.told) < calls:
            model = self.draw.choice(self.models)
            if self.draw.random() < 0.1:
                self.update(model)
                continue
            waiting.append(len(self.told))
            self.told.append([self.sample(model), None])
            if len(waiting) == IN_FLIGHT:
                self.take(waiting.popleft())
        while waiting:
            self.take(waiting.popleft())

    def take(self, number):
        self.told[number][1] = self.lives.answer(self.told[number][0])
        self.answered += 1


@pytest.mark.parametrize(
    ("models", "places", "number", "calls", "kills"),
    [(6, 3, 3, 60, 1), pytest.param(40, 4, 8, 2_000, 6, marks=pytest.mark.slow)],
)
def test_every_answer_is_by_its_own_model_and_each_call_is_drawn_once(
    tmp_path, models, places, number, calls, kills
):
    lives = Lives(tmp_path, tinker__samplers=places)
    clients = [Client(lives, n, models // number) for n in range(number)]
    with ThreadPoolExecutor(number) as pool:
        working = [pool.submit(one.work, calls // number) for one in clients]
        for kill in range(kills):
            enough = (kill + 1) * calls // (kills + 1)
            while sum(one.answered for one in clients) < enough and not all(
                one.done() for one in working
            ):
                time.sleep(0.01)
            lives.end()
            lives.begin()
        for one in working:
            one.result()
    told = [one for client in clients for one in client.told]
    assert sum(sum(client.numbers.values()) for client in clients) >= calls
    service, samples = lives.service, {}
    for call, _ in told:
        body = bodies.Sample.model_validate_json(call.body)
        samples[call.id] = keys_of(call.id, body.num_samples)

    # each once in a life, and in none after the one that has answered it
    drawn = set()
    for before, asked in lives.lives:
        assert len(set(asked)) == len(asked)
        assert not set(asked) & {key for name in before for key in samples[name]}
        drawn |= set(asked)
    assert drawn == {key for keys in samples.values() for key in keys}

    # as an engine draws that has this adapter alone, and does not draw ahead
    one = make_server(config(tmp_path / "alone", tinker__samplers=places)).service.samplers
    by_path = collections.defaultdict(list)
    for call, answer in told:
        by_path[service.sampled_path(call.target, call.owner)].append((call, answer))
    for path, given in by_path.items():
        parts = states.read(service.file_of(path))[0]
        one.engine.put_adapter(1, parts["adapters"], float(parts["scale"]))
        requests = [
            one._request(call, bodies.Sample.model_validate_json(call.body)) for call, _ in given
        ]
        alone = one.engine.generate(
            [dataclasses.replace(request, adapter=Adapter(path, 1)) for request in requests]
        )
        for (call, answer), completions in zip(given, alone, strict=True):
            assert answer == sample_response(completions, Prompt(), 0), call.id

    # what is kept of all that, when it is old
    service.journal.forget_answers(LATER)
    ((kept,),) = service.journal.rows("SELECT COUNT(*) FROM calls")
    assert kept <= len(by_path) + models * SNAPSHOT
    first = Call(f"{clients[0].models[0]}:1", "owner-0", clients[0].models[0], 1, "forward", b"")
    with pytest.raises(Reused, match="was done long ago"):
        service.accept(first)
    lives.end()
