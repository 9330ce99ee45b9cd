"""A rollout worker: `jaxrl.serve` for one run, which starts it and gives it weights.

`OwnServer` runs it as `python -m jaxrl.rollout.remote.worker CONFIG.json READY`. It writes its
address to the file READY once it can be asked, and ends when its standard input is closed: then
nobody is there any more who could ask it.
"""

import json
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxrl import cli
from jaxrl.files import replace_text
from jaxrl.rollout.remote.server_process import ServerProcess

MODULE = "jaxrl.rollout.remote.worker"
NOT_STARTED = "http://not-started"
# Of the trainer's own place in a job of several processes, which a worker has no part in.
_OF_THE_JOB = ("JAX_COORDINATOR_", "JAX_PROCESS_", "JAX_NUM_PROCESSES", "JAXRL_NUM_", "JAXRL_PROC")


@dataclass
class OwnServer(ServerProcess):
    """Run one server process at any free port, another one each time it is started.

    It ends with this process, however this ends: its standard input is then closed.

    Attributes:
        config: of the worker, see `build_remote.worker_config`; nested dicts.
        folder: for its files: config.json, ready (its address), log.
        environment: variables that it gets beside those of this process.
        start_seconds: until it must answer.
    """

    config: Mapping[str, Any]
    folder: Path
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    start_seconds: float = 1200.0
    url: str = NOT_STARTED

    kind = "rollout"

    def __post_init__(self) -> None:
        self.folder = Path(self.folder).absolute()
        self.log = self.folder / "log"

    async def ensure(self, folder: Path | None) -> bool:
        """Have the server run; return True if it had to be started.

        It is started with the weights of its config.

        Raises:
            ServerError: it ended, or does not answer; with the end of its log.
        """
        del folder
        if self.runs:
            return False
        config, ready = self.folder / "config.json", self.folder / "ready"
        replace_text(config, json.dumps(self.config))
        ready.unlink(missing_ok=True)
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(_OF_THE_JOB)}

        async def answers() -> bool:
            return ready.is_file()

        command = [sys.executable, "-m", MODULE, str(config), str(ready)]
        await self._start(command, {**inherited, **self.environment}, answers)
        self.url = ready.read_text(encoding="utf-8")
        return True


@cli.command(__doc__, bare=cli.REFUSED, mendable=cli.MENDABLE_WITH_EXTRAS)
def main(argv: Sequence[str]) -> int:
    """Run `python -m jaxrl.rollout.remote.worker CONFIG.json READY`."""
    arguments = cli.Arguments()
    arguments.add_argument("config", type=Path)
    arguments.add_argument("ready", type=Path)
    options = arguments.parse_args(argv)
    threading.Thread(target=_end_with_input, daemon=True).start()
    from jaxrl.rollout.server.build import make_server  # not needed to start a worker

    server = make_server(json.loads(options.config.read_text(encoding="utf-8")))
    server.start()
    replace_text(options.ready, server.url.removesuffix("/v1"))
    server.join()
    return cli.DONE


def _end_with_input() -> None:
    while os.read(sys.stdin.fileno(), 1024):
        pass
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
