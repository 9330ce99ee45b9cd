"""What a job takes of a cluster."""

import json
import re

import pytest

from jaxrl.cluster.placement import host_devices, place, place_in_slice, share_of_devices
from tests.jobs import run


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


def hosts_of(name, chips, head, count=2, **labels):
    """Hosts of a TPU slice, as Ray's TPU accelerator manager describes them."""
    shared = {"TPU": chips, name: 1.0, "TPU-V5E": 1.0, "memory": 1e9, "node:10.0.0.1": 1.0}
    first, *others = [node(**shared) | {"Labels": labels} for _ in range(count)]
    first["Resources"][head] = 1.0
    return [first, *others]


TWO = [*hosts_of("a", 4.0, "TPU-v4-16-head"), *hosts_of("b", 8.0, "TPU-v5e-16-head")]


@pytest.mark.parametrize(
    ("free", "name", "chips", "head"),
    [
        ({"a": 2.0, "b": 2.0}, "a", 4.0, "TPU-v4-16-head"),
        ({"a": 1.0, "b": 2.0}, "b", 8.0, "TPU-v5e-16-head"),  # another job has a host of a
        ({}, "a", 4.0, "TPU-v4-16-head"),  # none is free: it waits for the first
    ],
)
def test_a_tpu_slice_is_taken_whole(free, name, chips, head):
    found = place_in_slice([*TWO, node()], 2, 1, "", free)
    each = {"CPU": 1.0, "TPU": chips, name: 1.0}
    assert found.bundles(2) == [each | {head: 1.0}, each]
    assert found.devices == chips


def test_slices_may_be_known_by_their_labels():
    nodes = [node(TPU=4.0) | {"Labels": {"ray.io/tpu-slice-name": x}} for x in ("a", "b", "b")]
    assert place_in_slice(nodes, 1, 1, "", {}).bundles(1) == [{"CPU": 1.0, "TPU": 4.0}]
    with pytest.raises(ValueError, match=r"policy_num_nodes=3: .* a has 1, b has 2; set it to one"):
        place_in_slice(nodes, 3, 1, "", {})


def test_hosts_of_several_slices_make_no_job():
    with pytest.raises(ValueError, match=r"policy_num_nodes=4: .* whole, .* a has 2, b has 2; set"):
        place_in_slice(TWO, 4, 1, "", {})


def test_a_cluster_without_slices_is_placed_as_ever():
    nodes = [node(TPU=4.0), node(TPU=4.0)]
    assert place_in_slice(nodes, 2, 1, "", {}) == place(nodes, 2, 1)
    assert place_in_slice(TWO, 2, 1, "cpu", {}).bundles(2) == [{"CPU": 1.0}] * 2


@pytest.mark.slow
def test_jobs_on_a_ray_cluster_take_a_slice_each():
    """Two jobs of two hosts have one slice each, with its head; a third waits in vain."""
    argv, environment = ["-m", "tests.cluster.slices"], {"JAX_PLATFORMS": ""}
    for _ in range(3):  # Ray gives a node 30 seconds to start, which a busy machine may exceed
        (ended,) = run(argv, 1, devices=1, environment=environment)
        if "timed out during startup" not in ended.error:
            break
    assert ended.status == 0, ended.error[-3000:]
    found = json.loads(ended.out.splitlines()[-1])
    assert sorted(found["taken"]) == [["slice-a", "slice-a"], ["slice-b", "slice-b"]]
    assert re.fullmatch(r"2 hosts with .*'slice-.': 1.0.* were not free in time", found["said"])


def test_devices_that_cannot_be_divided_are_named():
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "CUDA_VISIBLE_DEVICES": ""}
    assert host_devices(flags["XLA_FLAGS"]) == 8
    assert host_devices("") == 0
    assert share_of_devices(flags, 0, 1) == {}
    with pytest.raises(ValueError, match="processes_per_host=3: does not divide the 8 devices"):
        share_of_devices(flags, 0, 3)
    with pytest.raises(ValueError, match="processes_per_host=2: does not divide the 1 GPUs"):
        share_of_devices({"CUDA_VISIBLE_DEVICES": "3"}, 0, 2)
