"""Rollout workers that are Ray actors."""

import pytest
import ray

from jaxrl.rollout.http_client import Server
from tests.rollout.test_rollout_workers import trained
from tests.test_train import assert_bitwise_equal


@pytest.mark.slow  # whole runs
def test_an_actor_killed_in_mid_generation_is_replaced_and_nothing_changes(
    cluster, tmp_path, monkeypatch
):
    undisturbed, dead, complete = trained(tmp_path / "undisturbed"), [], Server.complete

    def disturb(trainer):
        engine = trainer.engine

        async def completing(server, request, url=None):
            if server is engine.servers[0] and server.version == 1 and not dead:
                dead.append(engine.hosts[server].actor)
                ray.kill(dead[0])  # its server's input is closed with it
            return await complete(server, request, url)

        monkeypatch.setattr(Server, "complete", completing)

    trainer = trained(tmp_path / "disturbed", disturb)
    engine = trainer.engine
    assert dead
    assert engine.servers[0].url == engine.hosts[engine.servers[0]].url
    assert_bitwise_equal(trainer.state.params, undisturbed.state.params)
