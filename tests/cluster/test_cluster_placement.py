"""What a job takes of a cluster."""

import pytest

from jaxrl.cluster.placement import host_devices, place, share_of_devices


def node(alive=True, **resources):
    return {"Alive": alive, "Resources": {"CPU": 8.0, **resources}}


@pytest.mark.parametrize(
    ("nodes", "hosts", "each", "bundle"),
    [
        ([node()], 1, 2, {"CPU": 1.0}),
        ([node(TPU=4.0), node(TPU=4.0), node()], 2, 1, {"CPU": 1.0, "TPU": 4.0}),
        # two hosts with at least 4: the third best has 2
        ([node(GPU=8.0), node(GPU=2.0), node(GPU=4.0)], 2, 2, {"CPU": 1.0, "GPU": 4.0}),
    ],
)
def test_it_is_the_same_of_every_host(nodes, hosts, each, bundle):
    found = place(nodes, hosts, each)
    assert found.bundle == bundle
    assert found.devices == next((int(n) for k, n in bundle.items() if k != "CPU"), None)


def test_a_job_on_cpus_takes_no_accelerator():
    assert place([node(GPU=8.0)] * 2, 2, 1, "cpu").bundle == {"CPU": 1.0}


@pytest.mark.parametrize(
    ("nodes", "hosts", "each", "message"),
    [
        (
            [node(), node(alive=False)],
            2,
            1,
            r"policy_num_nodes=2: the Ray cluster has 1 host",
        ),
        (
            [node(GPU=8.0), node()],
            2,
            1,
            r"policy_num_nodes=2: .* 1 host\(s\) with a GPU; start",
        ),
        ([node(TPU=4.0)], 1, 2, "processes_per_host=2: a TPU host runs one process"),
        ([node(GPU=8.0)], 1, 3, "processes_per_host=3: does not divide the 8 GPUs of a host"),
    ],
)
def test_what_a_cluster_lacks_is_named(nodes, hosts, each, message):
    with pytest.raises(ValueError, match=message):
        place(nodes, hosts, each)


def test_devices_that_cannot_be_divided_are_named():
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "CUDA_VISIBLE_DEVICES": ""}
    assert host_devices(flags["XLA_FLAGS"]) == 8
    assert host_devices("") == 0
    assert share_of_devices(flags, 0, 1) == {}
    with pytest.raises(ValueError, match="processes_per_host=3: does not divide the 8 devices"):
        share_of_devices(flags, 0, 3)
    with pytest.raises(ValueError, match="processes_per_host=2: does not divide the 1 GPUs"):
        share_of_devices({"CUDA_VISIBLE_DEVICES": "3"}, 0, 2)
