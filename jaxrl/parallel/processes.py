"""The processes of one job: joining them, what they tell one another, arrays that span them.

Every process runs the same program over one mesh of all their devices. `allgather`, `agree`,
`fetch` and every computation on that mesh are collectives: all processes do them, in the same
order, in their main thread.
"""

import contextlib
import faulthandler
import itertools
import json
import os
import pickle
import platform
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec, Sharding

import jaxrl
from jaxrl import cli
from jaxrl.parallel import watchdog
from jaxrl.parallel.jax_internals import global_state
from jaxrl.parallel.shares import Share, put_share
from jaxrl.parallel.xla_flags import set_flags

T = TypeVar("T")

ADDRESS, COUNT, INDEX = "JAX_COORDINATOR_ADDRESS", "JAXRL_NUM_PROCESSES", "JAXRL_PROCESS_ID"
HEADER, FIRST, CHUNK = 8, 4096, 2**20  # bytes: of the length; sent at once; of a further round
START, HEARTBEAT = "JAXRL_START_SECONDS", "JAXRL_HEARTBEAT_SECONDS"
STALL = "JAXRL_STALL_SECONDS"
START_SECONDS, HEARTBEAT_SECONDS = 300, 100


class ProcessError(ValueError):
    """Signal that the processes do not make one job."""


class JoinError(ProcessError):
    """Signal that not all processes came; another time they may."""


def joined_main(main: Callable[[Sequence[str]], int], argv: Sequence[str]) -> int:
    """Run `main(argv)`, in a process of a job if the environment or --distributed says so.

    A process that fails ends at once: at its regular end JAX would have it wait for the others,
    which wait for it in a computation. They end when it is gone. The first alone prints. With
    JAXRL_STALL_SECONDS, which the launcher sets, a process that stands still ends, see
    `parallel.watchdog`: a number, "auto", or 0, it does not. SIGUSR1 has it print its stacks.

    An interrupt (Ctrl-C) that ends it at once is one line, with what `main` says in it, and status
    130 as of shells. What `jaxrl.signals` ends after a step `main` returns.
    """
    distributed = "--distributed" in argv
    if hasattr(faulthandler, "register"):  # not on Windows
        faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    if not distributed and ADDRESS not in os.environ:
        try:
            _watch()
            return main(argv)
        except KeyboardInterrupt as interrupt:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # another one ends it here and now
            return _interrupted(interrupt)
        except ProcessError as error:  # of what is in the environment
            return cli.refuse(error)
    alone = False  # it ends without waiting for the others
    try:
        start_processes()
        _watch()
        quiet = contextlib.nullcontext() if is_first() else open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
        with quiet as nothing, contextlib.redirect_stdout(nothing or sys.stdout):
            status = main([word for word in argv if word != "--distributed"])
    except ProcessError as error:
        cli.refuse(error)
        status = cli.CRASHED if isinstance(error, JoinError) else cli.REFUSED
    except KeyboardInterrupt as interrupt:
        status, alone = _interrupted(interrupt), True
    except BaseException:
        traceback.print_exc()
        status = cli.CRASHED
    if alone or status in (cli.REFUSED, cli.CRASHED):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status


def _watch() -> None:
    given = os.environ.get(STALL, "0")
    if given == "auto":
        watchdog.start(None)
    elif seconds := _number(STALL, None):
        watchdog.start(seconds)


def _interrupted(interrupt: KeyboardInterrupt) -> int:
    fix = "the same command resumes from the last checkpoint, if there is one"
    return cli.ended("interrupted", str(interrupt) or fix, cli.INTERRUPTED)


def start_processes(
    address: str | None = None,
    count: int | None = None,
    index: int | None = None,
    *,
    start_seconds: int | None = None,
    heartbeat_seconds: int | None = None,
) -> None:
    """Join the job; before anything else that JAX does.

    Args:
        address: "host:port" of process 0. None = JAX_COORDINATOR_ADDRESS, JAXRL_NUM_PROCESSES and
            JAXRL_PROCESS_ID, or what JAX finds out itself: on TPU pods, SLURM, Kubernetes and MPI.
        start_seconds: until all processes must be there; None = JAXRL_START_SECONDS, or 300.
        heartbeat_seconds: after which a silent process counts as dead, and the others end too; None
            = JAXRL_HEARTBEAT_SECONDS, or 100.

    Raises:
        JoinError: they did not all come.
        ProcessError: nothing says which process of which job this is; or they have other versions,
            platforms or numbers of devices, and it names the process, its host and what differs.
    """
    address = address or os.environ.get(ADDRESS)
    count, index = (_number(n, x) for n, x in ((COUNT, count), (INDEX, index)))
    start_seconds = _number(START, start_seconds) or START_SECONDS
    heartbeat_seconds = _number(HEARTBEAT, heartbeat_seconds) or HEARTBEAT_SECONDS
    if address is not None and (count is None or index is None):
        raise ProcessError(
            f"{ADDRESS}={address} without {COUNT} and {INDEX}: set them, the number of processes "
            "and that of this one, from 0"
        )
    set_flags()
    began = time.monotonic()
    try:
        _initialize(address, count, index, start_seconds, heartbeat_seconds)
    except (RuntimeError, ValueError) as error:
        if address is None and "be defined" in str(error):  # JAX's, of what it was not told
            raise ProcessError(
                f"JAX found no cluster here ({str(error).rstrip('.')}): set {ADDRESS} (host:port "
                f"of process 0), {COUNT} and {INDEX} on every host; all processes of a job on this "
                "machine are started by `jaxrl launch --local-processes=2`, one by `jaxrl train`"
            ) from error
        who = "" if index is None else f"process {index} of {count} "
        at = address or global_state.coordinator_address or "an address that JAX did not find"
        raise JoinError(
            f"{who}on {socket.gethostname()} could not join the job at {at} in "
            f"{time.monotonic() - began:.0f} s: {error}. Are all processes started, and does the "
            "address reach the host of process 0, with a port that is free?"
        ) from error
    _compare(_facts(), start_seconds)


def _initialize(
    address: str | None, count: int | None, index: int | None, seconds: int, heartbeat: int
) -> None:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # its notice of preemptions takes SIGTERM, and nobody asks for it: the process would not end
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(
        address,
        count,
        index,
        # asked only for what is not said: Slurm's answer gives a process one GPU of its host
        cluster_detection_method=None if address is None else "deactivate",
        initialization_timeout=seconds,
        heartbeat_timeout_seconds=heartbeat,
    )
    if _alone_on_its_host():
        for name in ("jax_cuda_visible_devices", "jax_rocm_visible_devices"):
            jax.config.update(name, "all")


def _alone_on_its_host() -> bool:
    """Return whether Slurm started one process per host: all GPUs are its own, not the first."""
    tasks = os.environ.get("SLURM_STEP_TASKS_PER_NODE", "")
    return tasks == "1" or tasks.startswith("1(")


def _number(variable: str, value: int | None) -> int | None:
    """Return the value, or where it is None that of an environment variable."""
    text = os.environ.get(variable)
    if value is not None or text is None:
        return value
    if not text.isdecimal():
        raise ProcessError(f"{variable}={text!r} must be a whole number")
    return int(text)


def _facts() -> dict[str, Any]:
    """Return what must be the same in all processes, read without a computation on the mesh."""
    return {
        "jaxrl": jaxrl.__version__,
        "jax": jax.__version__,
        "python": ".".join(platform.python_version_tuple()[:2]),
        "numpy": np.__version__,
    }


def _compare(facts: dict[str, Any], seconds: int) -> None:
    """Refuse processes that differ, before their first collective hangs or gives other bits.

    They talk through the coordinator: devices of other platforms could not. The devices are
    counted first, which itself waits for all.
    """
    client, index, count = global_state.client, global_state.process_id, global_state.num_processes
    assert client is not None

    def exchange(kind: str, about: dict[str, Any]) -> None:
        client.key_value_set(f"jaxrl/{kind}/{index}", json.dumps([socket.gethostname(), about]))
        first_host, wanted = {}, {}
        for i in range(count):
            text = client.blocking_key_value_get(f"jaxrl/{kind}/{i}", 1000 * seconds)
            host, found = json.loads(text)
            first_host, wanted = (first_host, wanted) if i else (host, found)
            for name in wanted:
                if found[name] != wanted[name]:
                    raise ProcessError(
                        f"process {i} on {host} has {name} {found[name]}, process 0 on "
                        f"{first_host} has {wanted[name]}: make them the same on all hosts"
                    )

    exchange("versions", facts)
    devices = jax.local_devices()
    about = {"devices": len(devices), "platform": devices[0].platform}
    exchange("devices", about | {"kind of devices": devices[0].device_kind})


def is_first() -> bool:
    """Return whether this process writes what is written once: logs, the ledger, exports."""
    return jax.process_index() == 0


def record_folder(folder: Path, process: int | None = None) -> Path:
    """Return where a process writes what each has of its own, in the folder of a run.

    Args:
        process: None = this one.
    """
    process = jax.process_index() if process is None else process
    return folder / "processes" / str(process) if process else folder


def allgather(value: T) -> list[T]:
    """Return the value of every process, in their order; a collective.

    It travels as bytes, in rounds of one size, so that nothing is compiled for another length.
    """
    if jax.process_count() == 1:
        return [value]
    data = np.frombuffer(pickle.dumps(value), np.uint8)
    start = np.frombuffer(len(data).to_bytes(HEADER, "little"), np.uint8)
    first = _all(_padded(np.concatenate([start, data[: FIRST - HEADER]]), FIRST))
    sizes = [int.from_bytes(row[:HEADER].tobytes(), "little") for row in first]
    parts = [first[:, HEADER:]]
    for begin in range(FIRST - HEADER, max(sizes), CHUNK):
        parts.append(_all(_padded(data[begin : begin + CHUNK], CHUNK)))
    rows = np.concatenate(parts, axis=1)
    return [pickle.loads(row[:size].tobytes()) for row, size in zip(rows, sizes, strict=True)]


def _all(row: np.ndarray) -> np.ndarray:
    """Gather [n] uint8 of every process as [processes, n]."""
    return np.asarray(multihost_utils.process_allgather(row))


def _padded(data: np.ndarray, size: int) -> np.ndarray:
    return np.pad(data, (0, size - len(data)))


def same_in_all(what: str, values: Mapping[str, Any]) -> None:
    """Refuse named values that differ between the processes, which would part ways; a collective.

    Args:
        what: they are, in words.

    Raises:
        ProcessError: names the process, its host, the first name and both values.
    """
    here = {name: repr(value) for name, value in values.items()}
    first, *others = allgather((socket.gethostname(), here))
    for process, (host, there) in enumerate(others, 1):
        for name in dict.fromkeys((*first[1], *there)):
            if (found := there.get(name)) != (wanted := first[1].get(name)):
                raise ProcessError(
                    f"{what} differ: {name} is {found} in process {process} on {host}, {wanted} in "
                    f"process 0 on {first[0]}; start all processes with the same"
                )


def agree(value: T | None) -> T:
    """Return the value of process 0; a collective."""
    return cast(T, allgather(value if is_first() else None)[0])


def local_slice(items: Sequence[T], hosts: int = 1) -> Sequence[T]:
    """Return this process's part of a list: neighbours, and none if there are too few.

    Args:
        hosts: neighbouring processes that have the same part; they divide the job.
    """
    parts = jax.process_count() // hosts
    edges = [len(items) * i // parts for i in range(parts + 1)]
    begin, end = list(itertools.pairwise(edges))[jax.process_index() // hosts]
    return items[begin:end]


def put(tree: Any, shardings: Any) -> Any:
    """Put host arrays, the same in all processes, on devices; each process copies its parts.

    A `Share` becomes the array that all processes together have; with one it is a collective.

    Args:
        shardings: one for all, or a tree of them; None = the default device.
    """
    if jax.process_count() == 1 or shardings is None:
        return jax.device_put(tree, shardings)
    if isinstance(shardings, Sharding):
        shardings = jax.tree.map(lambda _: shardings, tree, is_leaf=_is_share)
    return jax.tree.map(_put, tree, shardings, is_leaf=_is_share)


def _is_share(x: Any) -> bool:
    return isinstance(x, Share)


def _put(x: Any, sharding: Sharding) -> jax.Array:
    if isinstance(x, Share):
        assert isinstance(sharding, NamedSharding)  # as all that span processes
        return put_share(x, sharding)
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        return jax.device_put(x, sharding)
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        data = _put(jax.random.key_data(x), sharding)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    host = np.asarray(x)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def fetch(tree: Any) -> Any:
    """Return device arrays as host arrays, whole, in every process.

    A collective where they span processes.
    """
    spread = [x for x in jax.tree.leaves(tree) if _spans(x)]
    if spread:
        whole = dict(zip(map(id, spread), _replicated(spread), strict=True))
        tree = jax.tree.map(lambda x: whole.get(id(x), x), tree)
    return jax.device_get(tree)


def _spans(x: Any) -> bool:
    return isinstance(x, jax.Array) and not x.is_fully_addressable and not x.is_fully_replicated


def _replicated(arrays: list[jax.Array]) -> list[jax.Array]:
    """Copy arrays, whole, to every device."""

    def whole(x: jax.Array) -> NamedSharding:
        assert isinstance(x.sharding, NamedSharding)  # as all that span processes
        return NamedSharding(x.sharding.mesh, PartitionSpec())

    return [jax.device_put(x, whole(x)) for x in arrays]
