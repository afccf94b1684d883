# shellcheck shell=bash
# shellcheck disable=SC2034,SC2154 # job.sh reads what is set here, and sets what is read
# Slurm, as job.sh needs it. Sourced by the env.sh of machines that have it.

# shellcheck source=near.sh
. "$HPCLLM_ROOT/jobscripts/common/near.sh"

hpcllm_suffix=sbatch

hpcllm_submit() { echo "sbatch $*"; } # SCRIPT ARGUMENTS

hpcllm_nodes() { echo "${SLURM_JOB_NUM_NODES:-1}"; }

hpcllm_job_id() { echo "${SLURM_JOB_ID:-}"; }

# a run that its time limit or a signal has stopped puts itself back into the queue, which #SBATCH --requeue allows
hpcllm_settings() { settings=(--set run.requeue=true); }

hpcllm_enter() { # VERB: Slurm starts a job where it was submitted
    # left behind by sbatch --export=NONE, it would keep what is set here from the ranks (OLCF, "Installing mpi4py and h5py")
    unset SLURM_EXPORT_ENV
    if [ -n "${DRY_RUN:-}" ]; then hpcllm_header "$HPCLLM_ROOT/jobscripts/$hpcllm_machine/$1.sbatch"; fi
}

hpcllm_header() { # SCRIPT: a dry run's: what is asked for, and what Slurm would make of it
    local words
    words=$(sed -n 's/^#SBATCH \([^#]*\).*/\1/p' "$1" | tr '\n' ' ')
    echo "sbatch $words"
    SLURM_CPUS_PER_TASK=$(sed -n 's/.*--cpus-per-task=\([0-9]*\).*/\1/p' <<<"$words")
    SLURM_NTASKS_PER_NODE=$(sed -n 's/.*--ntasks-per-node=\([0-9]*\).*/\1/p' <<<"$words")
}

hpcllm_launcher() { # sets `launcher`: nodes and tasks are those of the job, cores of a task srun must be told
    # A rank that ends early, killed for its memory perhaps, takes the others with it a minute later. Not at once, as by
    # --kill-on-bad-exit=1: a run that stops with exit code 75 ends on all ranks, but not at one moment, and Slurm would
    # kill the last ones and say 143. Some sites have that as their default.
    launcher=(srun --kill-on-bad-exit=0 --wait=60 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}")
}

hpcllm_on_nodes() { # COMMAND...: once on each node
    if [ -n "${DRY_RUN:-}" ]; then hpcllm_print srun --ntasks-per-node=1 "$@" && return; fi
    srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --mpi=none "$@"
}

hpcllm_copy() { # FILE FOLDER: into that folder of each node, over Slurm's own tree
    if [ -n "${DRY_RUN:-}" ]; then hpcllm_print sbcast --force "$1" "$2/${1##*/}" && return; fi
    sbcast --force "$1" "$2/${1##*/}"
}
