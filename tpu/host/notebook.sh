#!/usr/bin/env bash
#
# On a TPU host: Jupyter for whoever has the port forwarded; ends with its terminal.
#
#   tpu/host/notebook.sh --port=8888 [--dry-run]

# shellcheck disable=SC2154 # the options are variables
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=../arguments.sh
. "$(dirname "$0")/../arguments.sh"
flags=''
values='port'
required='port'
parse_arguments "$@"
cd "$(dirname "$0")/../.."
bash tpu/host/train.sh idle
export JAX_PLATFORMS=tpu,cpu
run python3 -m uv pip install --quiet --python=.venv/bin/python jupyterlab
run .venv/bin/jupyter lab --no-browser --ip=127.0.0.1 "--port=$port" --ServerApp.port_retries=0
