#!/bin/bash
# Quantises the run's latest checkpoint (or EXPORT) after its training, under each of PTQ_RECIPES: a folder in ModelOpt's layout, and
# what the engine answers that serves that folder (W4A4 experts, KV4 cache), against the same policy in BF16.
source "$ROOT/launch/common.sh"
begin
checkpoint "${EXPORT:-$RUN/checkpoints}"
output=$RUN/ptq/version-$VERSION
# What a run of FP4 says of its own method does not hold here.
plain=(--trace-number-format=nvfp4 --trace-quantised-parts=experts_and_kv --trace-diagnostic-share=0)
make_folder convert "$output/bf16" "$PYTHON" tools/convert_checkpoint.py megatron-to-hf "$CHECKPOINT" "$output/bf16" --like "$PUBLISHED"
evaluate evaluate-bf16 "$output/evaluations/bf16" "${plain[@]}" --trace-method=bf16
for recipe in $PTQ_RECIPES; do
    make_folder "export-$recipe" "$output/$recipe" "$PYTHON" tools/export_rollout_weights.py \
        --published "$output/bf16" --calibration "${CALIBRATION:-$RUN}" --recipe "$recipe" --output "$output/$recipe"
    evaluate "evaluate-$recipe" "$output/evaluations/$recipe" "${plain[@]}" --trace-method=qat \
        --evaluate-export="$output/$recipe" --evaluate-published="$output/bf16"
done
for recipe in $PTQ_RECIPES; do evaluations+=("$output/evaluations/$recipe"); done
step compare 1 1 "$PYTHON" tools/compare_evaluations.py "$output/evaluations/bf16" "${evaluations[@]}" --output "$output/ptq.json"
finish "${STEP:-}" || over 1
((DRY_RUN)) || cat "$LOGS"/compare.*.log
over 0
