"""Without Ray: the processes of a job on this machine, all of them or the one of this host."""

import os
import socket
import time
from collections.abc import Sequence

from jaxrl.cluster.child import Start
from jaxrl.cluster.host import Host
from jaxrl.cluster.settings import Settings, place_in_job, read_settings
from jaxrl.cluster.supervise import REFUSED, supervise

TRAIN = "jaxrl.train"


def launch_here(arguments: Sequence[str], processes: int, module: str = TRAIN) -> int:
    """Run `python -m jaxrl.train`, or another module, supervised; return its exit status.

    This process has no jax.

    Args:
        arguments: of the module.
        processes: on this machine, the whole job; 0 = one of a job whose others are on other
            machines, as the environment says or JAX finds out.
        module: what is run; another one checks the devices for its config itself.

    Raises:
        ValueError: see `Host.start`.
    """
    settings = read_settings(arguments, processes if module == TRAIN else 0)
    if settings is None:
        return REFUSED

    def start(mode: str | None) -> tuple[Host, dict[int, str]]:
        words = ["-m", module, *arguments]
        if mode != settings.resume_mode:
            words.append(f"--config.trainer.resume_mode={mode}")
        host = Host()
        starts = _starts(settings, words, host, processes) if processes else [_one(settings, words)]
        try:
            host.start(starts)
        except BaseException:
            host.stop()
            raise
        return host, {s.index: f"[process {s.index}]" if i else "" for i, s in enumerate(starts)}

    return supervise(start, settings.restarts())


def _starts(settings: Settings, words: Sequence[str], host: Host, count: int) -> list[Start]:
    """Return what to start for a job that is on this machine alone."""
    address = f"127.0.0.1:{host.free_port()}"
    joined = [settings.limits() | place_in_job(address, count, index) for index in range(count)]
    return [
        Start(index, words, environment, settings.log(index), _heading(index))
        for index, environment in enumerate(joined)
    ]


def _one(settings: Settings, words: Sequence[str]) -> Start:
    """Return what to start here for a job on many machines.

    Where the environment does not say which process of the job this is, JAX has to find out.
    """
    said = "JAX_COORDINATOR_ADDRESS" in os.environ
    index = os.environ.get("JAXRL_PROCESS_ID", "")
    log = settings.log(index if said else socket.gethostname())
    words = words if said else [*words, "--distributed"]
    return Start(
        int(index) if index.isdecimal() else 0, words, settings.limits(), log, _heading(index)
    )


def _heading(index: object) -> str:
    now = time.strftime("%Y-%m-%d %H:%M:%S")
    return f"--- process {index} on {socket.gethostname()}, started {now}"
