#!/usr/bin/env bash
# one_device.sh VARIABLE DEVICES COMMAND...: of a comma-separated list each rank of a node sees one device, its own.
#
#     one_device.sh CUDA_VISIBLE_DEVICES 3,2,1,0 python ...      rank 0 of a node: CUDA_VISIBLE_DEVICES=3
#
# Unlike Slurm's --gpus-per-task this leaves all devices in one control group, without which ranks of a node cannot open one
# another's memory (LUMI documentation, "Distribution and binding options"; BLAST-WarpX/warpx#6382).
set -euo pipefail
variable=$1
IFS=, read -ra devices <<<"$2"
shift 2
rank=${SLURM_LOCALID:?is set by srun}
if [ "$rank" -ge "${#devices[@]}" ]; then
    echo "one_device.sh: rank $rank of its node, but there are ${#devices[@]} devices: start at most as many ranks a node" >&2
    exit 2
fi
export "$variable=${devices[$rank]}"
exec "$@"
