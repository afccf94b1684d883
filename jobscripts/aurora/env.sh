# shellcheck shell=bash
# shellcheck disable=SC2034,SC2154 # what is set here is read by ../common/, and what is read is set there
# Aurora, ALCF: 6 GPUs of 2 tiles a node, a rank on each tile. Sourced by the scripts here. Not run on this machine by us; from:
#     [1] ALCF user guides, "Running Jobs on Aurora"
#     [2] ALCF user guides, "PyTorch on Aurora" and "Python on Aurora"
#     [3] ALCF user guides, "Early User Notes and Known Issues" of Aurora
#     [4] ALCF user guides, "Copper"
# What the caller has set already stays.

# shellcheck source=../common/pbs.sh
. "$HPCLLM_ROOT/jobscripts/common/pbs.sh"

HPCLLM_VENV=${HPCLLM_ENV:-$HPCLLM_ROOT/.venv-aurora}
hpcllm_per_node=12 # tiles

# Rank i of a node runs on 8 cores of the socket that tile i hangs on; the first core of each socket is the system's [1]. The
# module below makes each tile a device (ZE_FLAT_DEVICE_HIERARCHY=FLAT), and with it gpu_tile_compact.sh shall not be used
# [1]: a rank takes the tile of its number on the node.
hpcllm_cores=1-8:9-16:17-24:25-32:33-40:41-48:53-60:61-68:69-76:77-84:85-92:93-100
hpcllm_start=("--cpu-bind=list:$hpcllm_cores")

hpcllm_modules() {
    hpcllm_load frameworks # Python, PyTorch for these GPUs, Aurora's MPICH [2]
}

hpcllm_variables() {
    # MPI does not touch a GPU's memory: the default MPICH can deliver wrong bytes there [3, runtime error 6; pmodels/mpich
    # 7302], so messages go through the host's memory. 1 tries it; preflight and communication.gpu_aware tell what happens [1]
    export MPIR_CVAR_ENABLE_GPU=${MPIR_CVAR_ENABLE_GPU:-0}
    # room for messages that come faster than they are taken: "Cassini Event Queue overflow" [3, runtime error 1]
    export FI_CXI_DEFAULT_CQ_SIZE=${FI_CXI_DEFAULT_CQ_SIZE:-131072}
    # the same [3]
    export FI_CXI_OFLOW_BUF_SIZE=${FI_CXI_OFLOW_BUF_SIZE:-8388608}
    # the same [3]
    export FI_CXI_CQ_FILL_PERCENT=${FI_CXI_CQ_FILL_PERCENT:-20}
    # as many threads as a rank has cores [1]
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-8}
    # how large a node's GPU memory is may be asked [3, runtime error 3]
    export ZES_ENABLE_SYSMAN=${ZES_ENABLE_SYSMAN:-1}
}

# PBS has no sbcast: Copper reads each file once for all nodes and hands it on [4]. ALCF asks for it at large node counts and
# warns of 1000 without it [2]
hpcllm_spread() {
    local packages nodes
    nodes=$(hpcllm_nodes)
    if [ "${HPCLLM_PACKED:-}" = 0 ]; then return; fi
    if [ "$nodes" -le "$hpcllm_many_nodes" ] && [ "${HPCLLM_PACKED:-}" != 1 ]; then return; fi
    if [ -z "${DRY_RUN:-}" ]; then hpcllm_say "$nodes nodes: Python's files come by Copper; HPCLLM_PACKED=0 switches that off"; fi
    hpcllm_load copper # that very program [4]
    if [ -n "${DRY_RUN:-}" ]; then echo launch_copper.sh && return; fi
    launch_copper.sh
    packages=$(echo "$HPCLLM_VENV"/lib/python3*/site-packages)
    hpcllm_copied=/tmp/${USER:-$(id -un)}/copper
    hpcllm_source=$hpcllm_copied$HPCLLM_ROOT:$hpcllm_copied$packages
}

hpcllm_gather() { if [ -n "$hpcllm_copied" ]; then stop_copper.sh; fi; }

# for install.sh
hpcllm_torch=""    # of the module [2]
hpcllm_cupy=""     # kernels are for CUDA and ROCm
hpcllm_mpicc=mpicc # Aurora's MPICH, of the module [1]
hpcllm_hdf5=""     # h5py as it is: our own writer needs no parallel HDF5
hpcllm_make=(python3 -m venv --system-site-packages "$HPCLLM_VENV") # [2]
