#!/usr/bin/env bash
# bash perf/gpu.sh [PART...]: what this code gets out of one GPU, of whatever kind PyTorch sees (CUDA, ROCm, XPU).
#
#     checks      tests/gpu on 1, 2 and 4 ranks; bits of runs whose launches wait; compute-sanitizer, where it is found
#     codecs      each codec that has kernels here, both ways, as a share of a copy on the device
#     mfu         llama-1b in bf16: recompute none and selective, each with the largest microbatch that fits
#     shared      gpt2-124m on one, two and four ranks that share the device, messages through pinned host memory
#     summary     gpu.md from gpu.json
#
#     part --> python perf/gpu.py PART --> perf/gpu.json --> perf/gpu.md
#
# Without parts: all of them, about half an hour on a recent GPU. In an environment that has hpcllm, a PyTorch for the
# GPU, CuPy for most codecs, and an MPI; several ranks are started by HPCLLM_LAUNCH, "mpirun -n" if it is not set, as in
#     HPCLLM_LAUNCH="srun --gpus=1 --overlap -n" bash perf/gpu.sh
# Where there is no GPU it says so, measures nothing, writes nothing, and ends with exit code 1.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
root=$(dirname "$here")
export HPCLLM_LAUNCH=${HPCLLM_LAUNCH:-mpirun -n} PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
[ $# -gt 0 ] || set -- checks codecs mfu shared summary
for part in "$@"; do
    python "$here/gpu.py" "$part"
done
