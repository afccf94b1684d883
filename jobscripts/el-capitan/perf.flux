#!/bin/bash -l
# flux batch [options of flux batch] jobscripts/el-capitan/perf.flux [ARGUMENTS of python -m hpcllm.perf]
# measures links, codecs and collectives, and writes tuning.toml (../README.md).
# Not run on this machine by us; env.sh has the sources. Your account: flux batch --bank=...
#
#flux: --nodes=2 --exclusive
#flux: --queue=pbatch --setattr=thp=always
#flux: --time-limit=30m --job-name=hpcllm-perf --output=hpcllm-perf-{{id}}.out

for root in "${HPCLLM_ROOT:-}" "$(dirname "$0")/../.." "$PWD"; do # Flux runs a copy of this file
    [ ! -e "$root/jobscripts/common/job.sh" ] || break
done
# shellcheck source=../common/job.sh
. "$root/jobscripts/common/job.sh" || {
    echo "hpcllm: where is its repository? flux batch from there, or export HPCLLM_ROOT=FOLDER" >&2
    exit 2
}
hpcllm_job el-capitan perf "$@"
