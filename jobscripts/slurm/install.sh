#!/usr/bin/env bash
# bash jobscripts/slurm/install.sh: the Python environment of a cluster, on its login node. HPCLLM_MPI says which MPI,
# HPCLLM_CUPY which CuPy: env.sh.
#
# It is that of jobscripts/local, which see for the choice of PyTorch: the folder must be one that nodes see too.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/../local/setup.sh"
if [ $# -gt 0 ]; then hpcllm_die 2 "'$*': this install.sh takes no argument"; fi
if [ -n "${DRY_RUN:-}" ]; then
    echo "HPCLLM_MPI=$HPCLLM_MPI bash $HPCLLM_ROOT/jobscripts/local/setup.sh${HPCLLM_CUPY:+ $HPCLLM_CUPY}"
    exit
fi
hpcllm_setup ${HPCLLM_CUPY:+"$HPCLLM_CUPY"}
