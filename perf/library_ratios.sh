#!/usr/bin/env bash
# bash perf/library_ratios.sh [PART...]: `auto` beside the MPI library, cell by cell, as library_ratios.py measures it.
#
#     dispatch    one rank, whose calls no other delays: what `auto` costs over the bare call; a minute
#     node        one machine: both MPI wheels, 2, 3 and 4 ranks, glibc's memory as found and kept; about 20 minutes
#     shared      the same for arrays in the node's shared memory; 20 minutes
#     limits      2 ranks whose waits have a limit, as in training; 3 minutes
#     gloo        2 ranks, with gloo as the third in turn; 3 minutes
#     levels      2 hosts of 2 ranks at 1 Gbit/s (cluster.sh, so root); 3 minutes
#     hosts       2, 3 and 4 hosts of one rank; 8 minutes
#     rates       2 hosts at 100 Mbit/s and 10 Gbit/s; 5 minutes
#     tuned       2 hosts, and 2 hosts of 2 ranks, at 1 Gbit/s, and 2 hosts at 10 Gbit/s, with measured rates (`hpcllm perf
#                 tune`); 10 minutes
#     summary     library_ratios.md from all that is there
#
# What is there already is not measured again: remove perf/library_ratios/<run>.json for that. With BEGIN_S=330 no run
# begins after so many seconds. The machine has to be quiet: a neighbour that takes a core makes 7 us into 12 ms.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
root=$(dirname "$here")
results=$here/library_ratios
export OMP_NUM_THREADS=1
kept=(env MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=34359738368)

. "$here/parts.sh"

is_passed() { # RUN: it is there, or it is too late to begin it
    [ -e "$results/$1.json" ] || [ $SECONDS -gt "${BEGIN_S:-1000000}" ]
}

measured() { # RUN LAUNCHER... -- ARGUMENTS of library_ratios.py measure...
    local run=$1 launcher arguments
    shift
    split_launcher "$@"
    if is_passed "$run"; then return; fi
    say "$run"
    "${launcher[@]}" python "$here/library_ratios.py" measure --json "$results/$run.part" "${arguments[@]}" >&2
    mv "$results/$run.part" "$results/$run.json"
}

on_node() { # RUN RANKS ARGUMENTS...: on both MPIs, with memory as found and kept
    local run=$1 ranks=$2 mpi
    shift 2
    for mpi in mpich openmpi; do
        local launcher=(env "HPCLLM_MPI=$mpi" bash "$root/jobscripts/local/mpirun.sh" "$ranks")
        measured "${run}_${mpi}_found" "${launcher[@]}" -- "$@"
        measured "${run}_${mpi}_kept" "${launcher[@]}" "${kept[@]}" -- "$@"
    done
}

on_hosts() { # RUN HOSTS RATE RANKS ARGUMENTS...
    local run=$1 hosts=$2 rate=$3 ranks=$4
    shift 4
    if is_passed "$run"; then return; fi
    bash "$here/cluster.sh" up "$hosts" "$rate"
    measured "$run" bash "$here/cluster.sh" run -n "$ranks" -- --link "$rate" --least-rounds 7 "$@"
}

part_dispatch() { on_node dispatch 1 --sizes "4K,64K" --seconds 0.2; }
part_node() { for ranks in 2 3 4; do on_node "node$ranks" "$ranks"; done; }
part_shared() { for ranks in 2 3 4; do on_node "shared$ranks" "$ranks" --memory shared; done; }
part_limits() { on_node limits2 2 --stall-s 300; }
part_gloo() { on_node gloo2 2 --gloo; }

slow=(--sizes "4K,64K,256K,1M,4M,16M,64M" --codecs "raw,int8:256")
part_levels() { on_hosts levels_1gbit 2 1gbit 4 "${slow[@]}"; }
part_hosts() {
    local hosts
    for hosts in 2 3 4; do on_hosts "hosts${hosts}_1gbit" "$hosts" 1gbit "$hosts" "${slow[@]}"; done
}

part_rates() {
    on_hosts hosts2_100mbit 2 100mbit 2 --sizes 4K,64K,256K,1M,4M --codecs raw,int8:256
    on_hosts hosts2_10gbit 2 10gbit 2 --sizes 4K,64K,256K,1M,4M,16M,64M --codecs raw,int8:256,exp,zfp:8
}

part_tuned() {
    local place ranks rate
    for place in "2 1gbit" "4 1gbit" "2 10gbit"; do
        read -r ranks rate <<<"$place"
        if is_passed "tuned${ranks}_$rate"; then continue; fi
        bash "$here/cluster.sh" up 2 "$rate"
        bash "$here/cluster.sh" run -n "$ranks" python -m hpcllm.perf tune --rates-only \
            --output "$results/tuned${ranks}_$rate.toml" >&2
        on_hosts "tuned${ranks}_$rate" 2 "$rate" "$ranks" --tuning "$results/tuned${ranks}_$rate.toml" "${slow[@]}"
    done
}

part_summary() {
    # shellcheck disable=SC2016 # expanded inside
    HPCLLM_MPI=openmpi bash "$root/jobscripts/local/mpirun.sh" 1 bash -c 'cd "$0" &&
        { sed "/^### /,\$d" library_ratios.md && python library_ratios.py table library_ratios/*.json; } >library_ratios.md.tmp &&
        mv library_ratios.md.tmp library_ratios.md' "$here"
}

cd "$root"
mkdir -p "$results"
for mpi in mpich openmpi; do HPCLLM_MPI=$mpi bash jobscripts/local/setup.sh test; done
run_parts "dispatch node shared limits gloo levels hosts rates tuned" "$@"
