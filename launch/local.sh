#!/bin/bash
# Runs a job on this machine, without Slurm: its scripts as they are, with srun, scontrol and squeue from here.
#   launch/local.sh colocated|evaluate|export|ptq CLUSTER.env RUN.env
# USR1, TERM or Ctrl-C ends it in order; the same command goes on where it ended.
set -euo pipefail
usage() { sed -n '2,4s/^# *//p' "$0" >&2; exit 2; }
(($# == 3)) || usage
export ROOT KIND=$1 CLUSTER RUN_FILE DRY_RUN=0
case $KIND in
    colocated | evaluate | export | ptq) ;;
    disaggregated) echo "a disaggregated run is two components of a Slurm job: on one machine, take colocated" >&2 && exit 2 ;;
    *) usage ;;
esac
ROOT=$(cd "$(dirname "$0")/.." && pwd)
CLUSTER=$(realpath -e "$2") RUN_FILE=$(realpath -e "$3")

srun() { # Starts the tasks of one node, each with its number, and waits for all; one that fails ends the others.
    local tasks=1 per_node=1 output=/dev/stdout kill_on_bad_exit=1 task pid status worst=0
    local -A left=()
    trap 'kill -USR1 "${left[@]}" 2>/dev/null || true' USR1
    trap 'kill -TERM "${left[@]}" 2>/dev/null || true' TERM
    while [[ ${1:-} == --* ]]; do
        case $1 in
            --ntasks=*) tasks=${1#*=} ;;
            --ntasks-per-node=*) per_node=${1#*=} ;;
            --output=*) output=${1#*=} ;;
            --kill-on-bad-exit=*) kill_on_bad_exit=${1#*=} ;;
            --nodes=1 | --open-mode=append | --cpus-per-task=*) ;;
            --version) echo "no Slurm, but launch/local.sh" && return ;;
            *) echo "launch/local.sh runs on one node, without containers or options of srun: it cannot take $1" >&2 && return 1 ;;
        esac
        shift
    done
    for ((task = 0; task < tasks; task++)); do
        SLURM_PROCID=$task SLURM_LOCALID=$task SLURM_NTASKS=$tasks SLURM_NTASKS_PER_NODE=$per_node \
            "$@" >>"${output//%t/$task}" 2>&1 &
        left[$!]=$!
    done
    while ((${#left[@]})); do
        status=0 pid=
        wait -n -p pid "${left[@]}" || status=$?
        [[ -n ${pid:-} ]] || continue # A signal ended `wait`, not a task.
        unset "left[$pid]"
        if ((status)); then
            ((worst)) || worst=$status
            if ((kill_on_bad_exit && ${#left[@]})); then kill -TERM "${left[@]}" 2>/dev/null || true; fi
        fi
    done
    return "$worst"
}
scontrol() {
    case "$1 ${2:-}" in
        "show hostnames") hostname ;;
        "show node") echo "   NodeAddr=127.0.0.1" ;;
        *) echo "the same command goes on" && return 1 ;; # requeue: there is no queue.
    esac
}
squeue() { # Jobs are processes of this machine.
    local job=${*##*--jobs=}
    if kill -0 "$job" 2>/dev/null; then echo RUNNING; fi
}
export -f srun scontrol squeue
export SLURM_JOB_ID=$$ SLURM_JOB_NODELIST=localhost SLURM_RESTART_COUNT=0
exec bash "$ROOT/launch/$KIND.sh"
