#!/usr/bin/env bash
# bash jobscripts/el-capitan/install.sh [pack]: the Python environment, on a login node; ../common/install.sh says what it does.
# Not run on this machine by us; what it is made of, and from which documents: env.sh.
. "$(dirname "${BASH_SOURCE[0]}")/../common/install.sh"
hpcllm_install_on el-capitan "$@"
