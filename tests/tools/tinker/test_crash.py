"""The server is killed while clients train: each ends as if nothing had happened."""

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from tinker import types

from jaxrl.tools.tinker import states
from jaxrl.tools.tinker.build import make_server
from tests.tools.tinker.serving import CHANGES, KEY, client, config, datum, serving, trainer

PROMPT = types.ModelInput.from_ints([3, 1, 4])


class Process:
    """A server in a process of its own, at one port for all its lives."""

    def __init__(self, root):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        changes = CHANGES | {"tinker.root": str(root), "tinker.snapshot_calls": 4}
        changes["generator.inference_engine.http_endpoint_port"] = port
        self.url = f"http://127.0.0.1:{port}"
        self.command = [sys.executable, "-m", "jaxrl.tinker", "--config=configs/quickstart.py"]
        self.command += [f"--config.{name}={value!r}" for name, value in changes.items()]
        self.running = None

    def start(self):
        self.running = subprocess.Popen(self.command, env=os.environ | {"JAX_PLATFORMS": "cpu"})
        request = urllib.request.Request(f"{self.url}/api/v1/healthz", headers={"X-API-Key": KEY})
        for _ in range(600):
            assert self.running.poll() is None
            try:
                urllib.request.urlopen(request, timeout=5)
                return
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                time.sleep(0.2)
        raise AssertionError("it did not start")

    def kill(self):
        self.running.send_signal(signal.SIGKILL)
        self.running.wait()


def train(url, number, steps, pause=0.0, acknowledged=None):
    """What one client does and is told, and the path of the last checkpoint.

    `acknowledged` is set after the first step."""
    told, rng = [], np.random.default_rng(number)
    with client(url, f"{KEY}{number}") as service:
        model = trainer(service, seed=number)
        for step in range(steps):
            tokens = rng.integers(0, 40, (3, 12)).tolist()
            data = [datum(row, weights=[1.0] * 11) for row in tokens]
            halves = [
                model.forward_backward(half, "cross_entropy") for half in (data[:1], data[1:])
            ]
            update = model.optim_step(types.AdamParams(learning_rate=1e-2))
            told += [half.result().metrics for half in halves]
            told.append(update.result().metrics)
            if step % 3 == 2:
                sampler = model.save_weights_and_get_sampling_client().result()
                params = types.SamplingParams(max_tokens=5, seed=step)
                drawn = sampler.sample(prompt=PROMPT, num_samples=2, sampling_params=params)
                told += [(s.tokens, s.logprobs) for s in drawn.result().sequences]
            if acknowledged is not None:
                acknowledged.set()
            time.sleep(pause)
        return told, model.save_state("end").result().path


def ends(root, paths):
    """The checkpoints that clients have written, as arrays."""
    found = []
    for path in paths:
        model, folder, name = path.removeprefix("tinker://").split("/")
        file = root / "checkpoints" / model / folder / f"{name}.safetensors"
        found.append(states.read(file)[0])
    return found


def test_a_program_that_fails_ends_the_service_and_is_left_out_when_it_begins_again(tmp_path):
    one = datum([1, 2, 3, 4], weights=[1.0] * 3)
    with serving(tmp_path) as server:
        run = server.service.tenants.run

        def fails(tiles, *, learns):
            if learns and len(tiles) == 1 and float(tiles[0].inputs["weights"].max()) == 7:
                raise MemoryError("no room")
            return run(tiles, learns=learns)

        server.service.tenants.run = fails
        with contextlib.suppress(RuntimeError), client(server) as service:
            model = trainer(service)
            first = model.forward_backward([one], "cross_entropy").result().metrics
            model.forward_backward([datum([1, 2], weights=[7.0])], "cross_entropy")
            with pytest.raises(MemoryError, match="no room"):
                server.join()
            name, session = model.model_id, service.holder.get_session_id()
            service.holder.close()  # there is nobody to tell that the session is over
    with serving(tmp_path) as server:
        journal = server.service.journal
        rows = journal.rows("SELECT number, state, answer FROM calls WHERE target = ?", name)
        states_of = {number: state for number, state, _ in rows}
        assert states_of == {0: 1, 1: 1, 2: 2}
        assert b"no room" in rows[2][2]
        assert server.service._models[name].next in (0, 1, 2, 3)
        deadline = time.monotonic() + 30
        while server.service._models[name].next < 3 and time.monotonic() < deadline:
            time.sleep(0.1)
        found = server.service.tenants.take(server.service._models[name].slot)
        assert any(pair["b"].any() for pair in found.gradients.values())
        assert first["loss:sum"] > 0
        server.service.end(session)
    for what, change in (("base", {"trainer__seed": 99}), ("max_rank", {"tinker__max_rank": 4})):
        with pytest.raises(ValueError, match=f"is of a service with another {what}"):
            make_server(config(tmp_path, **change))


def test_what_does_not_fit_or_cannot_be_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"need [\d.]+ GiB, [\d.]+ more than a device has"):
        make_server(config(tmp_path, tinker__adapters=10**6))
    with pytest.raises(ValueError, match="trainer.exact='full': an engine whose rows have adap"):
        make_server(config(tmp_path, trainer__exact="full"))


def undisturbed(root, clients, steps):
    """What clients are told by a service that nobody kills, and the checkpoints they write."""
    with serving(root) as server, ThreadPoolExecutor(clients) as pool:
        told, paths = zip(
            *pool.map(lambda n: train(server.url, n, steps), range(clients)), strict=True
        )
        return told, ends(root, paths)


@pytest.mark.parametrize(
    ("kills", "number", "steps", "pause"),
    [(1, 2, 3, 1.0), pytest.param(20, 4, 6, 3.0, marks=pytest.mark.slow)],
)
def test_what_was_acknowledged_survives_the_server(tmp_path, kills, number, steps, pause):
    expected = undisturbed(tmp_path / "undisturbed", number, steps)
    draw, server = random.Random(kills), Process(tmp_path)
    server.start()
    try:
        with ThreadPoolExecutor(number) as pool:
            first = threading.Event()
            clients = [
                pool.submit(train, server.url, n, steps, pause, first) for n in range(number)
            ]
            assert first.wait(300)
            for _ in range(kills):
                time.sleep(draw.uniform(0.2, pause))
                if all(one.done() for one in clients):
                    break
                server.kill()
                server.start()
            told, paths = zip(*(one.result(timeout=500) for one in clients), strict=True)
    finally:
        server.kill()
    assert told == expected[0]
    for found, alone in zip(ends(tmp_path, paths), expected[1], strict=True):
        assert found.keys() == alone.keys()
        for part in found:
            np.testing.assert_equal(found[part], alone[part])
