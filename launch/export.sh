#!/bin/bash
# Writes the run's latest checkpoint (or EXPORT) in Hugging Face's format: in BF16, and as the engine serves it (NVFP4 experts,
# the run's static scales, ModelOpt's layout).
source "$ROOT/launch/common.sh"
begin
checkpoint "${EXPORT:-$RUN/checkpoints}"
output=$RUN/exports/version-$VERSION
make_folder convert "$output/bf16" "$PYTHON" tools/convert_checkpoint.py megatron-to-hf "$CHECKPOINT" "$output/bf16" --like "$PUBLISHED"
make_folder export "$output/nvfp4" "$PYTHON" tools/export_rollout_weights.py \
    --published "$output/bf16" --settings "${EXPORT_SETTINGS:-$RUN}" --output "$output/nvfp4"
over 0
