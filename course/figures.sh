#!/usr/bin/env bash
# bash course/figures.sh FOLDER [NAME ...]: the figures of the lectures, made by our own commands on this machine.
#
#     p2p            lab 1   messages between two ranks: flat, then rising in proportion
#     sums           lab 2   a sum over 4 ranks, by algorithm and length
#     codecs         lab 3   encode and decode: is it faster than the wire?
#     gpipe 1f1b zb-h1 compare    lab 4   schedules as the engine runs them; all side by side
#     labs           1 2 4 5 6    the races of the labs by our own functions (hpcllm course demo)
#     plan           lab 8   layouts of a model on a machine
#
# Pictures of times are of this machine: say which, and with how many cores, where you show them.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
. "$here/jobscripts/local/setup.sh"
[ $# -ge 1 ] || { sed -n '2,/^$/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2 && exit 2; }
mkdir -p "$1"
cd "$1" && shift
hpcllm_setup

ranks() { hpcllm_mpirun "$@"; }

p2p() { ranks 2 python -m hpcllm.perf p2p --sizes 64:16M --plot p2p.svg --json p2p.json; }
sums() { ranks 4 python -m hpcllm.perf allreduce --sizes 1K:4M --plot sums.svg --json sums.json; }
codecs() { python -m hpcllm.perf codec --sizes 64K:4M --plot codecs.svg --json codecs.json; }
gpipe() { hpcllm schedule gpipe --stages 4 --microbatches 8 --plot gpipe.svg; }
1f1b() { hpcllm schedule 1f1b --stages 4 --microbatches 8 --plot 1f1b.svg; }
zb-h1() { hpcllm schedule zb-h1 --stages 4 --microbatches 8 --plot zb-h1.svg; }
compare() { hpcllm schedule --compare --stages 4 --microbatches 8; }
labs() {
    local lab
    for lab in latency allreduce pipeline tensor_parallel zero; do
        hpcllm course demo "$lab" --plot "lab-$lab.svg"
    done
}
plan() { hpcllm plan --machine lumi-g --model llama-13b --devices 64 --global-batch 1024 --top 3 --plot plan.png; }

for name in "${@:-p2p sums codecs gpipe 1f1b zb-h1 compare labs plan}"; do
    # shellcheck disable=SC2086 # the default is many words
    for figure in $name; do
        declare -F "$figure" >/dev/null || hpcllm_die 2 "no figure $figure; valid: those of: bash course/figures.sh"
        hpcllm_say "$figure"
        "$figure"
    done
done
