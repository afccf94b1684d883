# shellcheck shell=bash
# shellcheck disable=SC2034 # what is set here is read by ../common/
# LUMI-G, CSC: 8 GCDs a node, a rank on each. Sourced by the scripts here. Not run on this machine by us; from:
#     [1] LUMI documentation, "LUMI-G example batch scripts"
#     [2] LUMI documentation, "Distribution and binding options"
#     [3] LUMI documentation, "Software stacks", and "Slurm partitions"
#     [4] LUMI AI Guide, chapters 1, 2 and 5
#     [5] OLCF documentation, "PyTorch on Frontier" (the same node and network), and the Crusher guide's OLCFDEV-1292
#     [6] HPE, intro_mpi(3) of Cray MPICH, and its section on libfabric
#     [7] LUMI AI Factory, laifs-container-recipes (what is in an image) and laifs-container-tests (how it is started)
# What the caller has set already stays.
#
# LUMI asks for containers, whose image is one file, instead of environments of many [4]. So Python, PyTorch and MPICH are
# those of an image; what else is needed lies beside it, and `install.sh pack` makes one file of squashfs of that.
#
#     HPCLLM_CONTAINER=IMAGE.sif    another image, for install.sh and for jobs: ls /appl/local/laifs/containers
#     HPCLLM_CONTAINER=none         no image: the modules' Cray MPICH, and the older PyTorch that goes with their ROCm

# shellcheck source=../common/slurm.sh
. "$HPCLLM_ROOT/jobscripts/common/slurm.sh"

# Ubuntu 24.04, ROCm 7.0, libfabric 2.1, MPICH 5.0, PyTorch 2.10, as its name says [4]
hpcllm_images=/appl/local/laifs/containers
hpcllm_image=lumi-multitorch-full-u24r70f21m50t210-20260415_130625.sif
HPCLLM_CONTAINER=${HPCLLM_CONTAINER:-$hpcllm_images/lumi-multitorch-u24r70f21m50t210-20260415_130625/$hpcllm_image}

HPCLLM_VENV=${HPCLLM_ENV:-$HPCLLM_ROOT/.venv-lumi}
hpcllm_near=/tmp # in the node's memory: nodes have no disk [3]

# Rank i of a node sees GCD i alone [1], and runs on the cores beside it, of which the first of each eight is the system's.
# Task after task, as bits: cores 49-55, 57-63, 17-23, 25-31, 1-7, 9-15, 33-39, 41-47 [2]. For whole nodes only.
hpcllm_masks=0xfe000000000000,0xfe00000000000000,0xfe0000,0xfe000000,0xfe,0xfe00,0xfe00000000,0xfe0000000000
hpcllm_start=("--cpu-bind=mask_cpu:$hpcllm_masks")
hpcllm_each=(bash "$HPCLLM_ROOT/jobscripts/common/one_device.sh" ROCR_VISIBLE_DEVICES "0,1,2,3,4,5,6,7")

hpcllm_modules() {
    hpcllm_module purge # what a login shell has loaded may not fit to what follows [4]
    if [ "$HPCLLM_CONTAINER" != none ]; then
        hpcllm_image_is_there
        hpcllm_module use /appl/local/laifs/modules
        hpcllm_load lumi-aif-singularity-bindings # the container gets the network and the file systems [4]
        return
    fi
    hpcllm_load LUMI/25.03 partition/G # the software of the GPU nodes; brings craype-accel-amd-gfx90a, for MPI on GPUs [3]
    hpcllm_load PrgEnv-gnu             # packages of Python are made for GCC [5]
    hpcllm_load cray-python            # a Python that is on every node's own image [3]
    hpcllm_load rocm/6.3.4             # that of the torch below [3]
    hpcllm_load cray-hdf5-parallel     # for parallel h5py [3]
    hpcllm_load lumi-CrayPath          # the loader shall find the libraries of this stack, not of the default one [3]
}

hpcllm_variables() {
    if [ "$HPCLLM_CONTAINER" != none ]; then
        hpcllm_in_container
        # how srun and the image's MPICH find one another: Slurm's default there is for Cray's MPICH [7]
        export SLURM_MPI_TYPE=${SLURM_MPI_TYPE:-pmi2}
    else
        # MPI reads a GPU's memory. In jobs only: an MPI for CPUs ends each program that starts with it [1] [6]
        export MPICH_GPU_SUPPORT_ENABLED=${MPICH_GPU_SUPPORT_ENABLED:-1}
        # each rank sends by the card of its own NUMA domain, at its own MI250X; by default cards go round by rank [5] [6]
        export MPICH_OFI_NIC_POLICY=${MPICH_OFI_NIC_POLICY:-NUMA}
    fi
    # finds out when registered memory is freed; `memhooks`, the default in some containers, can hang [4, pull request 118] [5]
    export FI_MR_CACHE_MONITOR=${FI_MR_CACHE_MONITOR:-userfaultfd}
    # matching messages moves into software when the card has no room left, instead of failing [5] [6]
    export FI_CXI_RX_MATCH_MODE=${FI_CXI_RX_MATCH_MODE:-hybrid}
    # kernels that MIOpen has compiled go to the node's memory: locks on the home file system fail [4]
    export MIOPEN_USER_DB_PATH=${MIOPEN_USER_DB_PATH:-/tmp/miopen-${USER:-user}-${SLURM_JOB_ID:-0}}
    # the same place for what it has compiled itself [4]
    export MIOPEN_CUSTOM_CACHE_DIR=${MIOPEN_CUSTOM_CACHE_DIR:-$MIOPEN_USER_DB_PATH}
    # as many threads as a task has cores [2]
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-7}}
}

# for install.sh
hpcllm_build=hip # a torch for anything else is refused
if [ "$HPCLLM_CONTAINER" = none ]; then
    hpcllm_torch=torch==2.7.1 hpcllm_accelerator="ROCm 6.3" # for the rocm above: MPI's layer for GPUs loads that one, too
    hpcllm_mpicc="cc -shared"                               # as on Frontier, OLCF's "Installing mpi4py and h5py"
    hpcllm_hdf5=HDF5_ROOT                                   # of cray-hdf5-parallel
    hpcllm_make=(python3 -m venv "$HPCLLM_VENV")
    hpcllm_cupy="" # its wheels begin with ROCm 7
else
    hpcllm_inside=(singularity exec "$HPCLLM_CONTAINER")
    hpcllm_near=""                                 # the packages are one file already
    hpcllm_cupy=rocm7                              # the image has no CuPy, but the ROCm 7.0 that its wheel is made for [7]
    hpcllm_torch="" hpcllm_mpicc="" hpcllm_hdf5="" # the image has its own, mpi4py and an MPICH that knows GPUs among them [7]
    hpcllm_make=("${hpcllm_inside[@]}" python3 -m venv --system-site-packages "$HPCLLM_VENV") # [4]
    hpcllm_beside=yes # those packages are in a virtual environment, /opt/venv, which that option alone does not see [7]
fi

hpcllm_image_is_there() {
    if [ -n "${DRY_RUN:-}" ]; then return; fi
    if [ -e "$HPCLLM_CONTAINER" ]; then hpcllm_say "container: $HPCLLM_CONTAINER" && return; fi
    hpcllm_die 2 "no container image '$HPCLLM_CONTAINER'. ls $hpcllm_images shows what there is;
    then export HPCLLM_CONTAINER=IMAGE.sif, for install.sh and for jobs, or HPCLLM_CONTAINER=none for the modules' PyTorch"
}

hpcllm_in_container() { # each rank; the packages' one file lies over the folder that it was made from, so no path changes [4]
    hpcllm_image=(singularity exec)
    if hpcllm_packed "$HPCLLM_VENV.sqsh"; then hpcllm_image+=(-B "$HPCLLM_VENV.sqsh:$HPCLLM_VENV:image-src=/"); fi
    hpcllm_image+=("$HPCLLM_CONTAINER")
    hpcllm_each+=("${hpcllm_image[@]}")
    # shellcheck disable=SC2329 # job.sh calls it
    hpcllm_here() { "${hpcllm_image[@]}" "$@"; } # as Python is in the image
}
