"""Config of the processes of a job: how they are started, and started again (docs/cluster.md)."""

from dataclasses import dataclass

from jaxrl.config.dataclass_config import BaseConfig
from jaxrl.config.errors import fail


@dataclass
class ClusterConfig(BaseConfig):
    """Describe how `jaxrl.cluster.launch` starts the processes of a job, and restarts them."""

    processes_per_host: int = 1
    """Processes on each host, which divide its devices; 1 on TPUs."""
    max_restarts: int = 3
    """Restarts in a row without a new checkpoint; 0 = none. User errors are never tried again."""
    restart_backoff_seconds: float = 10.0
    """Wait before a restart; twice as long for each further one in a row, at most 300 seconds."""
    start_seconds: int = 300
    """Within which all hosts must be free and all processes must have joined the job."""
    heartbeat_seconds: int = 100
    """After which a silent process counts as dead; the others then end, too."""


def check_cluster(cluster: ClusterConfig, nodes: int) -> None:
    """Refuse cluster settings that make no sense.

    Args:
        nodes: trainer.placement.policy_num_nodes.

    Raises:
        ValueError: names the field, the value and the fix.
    """
    for name in ("processes_per_host", "start_seconds", "heartbeat_seconds"):
        if getattr(cluster, name) < 1:
            fail(f"trainer.cluster.{name}", getattr(cluster, name), "must be at least 1")
    for name in ("max_restarts", "restart_backoff_seconds"):
        if getattr(cluster, name) < 0:
            fail(f"trainer.cluster.{name}", getattr(cluster, name), "must not be negative")
    if nodes < 1:
        fail("trainer.placement.policy_num_nodes", nodes, "must be at least 1")
