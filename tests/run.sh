#!/usr/bin/env bash
# Run the tests, serial and on 1 to 4 ranks; the last line reads "N passed, N failed".
#
#     bash tests/run.sh              a sample: each value of each parameter of each test
#     bash tests/run.sh --fast       one case each of serial tests that start no process
#     bash tests/run.sh --all        all cases of all tests, on 5 ranks and in every mode of a device too
#     bash tests/run.sh --list-left  what the sample (or, after --fast, the fast one) leaves to --all
#     bash tests/run.sh --coverage   the sample's serial tests and those on 2 ranks; prints what share of each file they run
#     bash tests/run.sh [--fast | --sample | --all] [pytest arguments]     for example -k ring, or -x tests/collectives
#
# Who names tests, by a path, -k or HPCLLM_TESTS, gets all their cases unless --fast or --sample is given too. Paths
# start at the repository. With --sample the groups that are named share the cases out among them, those that the
# default leaves to --all too. At the end stand the slowest 20 tests.
#
#     HPCLLM_MPI=mpich | openmpi | system   which MPI (see jobscripts/local/setup.sh)
#     HPCLLM_TESTS="1 2 3 4 5"             only these groups: `serial`, two or three files at a time (`serial+1`: with those on one
#                                          rank); `alone`, serial ones that hold limits of time; a number of ranks;
#                                          sealed:serial, sealed:2, open:2, ...: on a device, late:2, ...: with late
#                                          messages, see tests/conftest.py
#
# What each choice runs is said in tests/README.md.
set -euo pipefail

usage() { sed -n '2,/^set /s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; }

wrong() { # MESSAGE
    printf 'tests/run.sh: error: %s; valid: --fast, --sample, --all, --list-left, --coverage, -h and arguments of pytest\n' "$1" >&2
    exit 2
}

level="" # fast | sample | all
list_left=""
coverage=""
names_tests=${HPCLLM_TESTS:+HPCLLM_TESTS}
arguments=()
for argument in "$@"; do
    case $argument in
        --fast | --sample | --all)
            [ -z "$level" ] || [ "$level" = "${argument#--}" ] || wrong "--fast, --sample and --all exclude each other"
            level=${argument#--}
            ;;
        --list-left) list_left=yes ;;
        --coverage) coverage=yes ;;
        -h | --help)
            usage
            exit
            ;;
        -k* | [!-]*) names_tests=${names_tests:-$argument} arguments+=("$argument") ;;
        *) arguments+=("$argument") ;;
    esac
done
if [ -z "$level" ]; then level=${names_tests:+all}; fi
level=${level:-sample}
if [ -n "$list_left" ] && [ -n "$names_tests" ]; then wrong "--list-left is of all tests, not of $names_tests"; fi
if [ -n "$list_left" ] && [ "$level" = all ]; then wrong "--all leaves nothing"; fi
. "$(dirname "${BASH_SOURCE[0]}")/../jobscripts/local/setup.sh"
hpcllm_setup test
cd "$HPCLLM_ROOT"
unset PYTHONDONTWRITEBYTECODE # or each rank of each group compiles all tests again

# a group that takes longer hangs in a way that the limit of a single test (pyproject.toml) did not see
group_limit_s=${HPCLLM_GROUP_LIMIT_S:-900}
at_once=3 # files of serial tests: many of the sample wait rather than compute
if [ "$level" = all ]; then at_once=2; fi
passed=0
failed=0
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
export PYTHONPATH="$HPCLLM_ROOT/tests${PYTHONPATH:+:$PYTHONPATH}" HPCLLM_TEST_TIMES=$logs/times
: >"$HPCLLM_TEST_TIMES"

pytest=(python)
if [ -n "$coverage" ]; then
    export COVERAGE_FILE=$logs/.coverage
    group_limit_s=1800 # one process, and each line is counted
    pytest+=(-m coverage run --parallel-mode --source=hpcllm)
fi
pytest+=(-m pytest -q --color=no -p sampling -p slowest --sample "$level")

if [ -n "$list_left" ]; then
    "${pytest[@]}" --list-left --collect-only --no-header --no-summary && code=0 || code=$?
    [ "$code" = 0 ] || [ "$code" = 5 ]
    exit
fi

limited() { # timeout, where there is one
    if command -v timeout >/dev/null; then timeout -k 20 "$group_limit_s" "$@"; else "$@"; fi
}

run_group() { # [MODE:]GROUP: pytest's exit code; rank 0 speaks, the others only where they fail alone
    local group=${1##*:} quiet workers marked
    export HPCLLM_TEST_GROUP=$1
    unset HPCLLM_PRETEND
    case $1 in *:*) export HPCLLM_PRETEND=${1%%:*} ;; esac
    shift
    case $group in
        serial | serial+1) # a thread each, or the two would wait for one another's threads
            if [ "$group" = serial ]; then marked="not parallel"; else marked="(not parallel or parallel[1])"; fi
            workers=(-n "$at_once" --dist loadfile --no-loadscope-reorder)
            if [ -n "$coverage" ]; then workers=(); fi # coverage sees one process
            limited env OMP_NUM_THREADS=1 "${pytest[@]}" ${workers[@]+"${workers[@]}"} -m "$marked and not alone" "$@"
            return
            ;;
        alone)
            limited "${pytest[@]}" -m alone "$@"
            return
            ;;
    esac
    # A temporary folder for each rank's pytest, for they would clear away one another's.
    # shellcheck disable=SC2016 # expanded on each rank
    quiet='rank=${PMI_RANK:-${OMPI_COMM_WORLD_RANK:-${PMIX_RANK:-0}}}; export PYTEST_DEBUG_TEMPROOT=$0/$rank
        mkdir -p "$0/$rank"; [ "$rank" = 0 ] || { unset HPCLLM_TEST_TIMES; exec >/dev/null; }; exec "$@"'
    limited bash jobscripts/local/mpirun.sh "$group" bash -c "$quiet" "$logs" \
        "${pytest[@]}" -p ranks -m "parallel and parallel[$group]" "$@"
}

count() { # WORD: the number before it in pytest's closing line; an MPI library may say something after it
    grep -E '^(=+ )?[0-9]+ (passed|failed|errors?|skipped|deselected|warnings?).* in [0-9.]+s' "$logs/out" | tail -n 1 |
        grep -oE "[0-9]+ $1" | grep -oE '[0-9]+' || echo 0
}

if [ -n "$coverage" ]; then export HPCLLM_TESTS="serial 2"; fi
groups=${HPCLLM_TESTS:-$(python tests/sampling.py "$level")}
for group in $groups; do
    case $group in
        serial) hpcllm_say "serial tests" ;;
        serial+1) hpcllm_say "serial tests, and tests on 1 rank" ;;
        alone) hpcllm_say "serial tests of time" ;;
        *) hpcllm_say "tests on $group ranks" ;;
    esac
    code=0
    run_group "$group" ${arguments[@]+"${arguments[@]}"} </dev/null | tee "$logs/out" || code=$?
    if [ "$code" = 4 ]; then wrong "pytest does not take these arguments (see above)"; fi
    failures=$(($(count failed) + $(count error)))
    passed=$((passed + $(count passed)))
    # 5: no test of this group was selected. A job that was cut off has no closing line, yet has failed.
    if [ "$code" != 0 ] && [ "$code" != 5 ] && [ "$failures" = 0 ]; then
        hpcllm_say "group $group ended early, exit code $code"
        failures=1
    fi
    failed=$((failed + failures))
done
if [ -n "$coverage" ]; then
    (cd "$logs" && python -m coverage combine -q)
    python -m coverage report --sort=cover >"$logs/covered"
    echo "the least covered files, and the share of all lines:"
    sed -n '1,30p;$p' "$logs/covered"
    echo "the share of each folder:"
    for folder in hpcllm/*/; do
        ! compgen -G "$folder*.py" >/dev/null ||
            printf '    %-16s %3s %%\n' "$(basename "$folder")" "$(python -m coverage report --include="$folder*" --format=total)"
    done
fi
echo "the slowest tests:"
sort -rn "$HPCLLM_TEST_TIMES" | sed -n 1,20p
if [ "$level" = sample ]; then echo "a sample; what it leaves to --all: bash tests/run.sh --list-left"; fi
if [ "$passed" = 0 ] && [ "$failed" = 0 ]; then hpcllm_say "no test was selected, which proves nothing"; fi
echo "$passed passed, $failed failed"
[ "$failed" = 0 ] && [ "$passed" -gt 0 ]
