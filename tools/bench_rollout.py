"""Measures decoding of a published model with random weights: tokens a second, bytes, memory.

    python tools/bench_rollout.py --layers 4 --json bench_rollout.json        on one GPU, a slice
    python tools/bench_rollout.py --layers 4 --modes bf16 fp4_kv --batches equal
    python tools/bench_rollout.py --cpu --reduced --memory-gib 1 --prompt-tokens 128 \\
        --response-tokens 512 --steps 2                                       tries the tool itself

The project's own engine runs its own steps: scheduling, forward, recording, sampling, bookkeeping.
Nobody computes the context: keys, values and states are random numbers, requests are moved to a few
lengths between prompt and end (`--points`), a step is timed at each (median of `--steps`), and the
time of a response is the trapezoid over its positions. With `--layers`, the step's time in the
decoder's layers is scaled to all layers; embedding, output layer, sampling and bookkeeping count
once. What weights and cache of the layers that are left out would take is taken off the memory that
the process may use, so that what fits is what would fit. Beside each row stands what the bytes
alone would take at the bandwidth of a copy (`planning/decode_bytes.py`), as the engine reads its
experts, and if they were packed.

Modes: bf16; fp4 (routed experts in NVFP4); fp4_kv (and the KV cache); fp4_only and fp4_kv_only,
where the engine holds no experts in BF16 beside the packed ones (`keep_bf16_experts=False`). Packed
experts are random codes and are never quantised here; BF16 ones beside them only count as memory.
"""

# ruff: noqa: E402  The stand-in for the CUDA runtime must be installed before Megatron is imported.
from __future__ import annotations

from megatron_trace.testing import cpu_runtime

cpu_runtime.install()

import argparse
import dataclasses
import gc
import json
import math
import platform
import subprocess
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_trace import compat
from megatron_trace.config import TraceConfig
from megatron_trace.formats import FORMAT_SETS
from megatron_trace.models.architecture import Architecture
from megatron_trace.models.local_config import architecture_config
from megatron_trace.models.presets import PRESETS, preset
from megatron_trace.planning.decode_bytes import (
    DecodeBytes,
    decode_bytes,
    read_share_of_experts,
    sequence_bytes,
)
from megatron_trace.planning.hardware import GIB
from megatron_trace.planning.sizes import HintChoice, dense_bytes, expert_bytes, hint_bytes
from megatron_trace.rollout.decode_graphs import DecodeGraphs
from megatron_trace.rollout.packed_experts import implementation_of
from megatron_trace.rollout.places import make_recorder
from megatron_trace.rollout.policy import ServedPolicy
from megatron_trace.rollout.serving import EngineLimits, Server
from megatron_trace.rollout.weights import quantise_experts
from megatron_trace.testing.device_timing import copy_bandwidth
from megatron_trace.testing.long_decode import LongDecode, fill_experts, random_settings
from megatron_trace.testing.single_process import single_process
from megatron_trace.testing.step_profile import host_profile, profiled

FORMAT = "nvfp4"
MODES: dict[str, dict[str, Any]] = {
    "bf16": {"method": "bf16"},
    "fp4": {"quantised_parts": "experts"},
    "fp4_only": {"quantised_parts": "experts"},
    "fp4_kv": {"quantised_parts": "experts_and_kv"},
    "fp4_kv_only": {"quantised_parts": "experts_and_kv"},
}
RECORDINGS: dict[str, dict[str, Any]] = {
    "off": {},
    "latter_half": {"hint_layers": "latter_half"},
    "all": {"hint_layers": "all"},
    "full": {"hint_layers": "all", "diagnostic_share": 1.0},
}
# Of each logit: BF16 and FP32 of it, log-probabilities, and what drawing a token takes in FP64.
SAMPLING_BYTES = 32
# The runtime, libraries, activations, what fragmentation wastes; of it what is not torch's.
RESERVE_BYTES = 3 * GIB
RUNTIME_BYTES = GIB // 2
STEP_TOKENS = 8192
# Of a case, after which the next one is measured all the same; the program then ends with 1.
FAILURES = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError)


@dataclass(frozen=True)
class Case:
    """What is measured at once.

    Attributes:
        mode: Of `MODES`.
        recording: Of `RECORDINGS`.
        batch_name: `equal`, `largest`, or a number.
    """

    mode: str
    recording: str
    batch_name: str

    def __post_init__(self) -> None:
        """Raises ValueError on a mode or recording that there is not, or records in BF16."""
        if self.mode not in MODES or self.recording not in RECORDINGS:
            raise ValueError(
                f"a case is one of {', '.join(MODES)} and one of {', '.join(RECORDINGS)}; got "
                f"{self.mode}/{self.recording}"
            )
        if self.mode == "bf16" and self.recording != "off":
            raise ValueError("a BF16 engine quantises nothing, so there is nothing to record")

    def __str__(self) -> str:
        """As the command line names it."""
        return f"{self.mode}/{self.recording}/{self.batch_name}"

    @property
    def drops_bf16(self) -> bool:
        """Whether the engine holds no experts in BF16."""
        return self.mode.endswith("_only")

    @property
    def trace(self) -> dict[str, Any]:
        """Settings of TRACE that the engine is built with."""
        return MODES[self.mode] | RECORDINGS[self.recording]

    @property
    def kv_format(self) -> str | None:
        """Formats of the KV cache."""
        return FORMAT if self.mode.startswith("fp4_kv") else None

    @property
    def hints(self) -> HintChoice | None:
        """What is recorded beside the cache, which holds codes of keys and values anyway."""
        if self.recording == "off":
            return None
        layers = "latter_half" if self.recording == "latter_half" else "all"
        return HintChoice(("fc1",), layers, 4 if self.recording == "full" else 1)


class Bench:
    """Measures cases one after another on one device.

    Args:
        options: The command line.

    Attributes:
        whole: The model.
        slice: Its layers that are built.
        device_bytes: Memory that an engine may take.
        rows: What was measured.
        facts: Machine, versions, sizes.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.started = options, time.perf_counter()
        whole = preset(options.preset)
        if options.reduced:
            whole = dataclasses.replace(whole.reduced(), num_layers=2 * whole.attention_interval)
        self.whole = whole
        self.slice = dataclasses.replace(whole, num_layers=options.layers or whole.num_layers)
        if not self.slice.num_layers <= whole.num_layers:
            raise ValueError(f"--layers {options.layers}, but {whole.name} has {whole.num_layers}")
        free, total = torch.cuda.mem_get_info()
        asked = options.memory_gib
        self.device_bytes = int(asked * GIB) if asked else free
        self.sequence_tokens = options.prompt_tokens + options.response_tokens
        self.packed = implementation_of(
            architecture_config(whole),
            TraceConfig(packed_experts=options.packed_experts),
            torch.device("cpu" if options.cpu else "cuda"),
        )
        self.copy_tb_s = copy_bandwidth(1 << (20 if options.cpu else 31))
        self.rows: list[dict[str, Any]] = []
        self.facts = {
            "machine": torch.cuda.get_device_name(),
            "memory_GiB": total / GIB,
            "usable_GiB": self.device_bytes / GIB,
            "copy_TBps": self.copy_tb_s,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "commit": _commit(),
            "model": whole.name + (", reduced" if options.reduced else ""),
            "layers": whole.num_layers,
            "layers_measured": self.slice.num_layers,
            "prompt_tokens": options.prompt_tokens,
            "response_tokens": options.response_tokens,
            "check_finite": options.check_finite,
            "packed_experts": self.packed,
        }

    def run(self) -> None:
        """Measures all cases; one that fails is told and the next one goes on."""
        for cases in self._by_policy():
            self._limit(0)  # The limit of the last case was that of another model.
            policy = self.policy(is_quantised=cases[0].mode != "bf16")
            torch.cuda.synchronize()
            self.say("built")
            if self.options.push and policy.quantised:
                self.facts["push_s"] = self._push_s(policy)
                self.say(f"pushed in {self.facts['push_s']:.2f} s, of the layers that are built")
            for case in cases:
                try:
                    self.rows.append(self.measured(policy, case))
                    self.say(json.dumps(self.rows[-1]))
                except FAILURES as error:
                    self.rows.append(dataclasses.asdict(case) | {"error": str(error)[:200]})
                    traceback.print_exc()
                self.save()
                _collect()
            del policy
            _collect()

    def _by_policy(self) -> list[list[Case]]:
        """Gives the cases of BF16, and those of FP4, which share a model."""
        groups: list[list[Case]] = []
        for is_bf16 in (True, False):
            cases: dict[tuple[str, str, int], Case] = {}
            for case in asked_cases(self.options):
                if (case.mode == "bf16") == is_bf16:
                    cases.setdefault((case.mode, case.recording, self.batch(case)), case)
            groups.append(list(cases.values()))
        return [cases for cases in groups if cases]

    def policy(self, *, is_quantised: bool) -> ServedPolicy:
        """Builds a model with random weights; packed experts are made on the device as they are."""
        a = self.slice
        mode = "fp4_kv" if is_quantised else "bf16"
        is_packed = is_quantised and self.packed is not None
        policy = ServedPolicy(
            architecture_config(a, use_cpu_initialization=False),
            pattern=a.pattern(),
            vocab_size=a.vocab_size,
            max_sequence_length=self.sequence_tokens,
            trace=self._trace(Case(mode, "off", "")),
            keep_packed_weights=False,
            keep_bf16_experts=not is_packed,
            model_id=a.name,
            rotary_percent=a.rope_share,
            rotary_base=a.rope_base,
        )
        self.say("model")
        if policy.quantised:
            policy.use_settings(random_settings(policy))
        if is_packed:
            fill_experts(policy.layers)
        elif policy.quantised:
            quantise_experts(
                policy.layers,
                number_format=FORMAT_SETS[FORMAT].weights,
                power_of_two_scales=False,
                implementation="auto",
            )
        return policy

    def _push_s(self, policy: ServedPolicy) -> float:
        """Gives the seconds of a second push of weights that lie on the device in BF16."""
        device = torch.cuda.current_device()
        named = {
            name: torch.empty(weight.shape, dtype=weight.dtype, device=device).normal_(std=0.02)
            for name, weight in policy.model.named_parameters()
        }
        seconds, digests = [], []
        for version in range(2):
            torch.cuda.synchronize()
            started = time.perf_counter()
            digests.append(policy.push_weights(named, version))
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - started)
        if digests[0] != digests[1]:
            raise RuntimeError(f"equal weights, but other digests: {digests[0]}, {digests[1]}")
        return seconds[1]

    def _trace(self, case: Case) -> TraceConfig:
        trace = dict(case.trace)
        if case.mode != "bf16":
            trace["packed_experts"] = self.options.packed_experts
        return TraceConfig(**trace, check_finite=self.options.check_finite)

    def _serve_as(self, policy: ServedPolicy, case: Case) -> None:
        """Makes a model's next server that of a case: what is recorded, and what of the cache."""
        policy.sites.trace = self._trace(case)
        policy.sites.recorder = make_recorder(policy.layers, policy.trace)

    def measured(self, policy: ServedPolicy, case: Case) -> dict[str, Any]:
        """Gives the row of a case; if the largest batch does not fit, of one that does."""
        if case.drops_bf16 and not self.packed:
            raise ValueError("BF16 experts cannot be dropped where no packed ones compute")
        self._serve_as(policy, case)
        expected = self.batch(case)
        batch = expected
        while True:
            try:
                row = self._measured(policy, case, batch)
                return row | {"batch_by_accounting": expected}
            except torch.OutOfMemoryError:
                if case.batch_name != "largest" or batch == 1:
                    raise
                self.say(f"{case}: {batch} do not fit")
                batch = max(1, min(batch - 1, math.floor(batch * 0.97)))
            _collect()

    def _measured(self, policy: ServedPolicy, case: Case, batch: int) -> dict[str, Any]:
        torch.cuda.reset_peak_memory_stats()
        missing = self._missing_bytes(case, batch)
        self._limit(missing)
        self.say(f"{case}: batch {batch}")
        server, launched = self._server(policy, case, batch)
        points = self._points()
        keep = case.recording != "off"
        self.say("server")
        # The same keys, values and states, so that cases of one mode choose the same experts.
        torch.manual_seed(0)
        with LongDecode(server, batch, keep=keep).running() as decode:
            steps = {
                tokens: decode.times(tokens, warm_up=self.options.warm_up, steps=self.options.steps)
                for tokens in points
            }
            distinct = decode.distinct_experts()
            is_profiled = str(case) in self.options.profile
            kernels = self._profiled(decode) if is_profiled else {}
        peak = torch.cuda.max_memory_reserved() + missing
        del decode, server
        scale = self.whole.num_layers / self.slice.num_layers
        whole_ms = {
            tokens: step.step_ms
            + (scale - 1) * (step.step_ms if step.decoder_ms is None else step.decoder_ms)
            for tokens, step in steps.items()
        }
        mean_ms = _mean(whole_ms)
        quantised = None if case.mode == "bf16" else FORMAT
        floors = {
            "read": self._bytes(case, batch, points, quantised if self.packed else None),
            "packed": self._bytes(case, batch, points, quantised),
        }
        row: dict[str, Any] = dataclasses.asdict(case) | {
            "batch": batch,
            "graphs": launched,
            "step_ms": {tokens: step.step_ms for tokens, step in steps.items()},
            "decoder_ms": {tokens: step.decoder_ms for tokens, step in steps.items()},
            "whole_ms": whole_ms,
            "mean_ms": mean_ms,
            "tokens_per_s": 1000 * batch / mean_ms,
            "distinct_experts": distinct,
            "distinct_experts_expected": self.whole.num_experts
            * read_share_of_experts(self.whole, batch),
            "peak_GiB": peak / GIB,
            "accounted_GiB": self.accounted_bytes(case, batch) / GIB,
            "host_hints_GiB": batch * self.sequence_tokens * self._hint_bytes(case) / GIB,
        }
        if kernels:
            row["profile"] = kernels
        for name, moved in floors.items():
            floor_ms = moved.total / self.copy_tb_s / 1e9
            row[f"bytes_per_token_{name}"] = moved.total / batch
            row[f"floor_ms_{name}"] = floor_ms
            row[f"floor_tokens_per_s_{name}"] = 1000 * batch / floor_ms
            row[f"bytes_{name}"] = dataclasses.asdict(moved)
        return row

    def _server(self, policy: ServedPolicy, case: Case, batch: int) -> tuple[Server, str]:
        """Gives a server, and how its decode steps are launched: as asked, or as the engine can."""
        launched = self.options.graphs
        if launched == "captured":
            try:
                return self._built(policy, case, batch, DecodeGraphs((batch,))), launched
            except ValueError as error:
                self.say(f"not captured: {error}")
                launched = "padded"
            _collect()
        graphs = DecodeGraphs((batch,), captured=False) if launched == "padded" else False
        return self._built(policy, case, batch, graphs), launched

    def _built(
        self, policy: ServedPolicy, case: Case, batch: int, graphs: DecodeGraphs | bool
    ) -> Server:
        return Server(
            policy.model,
            policy.sites,
            packed=case.kv_format is not None,
            # No token of the vocabulary ends a response.
            eod_token=self.whole.vocab_size,
            limits=EngineLimits(
                self.sequence_tokens,
                max_requests=batch,
                block_size_tokens=self.options.page_tokens,
                max_step_tokens=max(STEP_TOKENS, batch),
                cuda_graphs=graphs,
            ),
        )

    def batch(self, case: Case) -> int:
        """Gives the batch of a case: `equal` is the largest of a BF16 engine without recording."""
        if case.batch_name == "equal":
            return self.batch(Case("bf16", "off", "largest"))
        if case.batch_name != "largest":
            return int(case.batch_name)
        room = self.device_bytes - self.accounted_bytes(case, 0)
        batch = math.floor(room / self._bytes_of_a_sequence(case))
        if batch < 1:
            raise SystemExit(f"{case}: not one sequence fits {self.device_bytes / GIB:.0f} GiB")
        return batch

    def accounted_bytes(self, case: Case, batch: int) -> float:
        """Gives the memory that an engine of the whole model takes, by accounting."""
        weights = self._weight_bytes(self.whole, case)
        return weights + RESERVE_BYTES + batch * self._bytes_of_a_sequence(case)

    def _bytes_of_a_sequence(self, case: Case) -> float:
        sampling = SAMPLING_BYTES * self.whole.vocab_size
        return sampling + self._sequence_bytes(self.whole, case)

    def _weight_bytes(self, architecture: Architecture, case: Case) -> float:
        """Gives what the weights take: the engine keeps BF16 experts beside the packed ones."""
        weights = dense_bytes(architecture)
        if not case.drops_bf16:
            weights += expert_bytes(architecture, None)
        if case.mode != "bf16" and self.packed:
            weights += expert_bytes(architecture, FORMAT)
        return weights

    def _sequence_bytes(self, architecture: Architecture, case: Case) -> float:
        # Hints wait in host memory.
        return sequence_bytes(architecture, tokens=self.sequence_tokens, kv_format=case.kv_format)

    def _profiled(self, decode: LongDecode) -> dict[str, Any]:
        """Gives where a step's time goes, of the longest length, and prints it."""
        parts = {}
        if not self.options.cpu:
            profiled(decode.step)  # The first use of a profiler takes its own time.
            parts = profiled(decode.step)
        for name, part in parts.items():
            busy = f"busy {part.busy_us:.0f} of {part.span_us:.0f} us"
            self.say(f"{name}: {part.num_kernels} kernels, {busy}")
            for kernel, count, us in part.longest(24):
                print(f"    {us:8.1f} us {count:5d} x {kernel}")
        print(host_profile(decode.step, calls=60, lines=45), flush=True)
        return {name: dataclasses.asdict(part) for name, part in parts.items()}

    def _limit(self, missing_bytes: int) -> None:
        """Lets the process take what the layers that are left out would leave.

        Memory that was allocated in their place took long, and once stood still.
        """
        if not self.options.cpu:
            allowed = self.device_bytes - RUNTIME_BYTES - missing_bytes
            torch.cuda.set_per_process_memory_fraction(allowed / torch.cuda.mem_get_info()[1])

    def _missing_bytes(self, case: Case, batch: int) -> int:
        """Gives what the layers that are left out would take, and BF16 experts that are counted."""
        built = self._weight_bytes(self.slice, case)
        if case.mode != "bf16" and self.packed:
            built = dense_bytes(self.slice) + expert_bytes(self.slice, FORMAT)
        whole, part = (self._sequence_bytes(a, case) for a in (self.whole, self.slice))
        return math.ceil(self._weight_bytes(self.whole, case) - built + batch * (whole - part))

    def _bytes(
        self, case: Case, batch: int, points: Sequence[int], expert_format: str | None
    ) -> DecodeBytes:
        """Gives the bytes of a step of the whole model, on average over the response."""
        return decode_bytes(
            self.whole,
            batch=batch,
            context=(points[0] + points[-1]) / 2,
            expert_format=expert_format,
            kv_format=case.kv_format,
            hint_bytes=self._hint_bytes(case),
        )

    def _hint_bytes(self, case: Case) -> int:
        return hint_bytes(self.whole, case.hints) if case.hints else 0

    def _points(self) -> list[int]:
        """Gives the lengths at which steps are timed, from the prompt to the last token."""
        o = self.options
        last = self.sequence_tokens - 2 * o.page_tokens
        count = o.points - 1
        return [
            o.prompt_tokens + (last - o.prompt_tokens) * index // count for index in range(o.points)
        ]

    def say(self, what: str) -> None:
        """Prints what was done, and when: a run that the clock ends tells where it was."""
        print(f"{time.perf_counter() - self.started:.1f} s: {what}", flush=True)

    def save(self) -> None:
        """Writes what there is."""
        if self.options.json:
            numbers = {"facts": self.facts, "rows": self.rows}
            self.options.json.write_text(json.dumps(numbers, indent=1) + "\n")


def _mean(by_length: dict[int, float]) -> float:
    """Gives the mean over the positions, by the trapezoid rule."""
    lengths, values = list(by_length), list(by_length.values())
    area = sum(
        (lengths[i + 1] - lengths[i]) * (values[i] + values[i + 1]) / 2
        for i in range(len(lengths) - 1)
    )
    return area / (lengths[-1] - lengths[0])


def _collect() -> None:
    compat.forget_moe_layers()
    gc.collect()
    torch.cuda.empty_cache()


def _commit() -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "mode": lambda row: row["mode"],
    "recording": lambda row: row["recording"],
    "batch": lambda row: str(row["batch"]),
    "launched": lambda row: row["graphs"],
    "tokens/s": lambda row: f"{row['tokens_per_s']:.0f}",
    "ms a step, by context": lambda row: ", ".join(f"{ms:.1f}" for ms in row["whole_ms"].values()),
    "outside the layers, ms": lambda row: ", ".join(
        f"{ms - (row['decoder_ms'][length] or ms):.1f}" for length, ms in row["step_ms"].items()
    ),
    "MB a token": lambda row: f"{row['bytes_per_token_read'] / 1e6:.0f}",
    "bytes alone, tokens/s (share)": lambda row: (
        f"{row['floor_tokens_per_s_read']:.0f} "
        f"({row['tokens_per_s'] / row['floor_tokens_per_s_read']:.2f})"
    ),
    "experts read (even routing)": lambda row: (
        f"{row['distinct_experts']:.0f} ({row['distinct_experts_expected']:.0f})"
    ),
    "GiB (accounted)": lambda row: f"{row['peak_GiB']:.0f} ({row['accounted_GiB']:.0f})",
}


def table(rows: Sequence[dict[str, Any]], *, markdown: bool) -> str:
    """Gives the rows as text."""
    cells = [list(COLUMNS)]
    for row in rows:
        if "error" in row:
            texts = [row["mode"], row["recording"], row["batch_name"], "failed"]
            cells.append(texts + [""] * (len(COLUMNS) - len(texts)))
        else:
            cells.append([text(row) for text in COLUMNS.values()])
    if markdown:
        lines = ["| " + " | ".join(line) + " |" for line in cells]
        return "\n".join([lines[0], "|" + "---|" * len(COLUMNS), *lines[1:]])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True))
        for line in cells
    )


def asked_cases(options: argparse.Namespace) -> list[Case]:
    """Gives the cases that flags name, in their order, or all that they allow."""
    if options.cases:
        return [Case(*name.split("/")) for name in options.cases]
    return [
        Case(mode, recording, batch)
        for mode in options.modes
        for batch in options.batches
        for recording in (["off"] if mode == "bf16" else options.recording)
    ]


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    """Gives the flags of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", default="Qwen3.5-35B-A3B", help=", ".join(PRESETS))
    parser.add_argument("--reduced", action="store_true", help="small widths, for a CPU")
    parser.add_argument("--layers", type=int, help="decoder layers that are built; default all")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--recording", nargs="+", choices=RECORDINGS, default=list(RECORDINGS))
    parser.add_argument(
        "--batches", nargs="+", default=["equal", "largest"], help="equal, largest, or numbers"
    )
    parser.add_argument(
        "--cases", nargs="+", help="MODE/RECORDING/BATCH each, instead of all; in this order"
    )
    parser.add_argument("--prompt-tokens", type=int, default=8 << 10)
    parser.add_argument("--response-tokens", type=int, default=128 << 10)
    parser.add_argument("--points", type=int, default=3, help="lengths that are timed, default 3")
    parser.add_argument("--steps", type=int, default=5, help="timed at each length, default 5")
    parser.add_argument("--warm-up", type=int, default=3, help="steps before, default 3")
    parser.add_argument("--page-tokens", type=int, default=64)
    parser.add_argument(
        "--graphs",
        choices=("captured", "padded", "none"),
        default="captured",
        help="decode steps as CUDA graphs (default); the same, kernel by kernel; the plain engine",
    )
    parser.add_argument(
        "--packed-experts", choices=("off", "auto", "torch", "cuda"), default="auto"
    )
    parser.add_argument(
        "--profile",
        nargs="+",
        default=[],
        metavar="CASE",
        help="MODE/RECORDING/BATCH each: tell where a step's time goes",
    )
    parser.add_argument("--memory-gib", type=float, help="that an engine may take; default: free")
    parser.add_argument("--push", action="store_true", help="time a push of weights too")
    parser.add_argument("--check-finite", action="store_true", help="as a training run's engine")
    parser.add_argument("--cpu", action="store_true", help="try the tool without a GPU")
    parser.add_argument("--json", type=Path, help="file that gets the numbers")
    parser.add_argument("--markdown", type=Path, help="file that gets the table")
    options = parser.parse_args(arguments)
    if options.points < 2:
        parser.error("--points must be at least 2: the prompt's end and the response's")
    if not options.cpu and not torch.cuda.is_available():
        parser.error("no CUDA device is visible; --cpu tries the tool")
    return options


def main(arguments: list[str] | None = None) -> None:
    """Measures and prints."""
    options = parsed(arguments)
    # As torchrun sets it: threads that wait for one another cost more than the engine's small
    # tables on the host give them to do, milliseconds a step where other programs run.
    torch.set_num_threads(1)
    with single_process(seed=0):
        bench = Bench(options)
        print(json.dumps(bench.facts), flush=True)
        bench.run()
    print(table(bench.rows, markdown=False))
    if options.markdown:
        options.markdown.write_text(table(bench.rows, markdown=True) + "\n")
    failed = sum("error" in row for row in bench.rows)
    if failed:
        raise SystemExit(f"{failed} of {len(bench.rows)} cases failed")


if __name__ == "__main__":
    main()
