"""Weights that a server reads from a folder or a bucket, whole or as what changed."""

import asyncio
import os
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath

from jaxrl import config as cfg
from jaxrl.rollout.remote.engine import RemoteEngine, RemoteEngineError
from jaxrl.rollout.remote.http_client import RemoteOptions
from jaxrl.rollout.remote.probe import Probe, make_score
from jaxrl.rollout.remote.worker import OwnServer
from jaxrl.rollout.server.build import make_server
from jaxrl.rollout.weights import version_folder
from jaxrl.rollout.weights.version_folder import VersionFolder
from jaxrl.rollout.weights.versions import Index
from tests.rollout.buckets import empty_bucket
from tests.rollout.server.conftest import model_folder, serve_config
from tests.rollout.server.test_remote_engine import MODEL, PARAMS
from tests.rollout.server.test_server import ask
from tests.rollout.server.test_weight_transfer import ASKED, few_changes, tokens

WHOLE = sum(x.nbytes for x in jax.tree.leaves(PARAMS))
OTHER = few_changes(PARAMS)  # three elements
LATER = jax.tree.map(jnp.copy, OTHER) | {"embed": OTHER["embed"].at[0, 0].set(-0.5)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return model_folder(tmp_path_factory.mktemp("models") / "first", 0)


@pytest.fixture(params=["disk", "bucket"])
def root(request, tmp_path, monkeypatch):
    """Server and trainer are in one process, and have the stand-in for a bucket in common."""
    top = tmp_path if request.param == "disk" else empty_bucket(monkeypatch)
    return f"{top}/weights"


@pytest.fixture
def server(folder, root):
    config = serve_config(folder, **{"serve.weights_root": root})
    running = make_server(config, jax.devices()[:1])
    running.start()
    yield running
    running.stop()


def engine_of(url, root, hosts=(), recovery=300.0):
    return RemoteEngine(
        [url.removesuffix("/v1")],
        "native",
        hosts=hosts,
        weights=VersionFolder(epath.Path(root), jnp.float32, 100_000, delta=True),
        probe=Probe(make_score(MODEL, jnp.float32, None, 16), MODEL.vocab_size, 1e-3),
        options=RemoteOptions(timeout_seconds=300, recovery_seconds=recovery, poll_seconds=60.0),
    )


def held(server):
    """The parameters of the server's engine, by their bits."""
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(server.host.engine.programs.params)]


def test_changes_are_read_and_sampled_from(server, root):
    engine = engine_of(server.url, root)
    for version, (params, written) in enumerate([(PARAMS, WHOLE), (OTHER, 24), (LATER, 8)], 5):
        engine.update_weights(params, version)
        assert engine.source.written_bytes == written
        found = held(server)
        server.host.update_weights(params, version)
        assert found == held(server)
    drawn = tokens(engine)
    assert {v for _, _, versions in drawn for v in versions} == {7}
    assert ask(server, "/sleep")[0] == ask(server, "/wake_up")[0] == 200
    assert tokens(engine) == drawn
    engine.close()


def damage(monkeypatch, most):
    """The next files that are written are cut off; so many."""
    right, done = version_folder.write_group, []

    def wrong(path, *arguments):
        file = right(path, *arguments)
        if len(done) < most:
            done.append(path)
            path.write_bytes(path.read_bytes()[:-1])
        return file

    monkeypatch.setattr(version_folder, "write_group", wrong)


def test_a_damaged_version_is_written_whole(server, root, monkeypatch):
    engine = engine_of(server.url, root)
    engine.update_weights(PARAMS, 5)
    damage(monkeypatch, 1)
    engine.update_weights(OTHER, 6)
    assert engine.source.written_bytes == WHOLE
    assert Index.read(epath.Path(root) / "version-6").base is None
    assert [path.name for path in epath.Path(root).iterdir()] == ["version-6"]
    engine.update_weights(LATER, 7)
    assert engine.source.written_bytes == 8
    engine.close()


def test_what_stays_damaged_leaves_the_old_version(server, root, monkeypatch):
    engine = engine_of(server.url, root, recovery=1.0)
    engine.update_weights(PARAMS, 5)
    expected = tokens(engine)
    damage(monkeypatch, 10**6)
    cause = r"gives 502: .*version-6/\w+-00000.safetensors is cut off, or damaged"
    with pytest.raises(RemoteEngineError, match=f"no server was ready for 1 s: .*{cause}"):
        engine.update_weights(OTHER, 6)
    assert server.host.guests.version == 5
    ours = server.host.generate(ASKED)
    assert [(c.tokens, c.log_probs, c.versions) for g in ours for c in g] == expected
    engine.close()


def test_only_versions_below_the_root_are_read(server, root):
    publish = VersionFolder(epath.Path(root), jnp.float32, delta=True).publish
    index = publish(PARAMS, 5)
    assert index == f"{root}/version-5/index.json"
    outside = [
        "../weights/../version-5/index.json",
        f"{root}/../version-5/index.json",
        f"{root}-other/version-5/index.json",
        "s3://bucket/weights/version-5/index.json" if "://" in root else "index.json",
    ]
    found = [ask(server, "/update_weights", {"path": path})[0] for path in outside]
    assert found == [403] * 4
    refused = {"version-9/index.json": 502, "version-5/index.json/x": 400, "version-5": 400}
    for path, status in refused.items():
        assert ask(server, "/update_weights", {"path": path})[0] == status
    for path in ("version-5/index.json", index):
        assert ask(server, "/update_weights", {"path": path, "version": 5})[0] == 200


def test_another_model_ends_the_run(server, root):
    engine = engine_of(server.url, root)
    with pytest.raises(RemoteEngineError, match="400: path: extra is none of this model's arrays"):
        engine.update_weights(PARAMS | {"extra": PARAMS["embed"]}, 5)
    engine.close()


@pytest.mark.slow  # another process
def test_a_server_in_a_process_of_its_own_that_is_started_again(folder, tmp_path):
    """It begins with the last whole version."""
    root = tmp_path / "weights"
    config = cfg.get_config_as_dict(serve_config(folder, **{"serve.weights_root": str(root)}))
    worker = OwnServer(config, tmp_path / "worker", {"JAX_PLATFORMS": "cpu"})
    asyncio.run(worker.ensure(None))
    engine = engine_of(worker.url, root, hosts=[worker])
    try:
        engine.update_weights(PARAMS, 5)
        engine.update_weights(OTHER, 6)
        before = tokens(engine)
        process = worker._process
        assert isinstance(process, subprocess.Popen)
        os.killpg(process.pid, 9)
        process.wait()
        engine._call(engine._bring(engine.servers[0]))
        assert worker._process is not process and tokens(engine) == before
        engine.update_weights(LATER, 7)
        assert engine.source.written_bytes == 8
    finally:
        engine.close()
