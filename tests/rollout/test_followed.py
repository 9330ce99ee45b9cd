"""An engine that others follow: on devices of their own in one process, which then hold the same,
and in jobs, whose programs run over the devices of two processes."""

import multiprocessing
import pickle
import signal
import threading

import jax
import numpy as np
import pytest

from jaxrl.parallel import make_mesh
from jaxrl.rollout.native.engine import NativeEngine
from jaxrl.rollout.native.followed import Followers, FollowingEngine, LeadingEngine, phase_of
from jaxrl.rollout.protocol import Request, Sampling
from tests.jobs import finish, run, start
from tests.rollout.test_native import CONFIGS, random_params

LLAMA = CONFIGS["llama"]
# 4 rows on pages of 64; blocks of 4 tokens, each begun before the last is there
OPTIONS = {"max_num_seqs": 4, "steps_per_dispatch": 4, "ahead": True}
ASKED = [
    Request(tuple(range(1, 4 + i)), tuple((i, j) for j in range(3)), Sampling(max_tokens=12))
    for i in range(3)
]
# For four rows of up to 123 tokens, two pages each, there are 7 pages: one must make room.
LONG = Request((1, 2, 3), tuple((9, j) for j in range(4)), Sampling(max_tokens=120))
PAGES = 7


class Both:
    """A leader on two devices, and who follows it on two others, in a thread."""

    def __init__(self):
        leads, follows = multiprocessing.Pipe()
        meshes = [make_mesh(devices=jax.devices()[i : i + 2], tensor=2) for i in (0, 2)]
        self.stream = leads
        self.follower = FollowingEngine(LLAMA, meshes[1], 0, follows)
        self.leader = LeadingEngine(LLAMA, meshes[0], followers=Followers({1: leads}), **OPTIONS)
        self.params = random_params(LLAMA)

    def do(self, call):
        """Call it on both, each in its thread, as two processes do at one place of a program."""
        thread = threading.Thread(target=call, args=(self.follower,))
        thread.start()
        found = call(self.leader)
        thread.join(60)
        assert not thread.is_alive()
        return found


def sampled(engine):
    with phase_of(engine) as samples:
        if samples:
            return engine.generate(ASKED)
    return None


@pytest.fixture
def both():
    both = Both()
    both.do(lambda engine: engine.update_weights(both.params, 1))
    both.leader.programs._most_pages = both.follower._programs._most_pages = PAGES
    both.do(lambda engine: engine.warm_up([*ASKED, LONG]))
    return both


def held(engine):
    programs = engine.programs if isinstance(engine, LeadingEngine) else engine._programs
    return jax.device_get((programs.params, programs._cache))


def test_followers_have_on_their_devices_what_the_leader_has(both):
    """Bit for bit, after blocks that go on from one another, whose rows join and leave."""
    found = both.do(sampled)
    jax.tree.map(np.testing.assert_array_equal, held(both.follower), held(both.leader))
    alone = NativeEngine(LLAMA, make_mesh(devices=jax.devices()[:2], tensor=2), **OPTIONS)
    alone.update_weights(both.params, 1)
    alone.programs._most_pages = PAGES
    alone.warm_up([LONG])
    assert found == alone.generate(ASKED)
    both.do(lambda engine: engine.sleep())
    assert held(both.follower) == held(both.leader) == (None, None)


def test_what_makes_room_comes_back_on_all(both):
    """A row waits in host memory."""
    first = both.do(sampled)

    def generate(engine):
        with phase_of(engine) as samples:
            return engine.generate([LONG]) if samples else None

    both.do(generate)
    assert both.leader.suspended > 0
    jax.tree.map(np.testing.assert_array_equal, held(both.follower), held(both.leader))
    assert both.do(sampled) == first


def test_what_is_in_flight_at_the_end_of_a_phase_is_aborted(both):
    """Nothing of the engine may come between the collectives of training."""

    def fails(engine):
        with phase_of(engine) as samples:
            if samples:
                futures.extend(engine.submit(ASKED))
                raise ValueError("a reward")

    futures = []
    thread = threading.Thread(target=fails, args=(both.follower,))
    thread.start()
    with pytest.raises(ValueError, match="a reward"):
        fails(both.leader)
    thread.join(60)
    assert not thread.is_alive()
    assert all(future.done() for group in futures for future in group)
    assert both.do(sampled) is not None


def test_a_call_that_does_not_come_is_an_error():
    leads, follows = multiprocessing.Pipe()
    follower = FollowingEngine(LLAMA, make_mesh(devices=jax.devices()[:1]), 0, follows)
    leads.send((1, "drop", (), {"weights": False}))
    with pytest.raises(RuntimeError, match="call 0 of process 0 did not come"):
        follower.sleep()
    assert leads.recv() == "RuntimeError: call 0 of process 0 did not come"  # and the leader knows


def test_a_leader_that_is_gone_ends_who_follows_it():
    leads, follows = multiprocessing.Pipe()
    follower = FollowingEngine(LLAMA, make_mesh(devices=jax.devices()[:1]), 0, follows)
    leads.close()
    with pytest.raises(ConnectionError, match="process 0, which this one follows for its"):
        follower.sleep()


def test_a_follower_that_is_gone_is_named(both):
    both.follower._stream.close()
    with pytest.raises(ConnectionError, match="process 1, which follows this engine, is gone"):
        for _ in range(3):  # the first may yet be sent
            both.leader.sleep()


def test_who_follows_does_not_sample(both):
    with pytest.raises(RuntimeError, match="process 0 samples; this one follows it"):
        both.follower.generate(ASKED)
    with phase_of(NativeEngine(LLAMA, make_mesh(devices=jax.devices()[:1]))) as samples:
        assert samples


@pytest.mark.slow  # four processes
@pytest.mark.parametrize("ahead", [False, True])
def test_two_processes_sample_as_one(tmp_path, ahead):
    """Two engines of 2 processes x 2 devices with tensor 4, of weights that are spread over all."""
    argv = ["-m", "tests.rollout.spanning_job", str(tmp_path), str(int(ahead))]
    for count, devices in ((1, 4), (4, 2)):
        for ended in run(argv, count, devices=devices):
            assert ended.status == 0, ended.error[-3000:]
    [alone], job = (pickle.loads((tmp_path / f"of_{n}").read_bytes()) for n in (1, 4))
    assert job[1] is job[3] is None
    for found in job[0], job[2]:
        for mine, theirs in zip(alone, found, strict=True):
            for x, y in zip(mine, theirs, strict=True):
                assert x.tokens == y.tokens
                np.testing.assert_allclose(x.log_probs, y.log_probs, rtol=1e-5, atol=1e-6)


@pytest.mark.slow  # four processes
@pytest.mark.parametrize(("victim", "other"), [(3, 2), (2, 3)])
def test_one_that_is_killed_ends_all(tmp_path, victim, other):
    """Follower or leader, and whoever shares its engine says so; none waits."""
    argv = ["-m", "tests.rollout.spanning_job", str(tmp_path), "0", str(victim)]
    ended = finish(start(argv, 4, devices=2), seconds=200)
    assert ended[victim].status == -signal.SIGKILL
    assert all(process.status != 0 for process in ended)
    assert ended[other].status == 70  # to be started again
    said = "process 3, which follows this engine, is gone" if other == 2 else "process 2, which"
    assert said in ended[other].error
