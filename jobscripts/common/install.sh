# shellcheck shell=bash
# What every machine's install.sh does. Sourced by jobscripts/{frontier,lumi,...}/install.sh, which then says
#
#     hpcllm_install_on MACHINE [pack]         on a login node; afterwards jobs find the environment by themselves
#
#     modules of env.sh -> an empty environment -> torch -> mpi4py -> h5py -> hpcllm -> CuPy -> does it start?
#     pack:  one file beside it, which jobs copy to the disk of each node (pack.sh says why)
#
# What a step has done is noted in the environment, with its command; a second call, after a lost connection perhaps,
# goes on with what is missing, or with what has changed. rm -r the folder to begin anew. Variables of the caller:
#
#     HPCLLM_ENV=FOLDER         where; default: .venv-MACHINE in the repository. Give a folder on the parallel file system
#     HPCLLM_TORCH_INDEX=URL    the package index that PyTorch's installation page names for the machine's ROCm or CUDA
#     HPCLLM_CUPY=EXTRA         the CuPy that loads our kernels: cuda12, cuda13, rocm7, torch: by torch's own build; none
#     DRY_RUN=1                 anywhere: the commands
#
# env.sh gives: hpcllm_make, a command; hpcllm_torch, what to install, empty where a module brings it; hpcllm_accelerator, as
# in the index; hpcllm_mpicc, a compiler; hpcllm_hdf5, the variable in which a module says where HDF5 is, empty for the h5py
# that comes with its own; hpcllm_inside, where Python is in a container: what to say before it; hpcllm_beside, whether the
# packages of that Python are in a virtual environment themselves; hpcllm_build, what torch has to be made for, as
# torch.version calls it: hip, cuda; hpcllm_cupy, what HPCLLM_CUPY is where the caller does not say, empty where CuPy has no
# wheel; hpcllm_conda, whether it is an environment of conda.

# shellcheck source=job.sh
. "$(dirname "${BASH_SOURCE[0]}")/job.sh"

hpcllm_step() { # NAME COMMAND...: unless that very command has done its work already
    local note=$HPCLLM_VENV/hpcllm-steps/$1 name=$1
    shift
    if [ -n "${DRY_RUN:-}" ]; then hpcllm_print "$@" && return; fi
    if [ "$(cat "$note" 2>/dev/null)" = "$*" ]; then hpcllm_say "$name: done before" && return; fi
    hpcllm_say "$name: $(hpcllm_print "$@")"
    "$@" || hpcllm_die 1 "$name: failed; the same command goes on from here"
    mkdir -p "${note%/*}"
    printf '%s\n' "$*" >"$note"
}

hpcllm_pip() { # [NAME=VALUE ...] ARGUMENTS of pip install
    local settings=()
    while [[ ${1:-} =~ ^[A-Z0-9_]+= ]]; do settings+=("$1") && shift; done
    hpcllm_step "$step" env PIP_USER=0 ${settings[@]+"${settings[@]}"} \
        ${hpcllm_inside[@]+"${hpcllm_inside[@]}"} \
        "$HPCLLM_VENV/bin/python" -m pip install --disable-pip-version-check "$@"
}

hpcllm_python() { ${hpcllm_inside[@]+"${hpcllm_inside[@]}"} "$HPCLLM_VENV/bin/python" "$@"; }

hpcllm_pin() { # NAME: as pinned for all machines, such as mpi4py==4.1.2
    grep -E "^$1==" "$HPCLLM_ROOT/jobscripts/local/constraints.txt"
}

hpcllm_see_beside() { # packages of a virtual environment whose Python has made this one
    hpcllm_step packages-beside ${hpcllm_inside[@]+"${hpcllm_inside[@]}"} \
        python3 "$HPCLLM_ROOT/jobscripts/common/packages_beside.py" "$HPCLLM_VENV"
}

hpcllm_packages() {
    local step pins=$HPCLLM_VENV/constraints.txt
    step="torch"
    if [ -n "$hpcllm_torch" ]; then
        if [ -z "${HPCLLM_TORCH_INDEX:-}" ] && [ -z "${DRY_RUN:-}" ]; then
            hpcllm_die 2 "which PyTorch? Say HPCLLM_TORCH_INDEX=, the address of the package index that PyTorch's
    installation page names for $hpcllm_accelerator, and call again"
        fi
        hpcllm_pip "$hpcllm_torch" --index-url "${HPCLLM_TORCH_INDEX:-ADDRESS}"
    fi
    if [ -n "$hpcllm_mpicc" ]; then
        step="mpi4py" # compiled against the MPI of the modules; a wheel would look for one when it starts
        hpcllm_pip MPICC="$hpcllm_mpicc" --no-cache-dir --no-binary mpi4py "$(hpcllm_pin mpi4py)"
    fi
    if [ -n "$hpcllm_hdf5" ]; then
        step="h5py-tools" # without the isolation of builds, in which pip would compile another mpi4py
        hpcllm_pip numpy pkgconfig "cython>=3,<3.2" "setuptools>=77" wheel
        step="h5py"
        hpcllm_pip CC="${hpcllm_mpicc%% *}" HDF5_MPI=ON HDF5_DIR="${!hpcllm_hdf5:-\$$hpcllm_hdf5}" \
            --no-cache-dir --no-build-isolation --no-binary h5py --no-deps "$(hpcllm_pin h5py)"
    fi
    step="hpcllm"
    if [ -z "${DRY_RUN:-}" ]; then # what is here stays, torch above all; the rest as pinned for all machines
        # not `pip freeze`, which names the address of what came from one, and so would leave it without a pin
        { hpcllm_python -m pip list --format=freeze --exclude hpcllm && cat "$HPCLLM_ROOT/jobscripts/local/constraints.txt"; } |
            awk -F== 'NF == 2 { name = tolower($1); gsub("_", "-", name) } NF == 2 && !seen[name]++' >"$pins"
    fi
    # the number makes it another command, which is done again, once a newer hpcllm wants other packages
    hpcllm_pip HPCLLM_WANTS="$(cat "$HPCLLM_ROOT/pyproject.toml" "$HPCLLM_ROOT/jobscripts/local/constraints.txt" | cksum)" \
        --constraint "$pins" --editable "${HPCLLM_ROOT}[text,tensorboard]"
    hpcllm_kernels "$pins"
}

hpcllm_kernels() { # PINS: CuPy, which loads the kernels of codecs and model; without it all runs on, slower
    local step="cupy" extra=${HPCLLM_CUPY:-${hpcllm_cupy:-none}}
    if [ "$extra" = torch ] && [ -n "${DRY_RUN:-}" ]; then
        extra=cudaNN
    elif [ "$extra" = torch ]; then
        extra=$(hpcllm_python -c 'import torch; print("cuda" + (torch.version.cuda or "").partition(".")[0])')
    fi
    if [ "$extra" = none ]; then return; fi
    if [ -z "${DRY_RUN:-}" ] && hpcllm_python -c 'import sys, importlib.util as u; sys.exit(not u.find_spec("cupy"))'; then
        hpcllm_say "cupy: there already" && return
    fi
    # in a shell of its own, which ends where it fails: a run needs no kernels
    (hpcllm_pip --constraint "$1" --editable "${HPCLLM_ROOT}[$extra]") ||
        hpcllm_say "going on without kernels for codecs and model; HPCLLM_CUPY=none leaves that step out"
}

hpcllm_starts() { # on a login node: MPI itself is not started, for there it may end whom it did not start
    hpcllm_python -c 'import sys, h5py, mpi4py, torch
from hpcllm.cli.main import main
from hpcllm.codecs.gpu.launch import why_no_cupy
if sys.argv[1] and getattr(torch.version, sys.argv[1]) is None:
    sys.exit(f"torch {torch.__version__} in {torch.__path__[0]} is not made for {sys.argv[1]}, so it sees no device of this machine")
print("torch", torch.__version__, "mpi4py", mpi4py.__version__, "h5py", h5py.__version__,
    "parallel" if h5py.get_config().mpi else "not parallel: checkpoint.writer = offsets needs no other")
if (torch.version.cuda or torch.version.hip) and (why := why_no_cupy()):
    print("warning: no kernels for codecs and model:", why)' "$hpcllm_build"
}

hpcllm_install_on() { # MACHINE [pack]
    hpcllm_machine=$1
    hpcllm_start=() hpcllm_each=() hpcllm_near="" hpcllm_inside=() hpcllm_beside="" hpcllm_build="" hpcllm_cupy="" hpcllm_conda=""
    # shellcheck source=../frontier/env.sh
    . "$HPCLLM_ROOT/jobscripts/$hpcllm_machine/env.sh"
    set -eo pipefail # no -u: what modules run was not written for it
    case ${2:-} in
        "" | pack) ;;
        *) hpcllm_die 2 "'$2' is unknown: bash jobscripts/$hpcllm_machine/install.sh [pack]" ;;
    esac
    hpcllm_modules
    hpcllm_step environment "${hpcllm_make[@]}"
    if [ -n "$hpcllm_beside" ]; then hpcllm_see_beside; fi
    hpcllm_packages
    if [ -n "${DRY_RUN:-}" ]; then return; fi
    hpcllm_starts || hpcllm_die 1 "the environment in $HPCLLM_VENV does not start; see above"
    if [ "${2:-}" = pack ]; then hpcllm_pack || hpcllm_die 1 "could not pack $HPCLLM_VENV; see above"; fi
    hpcllm_say "ready: $HPCLLM_VENV"
}
