#!/usr/bin/env bash
# bash tests/slurm/fakeslurm.sh up FOLDER [NODES=2]     a real Slurm on this machine; then: export SLURM_CONF=FOLDER/slurm.conf
# bash tests/slurm/fakeslurm.sh down FOLDER             ends what `up` started, and nothing else
#
#     slurmctld ---- slurmd n1 (own host name, own /dev/shm, own /etc/hosts)     all on the loopback, as root,
#         `--------- slurmd n2 ( ... )                                           every file under FOLDER
#
# For Linux and root, with the commands of Slurm and munge installed (Debian and Ubuntu: apt-get install slurm-wlm). The
# nodes claim 288 cores and 8 GPUs each, and to be in every partition that jobscripts/ asks for, whatever the machine has. The
# ports are drawn anew, so several may be up at once.
set -euo pipefail

usage() {
    sed -n '2,3p' "${BASH_SOURCE[0]}" >&2
    exit 2
}

[ $# -ge 2 ] || usage
verb=$1 nodes=${3:-2}
mkdir -p "$2"
folder=$(cd "$2" && pwd -P)
case $folder in *[[:space:]]*) echo "fakeslurm: FOLDER = '$folder' has a space, and slurm.conf cannot say that" >&2 && exit 2 ;; esac
export SLURM_CONF=$folder/slurm.conf

configure() { # a limit is checked every second or so, a requeued job starts within seconds, both ends of a job are short
    local host port gpu
    host=$(hostname -s)
    port=$((20000 + RANDOM % 10000))
    cat >"$SLURM_CONF" <<CONF
ClusterName=fake
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$port
AuthType=auth/munge
AuthInfo=socket=$folder/run/munge.sock,cred_expire=5
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
SlurmUser=root
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool.%n
TmpFS=$folder/tmp.%n
SlurmctldPidFile=$folder/run/slurmctld.pid
SlurmdPidFile=$folder/run/slurmd.%n.pid
SlurmctldLogFile=$folder/log/slurmctld.log
SlurmdLogFile=$folder/log/slurmd.%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0
MpiDefault=pmi2
ReturnToService=2
KillWait=10
MinJobAge=3600
OverTimeLimit=0
PropagateResourceLimits=NONE
GresTypes=gpu
NodeName=n[1-$nodes] NodeHostname=$host NodeAddr=127.0.0.1 Port=[$((port + 1))-$((port + nodes))] CPUs=288 RealMemory=512000 Gres=gpu:8 Features=nvme,gpu
PartitionName=batch Nodes=n[1-$nodes] Default=YES MaxTime=2:00:00
PartitionName=standard-g Nodes=n[1-$nodes] MaxTime=2:00:00
PartitionName=boost_usr_prod Nodes=n[1-$nodes] MaxTime=2:00:00
CONF
    for gpu in 0 1 2 3 4 5 6 7; do # Slurm wants a device to hand out; these are as /dev/null
        [ -c "$folder/gpu$gpu" ] || mknod "$folder/gpu$gpu" c 1 3
    done
    echo "NodeName=n[1-$nodes] Name=gpu File=$folder/gpu[0-7]" >"$folder/gres.conf"
    echo CgroupPlugin=cgroup/v1 >"$folder/cgroup.conf"
    # of the nodes alone: the machine's own file stays as it is
    { cat /etc/hosts && echo "127.0.0.1 $(seq -s' ' -f n%g "$nodes")"; } >"$folder/hosts"
}

up() {
    local node
    mkdir -p "$folder"/{state,log,run,munge}
    chmod 755 "$folder"
    chmod 700 "$folder/munge"
    head -c 1024 /dev/urandom >"$folder/munge/key"
    chmod 400 "$folder/munge/key"
    munged --force --key-file="$folder/munge/key" --socket="$folder/run/munge.sock" \
        --pid-file="$folder/run/munged.pid" --log-file="$folder/munge/log" --seed-file="$folder/munge/seed"
    configure
    slurmctld
    for node in $(seq "$nodes"); do
        mkdir -p "$folder"/{spool,tmp}.n"$node"
        # shellcheck disable=SC2016 # expanded inside
        unshare --uts --ipc --mount bash -c 'hostname "n$1" && mount -t tmpfs tmpfs /dev/shm &&
            mount --bind "$2/hosts" /etc/hosts && exec slurmd -N "n$1"' - "$node" "$folder"
    done
    for _ in $(seq 120); do
        [ "$(sinfo -h -N -p batch -t idle -o %N 2>/dev/null | wc -l)" != "$nodes" ] || return 0
        sleep 0.25
    done
    echo "fakeslurm: the nodes did not come up within 30 s; see $folder/log" >&2
    return 1
}

down() {
    local file
    if [ -e "$SLURM_CONF" ]; then timeout 10 scancel --user="$(id -un)" 2>/dev/null || :; fi
    for _ in $(seq 60); do # else a node would leave its job's processes behind
        [ -n "$(timeout 10 squeue -h 2>/dev/null)" ] || break
        sleep 0.25
    done
    for file in "$folder"/run/slurmctld.pid "$folder"/run/slurmd.*.pid "$folder"/run/munged.pid; do
        if [ -s "$file" ]; then kill "$(cat "$file")" 2>/dev/null || :; fi
    done
    for _ in $(seq 60); do # each removes its own as it ends
        compgen -G "$folder/run/*.pid" >/dev/null || return 0
        sleep 0.25
    done
    echo "fakeslurm: still there after 15 s: $(echo "$folder"/run/*.pid)" >&2
    return 1
}

case $verb in
    up) up || { down && exit 1; } ;;
    down) down ;;
    *) usage ;;
esac
