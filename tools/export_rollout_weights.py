"""Writes what a rollout engine serves as a checkpoint in ModelOpt's layout (NVFP4 experts).

    python tools/export_rollout_weights.py --published HF_FOLDER --settings ROLLOUTS --output FOLDER

HF_FOLDER holds the trained weights in BF16, as published; from Megatron's own checkpoint
`tools/convert_checkpoint.py megatron-to-hf` makes it. ROLLOUTS is a folder of rollouts or a
checkpoint with a `settings.json`, whose static scales become the checkpoint's input scales. The
engine is built, takes the weights as in a push and quantises them; what is written is read again
and compared bit by bit.
"""

# ruff: noqa: E402  The stand-in for the CUDA runtime must be installed before Megatron is imported.
from __future__ import annotations

from megatron_trace.testing import cpu_runtime

cpu_runtime.install()

import argparse
import logging
from pathlib import Path

import torch

from megatron_trace.config import TraceConfig
from megatron_trace.conversion.modelopt_folder import (
    QuantisedModel,
    read_modelopt_folder,
    write_modelopt_folder,
)
from megatron_trace.conversion.published_folder import PublishedFolder, published_architecture
from megatron_trace.conversion.weight_rows import PublishedNames, weight_rows
from megatron_trace.hints.settings_file import load_settings
from megatron_trace.hints.types import QuantizerSettings
from megatron_trace.hints.weight_digest import combine_digests, matrix_digest
from megatron_trace.models.local_config import architecture_config
from megatron_trace.rollout import RolloutEngine
from megatron_trace.testing.single_process import single_process


def main() -> None:
    """Exports as the flags say."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--published", type=Path, required=True, metavar="HF_FOLDER")
    parser.add_argument("--settings", type=Path, required=True, metavar="ROLLOUTS")
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--shard-gb", type=float, default=5.0, help="size of the largest file")
    args = parser.parse_args()
    logging.getLogger("megatron").setLevel(logging.ERROR)
    try:
        with single_process(seed=0):
            engine, digest = serving_engine(args.published, load_settings(args.settings))
            model = QuantisedModel(*engine.quantised_model())
            max_shard_bytes = int(args.shard_gb * 1e9)
            copied = write_modelopt_folder(
                model, args.published, args.output, max_shard_bytes=max_shard_bytes
            )
            read = digest_read_back(model, args.output, args.published)
    except (OSError, ValueError, LookupError) as error:
        raise SystemExit(str(error)) from None
    if read != digest:
        raise SystemExit(
            f"{args.output} has experts of digest {read}, but the engine's is {digest}"
        )
    print(f"{args.output}: {len(model.experts)} matrices in NVFP4, digest {digest}")
    print(f"{len(model.parameters)} parameters as they are, {len(copied)} tensors copied")


def serving_engine(published: Path, settings: QuantizerSettings) -> tuple[RolloutEngine, str]:
    """Gives an engine that serves the weights of a folder, and the digest of its experts."""
    folder, architecture = PublishedFolder(published), published_architecture(published)
    rows = weight_rows(architecture, PublishedNames.of(folder.names), mtp=False)
    engine = RolloutEngine(
        architecture_config(architecture),
        pattern=architecture.pattern(),
        vocab_size=architecture.vocab_size,
        # It serves nothing; one page is the least that Megatron's engine has.
        max_sequence_length=32,
        max_requests=1,
        trace=TraceConfig(
            number_format=settings.number_format,
            quantised_parts=settings.quantised_parts,
            power_of_two_scales=settings.power_of_two_scales,
        ),
        eod_token=0,
        model_id=settings.model_id,
        rotary_percent=architecture.rope_share,
        rotary_base=architecture.rope_base,
        keep_packed_weights=True,
    )
    engine.use_settings(settings)
    named = {name: folder.read(parts) for name, parts in rows.items()}
    return engine, engine.push_weights(named, policy_version=0)


def digest_read_back(model: QuantisedModel, output: Path, published: Path) -> str:
    """Gives the digest of the experts that were written.

    Raises:
        ValueError: Another parameter or scale is not the one that serves.
    """
    back = read_modelopt_folder(output, published)
    if back.input_scales != model.input_scales:
        raise ValueError(f"{output} has other input scales than the engine")
    for name, value in model.parameters.items():
        if not torch.equal(back.parameters[name].to(value), value):
            raise ValueError(f"{output} has another {name} than the engine")
    return combine_digests(
        matrix_digest(*place, matrix.packed_codes, matrix.scale_bytes, matrix.global_scale)
        for place, matrix in back.experts.items()
    )


if __name__ == "__main__":
    main()
