#!/usr/bin/env bash
# bash tests/slurm/run.sh [--install] [pytest arguments]: runs as jobs of a real Slurm on two made-up nodes of this machine.
#
# Needs Linux, root, and Slurm with munge; --install fetches them by apt-get if they are missing. Where that cannot be,
# it says so and skips. Nothing is left running, and no file outside a temporary folder is changed.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/../../jobscripts/local/setup.sh"

install=""
if [ "${1:-}" = --install ]; then install=1 && shift; fi

why_not() { # what is missing; nothing if Slurm can be run here
    [ "$(uname -s)" = Linux ] && [ "$(id -u)" = 0 ] || { echo "needs root on Linux" && return; }
    for tool in slurmctld slurmd sbatch srun squeue scontrol munged unshare; do
        command -v "$tool" >/dev/null || { echo "not on PATH: $tool" && return; }
    done
    unshare --uts --ipc --mount true 2>/dev/null || echo "this kernel or container gives no namespaces"
}

export PATH=$PATH:/usr/sbin:/sbin
if [ -n "$install" ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null && ! command -v slurmctld >/dev/null; then
    hpcllm_say "installing Slurm"
    # without systemd its services cannot be started, and need not be
    { apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install --no-install-recommends slurm-wlm; } \
        >/dev/null 2>&1 || hpcllm_say "apt-get could not"
fi
missing=$(why_not)
if [ -n "$missing" ]; then
    hpcllm_say "skipped, no job of Slurm is run: $missing"
    exit 0
fi
hpcllm_setup test
cd "$HPCLLM_ROOT"
code=0
folder=$(mktemp -d -t hpcllm-slurm-XXXXXX)
# whatever becomes of the tests
trap 'bash tests/slurm/fakeslurm.sh down "$folder/slurm" || :; rm -rf "$folder"' EXIT
bash tests/slurm/fakeslurm.sh up "$folder/slurm" 2
# each test is several jobs, so the limit of a single test in pyproject.toml is too short
HPCLLM_SLURM=$folder timeout -k 20 1500 python -m pytest -q --color=no -p no:cacheprovider -o timeout=400 "$@" \
    tests/slurm/*jobs.py | tee "$folder/log" || code=$?
count() { tail -n 1 "$folder/log" | grep -oE "[0-9]+ $1" | grep -oE '[0-9]+' || echo 0; }
failed=$(($(count failed) + $(count error)))
if [ "$code" != 0 ] && [ "$failed" = 0 ]; then failed=1; fi
echo "$(count passed) passed, $failed failed"
exit "$code"
