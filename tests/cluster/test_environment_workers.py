"""Environments in Ray actors: the same trajectories as in threads, and what becomes of faults."""

import asyncio
import os
import re
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from pathlib import Path

import pytest

from jaxrl import config as cfg, envs
from jaxrl.cluster import environment_workers
from jaxrl.cluster.environment_workers import EnvironmentWorkers
from jaxrl.config import GeneratorConfig
from jaxrl.envs import Env
from jaxrl.rollout.conversations.conversation import ConversationGenerator, sample_key
from jaxrl.rollout.conversations.reward_terms import RewardTerms
from jaxrl.rollout.generator import generate_now
from jaxrl.rollout.protocol import Sampling
from jaxrl.train import BasePPOExp
from tests.rollout.scripted import ScriptedEngine, TalkingEnv, make_prompt
from tests.rollout.test_multi_turn import ASK, END, TOKENIZER
from tests.test_train import metric_lines, small

pytestmark = pytest.mark.usefixtures("cluster")
HERE, ROOT = __name__, Path(__file__).parents[2]
LIMIT = 2.0
TALK = make_prompt(TOKENIZER, "12", says=["ab", "c", None])
LOCK = threading.Lock()


class TermsEnv(TalkingEnv):
    """Terms by name, one of them by token; asynchronous."""

    async def step(self, action, tokens):
        await asyncio.sleep(0)
        step = super().step(action)
        return {**step, "reward": {"right": step["reward"], "calm": [-0.1] * len(tokens)}}


class CutEnv(TalkingEnv):
    """Lets the first character stand; what it notes cannot be pickled, and is read by nobody."""

    def step(self, action, stopped):
        step = super().step(action)
        note = {"lock": threading.Lock(), "stopped": stopped}
        return {**step, "postprocessed_action": action[:1], "metadata": note}


class FaultyEnv(TalkingEnv):
    """Does what the row's `fault` says in the second turn."""

    def step(self, action):
        if self.turns == 1:
            fault = self.extras["fault"]
            if fault == "raises":
                raise KeyError("no such door")
            if fault == "exits":
                sys.exit(3)
            if fault == "hangs":
                time.sleep(3600)
            if fault == "dies":
                os._exit(3)
            if fault == "keeps the lock":  # a regular expression that goes back without end
                re.match(r"(a+)+$", "a" * 60 + "b")
            if fault == "says nothing":
                return None
        return super().step(action)

    def get_metrics(self):
        return {"process": os.getpid()}


class LockedEnv(Env):
    """Cannot be sent to another process."""

    lock = LOCK

    def step(self, action):
        with LOCK:
            return {"observations": [], "reward": 0.0, "done": True, "metadata": {}}


def brevity(action, turn, done, extras):
    assert len(extras["says"]) >= turn
    return float(len(action) == 1) + 10.0 * done


async def places(tokens):
    return {"places": [float(i) for i in range(len(tokens))]}


def says(env, uid, **extras):
    given = {"says": ["ab", "c", None], **extras}
    return make_prompt(TOKENIZER, "12", uid=uid, env_class=f"{HERE}:{env}", **given)


def reply(tokens, key):
    """The answer of a turn depends on how many there were, and on the sample."""
    turn = list(tokens).count(ASK) - 1
    return [3 + key[0] % 5, 4, END] if turn == 0 else [5 + turn, END]


def converse(prompts, pool, **options):
    """The output, one trajectory for each prompt; pool None: in threads."""
    settings = GeneratorConfig(max_turns=5)
    given = {"max_env_workers": 4, "env_timeout_seconds": LIMIT, "pool": pool, **options}
    generator = ConversationGenerator(ScriptedEngine(reply), TOKENIZER, settings, **given)
    keys = [sample_key("test", i) for i in range(len(prompts))]
    sampling = Sampling(8, stop_token_ids=(END,))
    return generate_now(generator, {"prompts": prompts, "keys": keys, "sampling": sampling})


def untimed(output):
    metrics = dict(output["rollout_metrics"])
    assert metrics.pop("timing/environment") > 0
    return {**output, "rollout_metrics": metrics}


@pytest.fixture(scope="module", name="pool")
def pool_fixture(cluster):
    return EnvironmentWorkers(2, calls=4, timeout_seconds=LIMIT)


@pytest.mark.slow
def test_a_batch_is_the_same_as_in_threads(cluster, caplog):
    """Several turns, rewards by name and by token, functions, cut answers, errors: bit for bit.

    Nothing hangs here, so no call may run into a limit because the machine is busy.
    """
    pool = EnvironmentWorkers(2, calls=4, timeout_seconds=600.0)
    names = ["TermsEnv", "CutEnv", "FaultyEnv", "FaultyEnv", "FaultyEnv", "TermsEnv"]
    faults = ["", "", "raises", "exits", "says nothing", ""]
    prompts = [
        says(name, f"0:{i}", fault=fault)
        for i, (name, fault) in enumerate(zip(names, faults, strict=True))
    ]
    terms = RewardTerms({}, [f"{HERE}:brevity", f"{HERE}:places"])
    here = untimed(converse(prompts, None, reward_terms=terms, env_timeout_seconds=600.0))
    said_here = sorted(record.getMessage() for record in caplog.records)
    caplog.clear()
    there = untimed(converse(prompts, pool, reward_terms=terms))
    assert there == here
    assert said_here == sorted(record.getMessage() for record in caplog.records)
    assert here["stop_reasons"] == ["stop", "stop", *["env_error"] * 3, "stop"]
    # turn n: right n, calm -0.1 a token; brevity 1 for one character; places 0 1 2
    assert here["reward_terms"][0] == pytest.approx(
        {"right": 6.0, "calm": -0.7, "brevity": 12.0, "places": 5.0}
    )


def numbers_of_processes(pool, count):
    """Of `count` environments that live side by side: two calls of each."""

    async def ask():
        made = [await pool.make(f"{HERE}:FaultyEnv", {"says": [None]}) for _ in range(count)]
        for env in made:
            await env.init([])
        first, second = [[await env.get_metrics() for env in made] for _ in range(2)]
        for env in made:
            await env.close()
        assert first == second
        return [found["process"] for found in first]

    return asyncio.run(ask())


@pytest.mark.slow
def test_environments_stay_where_they_are_and_share_processes(pool):
    numbers = numbers_of_processes(pool, 6)
    assert os.getpid() not in numbers
    assert sorted(numbers.count(n) for n in set(numbers)) == [3, 3]


@pytest.mark.slow
def test_an_environment_of_a_script_needs_not_be_importable(pool, tmp_path, monkeypatch):
    source = """
        from jaxrl.envs import Env

        SECRET = "5"

        class Guess(Env):
            def step(self, action):
                right = float(action == SECRET)
                return {"observations": [], "reward": right, "done": True, "metadata": {}}
    """
    (tmp_path / "my_envs_of_ray.py").write_text(textwrap.dedent(source))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(envs.ENVS, "guess_of_ray", envs.load("my_envs_of_ray:Guess"))

    async def ask(env_class):
        env = await pool.make(env_class)
        assert (await env.init(["hello"])) == (["hello"], {})
        rewards = [(await env.step(x, [], True))["reward"] for x in ("5", "6")]
        await env.close()
        return rewards

    for env_class in ("my_envs_of_ray:Guess", "guess_of_ray"):
        assert asyncio.run(ask(env_class)) == [1.0, 0.0]


@pytest.mark.slow  # it waits until the time is up
def test_a_call_that_hangs_costs_its_own_conversation(pool, caplog):
    before = set(numbers_of_processes(pool, 2))
    prompts = [says("FaultyEnv", "0:0", fault="hangs"), TALK, TALK, TALK]
    output = converse(prompts, pool)
    assert output["stop_reasons"] == ["env_error", "stop", "stop", "stop"]
    assert "TimeoutError('no answer within 2 s')" in caplog.text
    after = set(numbers_of_processes(pool, 2))
    assert len(after) == 2 and len(after & before) == 1  # its process was replaced
    (gone,) = before - after
    assert ends(gone)


def test_a_process_that_dies_takes_its_environments_along_and_is_replaced(caplog):
    pool = EnvironmentWorkers(1, calls=4, timeout_seconds=LIMIT)
    bad = says("FaultyEnv", "0:0", fault="dies")
    with pytest.raises(RuntimeError, match=r"all 2 trajectories .*process \d+ of \S+ died: "):
        converse([bad, bad], pool)
    assert len(numbers_of_processes(pool, 1)) == 1
    assert converse([TALK], pool)["stop_reasons"] == ["stop"]


def ends(process):
    """Whether it is gone within a minute."""
    for _ in range(600):
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False


def test_what_cannot_be_sent_is_refused_before_the_run(cluster):
    config = cfg.resolve(cfg.TrainConfig())
    config.environment.skyrl_gym.ray_env_workers = 1
    config.environment.env_class = f"{HERE}:LockedEnv"
    with pytest.raises(ValueError, match=r"LockedEnv' cannot be pickled .*it captures .*lock"):
        environment_workers.pool_of_run(config)


def test_processes_that_sample_share_the_actors(cluster):
    config = cfg.resolve(cfg.TrainConfig())
    config.environment.skyrl_gym.ray_env_workers = 5
    assert environment_workers.pool_of_run(config, processes=2).count == 3
    config.generator.inference_engine.backend = "vllm"  # then one process samples
    assert environment_workers.pool_of_run(config, processes=2).count == 5


@pytest.mark.slow
def test_a_process_that_keeps_the_lock_is_ended(monkeypatch):
    """No thread of it can run, so that its other environments are lost with it."""
    monkeypatch.setattr(environment_workers, "_SILENT_SECONDS", 1.0)
    pool = EnvironmentWorkers(2, calls=4, timeout_seconds=LIMIT)
    numbers_of_processes(pool, 2)  # are up
    prompts = [says("FaultyEnv", "0:0", fault="keeps the lock"), TALK]
    output = converse(prompts, pool)
    assert output["stop_reasons"] == ["env_error", "stop"]
    assert converse([TALK, TALK], pool)["stop_reasons"] == ["stop", "stop"]


@pytest.mark.slow
def test_a_run_learns_the_same(tmp_path):
    short = {"trainer.max_training_steps": 2, "trainer.eval_interval": -1}
    short["environment.skyrl_gym.max_env_workers"] = 4
    here, there = tmp_path / "here", tmp_path / "there"
    BasePPOExp(small(here, **short)).run()
    BasePPOExp(small(there, **short, **{"environment.skyrl_gym.ray_env_workers": 2})).run()
    assert metric_lines(there) == metric_lines(here)


TWO_NODES = """
import asyncio
import time

import ray
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from jaxrl.cluster.environment_workers import EnvironmentWorkerError, EnvironmentWorkers
from jaxrl.envs import Env


class NodeEnv(Env):
    def step(self, action):
        self.turns += 1
        node = ray.get_runtime_context().get_node_id()
        return {"observations": [node], "reward": float(self.turns), "done": False}


def wait_for(node):
    there = NodeAffinitySchedulingStrategy(node, soft=False)
    for _ in range(60):  # until the first node knows of it
        try:
            ray.get(ray.remote(num_cpus=0)(int).options(scheduling_strategy=there).remote())
            return
        except ray.exceptions.TaskUnschedulableError:
            time.sleep(1)
    raise TimeoutError(node)


async def step(env):
    found = await env.step("", [], True)
    return found["observations"][0], found["reward"]


async def death(env):
    for _ in range(60):  # processes outlive their raylet by a while
        try:
            await step(env)
        except EnvironmentWorkerError as error:
            return str(error)
        await asyncio.sleep(1)


async def main():
    envs = [await pool.make("__main__:NodeEnv") for _ in range(4)]
    await asyncio.gather(*(env.init([]) for env in envs))
    places = [(await step(env))[0] for env in envs]
    assert sorted(places.count(node) for node in set(places)) == [2, 2], places
    cluster.remove_node(second, allow_graceful=False)
    lost = [env for env, place in zip(envs, places) if place == second.node_id]
    assert len(lost) == 2
    for env in envs:
        if env in lost:
            assert " died: " in await death(env)
        else:
            assert await step(env) == (head.node_id, 2.0)
        await env.close()
    fresh = [await pool.make("__main__:NodeEnv") for _ in range(2)]
    await asyncio.gather(*(env.init([]) for env in fresh))
    assert [await step(env) for env in fresh] == [(head.node_id, 1.0)] * 2
    print("all is well")


if __name__ == "__main__":
    cluster = Cluster()
    head, second = (cluster.add_node(num_cpus=1, include_dashboard=False) for _ in range(2))
    ray.init(address=cluster.address)
    wait_for(second.node_id)
    pool = EnvironmentWorkers(2, calls=4, timeout_seconds=60)
    try:
        asyncio.run(main())
    finally:
        ray.shutdown()
        cluster.shutdown()
"""


@pytest.mark.slow
def test_actors_are_spread_over_nodes_and_outlive_one(tmp_path):
    (tmp_path / "two_nodes.py").write_text(TWO_NODES)
    command = [sys.executable, str(tmp_path / "two_nodes.py")]
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # or others would join this cluster
        given = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_TMPDIR": folder}
        done = subprocess.run(command, check=False, capture_output=True, text=True, env=given)
    assert "all is well" in done.stdout, done.stdout + done.stderr
