#!/usr/bin/env bash
# bash perf/cluster.sh up N RATE | run [-n RANKS] COMMAND... | status | down
#
# A cluster of N hosts with slow links on one machine, to test and measure what travels between nodes:
#
#     h1 eth0 =tbf======tbf= port1 |        |      every host: a network namespace with its own name, address
#     h2 eth0 =tbf======tbf= port2 | bridge |      10.77.0.<i>, /etc/hosts, /dev/shm and semaphores; files are shared
#     h3 eth0 =tbf======tbf= port3 |        |      every link: RATE (1gbit, 200mbit) in each direction
#
# run     starts RANKS ranks (default: one a host; rank order fills one host after the other) with Open MPI: shared
#         memory inside a host, TCP between hosts. Exit code and output are the command's. SIGTERM, SIGUSR1 and Ctrl-C
#         reach the ranks as SIGUSR1; a second Ctrl-C kills. However it ends, nothing of it stays.
# up      replaces a cluster that is there, and ends what runs in it, as down does
#
#     HPCLLM_CLUSTER=name     another cluster beside the default one
#
# Needs root and iproute2, installs neither. mpirun and python are those on PATH if they are of one environment with
# Open MPI 5, else those of jobscripts/local. OMPI_MCA_* that are set win over what is set here.
set -euo pipefail
export HPCLLM_MPI=openmpi
. "$(dirname "${BASH_SOURCE[0]}")/../jobscripts/local/setup.sh"

export HPCLLM_CLUSTER=${HPCLLM_CLUSTER:-hpcllm}
cluster=$HPCLLM_CLUSTER
state=/run/hpcllm-cluster-$cluster # a path without a space, for mpirun cuts the agent's command line at spaces

cluster_needs() {
    local missing="" tool
    [ "$(uname -s)" = Linux ] || hpcllm_die 2 "a cluster of network namespaces needs Linux"
    [ "$(id -u)" = 0 ] || hpcllm_die 2 "a cluster of network namespaces needs root"
    for tool in ip tc unshare setpriv; do command -v "$tool" >/dev/null || missing="$missing $tool"; done
    [ -z "$missing" ] || hpcllm_die 2 "not on PATH:$missing; ip and tc come with iproute2, the others with util-linux"
    [[ $cluster =~ ^[a-z][a-z0-9]{0,15}$ ]] ||
        hpcllm_die 2 "HPCLLM_CLUSTER='$cluster' should be a letter and up to 15 letters or digits, all small"
}

cluster_spaces() { ip netns list 2>/dev/null | awk '{ print $1 }' | grep -xE "$cluster-(switch|h[0-9]+)" | sort || true; }

cluster_is_up() { [ -e "$state/ready" ] && ip netns list 2>/dev/null | grep "^$cluster-switch\b" >/dev/null; }

cluster_down() { # also what an interrupted `up` left behind
    local space pids
    for space in $(cluster_spaces); do # h1 first: mpirun there takes the loss of another host for an end, code 0
        pids=$(ip netns pids "$space")
        # shellcheck disable=SC2086 # one word for each process
        if [ -n "$pids" ]; then kill -KILL $pids 2>/dev/null || true; fi
        ip netns delete "$space" # its links go with it
    done
    rm -rf "/etc/netns/$cluster-switch" /etc/netns/"$cluster"-h[0-9]* "$state"
    rmdir /etc/netns 2>/dev/null || true
}

cluster_burst_bytes() { # RATE: what a link may send at once: 1 ms worth, and two of the largest packets at least
    awk -v rate="$1" 'BEGIN { unit["k"] = 1e3; unit["m"] = 1e6; unit["g"] = 1e9; bits = rate + 0
        match(rate, /[kmg]bit/); bits *= unit[substr(rate, RSTART, 1)]
        bytes = int(bits / 8 / 1000); print (bytes > 131072 ? bytes : 131072) }'
}

cluster_limit() { # NAMESPACE DEVICE RATE: for what leaves through the device
    # latency: how long a packet may wait in the queue, at 1 Gbit/s 2.5 MB, in the range of a switch port's buffer
    tc -n "$1" qdisc add dev "$2" root tbf rate "$3" burst "$(cluster_burst_bytes "$3")" latency 20ms
}

cluster_add_host() { # I RATE
    local switch=$cluster-switch host=$cluster-h$1
    ip netns add "$host"
    ip -n "$switch" link add "port$1" type veth peer name eth0 netns "$host"
    ip -n "$host" address add "10.77.0.$1/24" dev eth0
    ip -n "$host" link set lo up
    ip -n "$host" link set eth0 up
    ip -n "$switch" link set "port$1" master bridge up
    cluster_limit "$host" eth0 "$2"
    cluster_limit "$switch" "port$1" "$2"
    mkdir -p "/etc/netns/$host" # `ip netns exec` lays these files over /etc
    cp "$state/hosts" "/etc/netns/$host/hosts"
}

cluster_up() { # N RATE
    local i
    case ${1:-} in "" | *[!0-9]* | 0* | ????*) hpcllm_die 2 "N = '${1:-}' should be a number of hosts, 1 to 250" ;; esac
    [ "$1" -le 250 ] || hpcllm_die 2 "N = $1 should be a number of hosts, 1 to 250"
    [[ ${2:-} =~ ^[0-9]+(\.[0-9]+)?[kmg]bit$ ]] ||
        hpcllm_die 2 "RATE = '${2:-}' should be what a link carries in a second, such as 1gbit, 2.5gbit or 200mbit"
    [ $# = 2 ] || hpcllm_die 2 "up takes N and RATE, nothing after them"
    cluster_down
    trap cluster_down EXIT # a half-made cluster is none
    mkdir -p "$state"
    {
        echo "127.0.0.1 localhost"
        for ((i = 1; i <= $1; i++)); do echo "10.77.0.$i h$i"; done
    } >"$state/hosts"
    cp "$HPCLLM_ROOT/perf/cluster_enter.sh" "$state/enter"
    ip netns add "$cluster-switch"
    ip -n "$cluster-switch" link add bridge type bridge
    ip -n "$cluster-switch" link set bridge up
    for ((i = 1; i <= $1; i++)); do cluster_add_host "$i" "$2"; done
    printf '%s %s\n' "$1" "$2" >"$state/ready"
    trap - EXIT
    hpcllm_say "cluster $cluster: h1 to h$1, $2 each way"
}

cluster_status() {
    local i hosts rate
    cluster_is_up || hpcllm_die 1 "no cluster $cluster; make one with: cluster.sh up N RATE"
    read -r hosts rate <"$state/ready"
    echo "cluster $cluster: $hosts hosts, $rate each way"
    for ((i = 1; i <= hosts; i++)); do
        echo "h$i  10.77.0.$i  $(ip netns pids "$cluster-h$i" | wc -l) processes"
    done
}

cluster_environment() { # of what is on PATH if it is one environment that will do, else that of jobscripts/local
    local has='import sys, importlib.util as u; sys.exit(not all(map(u.find_spec, ("mpi4py", "numba", "torch"))))'
    if [ "$(dirname "$(command -v python)")" = "$(dirname "$(command -v mpirun)")" ] &&
        [[ $(mpirun --version 2>&1) == *"Open MPI) 5."* ]] && python -c "$has"; then
        return
    fi
    hpcllm_setup
}

cluster_mpi_settings() { # good for the library's own collectives, too: see the settings in collectives.md
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
    export PRTE_MCA_plm_ssh_agent="/bin/sh $state/enter agent" PRTE_MCA_prte_tmpdir_base=/dev/shm
    export OMPI_MCA_pml=${OMPI_MCA_pml:-ob1} OMPI_MCA_btl=${OMPI_MCA_btl:-self,sm,tcp} OMPI_MCA_btl_tcp_if_include=eth0
    # Without it a large message takes the socket whole, and an answer to the peer waits behind it: half duplex at times.
    export OMPI_MCA_btl_tcp_flags=${OMPI_MCA_btl_tcp_flags:-send}
    export OMPI_MCA_mpi_yield_when_idle=${OMPI_MCA_mpi_yield_when_idle:-1} OMPI_MCA_osc=${OMPI_MCA_osc:-^ucx}
}

cluster_host_list() { # HOSTS RANKS: h1:2,h2:2
    local i list=""
    for ((i = 1; i <= $1; i++)); do list=$list,h$i:$((($2 + $1 - 1) / $1)); done
    printf '%s\n' "${list#,}"
}

cluster_signal() { # SIGNAL: to mpirun, the first process of the run's own process namespace
    local first=""
    read -r first <"/proc/$job/task/$job/children" || true
    if [ -n "$first" ]; then kill "-$1" "$first" || true; fi
}

cluster_run() { # [-n RANKS] COMMAND...
    local hosts rate ranks cores code watch signalled=""
    cluster_is_up || hpcllm_die 2 "no cluster $cluster; make one with: cluster.sh up N RATE"
    read -r hosts rate <"$state/ready"
    ranks=$hosts
    if [ "${1:-}" = -n ]; then
        case ${2:-} in "" | *[!0-9]* | 0*) hpcllm_die 2 "-n '${2:-}' should be a number of ranks >= 1" ;; esac
        ranks=$2
        shift 2
    fi
    [ $# -ge 1 ] || hpcllm_die 2 "the command is missing: cluster.sh run [-n RANKS] COMMAND..."
    cluster_environment
    cluster_mpi_settings
    cores=$(hpcllm_cores)
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > ranks ? cores / ranks : 1))}
    hpcllm_abort_file
    set -m # a process group of its own, so that Ctrl-C comes to us alone
    # --pdeathsig, --kill-child: whoever kills this shell kills mpirun, and with it its process namespace: everything
    setpriv --pdeathsig KILL unshare --pid --fork --kill-child \
        /bin/sh "$state/enter" exec h1 \
        mpirun --bind-to none --host "$(cluster_host_list "$hosts" "$ranks")" -n "$ranks" "$@" </dev/null &
    job=$!
    set +m
    hpcllm_end_after_abort "$job" kill -KILL "$job" </dev/null &
    watch=$!
    trap 'signalled=1; cluster_signal USR1' TERM USR1
    trap 'signalled=1; cluster_signal USR1; trap "kill -KILL $job" INT' INT
    # without bash's own line about a job that was killed: what there is to say, hpcllm_end_after_abort says
    { wait "$job" && code=0 || code=$?; } 2>/dev/null
    while [ -n "$signalled" ]; do # the signal ended the wait, not mpirun
        signalled=""
        { wait "$job" && code=0 || code=$?; } 2>/dev/null
    done
    kill "$watch" 2>/dev/null || :
    exit "$(hpcllm_exit_code "$code")"
}

verb=${1:-}
[ $# = 0 ] || shift
case $verb in
    -h | --help)
        sed -n '2,20s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
        exit
        ;;
    up | run | status | down) cluster_needs ;;
    *) hpcllm_die 2 "'$verb' should be one of: up N RATE, run [-n RANKS] COMMAND..., status, down" ;;
esac
"cluster_$verb" "$@"
