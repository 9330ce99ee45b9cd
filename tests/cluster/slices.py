"""Jobs on a real local Ray cluster that declares two TPU slices of two hosts.

Prints what each took, by slice, as JSON, and what is said where none is free.
"""

import json
import time

import ray
from ray.cluster_utils import Cluster

from jaxrl.cluster.actors import RayAttempt
from jaxrl.cluster.placement import place_in_slice
from jaxrl.cluster.supervise import HostLost

SLICES = ("slice-a", "slice-b", "slice-a", "slice-b")  # of the hosts, as they come
HEAD = "TPU-v5e-16-head"


def begin(seconds: float) -> RayAttempt:
    placement = place_in_slice(ray.nodes(), 2, 1, "", ray.available_resources())
    return RayAttempt(placement, 2, time.monotonic() + seconds)


def taken(attempt: RayAttempt) -> list[str]:
    """The slices of the hosts of a job, that of the first bundle, which has the head, first."""
    nodes = {node["NodeID"]: node["Resources"] for node in ray.nodes()}
    bundles = ray.util.placement_group_table(attempt._group)["bundles_to_node_id"]
    hosts = [nodes[bundles[number]] for number in sorted(bundles)]
    assert [HEAD in host for host in hosts] == [True, False]
    return [name for host in hosts for name in set(SLICES) if name in host]


def main() -> None:
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False}
    )
    try:
        for number, name in enumerate(SLICES):
            head = {HEAD: 1} if number < 2 else {}
            cluster.add_node(num_cpus=1, resources={"TPU": 4, "TPU-V5E": 1, name: 1, **head})
        ray.init(cluster.address)
        jobs = [begin(120.0)]
        while ray.available_resources().get(taken(jobs[0])[0], 0):
            time.sleep(0.1)  # until Ray has counted what the first job took
        jobs.append(begin(120.0))
        try:
            begin(3.0)
        except HostLost as error:
            said = str(error)
        print(json.dumps({"taken": [taken(job) for job in jobs], "said": said}))
        for job in jobs:
            job.stop()
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main()
