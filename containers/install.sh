#!/usr/bin/env bash
# bash install.sh SOURCE TARGET: hpcllm beside the packages of a base image. Run by Dockerfile and hpcllm.def, as root.
#
#     the image's Python, and PyTorch if it has one -> TARGET, an environment that sees both -> MPICH, mpi4py, hpcllm -> starts?
#
# An image's PyTorch stays: everything that it has is pinned as it is. MPICH comes as a wheel; its interface (libmpi.so.12)
# is that of Cray MPICH, Intel MPI and MVAPICH, so a site's own library can take its place when the container is started.
set -euo pipefail
source=$1 target=$2

python3 -m venv --system-site-packages --without-pip "$target" # pip is the image's, too
python3 "$source/jobscripts/common/packages_beside.py" "$target"
{ "$target/bin/python" -m pip list --format=freeze --exclude hpcllm && cat "$source/jobscripts/local/constraints.txt"; } |
    awk -F== 'NF == 2 { name = tolower($1); gsub("_", "-", name) } NF == 2 && !seen[name]++' >"$target/constraints.txt"
"$target/bin/python" -m pip install --disable-pip-version-check --no-cache-dir --only-binary mpi4py,mpich \
    --constraint "$target/constraints.txt" "${source}[mpich,text,tensorboard,plot]"
"$target/bin/hpcllm" --version
