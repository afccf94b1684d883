#!/usr/bin/env bash
# bash perf/collectives.sh [PART...]: measures algorithms and codecs by `hpcllm perf`, about 12 minutes for all parts.
# What `auto` takes, beside the library, over all operations and sizes: library_ratios.sh.
#
#     hosts       clusters of 2, 3 and 4 hosts at 1 Gbit/s (cluster.sh, so root): fp32 and int8; bf16 and exp;
#                 and each allreduce that Open MPI has, for what it chooses by itself is not always its best
#     levels      2 hosts of 2 ranks: two_level beside the flat algorithms
#     settings    how much Open MPI's own allreduce gains by the settings of cluster.sh
#     codecs      rates of all codecs beside memcpy
#     summary     collectives.md from all records that are there
#
#     part --> python -m hpcllm.perf ... --json --> perf/collectives/<run>.json, .png --> perf/collectives.md
#
# Algorithms of a run take turns in one process, so its ratios hold on a machine that is not quiet; rates need one that is.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
root=$(dirname "$here")
results=$here/collectives
export OMP_NUM_THREADS=1

. "$here/parts.sh"

measured() { # RUN LAUNCHER... -- ARGUMENTS of hpcllm.perf...
    local run=$1 launcher arguments
    shift
    split_launcher "$@"
    say "$run: ${arguments[*]}"
    "${launcher[@]}" python -m hpcllm.perf "${arguments[@]}" --json "$results/$run.json" --plot "$results/$run.png"
}

on_hosts() { # RUN RANKS ARGUMENTS...
    local run=$1 ranks=$2
    shift 2
    measured "$run" bash "$here/cluster.sh" run -n "$ranks" -- "$@"
}

part_hosts() {
    local hosts
    for hosts in 2 3 4; do
        bash "$here/cluster.sh" up "$hosts" 1gbit
        on_hosts "hosts$hosts" "$hosts" allreduce --sizes 16M,64M --codecs raw,int8:256 \
            --algorithms mpi,ring,two_step,auto --check
        on_hosts "hosts${hosts}_bf16" "$hosts" allreduce --sizes 16M,64M --codecs raw,exp --dtype bfloat16 \
            --algorithms ring,two_step,auto --check
        # 4 is its ring, the best of its algorithms at these sizes
        OMPI_MCA_coll_tuned_use_dynamic_rules=1 OMPI_MCA_coll_tuned_allreduce_algorithm=4 \
            on_hosts "hosts${hosts}_library4" "$hosts" allreduce --sizes 16M,64M --algorithms mpi
    done
}

part_levels() {
    bash "$here/cluster.sh" up 2 1gbit
    on_hosts levels 4 allreduce --sizes 16M,64M --codecs raw,int8:256 --algorithms mpi,ring,two_step,two_level,auto \
        --check
}

part_settings() {
    local what=(2 allreduce --sizes 1M:64M --algorithms mpi --iterations 15)
    bash "$here/cluster.sh" up 2 1gbit
    on_hosts settings_cluster "${what[@]}"
    OMPI_MCA_btl_tcp_flags=send,put,inplace,need-ack,need-csum,hetero-rdma on_hosts settings_default "${what[@]}"
}

part_codecs() {
    local dtype
    for dtype in float32 bfloat16; do
        say "codecs_$dtype"
        HPCLLM_MPI=openmpi bash "$root/jobscripts/local/mpirun.sh" 1 python -m hpcllm.perf codec --dtype $dtype \
            --json "$results/codecs_$dtype.json"
    done
}

part_summary() {
    # shellcheck disable=SC2016 # expanded inside
    HPCLLM_MPI=openmpi bash "$root/jobscripts/local/mpirun.sh" 1 bash -c 'cd "$0" &&
        { sed "/^| claim/,\$d" collectives.md && python claims.py collectives &&
            python -m hpcllm.perf plot --markdown collectives/*.json; } >collectives.md.tmp &&
        mv collectives.md.tmp collectives.md' "$here"
}

cd "$root"
mkdir -p "$results"
HPCLLM_MPI=openmpi bash jobscripts/local/setup.sh plot
run_parts "hosts levels settings codecs" "$@"
