"""A rollout worker: `jaxrl.serve` for one run, which starts it and gives it weights.

`rollout.own_server` runs it as `python -m jaxrl.rollout.remote.worker CONFIG.json READY`. It writes
its address to the file READY once it can be asked, and ends when its standard input is closed: then
nobody is there any more who could ask it.
"""

import json
import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from jaxrl.rollout.server.build import make_server


def main(argv: Sequence[str]) -> int:
    """Run `python -m jaxrl.rollout.remote.worker CONFIG.json READY`."""
    if len(argv) != 2 or {"--help", "-h"} & set(argv):
        print(__doc__)
        return 0 if {"--help", "-h"} & set(argv) else 2
    threading.Thread(target=_end_with_input, daemon=True).start()
    try:
        server = make_server(json.loads(Path(argv[0]).read_text(encoding="utf-8")))
        server.start()
    except (ValueError, OSError, ImportError) as error:  # what a user can mend
        print(f"error: {error}", file=sys.stderr)
        return 2
    unnamed = Path(f"{argv[1]}.new")
    unnamed.write_text(server.url.removesuffix("/v1"), encoding="utf-8")
    unnamed.replace(argv[1])
    server.join()
    return 0


def _end_with_input() -> None:
    while os.read(sys.stdin.fileno(), 1024):
        pass
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
