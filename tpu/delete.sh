#!/usr/bin/env bash
#
# Delete a slice with its disks, which ends its costs, and list what is left in the zone.
#
#   tpu/delete.sh --project=P --zone=Z --name=N [--queued] [--yes] [--dry-run]
#
#   --project --zone --name   or JAXRL_TPU_PROJECT, _ZONE, _NAME in the environment
#   --queued               it was created with --queued: delete the request too
#   --yes                  do not ask
#   --dry-run              print the commands, run nothing

set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=arguments.sh
. "$(dirname "$0")/arguments.sh"
flags='queued yes'
values='project zone name'
required='project zone name'
parse_arguments "$@"
confirm "delete $name in $project, $zone, with what its disks hold?"
if [[ -n $queued ]]; then
  tpu queued-resources delete "$name" --force --quiet
else
  tpu tpu-vm delete "$name" --quiet
fi
tpu tpu-vm list
tpu queued-resources list
