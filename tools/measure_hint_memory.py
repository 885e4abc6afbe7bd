"""Measures the host memory of hints in files, read as training reads them.

    python tools/measure_hint_memory.py --samples 64 --tokens 4096 --layers 20 --bound-mb 256

Writes a folder of samples with random hints (fc1, k, v of every layer, 1 bit), and reads it once in
micro-batches of a trainer model of these sizes, on a CPU, each way in a process of its own: all
micro-batches in memory, one by one, and ahead within the bound. The step that would train on a
micro-batch is a sleep of `--work-s` seconds. Prints, beside the bytes and seconds, how far the
resident memory grew at most: all of it, with mapped pages of the files, and anonymous memory only.
"""

# ruff: noqa: E402  The stand-in for the CUDA runtime must be installed before Megatron is imported.
from __future__ import annotations

from megatron_trace.testing import cpu_runtime

cpu_runtime.install()

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megatron_trace.hints import HintFiles, HintFilesWriter, HintKey, QuantizerSettings, SiteHint
from megatron_trace.hints.types import RolloutSample, Site
from megatron_trace.testing.recorded_samples import random_samples
from megatron_trace.testing.single_process import single_process
from megatron_trace.testing.tiny_trainer import VOCAB_SIZE, tiny_trainer
from megatron_trace.training.micro_batch import MicroBatch, make_micro_batch
from megatron_trace.training.prefetch import MicroBatchPrefetcher, read_micro_batch
from megatron_trace.training.sites import TraceSites

WAYS = ("at once", "one by one", "ahead")
KV_CHANNELS, SCALE, MIB = 128, 2.0**-9, 2**20


def main() -> None:
    """Measures as the options say."""
    options = _options()
    if options.way:
        with single_process(seed=0):
            print(json.dumps(measured(options)))
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        with single_process(seed=0):
            num_bytes = write(options, Path(folder))
        print(f"{options.samples} samples x {options.tokens} tokens: {num_bytes / MIB:.0f} MiB")
        for way in WAYS:
            # Memory that one way freed would be used again unnoticed by the next.
            command = [sys.executable, *sys.argv, "--way", way, "--folder", folder]
            output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            found = json.loads(output.splitlines()[-1])
            print(f"{way:>10}: " + ", ".join(f"{name} {value}" for name, value in found.items()))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=1024, help="of each sample")
    parser.add_argument("--layers", type=int, default=4, help="MoE layers, all recorded")
    parser.add_argument("--hidden", type=int, default=2048, help="values of an fc1 row")
    parser.add_argument("--kv", type=int, default=512, help="values of a k or v row")
    parser.add_argument("--micro-batch-samples", type=int, default=2)
    parser.add_argument("--bound-mb", type=int, default=256)
    parser.add_argument("--work-s", type=float, default=0.3, help="a step on a micro-batch")
    parser.add_argument("--folder", help="where to write; a temporary folder by default")
    parser.add_argument("--way", choices=WAYS, help="(used by the tool itself)")
    return parser.parse_args()


def trainer(options: argparse.Namespace) -> TraceSites:
    """Gives the sites of a trainer model with rows of the sizes asked for."""
    config = {
        "hidden_size": options.hidden,
        "num_attention_heads": options.kv // KV_CHANNELS,
        "num_query_groups": options.kv // KV_CHANNELS,
        "kv_channels": KV_CHANNELS,
        "num_moe_experts": 2,
        "moe_router_topk": 2,
    }
    _, sites = tiny_trainer(
        pattern="*E" * options.layers,
        dtype=torch.bfloat16,
        max_sequence_length=options.tokens,
        config=config,
    )
    sites.settings = QuantizerSettings(dict.fromkeys(sites.shape.places, SCALE))
    return sites


def write(options: argparse.Namespace, folder: Path) -> int:
    """Writes the samples and gives the bytes of their hints; all have the same random ones."""
    sites = trainer(options)
    samples = random_samples(
        [(options.tokens // 4, options.tokens - options.tokens // 4)] * options.samples,
        sites.shape,
        vocab_size=VOCAB_SIZE,
        settings_digest=sites.settings.digest(),
    )
    records = [_record(sites, samples[0], place) for place in sites.recorded_places]
    with HintFilesWriter(folder) as files:
        for sample in samples:
            for record in records:
                files.put(replace(record, key=replace(record.key, sample_id=sample.sample_id)))
            files.commit([sample])
        return files.num_bytes


def _record(sites: TraceSites, sample: RolloutSample, place: tuple[int, Site]) -> SiteHint:
    rows, width = sample.num_rows, sites.shape.row_width(place[1])
    payload, scale_bytes = (
        torch.randint(96, (rows, width // values), dtype=torch.uint8) for values in (8, 16)
    )
    key = HintKey(sample.sample_id, *place, sample.policy_version, sample.settings_digest)
    return SiteHint(
        key=key,
        num_bits=1,
        payload=payload,
        scale_bytes=scale_bytes,
        global_scale=SCALE,
    )


def measured(options: argparse.Namespace) -> dict[str, Any]:
    """Reads the folder one way and gives the numbers."""
    sites, files = trainer(options), HintFiles(options.folder)
    names, size = files.sample_ids(), options.micro_batch_samples
    batches = [names[first : first + size] for first in range(0, len(names), size)]
    numbers: dict[str, Any] = {}
    with PeakMemory() as memory:
        started, checksum = time.perf_counter(), 0
        for micro_batch in _micro_batches(options, batches, files, sites, numbers):
            checksum += sum(int(rows.payload[::64].sum()) for rows in micro_batch.hints.values())
            numbers["hints of a micro-batch, MiB"] = round(micro_batch.hint_bytes / MIB)
            time.sleep(options.work_s)
        seconds = time.perf_counter() - started
    return {
        "peak growth, MiB": round(memory.resident / MIB),
        "of it anonymous": round(memory.anonymous / MIB),
        "bytes read, MiB": round(files.bytes_read.tensor_bytes / MIB),
        "s": round(seconds, 1),
        "s of it steps": round(options.work_s * len(batches), 1),
        **numbers,
        "checksum": checksum,
    }


def _micro_batches(
    options: argparse.Namespace,
    batches: Sequence[Sequence[str]],
    files: HintFiles,
    sites: TraceSites,
    numbers: dict[str, Any],
) -> Iterator[MicroBatch]:
    bound = options.bound_mb * MIB
    samples = ([files.sample(name) for name in names] for names in batches)
    if options.way == "at once":
        yield from [make_micro_batch(of_batch, files, sites) for of_batch in samples]
    elif options.way == "one by one":
        for of_batch in samples:
            yield read_micro_batch(of_batch, files, sites, max_host_bytes=bound)
    else:
        with MicroBatchPrefetcher(samples, files, sites, max_host_bytes=bound) as prefetcher:
            yield from prefetcher
        numbers["most bytes held, MiB"] = round(prefetcher.peak_host_bytes / MIB)


class PeakMemory:
    """Watches how far this process's memory grows while the context lasts.

    Attributes:
        resident: Bytes by which the resident memory grew at most.
        anonymous: Bytes of it that are no pages of files.
    """

    def __init__(self) -> None:
        self.resident = self.anonymous = 0
        self._before = _memory()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> PeakMemory:
        """Begins."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Ends."""
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(0.01):
            resident, anonymous = (
                now - before for now, before in zip(_memory(), self._before, strict=True)
            )
            self.resident = max(self.resident, resident)
            self.anonymous = max(self.anonymous, anonymous)


def _memory() -> tuple[int, int]:
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    resident, anonymous = (int(lines[name].split()[0]) for name in ("VmRSS", "RssAnon"))
    return resident * 1024, anonymous * 1024


if __name__ == "__main__":
    main()
