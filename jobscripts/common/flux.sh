# shellcheck shell=bash
# shellcheck disable=SC2034,SC2154 # job.sh reads what is set here, and sets what is read
# Flux, as job.sh needs it. Sourced by the env.sh of machines that have it, which says hpcllm_per_node: ranks a node. From the
# documentation of Flux: flux-batch(1), flux-run(1), flux-job(1), flux-archive(1), flux-environment(7), flux-shell-options(7).

# A batch job is a Flux of its own: commands in its script see the job's nodes alone. No user may put a job back into the
# queue, so a run that is longer than a job is a chain of them: flux batch --dependency=afterany:JOB ...

# shellcheck source=near.sh
. "$HPCLLM_ROOT/jobscripts/common/near.sh"

hpcllm_suffix=flux

hpcllm_submit() { echo "flux batch $*"; } # SCRIPT ARGUMENTS

hpcllm_job_id() { echo "${FLUX_ENCLOSING_ID:-}"; }

hpcllm_enter() { # VERB: Flux starts a job where it was submitted, with its arguments
    if [ -n "${DRY_RUN:-}" ]; then
        echo "flux batch $(sed -n 's/^#flux: \([^#]*\).*/\1/p' "$HPCLLM_ROOT/jobscripts/$hpcllm_machine/$1.flux" | tr '\n' ' ')"
    fi
}

hpcllm_nodes() { # in a dry run two, where there is no Flux
    if [ -n "${DRY_RUN:-}" ] && ! command -v flux >/dev/null; then echo 2; else flux resource list -s up -no '{nnodes}'; fi
}

hpcllm_launcher() { # sets `launcher`; a rank that ends early takes the others with it a minute later, not after Flux's 30 s
    local nodes
    nodes=$(hpcllm_nodes)
    launcher=(flux run --nodes="$nodes" --ntasks=$((nodes * hpcllm_per_node)) --setopt=exit-timeout=60s)
}

hpcllm_on_nodes() { # COMMAND...: once on each node
    if [ -n "${DRY_RUN:-}" ]; then hpcllm_print flux exec "$@" && return; fi
    flux exec "$@"
}

hpcllm_copy() { # FILE FOLDER: into that folder of each node, over Flux's own tree
    local create=(flux archive create --overwrite --mmap --directory="${1%/*}" "${1##*/}")
    if [ -n "${DRY_RUN:-}" ]; then hpcllm_print "${create[@]}"; else "${create[@]}" || return; fi
    # it may take a moment until all nodes know of it
    hpcllm_on_nodes flux archive extract --waitcreate=60s --directory="$2" || return
    if [ -z "${DRY_RUN:-}" ]; then flux archive remove; fi
}

hpcllm_settings() { # how long the run may go on, less half a minute; without a limit Flux says a large number
    local seconds
    seconds=$(flux job timeleft 2>/dev/null) || seconds=0
    settings=()
    if [ "$seconds" -gt 30 ]; then settings=(--set limits.wall_s=$((seconds - 30))); fi
}
