# shellcheck shell=bash
# shellcheck disable=SC2154 # job.sh and env.sh set what is read
# One file of the Python environment, from which nodes start Python. Sourced by job.sh.

# A Python that starts opens some thousand small files. On thousands of nodes that is what a parallel file system is worst
# at. So the environment becomes one file: an archive that near.sh copies to each node, or, where a container or a uenv can
# mount it, one of squashfs. `install.sh pack` makes it, and otherwise the first job of more nodes than this, which says so.
#
#     HPCLLM_PACKED=0     files are read where they are, however many nodes there are
#     HPCLLM_PACKED=1     from one file on few nodes, too; without it they use one that is there

hpcllm_many_nodes=64

hpcllm_packed() { # FILE: true if ranks are to start from it; it is made or made anew where it has to be
    local nodes
    nodes=$(hpcllm_nodes)
    case ${HPCLLM_PACKED:-} in
        0) return 1 ;;
        "") [ -e "$1" ] || [ "$nodes" -gt "$hpcllm_many_nodes" ] || return 1 ;;
    esac
    if hpcllm_is_current "$1"; then return 0; fi
    if [ -n "${DRY_RUN:-}" ]; then echo "bash jobscripts/$hpcllm_machine/install.sh pack" && return; fi
    hpcllm_say "$nodes nodes: packing the Python environment into one file; HPCLLM_PACKED=0 leaves it as it is"
    hpcllm_pack && return
    hpcllm_say "could not pack $HPCLLM_VENV, so all nodes read its files where they are"
    return 1
}

hpcllm_is_current() { # FILE: it is there, and nothing has been installed or written since
    [ -e "$1" ] || return
    [ -z "$(find "$HPCLLM_ROOT/hpcllm" -name '*.py' -newer "$1" -print -quit 2>/dev/null)" ] &&
        [ -z "$(find "$HPCLLM_VENV"/lib/python3*/site-packages -maxdepth 0 -newer "$1" -print -quit 2>/dev/null)" ]
}

hpcllm_pack() { # one file of the environment and of the source, which lies anywhere on a node; what it replaces stays whole
    local folder=$HPCLLM_VENV archive=$HPCLLM_VENV.tar new
    new=$HPCLLM_VENV.$(uname -n).$$
    if [ ${#hpcllm_inside[@]} != 0 ]; then # a container can use one file as a folder
        # LUMI AI Guide, chapter 2
        { mksquashfs "$folder" "$new" -noappend -processors 1 -no-xattrs && mv "$new" "$folder.sqsh"; } || hpcllm_unpacked "$new"
        return
    fi
    hpcllm_say "packing $archive"
    if [ -n "${hpcllm_conda:-}" ]; then # its files name the folder they were made for: conda-unpack mends them, on each node
        "$folder/bin/conda-pack" --prefix "$folder" --arcroot environment --format tar --output "$new" --force \
            --ignore-editable-packages --ignore-missing-files # hpcllm itself; files that pip has replaced
    else # names in a virtual environment are not used by `python -m`
        # tar reads a folder's name with a backslash as a pattern; ours has none of its own
        tar -C "${folder%/*}" --transform "s|^${folder##*/}|environment|" -cf "$new" "${folder##*/}"
    fi && tar -C "$HPCLLM_ROOT" --transform 's|^\./hpcllm|source/hpcllm|' -rf "$new" ./hpcllm && mv "$new" "$archive" ||
        hpcllm_unpacked "$new" || return
    hpcllm_say "$(du -h "$archive" | cut -f1) are copied to each node from now on"
}

hpcllm_unpacked() { # FILE: takes half a file away
    rm -f "$1"
    return 1
}
