#!/usr/bin/env bash
#
# Send the commit that is checked out to every host of a slice, and install it there.
#
#   tpu/setup.sh --project=P --zone=Z --name=N --type=v6e-8 [--models=gs://bucket/qwen] [--dry-run]
#
#   --project --zone --name --type   or JAXRL_TPU_PROJECT, _ZONE, _NAME, _TYPE in the environment
#   --models=PATH          a model's folder, gs:// or local: becomes models/<its last part> there
#   --env-file=FILE        lines NAME=value, such as HF_TOKEN=..., that runs there read; never printed
#   --extras=tpu,gcs       of pyproject.toml
#   --python=3.12
#   --internal-ip          the slice has no external address
#   --dry-run              print the commands, run nothing
#
# May be run again: .venv, models and runs stay, the rest of ~/jaxrl is replaced.

set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=arguments.sh
. "$(dirname "$0")/arguments.sh"
flags='internal-ip'
values='project zone name type models env-file extras python'
required='project zone name type'
parse_arguments "$@"
[[ -z $env_file || -f $env_file ]] || fail "--env-file=$env_file: there is no such file"
[[ -z $models || $models == gs://?* || -d $models ]] || fail "--models=$models: no folder; give one, or gs://BUCKET/FOLDER"

cd "$(dirname "$0")/.."
commit=$(git rev-parse --short HEAD 2>/dev/null) || fail "$PWD is not a git checkout: clone the repository, what is sent is a commit"
changed=$(git status --short)
[[ -z $changed ]] || printf 'not sent, because not committed:\n%s\n' "$changed" >&2
archive=$(mktemp -d)/jaxrl.tar.gz
trap 'rm -rf "$(dirname "$archive")"' EXIT

run git archive --format=tar.gz "--output=$archive" "$commit"
copy all "$archive" "$name:jaxrl.tar.gz"
if [[ -n $env_file ]]; then copy all "$env_file" "$name:jaxrl.env"; fi
on_host all "mkdir -p jaxrl/models && cd jaxrl \
&& if [ -f tpu/host/train.sh ]; then bash tpu/host/train.sh idle; fi \
&& find . -mindepth 1 -maxdepth 1 ! -name .venv ! -name models ! -name runs -exec rm -rf {} + \
&& tar -xzf ../jaxrl.tar.gz && echo $commit > COMMIT \
&& bash tpu/host/install.sh $(quoted "--chips=$chips_per_host" \
  ${extras:+"--extras=$extras"} ${python:+"--python=$python"})"
case $models in
  '') ;;
  gs://*)
    target=jaxrl/models/$(basename "$models")
    on_host all "mkdir -p $(quoted "$target") && gcloud storage rsync $(quoted "$models" "$target") --recursive"
    ;;
  *) copy all --recurse "$models" "$name:jaxrl/models/" ;;
esac
