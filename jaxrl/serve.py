"""Serve a model over HTTP, as OpenAI's API.

    python -m jaxrl.serve --config=configs/quickstart.py \\
        --config.trainer.policy.model.path=FOLDER --config.serve.weights_root=FOLDER

docs/serving.md has the routes, the limits, and what to know before others can reach it;
docs/configuration.md the fields serve.* and generator.*.
"""

from jaxrl import cli, config as cfg

if __name__ == "__main__":
    cli.answer_early(__doc__, cfg.read_early)

import sys
from collections.abc import Sequence

from jaxrl.parallel.devices import check_devices
from jaxrl.rollout.server.build import make_server, serve_jetstream


@cli.command(__doc__, mendable=cli.MENDABLE_WITH_EXTRAS)
def main(argv: Sequence[str]) -> int:
    """Run `python -m jaxrl.serve --config=FILE [--config.a.b=value ...]`."""
    config = cfg.read_command_line(argv)
    check_devices()
    server = make_server(config)
    server.start()
    if config.serve.grpc_port is not None:
        grpc = serve_jetstream(config, server)
        print(f"serving JetStream's clients at port {grpc.bound_port}")
    print(f"serving {server.served.name} at {server.url}; {server.host.describe()}")
    print(f"requests name it: model={server.served.name!r}", flush=True)
    try:
        server.join()
    except KeyboardInterrupt:
        server.stop()
    return cli.DONE


if __name__ == "__main__":
    sys.exit(main())
