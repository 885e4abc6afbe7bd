"""Says what this machine can run, by running a small kernel of each kind, and what serves instead.

    python tools/doctor.py [--folder WHERE_HINTS_GO] [--json]
    python tools/doctor.py --only triton fla
    python tools/doctor.py --versions           one line, nothing is run

Every check runs in a process of its own: a kernel that dies takes no other with it. Exit status 0
if nothing is broken (what is absent is not), else 1.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from importlib.abc import SourceLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from megatron_trace.launching.versions import differences, installed_versions, tested_versions

CONSTRAINTS = Path(__file__).parents[1] / "constraints.txt"
NEEDED = ("torch", "triton", "megatron-core", "nvidia-modelopt", "numpy")
TIMEOUT_S = 300
DISK_BYTES = 128 << 20
WORKS, ABSENT, BROKEN = "works", "absent", "broken"


@dataclass(frozen=True)
class Finding:
    """What one check found.

    Attributes:
        name: The check.
        state: works, absent (not here, and something else serves) or broken.
        detail: What was seen.
        instead: What serves, where it is absent or broken.
    """

    name: str
    state: str
    detail: str
    instead: str = ""


class AbsentError(Exception):
    """What a check looks for is not on this machine."""


def check_gpu(_: Path) -> str:
    """Gives the GPUs, after a product of BF16 matrices on each."""
    import torch

    if not torch.cuda.is_available():
        raise AbsentError("torch sees no CUDA device")
    told = []
    for number in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(number)
        ones = torch.ones(256, 256, dtype=torch.bfloat16, device=f"cuda:{number}")
        _require_equal(float((ones @ ones).sum()), 256.0**3, f"a product on GPU {number}")
        gib = torch.cuda.get_device_properties(number).total_memory / 2**30
        told.append(f"{torch.cuda.get_device_name(number)} {major}.{minor} {gib:.0f} GiB")
    return f"{len(told)}: {', '.join(sorted(set(told)))}, CUDA {torch.version.cuda}"


def check_torch(_: Path) -> str:
    """Checks the specification of NVFP4, in torch, on a known block."""
    import torch

    from megatron_trace.formats import ops

    x = torch.tensor([[0.0, 0.24, 0.26, 5.1, -6.0, *[1.0] * 11]])
    expected = torch.tensor([[0.0, 0.0, 0.5, 6.0, -6.0, *[1.0] * 11]])
    if not torch.equal(ops.rtn(x, 1.0, implementation="torch"), expected):
        raise RuntimeError("NVFP4 in torch gives other values than the specification")
    return f"NVFP4 in torch, {torch.get_num_threads()} threads"


def check_imports(_: Path) -> str:
    """Imports what every program does, and looks whether Python had to compile it all."""
    from megatron_trace.testing import cpu_runtime

    cpu_runtime.install()
    started = time.perf_counter()
    for name in ("megatron.training", "megatron_trace.rollout.engine"):
        _module(name)
    told = f"{time.perf_counter() - started:.1f} s to import Megatron, ModelOpt and the engine"
    modules = list(sys.modules.values())
    compiled = without_bytecode(modules)
    if len(compiled) > len(modules) // 4:
        raise AbsentError(
            f"{told}: every process compiles {len(compiled)} modules anew, as their bytecode is "
            "not kept"
        )
    return told


def without_bytecode(modules: Iterable[ModuleType]) -> list[str]:
    """Gives the names of those whose source the next process compiles again."""
    return [
        module.__name__
        for module in modules
        if (spec := getattr(module, "__spec__", None)) is not None
        and isinstance(spec.loader, SourceLoader)
        and not (spec.cached and Path(spec.cached).exists())
    ]


def check_triton(_: Path) -> str:
    """Compares NVFP4 in Triton with the specification, bit by bit."""
    import torch

    from megatron_trace.formats import ops

    _require_gpu()
    x = torch.randn(64, 512, device="cuda", dtype=torch.bfloat16)
    got, expected = (
        ops.rtn_record(x, 0.01, num_bits=1, implementation=name) for name in ("triton", "torch")
    )
    if not all(torch.equal(a, b) for a, b in zip(got, expected, strict=True)):
        raise RuntimeError("NVFP4 in Triton gives other bits than in torch")
    return "NVFP4 in Triton, the specification's bits"


def check_kv_triton(_: Path) -> str:
    """Compares attention over packed FP4 pages, in Triton, with FP64."""
    return _paged_attention("triton")


def check_kv_cuda(_: Path) -> str:
    """Builds the CUDA kernel of the same, and compares it."""
    return _paged_attention("cuda")


def check_transformer_engine(_: Path) -> str:
    """Runs a grouped linear of Transformer Engine."""
    import torch

    _require_gpu()
    te = _module("transformer_engine.pytorch")
    linear = te.GroupedLinear(2, 64, 32, bias=False, params_dtype=torch.bfloat16).cuda()
    x = torch.randn(32, 64, device="cuda", dtype=torch.bfloat16)
    got = linear(x, [16, 16])
    expected = torch.cat([x[:16] @ linear.weight0.T, x[16:] @ linear.weight1.T])
    torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)
    return "grouped linears of BF16"


def check_te_fp4(_: Path) -> str:
    """Asks Transformer Engine whether this GPU multiplies NVFP4."""
    _require_gpu()
    quantisation = _module("transformer_engine.pytorch.quantization")
    available, reason = quantisation.check_nvfp4_support()
    if not available:
        raise AbsentError(reason or "this GPU has no FP4 products")
    return "products of NVFP4 matrices"


def check_fla(_: Path) -> str:
    """Compares the gated delta rule of flash-linear-attention with torch's."""
    import torch

    from megatron_trace.models.delta_rule import delta_rule_kernels

    _require_gpu()
    _module("fla")
    query, key = (
        torch.nn.functional.normalize(torch.randn(1, 128, 2, 64, device="cuda"), dim=-1).bfloat16()
        for _ in range(2)
    )
    value = torch.randn(1, 128, 2, 64, device="cuda").bfloat16()
    decay = -torch.rand(1, 128, 2, device="cuda")
    beta = torch.rand(1, 128, 2, device="cuda").bfloat16()
    got, expected = (
        delta_rule_kernels(name, trains=False).mix(query, key, value, decay, beta)[0]
        for name in ("fla", "torch")
    )
    torch.testing.assert_close(got, expected, rtol=5e-2, atol=5e-2)
    return "the gated delta rule, as torch's"


def check_fla_backward(_: Path) -> str:
    """Compares the gradients of the same."""
    import torch

    from megatron_trace.models.delta_rule import delta_rule_kernels
    from megatron_trace.models.fla_backward import fla_setup, why_fla_cannot_train
    from megatron_trace.testing import delta_rule_gradients as rule

    _require_gpu()
    _module("fla")
    reason = why_fla_cannot_train(fla_setup())
    if reason is not None:
        raise AbsentError(reason)
    inputs = rule.random_inputs(
        1,
        256,
        num_heads=2,
        head_dim=128,
        dtype=torch.bfloat16,
        device=torch.device("cuda"),
    )
    exact = [x.float() for x in inputs]
    expected = rule.output_and_gradients(delta_rule_kernels("torch").mix, exact)
    found = rule.errors(expected, rule.output_and_gradients(delta_rule_kernels("fla").mix, inputs))
    if not max(found.values()) < rule.TOLERANCE:
        raise RuntimeError(f"gradients of the gated delta rule are not torch's: {found}")
    return f"gradients of the gated delta rule, {max(found.values()):.1e} from torch's"


def check_apex(_: Path) -> str:
    """Steps apex's fused Adam, which Megatron takes where it is installed."""
    import torch

    optimizers = _module("apex.optimizers")
    _require_gpu()
    weight = torch.nn.Parameter(torch.ones(8, device="cuda"))
    weight.grad = torch.ones_like(weight)
    optimizers.FusedAdam([weight], lr=0.1).step()
    torch.testing.assert_close(weight.detach(), torch.full_like(weight, 0.9), rtol=1e-4, atol=1e-4)
    return "fused Adam"


def check_collectives(folder: Path) -> str:
    """Adds up over one rank, with the backend that training would take."""
    import torch
    import torch.distributed as dist

    backend = "nccl" if torch.cuda.is_available() else "gloo"
    with tempfile.TemporaryDirectory(dir=folder) as own:
        store = dist.FileStore(f"{own}/store", 1)
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
        total = torch.ones(4, device="cuda" if backend == "nccl" else "cpu")
        dist.all_reduce(total)
        _require_equal(float(total.sum()), 4.0, "an all-reduce")
        dist.destroy_process_group()
    return backend


def check_pinned_memory(_: Path) -> str:
    """Copies from page-locked memory to the GPU."""
    import torch

    _require_gpu()
    source = torch.empty(256 << 20, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(source, device="cuda")
    target.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(4):
        target.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    rate = 4 * source.numel() / (time.perf_counter() - started)
    return f"{rate / 1e9:.1f} GB/s to the GPU"


def check_disk(folder: Path) -> str:
    """Writes a file where hints would go, synced, and reads it again."""
    block = os.urandom(1 << 20)
    with tempfile.TemporaryFile(dir=folder) as file:
        started = time.perf_counter()
        for _ in range(DISK_BYTES // len(block)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        written_s = time.perf_counter() - started
        # Otherwise it would be read from memory.
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        started = time.perf_counter()
        while file.read(1 << 20):
            pass
        read_s = time.perf_counter() - started
    free = shutil.disk_usage(folder).free
    return (
        f"{folder}: {DISK_BYTES / written_s / 1e9:.2f} GB/s written, "
        f"{DISK_BYTES / read_s / 1e9:.2f} read, {free / 2**30:.0f} GiB free"
    )


def check_nvcc(_: Path) -> str:
    """Looks for the compiler that the CUDA kernels of the KV cache need."""
    home = os.environ.get("CUDA_HOME")
    nvcc = shutil.which("nvcc") or (home and shutil.which("nvcc", path=f"{home}/bin"))
    if not nvcc:
        raise AbsentError("no nvcc on the path or below CUDA_HOME")
    told = subprocess.run([nvcc, "--version"], text=True, capture_output=True, check=True)
    return told.stdout.strip().splitlines()[-1]


# The check, and what serves where it is absent or broken.
CHECKS: dict[str, tuple[Callable[[Path], str], str]] = {
    "gpu": (
        check_gpu,
        "the CPU, with a stand-in for CUDA: tests, the demo and tiny models only",
    ),
    "torch": (check_torch, "nothing: it is needed"),
    "imports": (
        check_imports,
        "unset PYTHONDONTWRITEBYTECODE, with PYTHONPYCACHEPREFIX=FOLDER where nothing may be "
        "written beside the sources; or once: python -m compileall -j 0 SITE-PACKAGES",
    ),
    "triton": (check_triton, "the torch implementation (--trace-implementation torch)"),
    "nvcc": (check_nvcc, "Triton's kernels of the KV cache"),
    "kv_triton": (check_kv_triton, "attention over unpacked pages, in torch"),
    "kv_cuda": (check_kv_cuda, "Triton's kernels of the KV cache"),
    "transformer_engine": (check_transformer_engine, "local experts (--trace-experts local)"),
    "te_fp4": (check_te_fp4, "products of BF16 matrices of dequantised values"),
    "fla": (check_fla, "the gated delta rule in torch (--trace-delta-rule torch), slow"),
    "fla_backward": (
        check_fla_backward,
        "training by the gated delta rule in torch (--trace-delta-rule torch), slow",
    ),
    "apex": (check_apex, "the optimizer of Transformer Engine or torch, by Megatron's own choice"),
    "collectives": (check_collectives, "nothing: training needs them"),
    "pinned_memory": (check_pinned_memory, "pageable memory: --trace-prefetch hides less"),
    "disk": (check_disk, "nothing: hints in files need it; another --folder"),
}
NEEDED_CHECKS = ("torch", "collectives", "disk")


def main() -> None:
    """Examines the machine as the flags say."""
    args = parsed_flags()
    if args.versions:
        print(", ".join(f"{n} {v or 'none'}" for n, v in installed_versions().items()))
        return
    if args.run_check is not None:
        run_check(args.run_check, args.folder)
        return
    args.folder.mkdir(parents=True, exist_ok=True)
    findings = [versions_finding()] if not args.only else []
    findings += [examined(name, args.folder) for name in args.only or CHECKS]
    if args.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=1))
    else:
        print_table(findings)
    raise SystemExit(1 if any(finding.state == BROKEN for finding in findings) else 0)


def parsed_flags() -> argparse.Namespace:
    """Gives the flags of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=Path("out/doctor"), help="to write to")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", nargs="+", choices=CHECKS, metavar="CHECK")
    parser.add_argument("--versions", action="store_true")
    parser.add_argument("--run-check", choices=CHECKS, help=argparse.SUPPRESS)
    return parser.parse_args()


def versions_finding() -> Finding:
    """Compares what is installed with what is tested."""
    installed = installed_versions()
    missing = [name for name in NEEDED if installed[name] is None]
    told = ", ".join(f"{name} {version}" for name, version in installed.items() if version)
    if missing:
        return Finding("versions", BROKEN, f"missing: {', '.join(missing)}", "make setup")
    other = differences(installed, tested_versions(CONSTRAINTS))
    if other:
        changes = ", ".join(f"{n} is {a}, tested {b}" for n, (a, b) in other.items())
        return Finding("versions", BROKEN, changes, "pip install -c constraints.txt")
    return Finding("versions", WORKS, told)


def examined(name: str, folder: Path) -> Finding:
    """Runs one check in a process of its own."""
    command = [sys.executable, __file__, "--run-check", name, "--folder", str(folder)]
    instead = CHECKS[name][1]
    try:
        done = subprocess.run(
            command, text=True, capture_output=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return Finding(name, BROKEN, f"not done after {TIMEOUT_S} s", instead)
    lines = done.stdout.strip().splitlines()
    if done.returncode == 0 and lines:
        told: dict[str, Any] = json.loads(lines[-1])
        is_missing = told["state"] == ABSENT
        if is_missing and name in NEEDED_CHECKS:
            return Finding(name, BROKEN, told["detail"], instead)
        return Finding(name, told["state"], told["detail"], instead if is_missing else "")
    said = (done.stderr.strip() or f"ended with status {done.returncode}").splitlines()[-1]
    return Finding(name, BROKEN, said[:300], instead)


def run_check(name: str, folder: Path) -> None:
    """Does one check in this process; an error of it ends the process."""
    try:
        told = {"state": WORKS, "detail": CHECKS[name][0](folder)}
    except AbsentError as error:
        told = {"state": ABSENT, "detail": str(error)}
    print(json.dumps(told))


def print_table(findings: list[Finding]) -> None:
    """Prints a line for each finding."""
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        print(f"{finding.name:{width}}  {finding.state:6}  {finding.detail}")
        if finding.instead:
            print(f"{'':{width}}          instead: {finding.instead}")


def _paged_attention(implementation: Any) -> str:
    import torch

    from megatron_trace.formats.number_format import NVFP4
    from megatron_trace.rollout.kernels import cuda, ops
    from megatron_trace.rollout.pages import PageLayout
    from megatron_trace.testing.paged_kv import exact_attention, random_cache, relative_error

    _require_gpu()
    layout = PageLayout(number_format=NVFP4, page_tokens=64, head_dim=128)
    cache = random_cache(layout, [100, 7], num_heads=2, ratio=4, device="cuda")
    if implementation == "cuda":
        reason = cuda.why_not(cache.keys, 8, torch.device("cuda"))
        if reason is not None:
            raise AbsentError(reason)
    got = ops.paged_attention(
        cache.query,
        cache.keys,
        cache.values,
        cache.cu_query_lengths,
        cache.lengths,
        cache.block_table,
        cache.scale,
        max_new_tokens=1,
        implementation=implementation,
    )
    error = relative_error(got, exact_attention(cache))
    if not error < 2e-2:
        raise RuntimeError(f"attention over packed pages is {error:.2e} from FP64")
    return f"attention over packed FP4 pages, {error:.1e} from FP64"


def _require_gpu() -> None:
    import torch

    if not torch.cuda.is_available():
        raise AbsentError("it needs a GPU")


def _require_equal(got: float, expected: float, what: str) -> None:
    if got != expected:
        raise RuntimeError(f"{what} gave {got}, not {expected}")


def _module(name: str) -> Any:
    import importlib
    import importlib.util

    if importlib.util.find_spec(name.partition(".")[0]) is None:
        raise AbsentError(f"{name.partition('.')[0]} is not installed")
    return importlib.import_module(name)


if __name__ == "__main__":
    main()
