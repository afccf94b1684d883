#!/usr/bin/env bash
# bash tests/run.sh [pytest arguments]: all tests, serial and on 1 to 5 ranks; ends with "N passed, N failed".
#
#     HPCLLM_MPI=mpich | openmpi | system   which MPI (see jobscripts/local/setup.sh)
#     HPCLLM_TESTS="1 2 3 4 5"             only these groups: `serial`, two tests at a time; `alone`, serial ones that hold
#                                          limits of time; a number of ranks; sealed:serial, sealed:2, open:2, ...: on
#                                          a device, see tests/conftest.py
#
# Arguments go to each pytest, for example `-k ring` or `-x tests/collectives`; paths start at the repository.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/../jobscripts/local/setup.sh"
hpcllm_setup test
cd "$HPCLLM_ROOT"

# a group that takes longer hangs in a way that the limit of a single test (pyproject.toml) did not see
group_limit_s=${HPCLLM_GROUP_LIMIT_S:-900}
passed=0
failed=0
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
export PYTHONPATH="$HPCLLM_ROOT/tests${PYTHONPATH:+:$PYTHONPATH}"

limited() { # timeout, where there is one
    if command -v timeout >/dev/null; then timeout -k 20 "$group_limit_s" "$@"; else "$@"; fi
}

run_group() { # [MODE:]GROUP: pytest's exit code; rank 0 speaks, the others only where they fail alone
    local group=${1##*:} quiet
    unset HPCLLM_PRETEND
    case $1 in *:*) export HPCLLM_PRETEND=${1%%:*} ;; esac
    shift
    case $group in
        serial) # a thread each, or the two would wait for one another's threads
            limited env OMP_NUM_THREADS=1 python -m pytest -q --color=no -n 2 --dist loadgroup --no-loadscope-reorder \
                -m "not parallel and not alone" "$@"
            return
            ;;
        alone)
            limited python -m pytest -q --color=no -m alone "$@"
            return
            ;;
    esac
    # A temporary folder for each rank's pytest, for they would clear away one another's.
    # shellcheck disable=SC2016 # expanded on each rank
    quiet='rank=${PMI_RANK:-${OMPI_COMM_WORLD_RANK:-${PMIX_RANK:-0}}}; export PYTEST_DEBUG_TEMPROOT=$0/$rank
        mkdir -p "$0/$rank"; [ "$rank" = 0 ] || exec >/dev/null; exec "$@"'
    limited bash jobscripts/local/mpirun.sh "$group" bash -c "$quiet" "$logs" \
        python -m pytest -q --color=no -p ranks -m "parallel and parallel[$group]" "$@"
}

count() { # WORD: the number before it in pytest's closing line; an MPI library may say something after it
    grep -E '^(=+ )?[0-9]+ (passed|failed|errors?|skipped|deselected|warnings?).* in [0-9.]+s' "$logs/out" | tail -n 1 |
        grep -oE "[0-9]+ $1" | grep -oE '[0-9]+' || echo 0
}

for group in ${HPCLLM_TESTS:-serial alone 1 2 3 4 5 sealed:serial sealed:1 sealed:2 sealed:3 sealed:4 open:2 open:3}; do
    case $group in
        serial) hpcllm_say "serial tests" ;;
        alone) hpcllm_say "serial tests of time" ;;
        *) hpcllm_say "tests on $group ranks" ;;
    esac
    code=0
    run_group "$group" "$@" </dev/null | tee "$logs/out" || code=$?
    failures=$(($(count failed) + $(count error)))
    passed=$((passed + $(count passed)))
    # 5: no test of this group was selected. A job that was cut off has no closing line, yet has failed.
    if [ "$code" != 0 ] && [ "$code" != 5 ] && [ "$failures" = 0 ]; then
        hpcllm_say "group $group ended early, exit code $code"
        failures=1
    fi
    failed=$((failed + failures))
done
if [ "$passed" = 0 ] && [ "$failed" = 0 ]; then hpcllm_say "no test was selected, which proves nothing"; fi
echo "$passed passed, $failed failed"
[ "$failed" = 0 ] && [ "$passed" -gt 0 ]
