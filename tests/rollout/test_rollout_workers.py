"""Runs whose samples come from workers that they start, and that die."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest

from jaxrl import config as cfg
from jaxrl.rollout import build_remote
from jaxrl.rollout.build_remote import worker_config
from jaxrl.rollout.remote.http_client import RemoteServer, ServerError
from jaxrl.rollout.remote.worker import OwnServer
from jaxrl.rollout.weights.share import Share, Shares
from jaxrl.rollout.weights.transfer import WeightTransfer
from jaxrl.train import BasePPOExp
from tests.test_train import assert_bitwise_equal, small

WORKERS = {
    "trainer.placement.colocate_all": False,
    "trainer.placement.rollout_num_nodes": 2,
    "generator.inference_engine.weight_transport": "transfer",
    "trainer.eval_interval": -1,
    "trainer.hf_save_interval": -1,
    "trainer.dump_data_batch": False,
}


def test_workers_are_told_to_compute_alike(tmp_path):
    config = cfg.resolve(small(tmp_path, **WORKERS))
    cfg.validate(config, num_devices=8)
    told = cfg.to_train_config(worker_config(config))
    engine = told.generator.inference_engine
    # 16 samples over two workers, which may come to one; its slots are as many all the same
    assert (told.serve.max_num_seqs, told.serve.max_samples) == (8, 1024)
    assert engine.engine_init_kwargs["shrink"] is False
    assert cfg.in_process(told) and not cfg.in_process(config)
    assert told.serve.receive_weights


def trained(folder, disturb=None, **overrides):
    """Workers have one device each, this process its eight."""
    jax.devices()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"].replace("_count=8", "_count=1"))
        run = BasePPOExp(small(folder, **{**WORKERS, **overrides}))
        trainer = run.build()
        if disturb:
            disturb(trainer)
        run.train(trainer)
        if disturb:
            wait_for_all(trainer.engine)
        trainer.engine.close()
    return trainer


def wait_for_all(engine):
    """Until each server is in use; a run does not wait for one that is started again."""
    deadline = time.monotonic() + 300
    while not all(server.ready and server.version == 4 for server in engine.servers):
        assert time.monotonic() < deadline, engine.describe()
        time.sleep(0.1)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("undisturbed"))


@pytest.mark.slow  # whole runs
def test_a_worker_killed_in_mid_generation_is_replaced_and_nothing_changes(
    undisturbed, tmp_path, monkeypatch
):
    dead, complete = [], RemoteServer.complete

    def disturb(trainer):
        engine = trainer.engine
        victim = engine.servers[0]

        async def completing(server, request, url=None):
            if server is not victim or server.version != 1 or dead:
                return await complete(server, request, url)
            dead.append(engine.hosts[victim]._process)
            os.killpg(dead[0].pid, signal.SIGSTOP)  # it has the request, and no answer yet
            asked = asyncio.ensure_future(complete(server, request, url))
            await asyncio.sleep(0.3)
            assert not asked.done()
            os.killpg(dead[0].pid, signal.SIGKILL)
            return await asked

        monkeypatch.setattr(RemoteServer, "complete", completing)

    trainer = trained(tmp_path, disturb)
    host = trainer.engine.hosts[trainer.engine.servers[0]]
    assert dead[0].wait() == -signal.SIGKILL and host._process.pid != dead[0].pid
    assert_bitwise_equal(trainer.state.params, undisturbed.state.params)


def test_workers_pull_their_weights_whatever_the_config_names(tmp_path):
    """No folder is written for them; both words of the field stay valid."""
    for transport in ("folder", "transfer"):
        changes = {**WORKERS, "generator.inference_engine.weight_transport": transport}
        config = cfg.resolve(small(tmp_path, **changes))
        cfg.validate(config, num_devices=8)
        assert cfg.by_transfer(config)
        shares = Shares(Share(delta=False))
        source = build_remote._source(config, None, None, shares)  # pyright: ignore
        assert isinstance(source, WeightTransfer) and source.shares is shares
        told = cfg.to_train_config(worker_config(config))
        assert told.serve.receive_weights and told.serve.weights_root is None


DRIVER = """
import asyncio, json, pathlib, sys, time
from jaxrl.rollout.remote.worker import OwnServer
server = OwnServer(json.loads(pathlib.Path(sys.argv[1]).read_text()), pathlib.Path(sys.argv[2]))
asyncio.run(server.ensure(None))
print(server._process.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.slow  # another process
def test_a_worker_ends_with_a_driver_that_is_killed(tmp_path):
    config = cfg.resolve(small(tmp_path, **WORKERS))
    (tmp_path / "config.json").write_text(json.dumps(worker_config(config)))
    command = [sys.executable, "-c", DRIVER, str(tmp_path / "config.json"), str(tmp_path / "w")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as driver:
        worker = Path("/proc", driver.stdout.readline().strip())
        assert worker.is_dir()
        driver.kill()
    deadline = time.monotonic() + 60
    while worker.is_dir() and "State:\tZ" not in (worker / "status").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.slow  # another process
def test_a_worker_that_cannot_start_says_why(tmp_path):
    told = worker_config(cfg.resolve(small(tmp_path, **WORKERS)))
    told["trainer"]["policy"]["model"]["path"] = str(tmp_path / "nothing")
    server = OwnServer(told, tmp_path / "worker")
    with pytest.raises(
        ServerError, match=r"rollout server .* ended with status 2\. The end"
    ) as why:
        asyncio.run(server.ensure(None))
    assert str(tmp_path / "nothing") in str(why.value).splitlines()[-1]
    assert not why.value.retryable
