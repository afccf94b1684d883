# shellcheck shell=bash
# hpcllm_mpirun N COMMAND...: start N ranks on this machine, more than it has cores if need be. Sourced by setup.sh.
#
#     SIGTERM, SIGUSR1, Ctrl-C -> this shell or mpirun itself -> every rank once -> exit code of the ranks
#
# The numbers behind each choice are in perf/mpi_on_two_cores.md.

hpcllm_cores() { # nproc sees what this process may use, but also obeys OMP_NUM_THREADS
    env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc 2>/dev/null || getconf _NPROCESSORS_ONLN
}

hpcllm_room() { # warn of a /dev/shm too small for N ranks with MIB each, as in many containers (64 MiB)
    local free_kib
    free_kib=$(df -Pk /dev/shm 2>/dev/null | awk 'NR == 2 { print $4 }')
    if [ -n "$free_kib" ] && [ "$free_kib" -lt $(($1 * $2 * 1024)) ]; then
        hpcllm_say "warning: /dev/shm has $((free_kib / 1024)) MiB free, $1 ranks want $(($1 * $2)) MiB;" \
            "a container takes --shm-size=1g, or remove what killed runs left: /dev/shm/mpich_shm_* and sm_segment.*"
    fi
}

hpcllm_mpirun() { # does not return
    local ranks=$1 cores
    shift
    cores=$(hpcllm_cores)
    # Ranks share the cores. With the default, each rank would start as many threads as there are cores.
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > ranks ? cores / ranks : 1))}
    # Both keep sockets under TMPDIR, whose whole path may have about 100 characters.
    if [ "$(printf %s "${TMPDIR:-}" | wc -c)" -gt 50 ]; then export TMPDIR=/tmp; fi
    "hpcllm_$(hpcllm_family)" "$ranks" "$@"
}

# exports HPCLLM_ABORTED: an empty file; rank 0 writes "running", a rank that aborts the exit code, one that is ended in a
# call of MPI its stack, from "Timeout" on
hpcllm_abort_file() {
    HPCLLM_ABORTED=$(mktemp "${TMPDIR:-/tmp}/hpcllm-aborted-XXXXXX") || HPCLLM_ABORTED=""
    export HPCLLM_ABORTED
}

hpcllm_end_after_abort() { # PID COMMAND...: run COMMAND, which kills, if PID stays HPCLLM_ABORT_S after a rank's abort
    local pid=$1 left=${HPCLLM_ABORT_S:-10}
    shift
    while kill -0 "$pid" 2>/dev/null; do
        sleep 1 >/dev/null 2>&1 # which, left behind for a second, shall keep nobody's pipe open
        if grep -q '^[0-9T]' "$HPCLLM_ABORTED" 2>/dev/null && [ $((left -= 1)) -le 0 ]; then
            echo "hpcllm: mpirun did not end after a rank aborted the job, as when a host is out of reach; ended by force" >&2
            "$@"
            return
        fi
    done
}

hpcllm_kill_tree() { # PID: and all processes that it has started
    local child
    # shellcheck disable=SC2013 # words, of one line
    for child in $(cat /proc/"$1"/task/*/children 2>/dev/null); do hpcllm_kill_tree "$child"; done
    kill -KILL "$1" 2>/dev/null || :
}

hpcllm_exit_code() { # CODE: that of mpirun, unless a rank has aborted with another one; prints stacks; removes the file
    local code=""
    read -r code <"$HPCLLM_ABORTED" || :
    if sed -n '/^Timeout/,$p' "$HPCLLM_ABORTED" | grep '' >&2; then code=1; fi
    rm -f "$HPCLLM_ABORTED"
    case $code in
        running)
            code=$1
            if [ "$code" = 0 ]; then # Open MPI's, when it loses a host
                echo "hpcllm: mpirun ended with exit code 0, but rank 0 has not come to its end: a host was lost" >&2
                code=1
            fi
            ;;
    esac
    echo "${code:-$1}"
}

hpcllm_family() { # of the mpirun on PATH: openmpi or mpich, whose kin (Intel, Cray, MVAPICH) share its ABI and its mpirun
    case $(mpirun --version 2>&1) in
        *"Open MPI"* | *OpenRTE* | *PRRTE* | *prte*) echo openmpi ;;
        *) echo mpich ;;
    esac
}

hpcllm_stopped_ranks() { # PID OTHER: ranks of this mpirun that are stopped; nothing while one runs. OTHER: no manager
    local manager rank ranks=""
    # shellcheck disable=SC2013 # words, of one line
    for manager in $(cat /proc/"$1"/task/*/children); do
        if [ "$manager" = "$2" ]; then continue; fi
        for rank in $(cat /proc/"$manager"/task/*/children); do
            case $(grep '^State:' /proc/"$rank"/status) in
                *"T (stopped)") ranks="$ranks $rank" ;;
                *"Z (zombie)" | "") ;;
                *) return ;;
            esac
        done
    done
    echo "$ranks"
}

# PID RANKS: kill ranks of mpirun PID that stay stopped when the others have ended. Who was stopped after it had left MPI
# is missed by no other rank, and mpirun waits for it for ever.
hpcllm_end_stopped() {
    local pid=$1 all=$2 self=$BASHPID before="" ranks
    while sleep "${HPCLLM_STOPPED_S:-5}" && kill -0 "$pid"; do
        ranks=$(hpcllm_stopped_ranks "$pid" "$self" || :)
        # shellcheck disable=SC2086 # a word for each rank
        if [ -n "$ranks" ] && [ "$ranks" = "$before" ] && [ "$(echo $ranks | wc -w)" -lt "$all" ]; then
            echo "hpcllm: all other ranks have ended, and these processes are stopped, by a debugger or SIGSTOP; killed:$ranks" \
                >>/proc/"$pid"/fd/2 || :
            kill -KILL $ranks || :
        fi
        before=$ranks
    done
}

hpcllm_mpich() {
    hpcllm_room "$1" 2
    # All ranks are on this machine, so nobody needs to listen outside the loopback (no firewall in the way).
    if [ -d /sys/class/net/lo ]; then export UCX_NET_DEVICES=${UCX_NET_DEVICES:-lo}; fi
    hpcllm_end_stopped $$ "$1" </dev/null >/dev/null 2>&1 & # holds nobody's pipe open
    exec mpirun -n "$@"
}

hpcllm_openmpi() {
    local shared_memory=sm signalled="" code job watch
    hpcllm_room "$1" 17
    # Open MPI refuses root unless told twice. In a container one is root.
    if [ "$(id -u)" = 0 ]; then export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1; fi
    # Shared memory and nothing else: nobody listens outside this machine. Version 4 calls it vader.
    case $(mpirun --version) in *"Open MPI) "[1-4].* | *"(OpenRTE) "*) shared_memory=vader ;; esac
    export OMPI_MCA_pml=${OMPI_MCA_pml:-ob1} OMPI_MCA_btl=${OMPI_MCA_btl:-self,$shared_memory}
    # A rank that waits inside MPI gives its core away. By itself Open MPI does so only with more ranks than cores, yet
    # cores are shared with other programs too.
    export OMPI_MCA_mpi_yield_when_idle=${OMPI_MCA_mpi_yield_when_idle:-1}
    # The UCX module for windows is not usable here and says so on every window.
    export OMPI_MCA_osc=${OMPI_MCA_osc:-^ucx}
    set -m # a process group of its own: a signal to all of ours (timeout, scancel) shall reach mpirun through us alone
    hpcllm_abort_file
    mpirun --map-by :OVERSUBSCRIBE --bind-to none -n "$@" </dev/null &
    job=$!
    set +m
    hpcllm_end_after_abort "$job" hpcllm_kill_tree "$job" </dev/null &
    watch=$!
    # On SIGTERM and SIGINT mpirun gives its ranks 0.5 s, too short for a checkpoint. SIGUSR1 it hands on, then waits.
    trap 'signalled=1; kill -USR1 $job' TERM USR1
    # a second Ctrl-C is meant
    trap 'signalled=1; kill -USR1 $job; trap "signalled=1; kill -INT \$job" INT' INT
    wait $job && code=0 || code=$?
    while [ -n "$signalled" ]; do # the signal ended the wait, not mpirun
        signalled=""
        wait $job && code=0 || code=$?
    done
    kill "$watch" 2>/dev/null || :
    exit "$(hpcllm_exit_code "$code")"
}
