# shellcheck shell=bash
# What every job script does. Sourced by jobscripts/*/{train,perf,preflight,run}.{sbatch,pbs,flux}, which then say
#
#     hpcllm_job MACHINE VERB [ARGUMENTS...]        VERB: train, perf, preflight or run
#
#     what was asked for -> MACHINE/env.sh: modules, variables, how ranks start -> the Python environment, on large jobs
#       from a place near to each node -> before `train`: preflight -> python -m hpcllm VERB on all ranks -> its exit code;
#       0 of `train` counts only where the run folder has the run's own record `finished`
#
# Variables of the caller; sbatch hands them on, and qsub does with -v NAME=VALUE:
#     HPCLLM_ENV=FOLDER         the Python environment, if it is not the one that MACHINE/install.sh makes
#     PREFLIGHT=0 | quick | warn    `train` starts without looking first; looks, but measures nothing; starts whatever is found
#     HPCLLM_PACKED=0 | 1       Python starts from one file of its environment: never; always (pack.sh)
#     DRY_RUN=1                 anywhere, without a batch system: what would be loaded, set and run
#
# env.sh gives: HPCLLM_VENV, the environment; hpcllm_modules and hpcllm_variables, functions; hpcllm_start, options of srun or
# mpiexec; hpcllm_each, a command before each rank's own; hpcllm_near, a folder on each node's own disk. The last three may be
# empty. It sources slurm.sh, pbs.sh or flux.sh, which do what depends on the batch system.

# shellcheck source=../local/setup.sh
. "$(dirname "${BASH_SOURCE[0]}")/../local/setup.sh"
# shellcheck source=pack.sh
. "$HPCLLM_ROOT/jobscripts/common/pack.sh"

hpcllm_module() { # use FOLDER, or purge, which warns of modules that it has to keep
    if [ -n "${DRY_RUN:-}" ]; then echo "module $*" && return; fi
    command -v module >/dev/null || hpcllm_die 1 "there is no command 'module' here; is this $hpcllm_machine?"
    module "$@" || hpcllm_say "module $*: exit code $?"
}

hpcllm_load() { # MODULE...
    if [ -n "${DRY_RUN:-}" ]; then echo "module load $*" && return; fi
    command -v module >/dev/null || hpcllm_die 1 "there is no command 'module' here; is this $hpcllm_machine?"
    module load "$@" || hpcllm_die 1 "module load $*: failed. Versions come and go with the system's upgrades; see
    'module avail', then change them in jobscripts/$hpcllm_machine/env.sh"
}

hpcllm_usage() { # VERB
    case $1 in
        train) echo "RUN.toml [--set key=value ...] [--restart]" ;;
        perf) echo "[ARGUMENTS of python -m hpcllm.perf; none: tune --output tuning.toml]" ;;
        preflight) echo "[RUN.toml] [--set key=value ...] [--quick] [--json]" ;;
        run) echo "COMMAND [ARGUMENTS], as in: python -m hpcllm COMMAND [ARGUMENTS]" ;;
    esac
}

hpcllm_asked() { # VERB ARGUMENTS...: says no before anything is loaded
    local script=jobscripts/$hpcllm_machine/$1.$hpcllm_suffix usage
    usage=$(hpcllm_submit "$script" "$(hpcllm_usage "$1")")
    case ${2:-} in -h | --help) echo "usage: $usage" && exit ;; esac
    case $1:${2:-} in
        train:) hpcllm_die 2 "the run file is missing: $usage" ;;
        run:) hpcllm_die 2 "the command is missing: $usage" ;;
        train:* | preflight:[!-]*) [ -f "$2" ] || hpcllm_die 2 "no run file '$2' in $PWD: $usage" ;;
    esac
    if [ -z "$(hpcllm_job_id)" ] && [ -z "${DRY_RUN:-}" ]; then
        hpcllm_die 2 "this is no job, so there are no nodes; submit it: $usage
    to see what it would do: DRY_RUN=1 bash $script $(hpcllm_usage "$1")"
    fi
}

hpcllm_command() { # VERB ARGUMENTS...: sets `command`, what all ranks run
    local verb=$1 python=$HPCLLM_VENV/bin/python settings word
    shift
    case $verb in
        train)
            hpcllm_settings
            command=("$python" -m hpcllm train "$1" ${settings[@]+"${settings[@]}"}) # before the caller's, which win
            shift
            for word in "$@"; do # a job that comes again goes on, even if it was told to begin anew
                [ "$word" = --restart ] && [ "${SLURM_RESTART_COUNT:-0}" != 0 ] || command+=("$word")
            done
            ;;
        preflight) command=("$python" -m hpcllm preflight "$@") ;;
        run) command=("$python" -m hpcllm "$@") ;;
        perf)
            if [ $# = 0 ]; then set -- tune --output tuning.toml; fi
            command=("$python" -m hpcllm.perf "$@")
            ;;
    esac
}

hpcllm_run_file() { # RUN.toml ARGUMENTS of train: sets `run_file`, it and its --set, without what only train takes
    run_file=("$1")
    shift
    while [ $# -gt 0 ]; do
        case $1 in
            --set=*) run_file+=("$1") ;;
            --set) if [ $# -gt 1 ]; then run_file+=(--set "$2") && shift; fi ;;
        esac
        shift
    done
}

hpcllm_is_finished() { # RUN.toml ARGUMENTS of train: 0: the run's own record says so; 1: it does not; else nobody can tell
    local run_file
    hpcllm_run_file "$@"
    hpcllm_here "$HPCLLM_VENV/bin/python" -m hpcllm train "${run_file[@]}" --is-finished >&2
}

hpcllm_here() { "$@"; } # COMMAND...: on the node of this script; env.sh may say otherwise, as where Python is in an image

hpcllm_end_of_training() { # CODE RUN.toml ARGUMENTS of train: the exit code to end with
    local code=$1 answer=0
    shift
    case " $* " in *" --dry-run "* | *" --is-finished "*) return "$code" ;; esac
    case $code in
        0 | 1 | 2 | 75) ;;
        *) hpcllm_say "exit code $code is none of hpcllm's (0, 1, 2, 75): the launcher lost a rank or a node, or a signal ended it.
    The same job goes on from the newest checkpoint" ;;
    esac
    if [ "$code" = 0 ] && [ -z "${DRY_RUN:-}" ]; then
        hpcllm_is_finished "$@" || answer=$?
        case $answer in
            0) ;;
            1)
                hpcllm_say "exit code 0, but the run has not recorded its end: the launcher has lost ranks without a word.
    The same job goes on from the newest checkpoint"
                return 1
                ;;
            *) hpcllm_say "could not ask whether the run is finished (exit code $answer); the launcher's exit code counts" ;;
        esac
    fi
    return "$code"
}

hpcllm_preflight() { # RUN.toml ARGUMENTS of train: a bad allocation is told in the first minute
    local run_file command code=0
    hpcllm_run_file "$@"
    command=("$HPCLLM_VENV/bin/python" -m hpcllm preflight "${run_file[@]}")
    if [ "${PREFLIGHT:-}" = quick ]; then command+=(--quick); fi
    hpcllm_on_ranks "${command[@]}" || code=$?
    if [ "$code" = 0 ] || [ -n "${DRY_RUN:-}" ]; then return; fi
    if [ "${PREFLIGHT:-}" = warn ]; then
        hpcllm_say "preflight: exit code $code; PREFLIGHT=warn, so the run starts all the same"
        return
    fi
    hpcllm_die "$code" "preflight: exit code $code, so nothing is trained on these nodes. How to fix it stands above;
    PREFLIGHT=warn starts the run whatever is found, PREFLIGHT=0 does not look"
}

hpcllm_on_ranks() { # COMMAND...: its exit code
    local launcher
    hpcllm_launcher
    set -- "${launcher[@]}" ${hpcllm_start[@]+"${hpcllm_start[@]}"} ${hpcllm_each[@]+"${hpcllm_each[@]}"} "$@"
    if [ -n "${DRY_RUN:-}" ]; then hpcllm_print "$@" && return; fi
    hpcllm_say "$(hpcllm_print "$@")"
    "$@"
}

hpcllm_print() { # WORD...: as one could type it
    local word line=""
    for word in "$@"; do
        case $word in *[!A-Za-z0-9_.,/:=+@%-]* | "") word="'${word//\'/\'\\\'\'}'" ;; esac
        line="$line $word"
    done
    echo "${line# }"
}

hpcllm_environment() { # python and hpcllm are found by what all ranks run
    if [ -z "${DRY_RUN:-}" ] && [ ! -e "$HPCLLM_VENV/bin" ]; then
        hpcllm_die 2 "no Python environment in $HPCLLM_VENV; make it first: bash jobscripts/$hpcllm_machine/install.sh"
    fi
    hpcllm_source=$HPCLLM_ROOT
    trap hpcllm_gather EXIT
    hpcllm_spread # to all nodes; may change both
    export PATH=$HPCLLM_VENV/bin:$PATH VIRTUAL_ENV=$HPCLLM_VENV
    # the code whose script was submitted, whatever is installed
    export PYTHONPATH=$hpcllm_source${PYTHONPATH:+:$PYTHONPATH}
    unset PYTHONHOME
}

hpcllm_show_variables() { # BEFORE: a dry run's: what is set now and was not
    comm -13 <(sort "$1") <(export -p | sort) | sed -nE 's/^declare -x ([A-Z_0-9]+=)/\1/p' |
        grep -vE '^(DRY_RUN|HPCLLM_MPI|PATH)=' || :
}

hpcllm_prepare() { # modules, variables, environment
    local before
    before=$(mktemp)
    export -p >"$before"
    set +u # what modules run was not written for it
    hpcllm_modules
    hpcllm_variables
    set -u
    if [ -n "${DRY_RUN:-}" ]; then hpcllm_show_variables "$before"; fi
    rm -f "$before"
    hpcllm_environment
}

hpcllm_job() { # MACHINE VERB [ARGUMENTS...]
    local verb=$2 command code=0
    hpcllm_machine=$1
    hpcllm_start=() hpcllm_each=() hpcllm_near="" hpcllm_handed=() hpcllm_inside=()
    # shellcheck source=../frontier/env.sh
    . "$HPCLLM_ROOT/jobscripts/$hpcllm_machine/env.sh"
    shift 2
    set -euo pipefail
    hpcllm_enter "$verb"
    if [ $# = 0 ]; then set -- ${hpcllm_handed[@]+"${hpcllm_handed[@]}"}; fi
    hpcllm_asked "$verb" "$@"
    case ${PREFLIGHT:-1} in
        0 | 1 | quick | warn) ;;
        *) hpcllm_die 2 "PREFLIGHT=$PREFLIGHT; valid: 0, quick, warn, or nothing for all of it" ;;
    esac
    case ${HPCLLM_PACKED:-} in
        0 | 1 | "") ;;
        *) hpcllm_die 2 "HPCLLM_PACKED=$HPCLLM_PACKED; valid: 0, 1, or nothing: on more than $hpcllm_many_nodes nodes" ;;
    esac
    hpcllm_prepare
    if [ "$verb" = train ] && [ "${SLURM_RESTART_COUNT:-0}" != 0 ] && [ -z "${DRY_RUN:-}" ] &&
        hpcllm_is_finished "$@"; then
        hpcllm_say "the job came again, but its run is finished; nothing is started"
        exit 0
    fi
    if [ "$verb" = train ] && [ "${PREFLIGHT:-1}" != 0 ]; then hpcllm_preflight "$@"; fi
    hpcllm_command "$verb" "$@"
    hpcllm_on_ranks "${command[@]}" || code=$?
    if [ "$verb" = train ]; then hpcllm_end_of_training "$code" "$@" && code=0 || code=$?; fi
    if [ "$code" = 75 ]; then hpcllm_say "exit code 75: stopped with a checkpoint; the same job goes on from there"; fi
    exit "$code"
}
