#!/bin/bash -l
# flux batch [options of flux batch] jobscripts/el-capitan/run.flux COMMAND [ARGUMENTS]
# python -m hpcllm COMMAND on all ranks: prepare, generate, checkpoint ... (../README.md).
# Not run on this machine by us; env.sh has the sources. Your account: flux batch --bank=...
#
#flux: --nodes=2 --exclusive
#flux: --queue=pbatch --setattr=thp=always
#flux: --time-limit=1h --job-name=hpcllm-run --output=hpcllm-run-{{id}}.out

for root in "${HPCLLM_ROOT:-}" "$(dirname "$0")/../.." "$PWD"; do # Flux runs a copy of this file
    [ ! -e "$root/jobscripts/common/job.sh" ] || break
done
# shellcheck source=../common/job.sh
. "$root/jobscripts/common/job.sh" || {
    echo "hpcllm: where is its repository? flux batch from there, or export HPCLLM_ROOT=FOLDER" >&2
    exit 2
}
hpcllm_job el-capitan run "$@"
