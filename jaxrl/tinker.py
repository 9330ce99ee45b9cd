"""Serve training and sampling over Tinker's API: many adapters of one base at once.

    python -m jaxrl.tinker --config=configs/quickstart.py \\
        --config.trainer.policy.model.path=FOLDER --config.tinker.root=runs/tinker

Clients of the public SDK use it with `TINKER_BASE_URL` and `TINKER_API_KEY`. docs/tinker.md has a
first loop, what is supported and what differs; docs/configuration.md the fields tinker.*.
"""

from jaxrl import cli, config as cfg

if __name__ == "__main__":
    cli.answer_early(__doc__, cfg.read_early)

import sys
from collections.abc import Sequence

from jaxrl.parallel.devices import check_devices

EXTRA = "the training service needs pydantic and protobuf: pip install 'jaxrl[tinker]'"


@cli.command(__doc__, mendable=cli.MENDABLE_WITH_EXTRAS)
def main(argv: Sequence[str]) -> int:
    """Run `python -m jaxrl.tinker --config=FILE [--config.a.b=value ...]`."""
    config = cfg.read_command_line(argv)
    check_devices()
    try:
        from jaxrl.tools.tinker.build import make_server
    except ImportError as error:
        raise ImportError(f"{EXTRA} ({error})") from error
    server = make_server(config)
    server.start()
    print(f"serving {server.service.base} at {server.url}")
    print(f"clients: TINKER_BASE_URL={server.url} TINKER_API_KEY=tml-...", flush=True)
    try:
        server.join()
    except KeyboardInterrupt:
        server.stop()
    return cli.DONE


if __name__ == "__main__":
    sys.exit(main())
