#!/bin/bash
# Writes the run's latest checkpoint (or EXPORT) in Hugging Face's format, in BF16 and with FP4 experts.
source "$ROOT/launch/common.sh"
begin
: "${PUBLISHED:?is the folder of the Hugging Face checkpoint that START was converted from}"
output=$RUN/exports/version-$(version)
mkdir -p "$output"
checkpoint=${EXPORT:-$RUN/checkpoints}
step convert 1 1 "$PYTHON" tools/convert_checkpoint.py megatron-to-hf "$checkpoint" "$output/bf16" --like "$PUBLISHED"
finish "${STEP:-}" || over 1
step quantise 1 1 "$PYTHON" tools/export_fp4.py "$output/bf16" "$output/nvfp4"
finish "${STEP:-}" || over 1
over 0
