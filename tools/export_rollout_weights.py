"""Writes what a rollout engine serves as a checkpoint in ModelOpt's layout (NVFP4 experts).

    python tools/export_rollout_weights.py --published HF_FOLDER --settings ROLLOUTS --output FOLDER
    python tools/export_rollout_weights.py --published HF_FOLDER --calibration ROLLOUTS \\
        --recipe h_scale --output FOLDER

HF_FOLDER holds the trained weights in BF16, as published; from Megatron's own checkpoint
`tools/convert_checkpoint.py megatron-to-hf` makes it. The engine is built, takes the weights as in
a push and quantises them; what is written is read again and compared bit by bit.

The checkpoint's input scales are those of `--settings`, a folder of rollouts or a checkpoint with a
`settings.json`; or, after training in BF16, what the samples of the folder `--calibration` give:
of rollouts, or of a run (`rl.exchange`), whose newest batches are taken.
`--recipe` chooses how the experts' scales are found (`ptq`); h_scale reads those samples too.
"""

# ruff: noqa: E402  The stand-in for the CUDA runtime must be installed before Megatron is imported.
from __future__ import annotations

from megatron_trace.testing import cpu_runtime

cpu_runtime.install()

import argparse
import itertools
import logging
from collections.abc import Iterator
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
from megatron_trace.hints.files import HintFiles
from megatron_trace.hints.settings_file import load_settings
from megatron_trace.hints.types import QuantizerSettings, RolloutSample
from megatron_trace.hints.weight_digest import combine_digests, matrix_digest
from megatron_trace.models.local_config import architecture_config
from megatron_trace.ptq.hessian import calibrate_with_hessians
from megatron_trace.ptq.recipes import RECIPES, Recipe
from megatron_trace.rl.exchange import RUN_FILE, Exchange
from megatron_trace.rollout import RolloutEngine
from megatron_trace.testing.single_process import single_process


def main() -> None:
    """Exports as the flags say."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--published", type=Path, required=True, metavar="HF_FOLDER")
    scales = parser.add_mutually_exclusive_group(required=True)
    scales.add_argument("--settings", type=Path, metavar="ROLLOUTS")
    scales.add_argument("--calibration", type=Path, metavar="ROLLOUTS")
    parser.add_argument(
        "--calibration-samples", type=int, default=256, help="most samples of it (default 256)"
    )
    parser.add_argument("--recipe", choices=RECIPES, default="vanilla", help="default vanilla")
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--shard-gb", type=float, default=5.0, help="size of the largest file")
    args = parser.parse_args()
    if args.settings and RECIPES[args.recipe].needs_hessians:
        parser.error(f"--recipe {args.recipe} needs --calibration, not --settings")
    logging.getLogger("megatron").setLevel(logging.ERROR)
    try:
        with single_process(seed=0):
            given = (
                load_settings(args.settings)
                if args.settings
                else sample_tokens(args.calibration, args.calibration_samples)
            )
            engine, digest = serving_engine(args.published, given, RECIPES[args.recipe])
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
    print(f"recipe {args.recipe}: {RECIPES[args.recipe].note}")
    print(f"{len(model.parameters)} parameters as they are, {len(copied)} tensors copied")


def sample_tokens(folder: Path, num_samples: int) -> list[torch.Tensor]:
    """Gives prompt and response of samples of a folder, int64 [1, S] each.

    Args:
        folder: Folder of rollouts, of which the first ones are taken; or of a run, of which those
            of the newest batches are.
        num_samples: Most of them.

    Raises:
        ValueError: There is none.
    """
    if (folder / RUN_FILE).is_file():
        samples = list(itertools.islice(_newest_samples(Exchange(folder)), num_samples))
    else:
        files = HintFiles(folder)
        samples = [files.sample(name) for name in files.sample_ids()[:num_samples]]
    if not samples:
        raise ValueError(f"{folder} has no sample to calibrate with")
    return [torch.tensor([[*one.prompt_tokens, *one.response_tokens]]) for one in samples]


def _newest_samples(run: Exchange) -> Iterator[RolloutSample]:
    """Yields the samples of a run that its workers have not removed yet, newest batch first."""
    for number in reversed(range(run.settings.num_batches)):
        if not run.is_complete(number):
            continue
        batch = run.batch(number)
        files = HintFiles(run.folder / batch.folder)
        there = set(files.sample_ids())
        for reward in batch.rewards:
            if reward.sample_id in there:
                yield files.sample(reward.sample_id)


def serving_engine(
    published: Path, given: QuantizerSettings | list[torch.Tensor], recipe: Recipe
) -> tuple[RolloutEngine, str]:
    """Gives an engine that serves the weights of a folder, and the digest of its experts.

    Args:
        published: The folder.
        given: Settings that the engine takes, or tokens that calibrate it in NVFP4.
        recipe: How the experts' scales are found.
    """
    folder, architecture = PublishedFolder(published), published_architecture(published)
    rows = weight_rows(architecture, PublishedNames.of(folder.names), mtp=False)
    settings = given if isinstance(given, QuantizerSettings) else QuantizerSettings({})
    engine = RolloutEngine(
        architecture_config(architecture),
        pattern=architecture.pattern(),
        vocab_size=architecture.vocab_size,
        # It serves nothing; one page is the least that Megatron's engine has.
        max_sequence_length=32,
        max_requests=1,
        trace=TraceConfig(
            # Any string for the type checker; the settings have checked it.
            number_format=settings.number_format,  # pyright: ignore[reportArgumentType]
            quantised_parts=settings.quantised_parts,
            power_of_two_scales=settings.power_of_two_scales,
        ),
        eod_token=0,
        model_id=settings.model_id,
        rotary_percent=architecture.rope_share,
        rotary_base=architecture.rope_base,
        keep_packed_weights=True,
    )
    named = {name: folder.read(parts) for name, parts in rows.items()}
    hessians = None
    if isinstance(given, QuantizerSettings):
        engine.use_settings(given)
    else:
        engine.load_weights(named)
        hessians = calibrate_with_hessians(engine, given)
    # What a push does by itself, in the settings' own number format.
    rule = None if recipe.name == "vanilla" else recipe.rule(hessians)
    return engine, engine.push_weights(named, policy_version=0, rule=rule)


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
