# shellcheck shell=bash
# shellcheck disable=SC2034 # what is set here is read by ../common/
# Frontier, OLCF: 8 GCDs a node, a rank on each. Sourced by the scripts here. Not run on this machine by us; from:
#     [1] OLCF documentation, "PyTorch on Frontier"
#     [2] OLCF documentation, "Installing mpi4py and h5py"
#     [3] OLCF documentation, "Frontier User Guide"; the Crusher guide's OLCFDEV-1292 for the network cards
#     [4] OLCF documentation, "Sbcast Conda Environments"
#     [5] HPE, intro_mpi(3) of Cray MPICH, and its section on libfabric
# What the caller has set already stays.

# shellcheck source=../common/slurm.sh
. "$HPCLLM_ROOT/jobscripts/common/slurm.sh"

HPCLLM_VENV=${HPCLLM_ENV:-$HPCLLM_ROOT/.venv-frontier}
hpcllm_near=/mnt/bb/${USER:-$(id -un)} # the node's NVMe, with --constraint=nvme [4]

# Rank i of a node sees GCD i alone, and runs on the cores beside it, of which the first of each eight is the system's.
# Task after task, as bits: cores 49-55, 57-63, 17-23, 25-31, 1-7, 9-15, 33-39, 41-47 [3]. The guide's own
# --gpus-per-task=1 --gpu-bind=closest [1] makes a control group for each task, in which ranks of a node cannot open one
# another's memory (../common/one_device.sh); GPUs stay in one group here.
hpcllm_masks=0xfe000000000000,0xfe00000000000000,0xfe0000,0xfe000000,0xfe,0xfe00,0xfe00000000,0xfe0000000000
hpcllm_start=("--cpu-bind=mask_cpu:$hpcllm_masks" --gpu-bind=none)
hpcllm_each=(bash "$HPCLLM_ROOT/jobscripts/common/one_device.sh" ROCR_VISIBLE_DEVICES "0,1,2,3,4,5,6,7")

hpcllm_modules() {
    hpcllm_load PrgEnv-gnu/8.7.0        # packages of Python are made for GCC [1] [2]
    hpcllm_load cpe/26.03               # the versions that go with this ROCm [1]
    hpcllm_load miniforge3/23.11.0-0    # conda, for an environment with its own Python, which can be copied to nodes [1] [4]
    hpcllm_load rocm/7.1.1              # that of the torch below; the user guide recommends the pair [1]
    hpcllm_load craype-accel-amd-gfx90a # makes `cc` link the layer by which MPI reads a GPU's memory: not [2], which is for CPUs
    hpcllm_load cray-hdf5-parallel      # the site's own h5py is not parallel [2]
    # the loader shall find the libraries of a cpe that is not the default one [1]
    export LD_LIBRARY_PATH=${CRAY_LD_LIBRARY_PATH:-}${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
}

hpcllm_variables() {
    # MPI reads a GPU's memory. In jobs only: an MPI for CPUs ends each program that starts with it [4] [5]
    export MPICH_GPU_SUPPORT_ENABLED=${MPICH_GPU_SUPPORT_ENABLED:-1}
    # each rank sends by the card of its own NUMA domain, which is at its own MI250X; by default cards go round by rank [3] [5]
    export MPICH_OFI_NIC_POLICY=${MPICH_OFI_NIC_POLICY:-NUMA}
    # finds out when registered memory is freed; Frontier's default. `memhooks` of older scripts can hang [1]
    export FI_MR_CACHE_MONITOR=${FI_MR_CACHE_MONITOR:-kdreg2}
    # matching messages moves into software when the card has no room left, instead of failing [1] [5]
    export FI_CXI_RX_MATCH_MODE=${FI_CXI_RX_MATCH_MODE:-hybrid}
    # kernels that MIOpen has compiled go to the node's memory: locks on the home file system fail [1]
    export MIOPEN_USER_DB_PATH=${MIOPEN_USER_DB_PATH:-/tmp/miopen-${USER:-user}-${SLURM_JOB_ID:-0}}
    # the same place for what it has compiled itself [1]
    export MIOPEN_CUSTOM_CACHE_DIR=${MIOPEN_CUSTOM_CACHE_DIR:-$MIOPEN_USER_DB_PATH}
    # as many threads as a task has cores: 7, for the first of each eight is the system's [3]
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-7}}
}

# for install.sh
hpcllm_torch=torch==2.10.0 hpcllm_accelerator="ROCm 7.1" hpcllm_build=hip # [1]
hpcllm_cupy=rocm7 # its wheel is made for 7.0, whose libraries have the names of 7.1's
hpcllm_mpicc="cc -shared"                                # [2]
hpcllm_hdf5=HDF5_ROOT # of cray-hdf5-parallel [2]
hpcllm_make=(conda create --yes --prefix "$HPCLLM_VENV" --channel conda-forge python=3.12 conda-pack) # [1] [4]
hpcllm_conda=yes # such an environment cannot be moved as it is, so conda-pack packs it [4]
