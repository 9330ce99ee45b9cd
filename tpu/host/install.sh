#!/usr/bin/env bash
#
# On a TPU host: install the checkout around this file into its .venv, and count the chips.
#
#   tpu/host/install.sh --chips=8 [--dry-run]
#
#   --chips=N              of this host; fails if JAX sees another number
#   --extras=tpu,gcs       of pyproject.toml
#   --python=3.12          fetched by uv if the host lacks it (images have 3.10; jaxrl needs 3.11)
#   --dry-run              print the commands, run nothing

# shellcheck disable=SC2154 # the options are variables
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=../arguments.sh
. "$(dirname "$0")/../arguments.sh"
flags=''
values='chips extras python'
required='chips'
parse_arguments "$@"
cd "$(dirname "$0")/../.."
export PIP_BREAK_SYSTEM_PACKAGES=1 # of newer images; older pips do not know the setting
run python3 -m pip install --quiet uv
run python3 -m uv venv --quiet --allow-existing "--python=${python:-3.12}" .venv
run python3 -m uv pip install --quiet --python=.venv/bin/python --editable ".[${extras:-tpu,gcs}]"
run .venv/bin/python tpu/host/check_chips.py "$chips"
