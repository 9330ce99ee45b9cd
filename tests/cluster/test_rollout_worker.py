"""Rollout workers that are Ray actors."""

import pytest
import ray

from jaxrl.cluster.rollout_worker import bundles, ray_workers
from jaxrl.rollout.remote.http_client import RemoteServer
from tests.rollout.test_rollout_workers import trained
from tests.test_train import assert_bitwise_equal


@pytest.mark.slow  # whole runs
def test_an_actor_killed_in_mid_generation_is_replaced_and_nothing_changes(
    cluster, tmp_path, monkeypatch
):
    undisturbed, dead, complete = trained(tmp_path / "undisturbed"), [], RemoteServer.complete

    def disturb(trainer):
        engine = trainer.engine

        async def completing(server, request, url=None):
            if server is engine.servers[0] and server.version == 1 and not dead:
                dead.append(engine.hosts[server].actor)
                ray.kill(dead[0])  # its server's input is closed with it
            return await complete(server, request, url)

        monkeypatch.setattr(RemoteServer, "complete", completing)

    trainer = trained(tmp_path / "disturbed", disturb)
    engine = trainer.engine
    assert dead
    assert engine.servers[0].url == engine.hosts[engine.servers[0]].url
    assert_bitwise_equal(trainer.state.params, undisturbed.state.params)


def node(address, **resources):
    return {"Alive": True, "NodeManagerAddress": address, "Resources": {"CPU": 8.0, **resources}}


def test_where_hosts_have_accelerators_workers_share_none_with_the_trainer():
    nodes = [node(name, GPU=8.0) for name in "abcd"]
    what, wanted, strategy = bundles(nodes, address="a", number=2, trainer_hosts=2, platforms="")
    assert strategy == "STRICT_SPREAD"
    assert wanted == [{"CPU": 1.0, "GPU": 8.0}] * 2 + [{"node:a": 0.001}]
    assert what.devices == 8
    # 4 hosts, 1 this one, 2 more of the trainer's: 1 is left
    with pytest.raises(ValueError, match=r"rollout_num_nodes=2: .* has 1 host\(s\) with a GPU bes"):
        bundles(nodes, address="a", number=2, trainer_hosts=3, platforms="")


def test_on_cpus_workers_may_share_a_host():
    nodes = [node("a", GPU=8.0)]
    assert bundles(nodes, address="a", number=2, trainer_hosts=1, platforms="cpu")[1:] == (
        [{"CPU": 1.0}] * 2,
        "SPREAD",
    )
    assert bundles([node("a")], address="a", number=2, trainer_hosts=1, platforms="")[1:] == (
        [{"CPU": 1.0}] * 2,
        "SPREAD",
    )


def test_workers_for_which_there_is_no_room_are_an_error(cluster):
    """Three bundles of a CPU on two CPUs, whose group would never be there."""
    before = len(ray.util.placement_group_table())
    with pytest.raises(ValueError, match=r"rollout_num_nodes=3: .* not free within 1 s .*lower it"):
        ray_workers({}, [None] * 3, [{}] * 3, trainer_hosts=1, start_seconds=1.0)
    table = list(ray.util.placement_group_table().values())[before:]
    assert [group["state"] for group in table] == ["REMOVED"]


def test_a_bundle_keeps_this_host_free(cluster):
    """As `bundles` does, but with the CPUs that there are."""
    own = {f"node:{ray.util.get_node_ip_address()}": 0.001}
    for strategy, fits in (("STRICT_PACK", True), ("STRICT_SPREAD", False)):
        group = ray.util.placement_group([{"CPU": 1.0}, own], strategy)
        assert group.wait(5.0 if fits else 1.0) == fits
        ray.util.remove_placement_group(group)
