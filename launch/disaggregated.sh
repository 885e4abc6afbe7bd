#!/bin/bash
# Training on component 0, rollout on component 1 of a heterogeneous job, at once; samples lag by MAX_LAG steps at most.
source "$ROOT/launch/common.sh"
begin
own_run
programs
create_run
rendezvous
((DRY_RUN || $(version) < STEPS_OF_RUN)) || over 0
HET_GROUP=0 step trainer "$NODES" "$GPUS_PER_NODE" "${TRAINER[@]}"
trainer=${STEP:-}
# One worker that is lost for good must not end the others.
HET_GROUP=1 KILL_ON_BAD_EXIT=0 step rollout "$ROLLOUT_NODES" "$WORKERS_PER_NODE" "${WORKER[@]}"
rollout=${STEP:-}
((DRY_RUN)) && over 0
(
    # Without workers the trainer would wait for ever.
    while kill -0 "$rollout" 2>/dev/null; do sleep 2; done
    complete=$(find "$RUN/batches" -name 'b*.json' | wc -l)
    ((complete >= STEPS_OF_RUN * BATCHES_PER_STEP)) || touch "$PAUSED"
) &
status=0
finish "$trainer" || status=$?
# The trainer failed, or was told to save: workers end too.
if (($(version) < STEPS_OF_RUN)); then touch "$PAUSED"; fi
finish "$rollout" || true
if ((!STOPPING && !status && $(version) < STEPS_OF_RUN)); then status=1; fi
over "$status"
