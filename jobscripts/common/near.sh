# shellcheck shell=bash
# shellcheck disable=SC2034,SC2154 # job.sh reads what is set here, and sets what is read
# One archive to each node's own disk. Sourced by the slurm.sh and flux.sh beside it, which give hpcllm_copy and hpcllm_on_nodes.

# A Python that starts opens some thousand small files. On thousands of nodes that is what a parallel file system is worst
# at, so one archive goes to each node over the batch system's own tree, and Python starts from the node's own disk. OLCF,
# "Sbcast Conda Environments", measures 2 s against 51 s from Lustre and 236 s from NFS, on 8 nodes.

hpcllm_copied=""

hpcllm_spread() { # the archive that `install.sh pack` made, if there is one and nodes have a place for it
    local archive=$HPCLLM_VENV.tar folder job
    job=$(hpcllm_job_id)
    folder=$hpcllm_near/hpcllm-${job:-JOB}
    if [ -z "$hpcllm_near" ] || [ ! -e "$archive" ]; then return 0; fi
    if [ -z "${DRY_RUN:-}" ]; then hpcllm_say "copying $archive to the disk of each node"; fi
    # shellcheck disable=SC2016 # expanded on each node
    hpcllm_on_nodes bash -c 'rm -rf "$0" && mkdir "$0"' "$folder"
    # it may leave half a file behind, from which Python would start in strange ways
    hpcllm_copy "$archive" "$folder" || hpcllm_die 1 "could not copy $archive to $folder of each node"
    # shellcheck disable=SC2016 # expanded on each node
    hpcllm_on_nodes bash -c 'cd "$0" && tar -xf "$1" && rm "$1" || exit
        cd environment/bin && if [ -e conda-unpack ]; then ./python conda-unpack; fi' "$folder" "${archive##*/}"
    hpcllm_copied=$folder HPCLLM_VENV=$folder/environment hpcllm_source=$folder/source
}

hpcllm_gather() { # takes away what hpcllm_spread has put there
    if [ -n "$hpcllm_copied" ]; then hpcllm_on_nodes rm -rf "$hpcllm_copied"; fi
}
