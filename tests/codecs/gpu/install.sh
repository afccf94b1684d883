#!/usr/bin/env bash
# bash tests/codecs/gpu/install.sh: what the compile checks of device kernels need and pip does not bring: g++ for the
# emulator, hipRTC and clang for AMD's devices (clang 19 with its linker: 42 MB, a third of a minute). On Debian or Ubuntu,
# as root; NVRTC is in the `test` extra. None needs a device.
set -euo pipefail
missing=()
command -v g++ >/dev/null || missing+=(g++)
ldconfig -p | grep -E 'libhiprtc\.so|libamdhip64\.so\.[56]' >/dev/null || missing+=(libamdhip64-5 libhiprtc-builtins5)
command -v clang-19 >/dev/null && command -v ld.lld-19 >/dev/null || missing+=(clang-19 lld-19)
[ ${#missing[@]} -gt 0 ] || exit 0
apt-get update -qq
apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
