#!/usr/bin/env bash
#
# Jupyter on the first host of a slice, in a browser here. Ends with Ctrl-C.
#
#   tpu/notebook.sh --project=P --zone=Z --name=N [--port=8888] [--dry-run]
#
#   --project --zone --name   or JAXRL_TPU_PROJECT, _ZONE, _NAME in the environment
#   --port=8888            there and here: open the address with its token that Jupyter prints
#   --internal-ip          the slice has no external address
#   --dry-run              print the commands, run nothing

set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=arguments.sh
. "$(dirname "$0")/arguments.sh"
flags='internal-ip'
values='project zone name port'
required='project zone name'
parse_arguments "$@"
port=${port:-8888}
on_host 0 "cd jaxrl && bash tpu/host/notebook.sh --port=$port" -t -L "$port:127.0.0.1:$port"
