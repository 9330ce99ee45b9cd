#!/usr/bin/env bash
#
# Create a TPU slice. It costs money from the moment it exists until tpu/delete.sh.
#
#   tpu/create.sh --project=P --zone=Z --name=N --type=v6e-8 [--spot] [--queued] [--yes] [--dry-run]
#
#   --project --zone --name --type   or JAXRL_TPU_PROJECT, _ZONE, _NAME, _TYPE in the environment
#   --type                 of tpu/accelerators.tsv; v5e-8 means v5litepod-8
#   --spot                 cheaper; may be taken away at any time
#   --queued               wait in the queue for capacity, instead of failing when there is none
#   --queued-for=6h        ... and at most so long
#   --runtime-version=V    software of the TPU VM, instead of the table's
#   --service-account=EMAIL --network=NAME --subnetwork=NAME
#   --internal-ip          no external address; the other scripts then need --internal-ip too
#   --yes                  do not ask
#   --dry-run              print the commands, run nothing

set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=arguments.sh
. "$(dirname "$0")/arguments.sh"
flags='spot queued internal-ip yes'
values='project zone name type queued-for runtime-version service-account network subnetwork'
required='project zone name type'
parse_arguments "$@"
[[ -z $queued_for || -n $queued ]] || fail "--queued-for=$queued_for: it needs --queued"
[[ -z $queued_for || $queued_for =~ ^[0-9]+[smhd]$ ]] || fail "--queued-for=$queued_for: give 30m, 6h or 2d"

how='on demand'
[[ -z $spot ]] || how=spot
delete=("$(dirname "$0")/delete.sh" "--project=$project" "--zone=$zone" "--name=$name" ${queued:+--queued})
cat >&2 <<TEXT
$name: $type, topology $topology, $hosts host(s) of $chips_per_host chips with $hbm_gb GB each, $how
billed from its creation until: $(quoted "${delete[@]}")
TEXT
((hosts == 1)) || printf 'note: all %s hosts must see the checkpoints: give run.sh --config.trainer.ckpt_path=gs://...\n' "$hosts" >&2
confirm "create it in $project, $zone?"

common=(
  "--accelerator-type=$type" ${spot:+--spot} ${internal_ip:+--internal-ips}
  ${service_account:+"--service-account=$service_account"}
  ${network:+"--network=$network"} ${subnetwork:+"--subnetwork=$subnetwork"}
)
version=${runtime_version:-$runtime}
if [[ -n $queued ]]; then
  tpu queued-resources create "$name" "--node-id=$name" "--runtime-version=$version" "${common[@]}" \
    ${queued_for:+"--valid-until-duration=$queued_for"}
  tpu queued-resources describe "$name" '--format=value(state)' # setup.sh once this says ACTIVE
else
  tpu tpu-vm create "$name" "--version=$version" "${common[@]}"
fi
