#!/bin/bash
# Checks a job and submits it.
#   launch/submit.sh [--dry-run] colocated|disaggregated|evaluate|export CLUSTER.env RUN.env [SBATCH OPTIONS]
# --dry-run prints the sbatch line and the srun lines of the job, after the checks, and submits nothing.
set -euo pipefail
usage() { sed -n '2,4s/^# *//p' "$0" >&2; exit 2; }

export ROOT CLUSTER RUN_FILE DRY_RUN
DRY_RUN=0
[[ ${1:-} == --dry-run ]] && DRY_RUN=1 && shift
(($# >= 3)) || usage
kind=$1
ROOT=$(cd "$(dirname "$0")/.." && pwd)
CLUSTER=$(realpath -e "$2") RUN_FILE=$(realpath -e "$3")
shift 3
case $kind in colocated | disaggregated | evaluate | export) ;; *) usage ;; esac
source "$ROOT/launch/common.sh"

if [[ $kind == disaggregated ]]; then
    ((ROLLOUT_NODES > 0)) || { echo "a disaggregated run needs ROLLOUT_NODES in $RUN_FILE" >&2; exit 1; }
else
    ROLLOUT_NODES=0
fi
[[ $kind == export ]] || preflight

component() { # component NODES TASKS_PER_NODE: options of one component.
    OPTIONS=(--nodes="$1" --ntasks-per-node="$2" --time="$TIME_LIMIT_MIN" ${PARTITION:+--partition="$PARTITION"}
        ${ACCOUNT:+--account="$ACCOUNT"} ${QOS:+--qos="$QOS"} ${CPUS_PER_TASK:+--cpus-per-task="$CPUS_PER_TASK"}
        ${GPUS_OPTION:+"$GPUS_OPTION"})
    # shellcheck disable=SC2206
    OPTIONS+=(${SBATCH_OPTIONS:-})
}

sbatch=(sbatch --parsable --job-name="trace-$kind" --output="$RUN/logs/job-%j.txt" --open-mode=append
    --requeue --signal="B:USR1@$SIGNAL_S" --export=ALL)
# Rollouts by turns may have more tasks than training.
tasks=$GPUS_PER_NODE
if [[ $kind != disaggregated && ${WORKERS_PER_NODE:-0} -gt $tasks ]]; then tasks=$WORKERS_PER_NODE; fi
component "$TRAIN_NODES" "$tasks"
sbatch+=("${OPTIONS[@]}" "$@")
if [[ $kind == disaggregated ]]; then
    component "$ROLLOUT_NODES" "${WORKERS_PER_NODE:-$GPUS_PER_NODE}"
    sbatch+=(: "${OPTIONS[@]}" "$@")
fi
sbatch+=("$ROOT/launch/$kind.sh")
printf '%q ' "${sbatch[@]}" && echo
if ((DRY_RUN)); then
    exec bash "$ROOT/launch/$kind.sh"
fi
mkdir -p "$RUN/logs"
"${sbatch[@]}"
