# shellcheck shell=bash
# shellcheck disable=SC2034 # what is set here is read by ../common/
# El Capitan and Tuolumne, LLNL: 4 MI300A a node, a rank on each. Sourced by the scripts here. Not run on this machine by us; from:
#     [1] LLNL, HPC-launcher: its settings for systems of the El Capitan family
#     [2] Flux documentation, flux-run(1) and flux-shell-options(7)
#     [3] WarpX, Tools/machines/tuolumne-llnl
#     [4] MFC, toolchain, its modules and batch template for Tuolumne
#     [5] HPE, intro_mpi(3) of Cray MPICH, and its section on libfabric
# What the caller has set already stays.

# shellcheck source=../common/flux.sh
. "$HPCLLM_ROOT/jobscripts/common/flux.sh"

HPCLLM_VENV=${HPCLLM_ENV:-$HPCLLM_ROOT/.venv-el-capitan}
hpcllm_near=/tmp # in the node's memory
hpcllm_per_node=4

# A node's cores are shared out evenly, and each rank sees one device, as number 0 [2]. Where LLNL's mpibind is at work, it
# does both instead, and knows which cores are a device's own.
hpcllm_start=(--exclusive --gpus-per-task=1 --setopt=cpu-affinity=per-task --setopt=gpu-affinity=per-task)

hpcllm_modules() {
    hpcllm_load PrgEnv-gnu              # packages of Python are made for GCC [4]
    hpcllm_load rocm/6.4.1              # of the version that the torch below is made for; mixing two is a hazard [1] [3]
    hpcllm_load craype-accel-amd-gfx942 # makes `cc` link the layer by which MPI reads a GPU's memory [4] [5]
    hpcllm_load cray-python/3.11.7      # a Python that is on every node's own image [3]
    hpcllm_load cray-hdf5-parallel      # for parallel h5py [4]
    # the loader shall find the libraries of these modules first [1]
    export LD_LIBRARY_PATH=${CRAY_LD_LIBRARY_PATH:-}${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
}

hpcllm_variables() {
    # MPI reads a GPU's memory. In jobs only: an MPI for CPUs ends each program that starts with it [3] [5]
    export MPICH_GPU_SUPPORT_ENABLED=${MPICH_GPU_SUPPORT_ENABLED:-1}
    # each rank sends by the card beside its device; by default cards go round by rank [3] [5]
    export MPICH_OFI_NIC_POLICY=${MPICH_OFI_NIC_POLICY:-GPU}
    # finds out when registered memory is freed; `memhooks` can hang [1]
    export FI_MR_CACHE_MONITOR=${FI_MR_CACHE_MONITOR:-userfaultfd}
    # matching messages moves into software when the card has no room left, instead of failing [1] [5]
    export FI_CXI_RX_MATCH_MODE=${FI_CXI_RX_MATCH_MODE:-hybrid}
    # room for messages that come faster than they are taken [1]
    export FI_CXI_DEFAULT_CQ_SIZE=${FI_CXI_DEFAULT_CQ_SIZE:-131072}
    # the same for what waits to be sent [1]
    export FI_CXI_DEFAULT_TX_SIZE=${FI_CXI_DEFAULT_TX_SIZE:-1024}
    # host memory, which here is the device's too, is not registered with the GPU's driver again [1]
    export FI_CXI_DISABLE_HOST_REGISTER=${FI_CXI_DISABLE_HOST_REGISTER:-1}
    # kernels that MIOpen has compiled go to the node's memory, not to the home file system [1]
    export MIOPEN_USER_DB_PATH=${MIOPEN_USER_DB_PATH:-/tmp/miopen-${USER:-user}-${FLUX_ENCLOSING_ID:-0}}
    # the same place for what it has compiled itself [1]
    export MIOPEN_CUSTOM_CACHE_DIR=${MIOPEN_CUSTOM_CACHE_DIR:-$MIOPEN_USER_DB_PATH}
    # as many threads as a rank has cores: 24 of an MI300A, less 3 that the system keeps [3]
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-21}
}

# for install.sh
hpcllm_build=hip
hpcllm_torch=torch==2.9.1 hpcllm_accelerator="ROCm 6.4"
hpcllm_cupy="" # its wheels begin with ROCm 7
hpcllm_mpicc="cc -shared"
hpcllm_hdf5=HDF5_ROOT # of cray-hdf5-parallel
hpcllm_make=(python3 -m venv "$HPCLLM_VENV")
