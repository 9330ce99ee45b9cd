"""The Ray actor through which the processes of a job share user functions.

It holds pickles and never loads them, so neither this module nor the actor's process needs jax.
`jaxrl.registry` is the only caller.
"""

import uuid
from typing import Any

from jaxrl.cluster.ray_import import ray
from jaxrl.registry.pickling import PackedFunction


@ray.remote(num_cpus=0)
class RegistryActor:
    """Hold tables of pickled functions: kind -> name -> function. There is one per Ray job."""

    def __init__(self) -> None:
        self._session = uuid.uuid4().hex
        self._tables: dict[str, dict[str, PackedFunction]] = {}

    def session(self) -> str:
        """Return an id of this actor: what was shared with another one is not known here."""
        return self._session

    def exchange(
        self, kind: str, new: dict[str, PackedFunction]
    ) -> tuple[dict[str, str], dict[str, PackedFunction]]:
        """Take the functions that the caller has not shared yet, unless a name clashes.

        Args:
            kind: "policy loss" or "advantage estimator".
            new: name -> function.

        Returns:
            Clashes, name -> origin of the other function; all functions of the kind.
        """
        table = self._tables.setdefault(kind, {})
        clashes = {
            name: table[name].origin
            for name, packed in new.items()
            if name in table and table[name].fingerprint != packed.fingerprint
        }
        if not clashes:
            table.update(new)
        return clashes, table

    def remove(self, kind: str, name: str) -> bool:
        """Forget a function; return whether there was one."""
        return self._tables.get(kind, {}).pop(name, None) is not None

    def clear(self, kind: str) -> None:
        """Forget all functions of a kind."""
        self._tables.pop(kind, None)


_created: list[Any] = []  # an actor ends when its creator drops the handle


def ask(method: str, *args: Any) -> Any:
    """Call a method of this job's `RegistryActor`, which is created by the first caller.

    It is found by name, because a handle of before `ray.shutdown()` is stale. The name holds the
    job, so that two runs on one cluster do not mix even in one namespace. The actor ends with its
    creator, which is right for the driver; a worker may end before the job.
    """
    context = ray.get_runtime_context()
    name = f"jaxrl_registry_{context.get_job_id()}"
    try:
        actor = ray.get_actor(name)
    except ValueError:
        lifetime = "detached" if context.worker.mode == ray.WORKER_MODE else None
        options = RegistryActor.options(name=name, get_if_exists=True, lifetime=lifetime)
        actor = options.remote()
        _created[:] = [actor]
    return ray.get(getattr(actor, method).remote(*args))
