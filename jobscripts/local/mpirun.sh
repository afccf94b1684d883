#!/usr/bin/env bash
# bash jobscripts/local/mpirun.sh N COMMAND...
#
# Runs a command of yours on N ranks of this machine, in the environment of setup.sh, for example
#     bash jobscripts/local/mpirun.sh 2 python -m hpcllm train my.toml --set mesh.dp=2
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
case ${1:-} in
    "" | *[!0-9]* | 0) hpcllm_die 2 "N = '${1:-}' should be a number of ranks >= 1, as in: mpirun.sh N COMMAND..." ;;
esac
[ $# -ge 2 ] || hpcllm_die 2 "the command is missing: mpirun.sh N COMMAND..."
hpcllm_setup
hpcllm_mpirun "$@"
