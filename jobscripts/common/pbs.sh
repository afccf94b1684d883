# shellcheck shell=bash
# shellcheck disable=SC2034,SC2154 # job.sh reads what is set here, and sets what is read
# PBS Pro, as job.sh needs it. Sourced by the env.sh of machines that have it, which says hpcllm_per_node: ranks a node.

# A script of PBS has no arguments, so qsub hands them on in two variables:
#
#     qsub -A PROJECT -v HPCLLM_RUN=my.toml,HPCLLM_ARGUMENTS="--set run.steps=10 --set run.name=first" jobscripts/...

hpcllm_suffix=pbs hpcllm_copied=""

hpcllm_submit() { echo "qsub -A PROJECT -v HPCLLM_RUN=RUN.toml,HPCLLM_ARGUMENTS='...' $1"; } # SCRIPT ARGUMENTS

hpcllm_job_id() { echo "${PBS_JOBID:-}"; }

hpcllm_enter() { # VERB: PBS starts a job in the home folder, without arguments; sets hpcllm_handed
    if [ -n "${PBS_O_WORKDIR:-}" ]; then cd "$PBS_O_WORKDIR" || exit; fi
    read -ra hpcllm_handed <<<"${HPCLLM_ARGUMENTS:-}" || :
    if [ -n "${HPCLLM_RUN:-}" ]; then hpcllm_handed=("$HPCLLM_RUN" ${hpcllm_handed[@]+"${hpcllm_handed[@]}"}); fi
    if [ -n "${DRY_RUN:-}" ]; then
        echo "qsub $(sed -n 's/^#PBS \([^#]*\).*/\1/p' "$HPCLLM_ROOT/jobscripts/$hpcllm_machine/$1.pbs" | tr '\n' ' ')"
    fi
}

hpcllm_nodes() { if [ -n "${PBS_NODEFILE:-}" ]; then sort -u "$PBS_NODEFILE" | wc -l; else echo 1; fi; }

hpcllm_launcher() { # sets `launcher`
    local nodes
    nodes=$(hpcllm_nodes)
    launcher=(mpiexec -n $((nodes * hpcllm_per_node)) --ppn "$hpcllm_per_node")
}

hpcllm_settings() { # what Slurm would be asked by the run itself: how long it may go on, less half a minute
    local seconds
    seconds=$(qstat -f "${PBS_JOBID:-}" 2>/dev/null |
        awk '$1 == "Resource_List.walltime" { split($3, t, ":"); print t[1] * 3600 + t[2] * 60 + t[3] }') || seconds=""
    settings=()
    if [ -n "$seconds" ]; then settings=(--set limits.wall_s=$((seconds - SECONDS - 30))); fi
}
