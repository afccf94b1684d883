#!/usr/bin/env bash
# bash tests/modules/run.sh [--install] [pytest arguments]: `module load` with a real Lmod and environment-modules.
#
# Takes what is installed. --install fetches what is missing by apt-get, as root on Debian and Ubuntu. The two packages
# exclude each other, so they are unpacked side by side in a temporary folder and only what they need is installed.
# What cannot be had is skipped with the reason. Ends with "N passed, N failed".
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/../../jobscripts/local/setup.sh"

install=""
if [ "${1:-}" = --install ]; then install=1 && shift; fi
folder=$(mktemp -d -t hpcllm-modules-XXXXXX)
trap 'rm -rf "$folder"' EXIT

apt_install() {
    DEBIAN_FRONTEND=noninteractive apt-get -qq install --no-install-recommends "$@" >/dev/null 2>&1
}

unpack() { # PACKAGE NEEDS...: the package in $folder/PACKAGE, its own paths changed to that
    local package=$1 path
    shift
    apt_install "$@" || { apt-get -qq update >/dev/null 2>&1 && apt_install "$@"; } || return
    # apt fetches as a user of its own, who may not write here
    (mkdir "$folder/$package" && cd "$folder" && apt-get -qq -o APT::Sandbox::User=root download "$package" &&
        dpkg -x "$package"_*.deb "$package") >/dev/null 2>&1 || return
    (
        cd "$folder/$package"
        for path in etc/lmod etc/environment-modules usr/share/lmod usr/share/modules usr/lib/*/modulecmd.tcl \
            usr/lib/*/libtclenvmodules.so; do
            if [ -e "$path" ]; then { grep -rlIF "/$path" . || :; } | xargs -r sed -i "s|/$path|$PWD/$path|g"; fi
        done
    )
}

init_of() { # PACKAGE INIT NEEDS...: the path of its init/bash, unpacked if need be
    local package=$1 init=$2
    shift 2
    if [ ! -e "$init" ] && [ -n "$install" ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        hpcllm_say "fetching $package" >&2
        if unpack "$package" "$@"; then init=$folder/$package$init; else hpcllm_say "apt-get could not" >&2; fi
    fi
    if [ -e "$init" ]; then printf '%s\n' "$init"; else hpcllm_say "skipped: $package is not installed" >&2; fi
}

lmod=$(init_of lmod "${LMOD_PKG:-/usr/share/lmod/lmod}/init/bash" \
    lua5.3 lua-filesystem lua-json lua-posix lua-term tcl)
modules=$(init_of environment-modules /usr/share/modules/init/bash tcl8.6 less procps)
if [ -z "$lmod$modules" ]; then exit; fi
hpcllm_setup test
cd "$HPCLLM_ROOT"
code=0
HPCLLM_LMOD=$lmod HPCLLM_MODULES=$modules timeout -k 20 300 \
    python -m pytest -q --color=no -p no:cacheprovider "$@" tests/modules/loading.py | tee "$folder/log" || code=$?
count() { tail -n 1 "$folder/log" | grep -oE "[0-9]+ $1" | grep -oE '[0-9]+' || echo 0; }
failed=$(($(count failed) + $(count error)))
if [ "$code" != 0 ] && [ "$failed" = 0 ]; then failed=1; fi
echo "$(count passed) passed, $failed failed"
exit "$code"
