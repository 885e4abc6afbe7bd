#!/bin/bash
# Checks a job and submits it.
#   launch/submit.sh [--dry-run] colocated|disaggregated|evaluate|export|ptq CLUSTER.env RUN.env [SBATCH OPTIONS]
# --dry-run prints the sbatch line and the srun lines of the job, after the checks, and submits nothing.
set -euo pipefail
usage() { sed -n '2,4s/^# *//p' "$0" >&2; exit 2; }

export ROOT KIND CLUSTER RUN_FILE DRY_RUN=0
[[ ${1:-} == --dry-run ]] && DRY_RUN=1 && shift
(($# >= 3)) || usage
KIND=$1
case $KIND in colocated | disaggregated | evaluate | export | ptq) ;; *) usage ;; esac
ROOT=$(cd "$(dirname "$0")/.." && pwd)
CLUSTER=$(realpath -e "$2") RUN_FILE=$(realpath -e "$3")
shift 3
# shellcheck source=launch/common.sh
source "$ROOT/launch/common.sh"
preflight

component() { # component NODES TASKS_PER_NODE: options of one component.
    OPTIONS=(--nodes="$1" --ntasks-per-node="$2" --time="$TIME_LIMIT_MIN" ${PARTITION:+--partition="$PARTITION"}
        ${ACCOUNT:+--account="$ACCOUNT"} ${QOS:+--qos="$QOS"} ${CPUS_PER_TASK:+--cpus-per-task="$CPUS_PER_TASK"}
        ${GPUS_OPTION:+"$GPUS_OPTION"})
    # shellcheck disable=SC2206
    OPTIONS+=(${SBATCH_OPTIONS:-})
}

sbatch=(sbatch --parsable --job-name="trace-$KIND" --output="$RUN/logs/job-%j.txt" --open-mode=append
    --requeue --signal="B:USR1@$SIGNAL_S" --export=ALL)
# By turns, workers may be more than ranks.
tasks=$GPUS_PER_NODE
if [[ $KIND == export ]]; then tasks=1; elif ((!ROLLOUT_NODES && WORKERS_PER_NODE > tasks)); then tasks=$WORKERS_PER_NODE; fi
component "$NODES" "$tasks"
sbatch+=("${OPTIONS[@]}" "$@")
if ((ROLLOUT_NODES)); then
    component "$ROLLOUT_NODES" "$WORKERS_PER_NODE"
    sbatch+=(: "${OPTIONS[@]}" "$@")
fi
sbatch+=("$ROOT/launch/$KIND.sh")
printf '%q ' "${sbatch[@]}" && echo
if ((DRY_RUN)); then
    exec bash "$ROOT/launch/$KIND.sh"
fi
mkdir -p "$RUN/logs"
"${sbatch[@]}"
