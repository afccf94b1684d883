# shellcheck shell=bash
# shellcheck disable=SC2034 # what is set here is read by ../common/
# Alps, CSCS (Clariden, Daint): 4 GH200 a node, a rank on each. Sourced by the scripts here. Not run on this machine by us; from:
#     [1] CSCS documentation, "PyTorch", and "Python"
#     [2] CSCS documentation, "Slurm", its sections on GH200
#     [3] CSCS documentation, "Cray MPICH"
#     [4] CSCS documentation, "Using uenv"
# What the caller has set already stays.
#
# Software comes as a uenv, one file of squashfs that Slurm mounts for each task. That of PyTorch has the Cray MPICH that reads
# a GPU's memory, and mpi4py for it. CSCS recommends containers of its container engine for PyTorch [1]; those bring NVIDIA's
# MPI, so srun needs more than --environment=FILE.toml for MPI ranks to meet, which the documents do not say.
#
#     HPCLLM_UENV=pytorch/v2.9.1       another one, for install.sh and for jobs: uenv image find pytorch

# shellcheck source=../common/slurm.sh
. "$HPCLLM_ROOT/jobscripts/common/slurm.sh"

HPCLLM_VENV=${HPCLLM_ENV:-$HPCLLM_ROOT/.venv-alps}
HPCLLM_UENV=${HPCLLM_UENV:-pytorch/v2.9.1} # the first whose mpi4py is new enough [1]
hpcllm_near=""                             # the packages are one file already, after `install.sh pack`

hpcllm_mounted=$HPCLLM_UENV

# 72 cores each, those of the GPU's own Grace. Rank i of a node sees GPU i alone, as with the --gpus-per-task=1 of [2], which
# says that it is the same; but where Slurm makes a control group for each task of it, ranks of a node cannot open one
# another's memory (../common/one_device.sh). Without that option all GPUs stay with all tasks [2].
hpcllm_start=(--uenv="$hpcllm_mounted" --view=default --cpu-bind=cores --gpu-bind=none)
hpcllm_each=(bash "$HPCLLM_ROOT/jobscripts/common/one_device.sh" CUDA_VISIBLE_DEVICES "0,1,2,3")

hpcllm_modules() { :; } # none: all is in the uenv

hpcllm_here() { uenv run --view=default "$hpcllm_mounted" -- "$@"; } # as Python is in the uenv [4]

hpcllm_variables() {
    # the one file lies over the folder that it was made from, so no path changes (CSCS, "Storage" guide)
    if hpcllm_packed "$HPCLLM_VENV.sqsh"; then
        hpcllm_mounted=$HPCLLM_UENV,$HPCLLM_VENV.sqsh:$HPCLLM_VENV
        hpcllm_start[0]=--uenv=$hpcllm_mounted
    fi
    # MPI reads a GPU's memory. In jobs only: an MPI for CPUs ends each program that starts with it [3]
    export MPICH_GPU_SUPPORT_ENABLED=${MPICH_GPU_SUPPORT_ENABLED:-1}
    # finds out when registered memory is freed; may avoid hangs of large runs, and costs less than `disabled` [3]
    export FI_MR_CACHE_MONITOR=${FI_MR_CACHE_MONITOR:-userfaultfd}
    # kernels that the driver has compiled do not go to the file system that all nodes share [1]
    export CUDA_CACHE_DISABLE=${CUDA_CACHE_DISABLE:-1}
    # what Triton has compiled goes to the node's memory, for the same reason [1]
    export TRITON_HOME=${TRITON_HOME:-/dev/shm}
    # as many threads as a task has cores [1] [2]
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-72}}
}

# for install.sh
hpcllm_build=cuda
hpcllm_cupy=torch # for the CUDA of the uenv's torch
hpcllm_torch="" hpcllm_mpicc="" hpcllm_hdf5="" # of the uenv; h5py comes with its own HDF5
hpcllm_inside=(uenv run --view=default "$HPCLLM_UENV" --) # [4]
hpcllm_make=("${hpcllm_inside[@]}" python3 -m venv --system-site-packages "$HPCLLM_VENV") # [1]
