#!/bin/sh
# sh cluster_enter.sh exec|agent HOST COMMAND...: run a command as that host of the cluster $HPCLLM_CLUSTER would.
#
#     network, /etc/hosts  of the namespace      name, /proc, /dev/shm, semaphores  made here, gone with the command
#
# exec    COMMAND as it stands
# agent   what mpirun calls in place of ssh: COMMAND is text for a shell
set -eu
mode=$1 host=$2
shift 2
if [ "$mode" = agent ]; then
    words=$*
    case $words in
        # mpirun repeats the environment in front, unquoted, which a path with a space breaks; we have inherited it
        *"/prted "*) set -- /bin/sh -c "exec prted ${words#*/prted }" ;;
        *) set -- /bin/sh -c "$words" ;;
    esac
fi
# shellcheck disable=SC2016 # expanded inside
exec ip netns exec "$HPCLLM_CLUSTER-$host" unshare --uts --ipc --mount /bin/sh -euc '
    hostname "$0"
    mount -t proc proc /proc
    mount -t tmpfs -o mode=1777 tmpfs /dev/shm
    exec "$@"' "$host" "$@"
