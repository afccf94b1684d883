#!/usr/bin/env bash
# bash jobscripts/local/train.sh [-n RANKS] [--restart] [--set key=value ...]
#
#     setup.sh -> prepare data/stdlib.h5 (once) -> RANKS ranks train jobscripts/local/tiny.toml -> runs/tiny, and the page runs/tiny/report/index.html
#
# A second call goes on from the last checkpoint; --restart begins anew. All but -n is for `hpcllm train`, whose exit
# code is ours. SIGTERM, SIGUSR1 and Ctrl-C let it finish the step and write a checkpoint; a second Ctrl-C cuts it off.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

ranks=4
arguments=()
while [ $# -gt 0 ]; do
    case $1 in
        -n)
            case ${2:-} in "" | *[!0-9]* | 0) hpcllm_die 2 "-n ${2:-} should be a number of ranks >= 1" ;; esac
            ranks=$2
            shift
            ;;
        -h | --help)
            sed -n '2,7s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
            exit
            ;;
        *) arguments+=("$1") ;;
    esac
    shift
done

hpcllm_setup plot # the report has pictures
cd "$HPCLLM_ROOT"
if [ ! -e data/stdlib.h5 ]; then
    hpcllm_say "preparing data/stdlib.h5 from the source of Python's standard library"
    mkdir -p data
    bash jobscripts/local/mpirun.sh "$ranks" python -m hpcllm prepare --output data/stdlib.h5
fi
hpcllm_say "training on $ranks ranks; run folder: $HPCLLM_ROOT/runs/tiny"
hpcllm_mpirun "$ranks" python -m hpcllm train jobscripts/local/tiny.toml --report \
    ${arguments[@]+"${arguments[@]}"}
