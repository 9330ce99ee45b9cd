#!/usr/bin/env bash
#
# Start a run on every host of a slice, one process per host, and leave it running; or end it.
#
#   tpu/run.sh --project=P --zone=Z --name=N --type=v6e-8 [--dry-run] -- --config=configs/quickstart.py
#   tpu/run.sh --project=P --zone=Z --name=N --type=v6e-8 --stop
#
#   --project --zone --name --type   or JAXRL_TPU_PROJECT, _ZONE, _NAME, _TYPE in the environment
#   --module=jaxrl.train   what `python -m` runs; jaxrl.sft, jaxrl.evaluate, ...
#   --watch=15             seconds to wait for an early end, to show here what was wrong
#   --stop                 end the run; the same command resumes it from its last checkpoint
#   --internal-ip          the slice has no external address
#   --dry-run              print the commands, run nothing
#
# What follows -- goes to the module as it is. tpu/logs.sh shows what the run prints. On several hosts
# it must name a trainer.ckpt_path that all of them see, --config.trainer.ckpt_path=gs://...

set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=arguments.sh
. "$(dirname "$0")/arguments.sh"
flags='stop internal-ip'
values='project zone name type module watch'
required='project zone name type'
unknown="--help lists them; put the run's arguments after --"
parse_arguments "$@"
host_script='cd jaxrl && bash tpu/host/train.sh'
if [[ -n $stop ]]; then
  on_host all "$host_script stop"
  exit
fi
((${#rest[@]})) || fail 'nothing to run: give the arguments of the module after --, such as -- --config=configs/quickstart.py'
many=''
if ((hosts > 1)); then
  many=--many # each host starts its process again when another one fails
  case ${module:-jaxrl.train},${rest[*]} in
    jaxrl.train,*trainer.ckpt_path[=\ ]* | jaxrl.sft,*trainer.ckpt_path[=\ ]*) ;;
    jaxrl.train,* | jaxrl.sft,*)
      echo "note: all $hosts hosts must see the checkpoints: unless the recipe says so, add --config.trainer.ckpt_path=gs://..., or a folder that they share" >&2
      ;;
  esac
fi
on_host all "$host_script $(quoted start ${many:+"$many"} ${module:+"--module=$module"} ${watch:+"--watch=$watch"} -- "${rest[@]}")"
