#!/usr/bin/env bash
#
# On a TPU host: start a run that outlives the connection, end it, or say whether there is one.
#
#   tpu/host/train.sh start [--many] [--module=jaxrl.train] [--watch=15] -- --config=configs/quickstart.py
#   tpu/host/train.sh stop | idle
#
#   --module=NAME          what `python -m` runs
#   --many                 it is one process of many, which JAX finds: the launcher starts it, again
#                          if need be
#   --watch=SECONDS        how long `start` waits for an early end, to show what was wrong
#   --dry-run              print the commands, run nothing
#
# Prints go to runs/logs/<time>.log, and runs/logs/latest.log is the last. ~/jaxrl.env is read first.

set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=../arguments.sh
. "$(dirname "$0")/../arguments.sh"
flags='many'
values='module watch'
required=''
verb=${1-}
(($# == 0)) || shift
case $verb in -*) set -- "$verb" "$@" ;; esac # --help
parse_arguments "$@"
cd -P "$(dirname "$0")/../.."
pid_file=runs/train.pid
platforms=tpu,cpu # no TPU is an error, not a run on the CPU

alive() { # is the last run there? (not another process that got its number)
  [[ -f $pid_file && $(readlink "/proc/$(<"$pid_file")/cwd") == "$PWD" ]]
}

refuse_second() {
  ! alive || fail "a run is alive on this host (process $(<"$pid_file")), and a TPU has one user at a time: tpu/run.sh --stop ends it"
}

start() {
  ((${#rest[@]})) || fail 'nothing to run: give the arguments of the module after --'
  refuse_second
  local log command status=0 second
  log=runs/logs/$(date -u +%Y%m%d_%H%M%S).log
  command=(.venv/bin/python -m "${module:-jaxrl.train}" "${rest[@]}")
  [[ -z $many ]] || command=(.venv/bin/python -m jaxrl.cluster.launch --no-ray "--module=${module:-jaxrl.train}" "${rest[@]}")
  run mkdir -p runs/logs
  if [[ -n $dry_run ]]; then
    printf 'JAX_PLATFORMS=%s PYTHONUNBUFFERED=1 setsid %s > %s 2>&1 &\n' "$platforms" "$(quoted "${command[@]}")" "$log"
    return
  fi
  set -a
  # shellcheck disable=SC1091
  if [[ -f ../jaxrl.env ]]; then . ../jaxrl.env; fi
  set +a
  export PYTHONUNBUFFERED=1 JAX_PLATFORMS=${JAX_PLATFORMS:-$platforms}
  setsid "${command[@]}" >"$log" 2>&1 </dev/null &
  printf '%s\n' $! >"$pid_file"
  ln -sfn "$(basename "$log")" runs/logs/latest.log
  for ((second = 0; second < ${watch:-15}; second++)); do
    sleep 1
    alive && continue
    wait $! || status=$?
    tail -n 20 "$log"
    printf 'the run ended within %s s with status %s; all it printed: %s\n' $((second + 1)) "$status" "$log" >&2
    exit "$status"
  done
  printf 'running as process %s, prints go to %s\n' "$(<"$pid_file")" "$log"
}

stop() {
  alive || { printf 'no run is alive on this host\n' && return; }
  local pid second
  pid=$(<"$pid_file")
  run kill "$pid"
  for ((second = 0; second < 30; second++)); do
    alive || return 0
    sleep 1
  done
  run kill -9 "$pid" # a killed run resumes from its last checkpoint, to the bit
}

case $verb in
  start) start ;;
  stop) stop ;;
  idle) refuse_second ;;
  *) fail "${verb:-no verb}: give start, stop or idle; --help says more" ;;
esac
