# shellcheck shell=bash disable=SC2034,SC2154 # arguments, here: of those that source it
# The parts of a campaign and the launchers of its runs: sourced by collectives.sh and library_ratios.sh.
# Before: here=FOLDER of those. After: a function part_NAME for each part, then run_parts.

say() { printf '[%s] %s\n' "$(date +%H:%M:%S)" "$*" >&2; }

split_launcher() { # LAUNCHER... -- ARGUMENTS...: into the arrays launcher and arguments
    launcher=()
    while [ "$1" != -- ]; do
        launcher+=("$1")
        shift
    done
    shift
    arguments=("$@")
}

run_parts() { # "ALL PARTS" [PART...]: those, or all; then the summary. Takes down the cluster that a part has made
    local all=$1 part
    shift
    # shellcheck disable=SC2086 # a word for each part
    if [ $# = 0 ]; then set -- $all; fi
    for part in "$@"; do
        if ! declare -F "part_$part" >/dev/null; then
            echo "'$part' should be one of: $all summary" >&2
            exit 2
        fi
    done
    trap 'if [ "$(id -u)" = 0 ]; then bash "$here/cluster.sh" down; fi' EXIT
    for part in "$@"; do "part_$part"; done
    part_summary
}
