"""Run one section in a process of its own: `proof` starts it, and reads what it writes.

Its arguments are the section, its function, the mode, and the folder of the proof.
"""

import contextlib
import json
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from dataclasses import asdict, replace
from pathlib import Path

from jaxrl import cli, config as cfg
from jaxrl.files import replace_text
from jaxrl.functions import import_function
from jaxrl.parallel.compilation import enable_cache
from jaxrl.parallel.devices import check_devices
from jaxrl.parallel.xla_flags import set_flags
from jaxrl.tools.prove.section import FACTS, Machine, Result, Task, write_result


def main(name: str, function: str, mode: str, out: Path) -> int:
    """Run a section and write its result; the first one also writes what the machine is."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    set_flags()
    enable_cache(cfg.TrainConfig().trainer.compilation_cache_path)
    started, run = time.perf_counter(), import_function(function, name)
    if name == "machine":
        try:
            check_devices()
        except ValueError as error:
            return cli.refuse(error)
        machine, result = run()
        replace_text(out / FACTS, json.dumps(asdict(machine)))
    else:
        machine = Machine.of(out)
        with tempfile.TemporaryDirectory(prefix="jaxrl_prove_") as folder:
            try:
                result = run(Task(mode, Path(folder), machine))
            except Exception as error:
                traceback.print_exc()
                first = (str(error).splitlines() or [""])[0]
                result = Result(False, reason=f"{type(error).__name__}: {first}")
    result = replace(result, seconds=time.perf_counter() - started)
    write_result(out, name, mode, machine, result)
    return cli.DONE


def _end_with_parent() -> None:
    """End this process, and those that it started, when the proof has gone: its pipe is closed."""
    with contextlib.suppress(OSError):
        os.read(sys.stdin.fileno(), 1)  # waits until the other end is closed
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    section, its_function, its_mode, folder_of_proof = sys.argv[1:]
    sys.exit(main(section, its_function, its_mode, Path(folder_of_proof)))
