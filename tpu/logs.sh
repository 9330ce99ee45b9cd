#!/usr/bin/env bash
#
# Show what the run of tpu/run.sh prints, or bring its records here.
#
#   tpu/logs.sh --project=P --zone=Z --name=N [--follow | --fetch=FOLDER] [--dry-run]
#
#   --project --zone --name   or JAXRL_TPU_PROJECT, _ZONE, _NAME in the environment
#   --follow               go on until Ctrl-C; the run does not notice
#   --lines=50             how many to begin with
#   --fetch=FOLDER         copy the host's runs/ (metrics, curves, TensorBoard, ledger, logs) to
#                          FOLDER/runs, without checkpoints and exports
#   --worker=0             which host
#   --internal-ip          the slice has no external address
#   --dry-run              print the commands, run nothing

set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=arguments.sh
. "$(dirname "$0")/arguments.sh"
flags='follow internal-ip'
values='project zone name lines fetch worker'
required='project zone name'
parse_arguments "$@"
worker=${worker:-0}
[[ -z $follow || -z $fetch ]] || fail '--follow and --fetch: give one of them'
[[ $worker != all || -z $fetch ]] || fail '--worker=all: --fetch copies from one host at a time'
if [[ -n $fetch ]]; then
  on_host "$worker" 'tar -C jaxrl -czf jaxrl_runs.tar.gz --exclude=checkpoints --exclude=exports runs'
  run mkdir -p "$fetch"
  copy "$worker" "$name:jaxrl_runs.tar.gz" "$fetch/jaxrl_runs.tar.gz"
  run tar -C "$fetch" -xzf "$fetch/jaxrl_runs.tar.gz"
  run rm "$fetch/jaxrl_runs.tar.gz"
else
  on_host "$worker" "tail -n ${lines:-50} ${follow:+-F }jaxrl/runs/logs/latest.log"
fi
