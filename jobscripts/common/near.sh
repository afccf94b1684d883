# shellcheck shell=bash
# shellcheck disable=SC2034,SC2154 # job.sh reads what is set here, and sets what is read
# One archive to each node's own disk. Sourced by the slurm.sh and flux.sh beside it, which give hpcllm_copy and hpcllm_on_nodes.

# OLCF, "Sbcast Conda Environments", measures 2 s for a start from the node's own disk, 51 s from Lustre and 236 s from NFS,
# on 8 nodes. pack.sh says when.

hpcllm_copied=""

hpcllm_spread() { # the archive, over the batch system's own tree
    local archive=$HPCLLM_VENV.tar near=$hpcllm_near folder job
    if [ -z "$near" ] && [ ${#hpcllm_inside[@]} != 0 ]; then return; fi # one file is mounted, by env.sh
    if [ -z "$near" ] && [ "$(hpcllm_nodes)" -le "$hpcllm_many_nodes" ] && [ "${HPCLLM_PACKED:-}" != 1 ]; then return; fi
    near=${near:-/dev/shm} # a folder in the node's memory, on every Linux
    hpcllm_packed "$archive" || return 0
    job=$(hpcllm_job_id)
    folder=$near/hpcllm-${job:-JOB}
    if [ -z "${DRY_RUN:-}" ]; then
        hpcllm_say "copying $archive to $near of each node, to start Python from; HPCLLM_PACKED=0 switches that off"
    fi
    hpcllm_copied=$folder
    if ! hpcllm_spread_to "$archive" "$folder"; then
        hpcllm_say "could not copy $archive to $folder of each node, so all nodes read its files where they are"
        hpcllm_gather
        hpcllm_copied=""
        return 0
    fi
    HPCLLM_VENV=$folder/environment hpcllm_source=$folder/source
}

hpcllm_spread_to() { # ARCHIVE FOLDER
    # shellcheck disable=SC2016 # expanded on each node
    hpcllm_on_nodes bash -c 'rm -rf "$0" && mkdir "$0"' "$2" || return
    # it may leave half a file behind, from which nothing is unpacked then
    hpcllm_copy "$1" "$2" || return
    # shellcheck disable=SC2016 # expanded on each node
    hpcllm_on_nodes bash -c 'cd "$0" && tar -xf "$1" && rm "$1" || exit
        cd environment/bin && if [ -e conda-unpack ]; then ./python conda-unpack; fi' "$2" "${1##*/}"
}

hpcllm_gather() { # takes away what hpcllm_spread has put there
    if [ -n "$hpcllm_copied" ]; then hpcllm_on_nodes rm -rf "$hpcllm_copied" || :; fi
}
