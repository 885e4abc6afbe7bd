#!/bin/bash
# Answers held-out prompts from a checkpoint (EVALUATE, or the run's latest), with the run's quantiser settings.
source "$ROOT/launch/common.sh"
begin
checkpoint "${EVALUATE:-$RUN/checkpoints}"
evaluate evaluate "$RUN/evaluations/version-$VERSION" --evaluate-settings="${EVALUATE_SETTINGS:-$RUN}"
over 0
