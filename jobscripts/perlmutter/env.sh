# shellcheck shell=bash
# shellcheck disable=SC2034 # what is set here is read by ../common/
# Perlmutter, NERSC: 4 A100 a node, a rank on each. Sourced by the scripts here. Not run on this machine by us; from:
#     [1] NERSC documentation, "Using Python on Perlmutter" and "Parallel Python"
#     [2] NERSC documentation, "Cray MPICH"
#     [3] NERSC documentation, "Process and thread affinity", and "Perlmutter architecture"
#     [4] WarpX, Tools/machines/perlmutter-nersc, made with NERSC's staff
#     [5] HPE, intro_mpi(3) of Cray MPICH, and its section on libfabric
# What the caller has set already stays.

# shellcheck source=../common/slurm.sh
. "$HPCLLM_ROOT/jobscripts/common/slurm.sh"

HPCLLM_VENV=${HPCLLM_ENV:-$HPCLLM_ROOT/.venv-perlmutter}
hpcllm_near=/tmp # in the node's memory: nodes have no disk [3]

# 16 cores each, and both threads of a core, 32 "CPUs" [3]; GPUs are numbered against the cores: 3 is beside the first 16 [4].
# All GPUs stay in one control group (--gpu-bind=none), for ranks to open one another's memory [4].
hpcllm_start=(--cpu-bind=cores --gpu-bind=none)
hpcllm_each=(bash "$HPCLLM_ROOT/jobscripts/common/one_device.sh" CUDA_VISIBLE_DEVICES "3,2,1,0")

hpcllm_modules() {
    hpcllm_load PrgEnv-gnu            # packages of Python are made for GCC [1]
    hpcllm_load cudatoolkit           # with the next one: `cc` links the layer by which MPI reads a GPU's memory [2]
    hpcllm_load craype-accel-nvidia80 # [2]
    hpcllm_load cray-python           # a Python that is on every node's own image [4]
    hpcllm_load cray-hdf5-parallel    # for parallel h5py [1]
}

hpcllm_variables() {
    # MPI reads a GPU's memory. In jobs only: an MPI for CPUs ends each program that starts with it [2] [5]
    export MPICH_GPU_SUPPORT_ENABLED=${MPICH_GPU_SUPPORT_ENABLED:-1}
    # each rank sends by the card of its own NUMA domain, of 16 cores; by default cards go round by rank [5]
    export MPICH_OFI_NIC_POLICY=${MPICH_OFI_NIC_POLICY:-NUMA}
    # as many threads as a task has cores: its CPUs are two a core [3] [4]
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((${SLURM_CPUS_PER_TASK:-32} / 2))}
}

# for install.sh
hpcllm_build=cuda
hpcllm_torch=torch==2.10.0 hpcllm_accelerator="CUDA 12.6 or newer, as the driver allows (nvidia-smi)"
hpcllm_cupy=torch # for the CUDA of the torch above
hpcllm_mpicc="cc -target-accel=nvidia80 -shared" # [1]
hpcllm_hdf5=HDF5_ROOT # of cray-hdf5-parallel [1]
hpcllm_make=(python3 -m venv "$HPCLLM_VENV")
