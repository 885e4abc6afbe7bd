#!/bin/bash
# Answers held-out prompts from a checkpoint (EVALUATE, or the run's latest), with the run's quantiser settings.
source "$ROOT/launch/common.sh"
begin
: "${EVALUATE_TASKS:?is the file of held-out prompts}"
export RUN
output=$RUN/evaluations/version-$(version)
step evaluate "$TRAIN_NODES" "${WORKERS_PER_NODE:-$GPUS_PER_NODE}" launch/worker.sh --evaluate-share "$PYTHON" examples/evaluate.py \
    "${MODEL_FLAGS[@]}" "${ROLLOUT_FLAGS[@]}" --load="${EVALUATE:-$RUN/checkpoints}" \
    --rollout-tasks="$EVALUATE_TASKS" --evaluate-output="$output" --evaluate-settings="${EVALUATE_SETTINGS:-$RUN}" \
    --evaluate-num-shares=$((TRAIN_NODES * ${WORKERS_PER_NODE:-$GPUS_PER_NODE}))
finish "${STEP:-}" || over 1
((DRY_RUN)) || [[ -f $output/evaluation.json ]] || over 1 # Workers of a paused run end without an error.
over 0
