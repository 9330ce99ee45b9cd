# shellcheck shell=bash disable=SC2154
# Sourced by every script of this folder: its options, the table of slices, and how a command is
# printed and run. Written for bash 3.2, macOS's.
#
# A script names its options in `flags` (without a value), `values` and `required` (of the values),
# then calls parse_arguments "$@", which sets the variable of each: --dry-run sets $dry_run. What
# follows -- is in the array `rest`. Its first comment is its help; `unknown` is the fix of a word
# that is no option.

unset project zone name type worker chips lines port watch internal_ip yes # of the environment
unknown='--help lists them'
table="$(dirname "${BASH_SOURCE[0]}")/accelerators.tsv"

fail() {
  printf 'error: %s\n' "$1" >&2
  exit 2
}

parse_arguments() {
  local word
  for word in $flags $values dry-run; do printf -v "${word//-/_}" '%s' ''; done
  for word in project zone name type; do # of the environment; an option outranks it
    case " $values " in *" $word "*) from_environment "$word" ;; esac
  done
  rest=()
  while (($#)); do
    case $1 in
      -h | --help) sed -n '3,/^$/p' "$0" | sed 's/^# \{0,1\}//' && exit 0 ;;
      --) shift && rest=(${1+"$@"}) && break ;;
      --*=*) set_value "${1%%=*}" "${1#*=}" ;;
      --*) set_flag "$1" ;;
      *) fail "$1: not an option; options start with --, and $unknown" ;;
    esac
    shift
  done
  for word in $required; do check_given "$word"; done
  check_values
}

from_environment() {
  local variable
  variable=JAXRL_TPU_$(printf '%s' "$1" | tr '[:lower:]' '[:upper:]')
  printf -v "$1" '%s' "${!variable-}"
}

set_value() { # --option value
  local word=${1#--}
  case " $values " in
    *" $word "*) printf -v "${word//-/_}" '%s' "$2" ;;
    *) fail "$1=$2: there is no such option with a value; $unknown" ;;
  esac
}

set_flag() { # --option
  local word=${1#--}
  case " $flags dry-run " in *" $word "*) printf -v "${word//-/_}" '%s' yes && return ;; esac
  case " $values " in *" $word "*) fail "$1 needs a value: give $1=VALUE" ;; esac
  fail "$1: there is no such option; $unknown"
}

check_given() { # option
  local variable=${1//-/_} environment=''
  [[ -n ${!variable} ]] && return
  case $1 in
    project | zone | name | type)
      environment=", or set JAXRL_TPU_$(printf '%s' "$1" | tr '[:lower:]' '[:upper:]')" ;;
  esac
  fail "--$1 is missing: give --$1=VALUE$environment"
}

check_values() { # what gcloud would refuse minutes later, or with a message that does not help
  [[ -z ${project-} || $project =~ ^[a-z][a-z0-9.:-]+$ ]] ||
    fail "--project=$project: no id of a project (lower case letters, digits, -): gcloud projects list"
  [[ -z ${zone-} || $zone =~ ^[a-z]+-[a-z]+[0-9]+-[a-z0-9]+$ ]] ||
    fail "--zone=$zone: no zone, such as us-east5-b (a region has no last letter): gcloud compute tpus locations list"
  [[ -z ${name-} || $name =~ ^[a-z]([a-z0-9-]{0,61}[a-z0-9])?$ ]] ||
    fail "--name=$name: give lower case letters, digits and -, starting with a letter, at most 63"
  [[ -z ${worker-} || $worker =~ ^([0-9]+|all)$ ]] || fail "--worker=$worker: give a number from 0, or all"
  local number
  for number in chips lines port watch; do
    [[ -z ${!number-} || ${!number} =~ ^[1-9][0-9]*$ ]] || fail "--$number=${!number}: give a whole number above 0"
  done
  if [[ -n ${type-} ]]; then describe_type; fi
}

describe_type() { # the row of $type: $topology $hosts $chips_per_host $hbm_gb $runtime
  type=${type/#v5e-/v5litepod-}
  local row
  row=$(awk -F '\t' -v "type=$type" '$1 == type' "$table")
  [[ -n $row ]] || fail "--type=$type: not a slice of tpu/accelerators.tsv; choose one of $(
    awk -F '\t' '!/^#/ && $1 != "type" {print $1}' "$table" | paste -sd ' ' -
  )"
  # shellcheck disable=SC2034 # the scripts use them
  IFS=$'\t' read -r _ topology hosts chips_per_host hbm_gb runtime _ <<<"$row"
}

quoted() { # the words as a shell would read them again
  local word separator=''
  for word in "$@"; do
    case $word in
      '' | *[!A-Za-z0-9_./:=@%+,-]*) word="'$(printf '%s' "$word" | sed "s/'/'\\\\''/g")'" ;;
    esac
    printf '%s%s' "$separator" "$word"
    separator=' '
  done
}

run() { # the command, printed; with --dry-run only printed
  if [[ -n $dry_run ]]; then
    printf '%s\n' "$(quoted "$@")"
  else
    printf '+ %s\n' "$(quoted "$@")" >&2
    "$@"
  fi
}

tpu() { # group verb words...: of gcloud compute tpus, in this project and zone
  local group=$1 verb=$2
  shift 2
  run gcloud compute tpus "$group" "$verb" "--project=$project" "--zone=$zone" "$@"
}

on_host() { # worker command [options of gcloud]: run there by its login shell
  local worker=$1 command=$2
  shift 2
  tpu tpu-vm ssh "$name" ${internal_ip:+--internal-ip} "--worker=$worker" "--command=$command" "$@"
}

copy() { # worker words...: of scp, where NAME: is the host's home folder
  local worker=$1
  shift
  tpu tpu-vm scp "$@" ${internal_ip:+--internal-ip} "--worker=$worker"
}

confirm() { # question
  [[ -n $yes || -n $dry_run ]] && return
  [[ -t 0 ]] || fail "nobody to ask ($1): give --yes"
  local answer
  read -r -p "$1 [y/N] " answer
  [[ $answer == [yY]* ]] || fail 'nothing was done'
}
