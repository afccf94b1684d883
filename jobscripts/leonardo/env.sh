# shellcheck shell=bash
# shellcheck disable=SC2034 # what is set here is read by ../common/
# Leonardo Booster, CINECA: 4 A100 a node, a rank on each. Sourced by the scripts here. Not run on this machine by us; from:
#     [1] CINECA HPC documentation, "Leonardo", and "Environment and Customization"
#     [2] WarpX, Tools/machines/leonardo-cineca
#     [3] mpi4py documentation, "Installation"
# Names of modules: as jobs of users there load them in 2025. What the caller has set already stays.

# shellcheck source=../common/slurm.sh
. "$HPCLLM_ROOT/jobscripts/common/slurm.sh"

HPCLLM_VENV=${HPCLLM_ENV:-$HPCLLM_ROOT/.venv-leonardo}
# nodes have no disk of their own that every job gets [1]: on many nodes the environment goes to their memory
hpcllm_near=""

# One socket: all cores are as far from each GPU. A rank takes the GPU of its number on the node, of the four it sees.
hpcllm_start=(--cpu-bind=cores)

hpcllm_modules() {
    hpcllm_load profile/base                           # where the next ones are [2]
    hpcllm_load gcc/12.2.0                             # what the MPI below was made with [2]
    hpcllm_load cuda/12.2                              # as MPI's [2]
    hpcllm_load openmpi/4.1.6--gcc--12.2.0-cuda-12.2   # an Open MPI that reads a GPU's memory [2]
    hpcllm_load python/3.11.7                          # [1]
}

hpcllm_variables() {
    # as many threads as a task has cores: 32 of a node, four tasks [1]
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-8}}
}

# for install.sh
hpcllm_torch=torch==2.10.0 hpcllm_accelerator="CUDA 12.6 or newer, as the driver allows (nvidia-smi)"
hpcllm_cupy=torch # for the CUDA of the torch above
hpcllm_mpicc=mpicc # [3]
hpcllm_hdf5=""     # h5py as it is: our own writer needs no parallel HDF5
hpcllm_make=(python3 -m venv "$HPCLLM_VENV")
