"""Serve a model over HTTP, as OpenAI's API.

    python -m jaxrl.serve --config=configs/quickstart.py \\
        --config.trainer.policy.model.path=FOLDER --config.serve.weights_root=FOLDER

docs/serving.md has the routes, the limits, and what to know before others can reach it.
"""

import sys
from collections.abc import Sequence

from jaxrl import config as cfg
from jaxrl.parallel.devices import check_devices
from jaxrl.rollout.server.build import make_server, serve_jetstream


def main(argv: Sequence[str]) -> int:
    """Run `python -m jaxrl.serve --config=FILE [--config.a.b=value ...]`."""
    if not argv or "--help" in argv or "-h" in argv:
        print(f"{__doc__}\nFields: serve.* and generator.* of docs/configuration.md.")
        return 0
    try:
        path, overrides = cfg.parse_command_line(list(argv))
        config = cfg.apply_overrides(cfg.load_config_file(path), overrides)
        check_devices()
        server = make_server(config)
        server.start()
        if config.serve.grpc_port is not None:
            grpc = serve_jetstream(config, server)
            print(f"serving JetStream's clients at port {grpc.bound_port}")
    except (ValueError, OSError, ImportError) as error:  # what a user can mend
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"serving {server.served.name} at {server.url}; {server.host.describe()}", flush=True)
    try:
        server.join()
    except KeyboardInterrupt:
        server.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
