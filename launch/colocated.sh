#!/bin/bash
# Rollout and training on the same GPUs, by turns: all workers roll out what the next version needs, then all ranks train.
source "$ROOT/launch/common.sh"
begin
own_run
programs
create_run
rendezvous
while ((DRY_RUN || $(version) < STEPS_OF_RUN)); do
    step rollout "$NODES" "$WORKERS_PER_NODE" "${WORKER[@]}" --rollout-until-idle
    finish "${STEP:-}" || ((STOPPING)) || over 1
    ((STOPPING)) && over 0
    step trainer "$NODES" "$GPUS_PER_NODE" "${TRAINER[@]}" --exit-interval="$PUBLISH_EVERY"
    finish "${STEP:-}" || ((STOPPING)) || over 1
    ((STOPPING || DRY_RUN)) && over 0
done
over 0
