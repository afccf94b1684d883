#!/bin/sh
# sh links.sh run N RATE COMMAND...    start COMMAND as N ranks, each on a host of its own behind a link of that RATE
# sh links.sh probe                    exit code 0 if that can be done here; else say what is missing
#
#     h1 eth0 =tbf======tbf= port1 |        |     each host is a network namespace with its own name, address and
#     h2 eth0 =tbf======tbf= port2 | bridge |     /dev/shm; each link carries RATE (100mbit, 1gbit) each way, kept to
#     h3 eth0 =tbf======tbf= port3 |        |     it by the kernel's token bucket filter; files are shared
#
# As root, and without root where the kernel lets users make namespaces (unshare --user). All of it lives in a process
# namespace of its own and ends with the command, however that ends. Needs iproute2 and util-linux, Open MPI 5 or MPICH.
# The mpirun is that of $HPCLLM_MPIRUN, else the one on PATH. hpcllm.course.links starts this; a person can, too.
set -eu

die() {
    echo "hpcllm: $1" >&2
    exit 2
}

needs() {
    [ "$(uname -s)" = Linux ] || die "slow links need Linux"
    for tool in ip tc unshare nsenter; do
        command -v "$tool" >/dev/null || die "slow links need $tool: packages iproute2 and util-linux"
    done
}

unshared() { # COMMAND...: as root of new namespaces, of a user's own where this is not root
    if unshare --net --mount true 2>/dev/null; then
        exec unshare --net --mount --pid --fork --kill-child --mount-proc "$@"
    fi
    unshare --user --map-root-user --net --mount true 2>/dev/null ||
        die "the kernel lets neither this user nor its namespaces make networks"
    exec unshare --user --map-root-user --net --mount --pid --fork --kill-child --mount-proc "$@"
}

limited() { # DEVICE RATE [nsenter and its options]: limit what leaves through the device
    device=$1 rate=$2
    shift 2
    "$@" tc qdisc add dev "$device" root tbf rate "$rate" burst 256kb latency 20ms
}

host() { # PID COMMAND...: run as that host would
    pid=$1
    shift
    nsenter --target "$pid" --net --uts --ipc --mount -- "$@"
}

add_host() { # I RATE
    # shellcheck disable=SC2016 # expanded inside
    unshare --net --uts --ipc --mount sh -c 'hostname "$0"; mount -t tmpfs -o mode=1777 tmpfs /dev/shm
        : >"$1"; exec sleep infinity' "h$1" "$LINKS_FOLDER/ready$1" &
    pid=$!
    until [ -e "$LINKS_FOLDER/ready$1" ]; do sleep 0.02; done
    echo "$pid" >"$LINKS_FOLDER/h$1"
    ip link add "port$1" type veth peer name eth0 netns "$pid"
    ip link set "port$1" master bridge up
    host "$pid" ip address add "10.77.0.$1/24" dev eth0
    host "$pid" ip link set lo up
    host "$pid" ip link set eth0 up
    limited "port$1" "$2"
    limited eth0 "$2" nsenter --target "$pid" --net
}

inside() { # N RATE COMMAND...: the first process of the namespaces
    ranks=$1 rate=$2 number=0 hosts=""
    shift 2
    ip link add bridge type bridge
    ip link set bridge up
    echo "127.0.0.1 localhost" >"$LINKS_FOLDER/hosts"
    while [ "$number" -lt "$ranks" ]; do
        number=$((number + 1))
        echo "10.77.0.$number h$number" >>"$LINKS_FOLDER/hosts"
    done
    mount --bind "$LINKS_FOLDER/hosts" /etc/hosts # in this mount namespace alone
    number=0
    while [ "$number" -lt "$ranks" ]; do
        number=$((number + 1))
        add_host "$number" "$rate"
        hosts=$hosts,h$number
    done
    settings
    mpirun=${HPCLLM_MPIRUN:-mpirun}
    case $("$mpirun" --version 2>&1) in
        *"Open MPI"* | *prte*) set -- "$mpirun" --bind-to none --host "${hosts#,}" -n "$ranks" "$@" ;;
        *) set -- "$mpirun" -launcher ssh -launcher-exec "$LINKS_FOLDER/agent" -hosts "${hosts#,}" -ppn 1 -n "$ranks" "$@" ;;
    esac
    code=0
    host "$(cat "$LINKS_FOLDER/h1")" "$@" || code=$?
    exit "$code" # the first process: all others end with it
}

settings() { # messages between hosts go through eth0, by TCP
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
    export PRTE_MCA_plm_ssh_agent="$LINKS_FOLDER/agent" PRTE_MCA_prte_tmpdir_base=/dev/shm
    export OMPI_MCA_pml=ob1 OMPI_MCA_btl=self,tcp OMPI_MCA_btl_tcp_if_include=eth0 OMPI_MCA_btl_tcp_flags=send
    export OMPI_MCA_mpi_yield_when_idle=1 OMPI_MCA_osc=^ucx
    export UCX_NET_DEVICES=eth0 UCX_TLS=tcp,self FI_TCP_IFACE=eth0
}

agent() { # [OPTION...] HOST COMMAND...: what mpirun calls in place of ssh
    while [ "${1#-}" != "$1" ]; do shift; done
    pid=$(cat "$LINKS_FOLDER/$1")
    shift
    words=$*
    case $words in
        *"/prted "*) words="exec prted ${words#*/prted }" ;; # what stands in front is the environment, inherited anyway
    esac
    host "$pid" sh -c "$words"
}

verb=${1:-}
[ $# = 0 ] || shift
case $verb in
    -h | --help) sed -n '2,14s/^# \{0,1\}//p' "$0" ;;
    probe)
        needs
        # shellcheck disable=SC2016 # expanded inside
        unshared sh -euc 'ip link add bridge type bridge; ip link add port1 type veth peer name eth0
            tc qdisc add dev port1 root tbf rate 1gbit burst 256kb latency 20ms'
        ;;
    run)
        needs
        [ $# -ge 3 ] || die "run takes N, RATE, as 100mbit, and a command"
        LINKS_FOLDER=$(mktemp -d /tmp/hpcllm-links.XXXXXX) # mpirun cuts names at spaces
        export LINKS_FOLDER
        cp "$0" "$LINKS_FOLDER/links.sh"
        printf '#!/bin/sh\nexec sh %s/links.sh agent "$@"\n' "$LINKS_FOLDER" >"$LINKS_FOLDER/agent"
        chmod +x "$LINKS_FOLDER/agent"
        code=0
        (unshared sh "$LINKS_FOLDER/links.sh" inside "$@") </dev/null &
        child=$!
        trap 'kill -KILL "$child"; rm -rf "$LINKS_FOLDER"; exit 143' TERM INT HUP
        wait "$child" || code=$?
        rm -rf "$LINKS_FOLDER"
        exit "$code"
        ;;
    inside | agent) "$verb" "$@" ;;
    *) die "'$verb' should be one of: run N RATE COMMAND..., probe" ;;
esac
