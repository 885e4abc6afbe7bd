#!/bin/bash
# Writes the run's latest checkpoint (or EXPORT) in Hugging Face's format: in BF16, and as the engine serves it (NVFP4 experts,
# the run's static scales, ModelOpt's layout).
source "$ROOT/launch/common.sh"
begin
: "${PUBLISHED:?is the folder of the Hugging Face checkpoint that START was converted from}"
output=$RUN/exports/version-$(version)
((DRY_RUN)) || mkdir -p "$RUN/exports" "$output"
step convert 1 1 "$PYTHON" tools/convert_checkpoint.py megatron-to-hf "${EXPORT:-$RUN/checkpoints}" "$output/bf16" --like "$PUBLISHED"
finish "${STEP:-}" || over 1
step export 1 1 "$PYTHON" tools/export_rollout_weights.py --published "$output/bf16" --settings "${EXPORT_SETTINGS:-$RUN}" --output "$output/nvfp4"
finish "${STEP:-}" || over 1
over 0
