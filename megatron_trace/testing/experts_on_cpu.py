"""`experts.cu` as it stands on a CPU: bodies of PTX replaced, the rest compiled by g++.

Every function of `experts*.cu*` and `fp4.cuh` that holds PTX has its body in BODIES; all else, the
sort, the schedule, rings and barriers, indices, epilogues, is the source itself, run thread by
thread (`cuda_on_cpu.h`). Sums are FP64 within an MMA, so values may round otherwise than on a GPU.
What a GPU alone shows: the machine's memory order, speed, and whether PTX means what BODIES says.
"""

from __future__ import annotations

import contextlib
import ctypes
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch

from megatron_trace.rollout.kernels import experts as kernel

HEADER = Path(__file__).with_name("cuda_on_cpu.h")
BODIES = {
    # fp4.cuh
    "and_or": "return (a & b) | c;",
    "chosen_bits": "return (a & ~mask) | (b & mask);",
    "times": "return on_cpu::times(a, b);",
    "scales_of": "return on_cpu::scales_of(two_bytes);",
    "multiply_add": "on_cpu::multiply_add(c, a0, a1, a2, a3, b0, b1);",
    "pair_of": 'on_cpu::fail("pair_of is not translated");',
    "transposed": "return on_cpu::transposed(row);",
    "exp2_of": 'on_cpu::fail("exp2_of is not translated");',
    "copy_async": 'on_cpu::fail("copy_async is not translated");',
    "barrier_init": "on_cpu::barrier_init(barrier);",
    "barrier_expect": "on_cpu::barrier_expect(barrier, num_bytes);",
    "barrier_wait": "on_cpu::barrier_wait(barrier, parity);",
    # experts*.cu*
    "wait_for_previous": "",
    "let_next_start": "",
    "is_elected": "return threadIdx.x % 32 == 0;",
    "fence_barriers": "",
    "fetch_map": "",
    "taken_before": "return (*count)++;",
    "max_of": "return a != a || b != b ? __uint_as_float(0x7FC00000u) : a > b ? a : b;",
    "min_of": "return a != a || b != b ? __uint_as_float(0x7FC00000u) : a < b ? a : b;",
    "about_one_over": "return 1.0f / b;",
    "copy_box": "on_cpu::copy_box(to, reinterpret_cast<const on_cpu::Map&>(map), column, row, "
    "depth, barrier);",
    "add_released": "++*count;",
    "load_acquired": "return *count;",
    "load_16": "uint4 r; std::memcpy(&r, on_cpu::shared(from, 16), 16); return r;",
    "load_4": "uint32_t r; std::memcpy(&r, on_cpu::shared(from, 4), 4); return r;",
    "load_operands": "std::memcpy(&to, from + WORD * 4, 16);",
}
# Not PTX, but the machine's or the driver's.
OTHER_BODIES = {
    "shared_address": "return static_cast<uint32_t>(static_cast<const uint8_t*>(pointer) - "
    "on_cpu::blocks[on_cpu::current->block].shared.data());",
    "describe": "on_cpu::Map described{static_cast<const uint8_t*>(base), columns, rows, depth, "
    "int(box_columns), int(box_rows), int(box_depth)}; static_assert(sizeof described <= "
    "sizeof map); std::memcpy(&map, &described, sizeof described); return true;",
    "launch_after": "return on_cpu::launch(kernel, blocks, threads, shared_bytes, parameters...);",
}
# What a test calls besides the source's own entry: a switch, and how often numbers that a kernel
# gets without dividing are not those of a division, among all BF16 magnitudes.
ENTRIES = """
extern "C" void set_late_copies(int late) { on_cpu::late_copies = late; }

extern "C" int codes_unlike_division(const float* divisors, int count) {
    const float midpoints[] = {0.25f, 0.75f, 1.25f, 1.75f, 2.5f, 3.5f, 5.0f};
    int wrong = 0;
    for (int i = 0; i < count; ++i) {
        Divisor divisor(divisors[i]);
        for (uint32_t bits = 0; bits < 65536; ++bits) {
            float x = __uint_as_float(bits << 16), quotient = std::fabs(x) / divisors[i];
            uint32_t code = 0;
            for (int j = 0; j < 7; ++j)
                code += !(j % 2 ? quotient < midpoints[j] : quotient <= midpoints[j]);
            wrong += divisor.code_of(x) != (code | bits >> 15 << 3);
        }
    }
    return wrong;
}

extern "C" int scales_unlike_division(const float* globals, int count) {
    int wrong = 0;
    for (int i = 0; i < count; ++i) {
        for (uint32_t bits = 0; bits < 32768; ++bits) {
            float amax = __uint_as_float(bits << 16), effective;
            float scale = amax / (globals[i] * 6.0f);
            scale = scale < 0x1p-9f ? 0x1p-9f : scale > 448.0f ? 448.0f : scale;
            uint32_t byte = __nv_cvt_float_to_fp8(scale, __NV_SATFINITE, __NV_E4M3) & 0x7F;
            float expected = on_cpu::half_of(on_cpu::scales_of(byte), 0) * globals[i];
            if (amax == 0.0f || expected == 0.0f) byte = 0, expected = 0.0f;
            wrong += block_scale(amax, globals[i], effective) != byte ||
                     (effective != expected && effective == effective);
        }
    }
    return wrong;
}

extern "C" int swish_unlike_division() {
    int wrong = 0;
    for (uint32_t bits = 0; bits < 65536; ++bits) {
        float gate = __uint_as_float(bits << 16), divisor = 1.0f + std::exp(-gate);
        if (!is_plain(gate)) continue;
        for (int step = -2; step <= 2; ++step) {
            float near = __uint_as_float(__float_as_uint(divisor) + step);
            if (near >= 1.0f) wrong += quotient(gate, near, reciprocal(near)) != gate / near;
        }
    }
    return wrong;
}
"""
_FUNCTION = re.compile(r"\b(\w+)\([^()]*(?:\([^()]*\)[^()]*)*\)\s*(?:const\s*)?\{")


def why_not() -> str | None:
    """Says why the source cannot be built here; None if it can."""
    if shutil.which("g++") is None:
        return "there is no g++"
    if _headers() is None:
        return "there are no headers of the CUDA toolkit"
    return None


def _headers() -> Path | None:
    """Gives the folder of the toolkit's headers, of nvcc or where it is installed by default."""
    nvcc = shutil.which("nvcc")
    folders = [] if nvcc is None else [Path(nvcc).resolve().parent.parent / "include"]
    folders += sorted(Path("/usr/local").glob("cuda*/include"), reverse=True)
    names = ("cuda.h", "cuda_fp8.h", "crt/host_defines.h")
    return next((f for f in folders if all((f / name).exists() for name in names)), None)


def _with_includes(source: Path, included: set[Path]) -> str:
    """Gives the text with the files of its folder that it includes, each of them once."""

    def text_of(match: re.Match[str]) -> str:
        path = source.parent / match[1]
        if path in included:
            return ""
        included.add(path)
        return _with_includes(path, included)

    text = source.read_text().replace("#pragma once", "")
    return re.sub(r'^#include "(.*)"$', text_of, text, flags=re.MULTILINE)


def translated(source: str) -> str:
    """Gives C++ with the bodies of BODIES and OTHER_BODIES.

    Raises:
        ValueError: PTX is left, in a function that BODIES does not know.
    """
    pieces, at = [], 0
    bodies = BODIES | OTHER_BODIES
    for match in _FUNCTION.finditer(source):
        if match.start() < at or match[1] not in bodies:
            continue
        end, depth = match.end(), 1
        while depth:
            depth += {"{": 1, "}": -1}.get(source[end], 0)
            end += 1
        pieces += [source[at : match.end()], bodies[match[1]], "}"]
        at = end
    result = "".join([*pieces, source[at:]])
    if left := re.search(r"^.*\basm\b.*$", result, re.MULTILINE):
        raise ValueError(f"PTX that has no translation: {left[0].strip()}")
    return result


def build(folder: Path, num_warps: int) -> ctypes.CDLL:
    """Compiles the source for a CPU.

    Args:
        folder: Where the library goes.
        num_warps: Of a block of `multiply`.

    Raises:
        RuntimeError: g++ refuses it.
    """
    text = translated(_with_includes(kernel.SOURCE, set()))
    text = text.replace(
        "extern __shared__ __align__(1024) uint8_t shared[];",
        "uint8_t* shared = on_cpu::blocks[on_cpu::current->block].shared.data();",
    )
    text = text.replace("__shared__", "static")
    text = re.sub(r"cudaFuncSetAttribute\([^;]*\);", "cudaSuccess;", text)
    program = folder / "experts_on_cpu.cpp"
    program.write_text(f'#include "{HEADER}"\n{text}\n{ENTRIES}')
    library = folder / "experts_on_cpu.so"
    command = ["g++", "-O1", "-std=c++17", "-w", "-shared", "-fPIC", "-ffp-contract=off"]
    command += ["-fno-strict-aliasing", f"-I{_headers()}", f"-DEXPERT_WARPS={num_warps}"]
    done = subprocess.run(
        [*command, "-o", str(library), str(program)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"g++ refused {program}:\n{done.stderr[:4000]}")
    return ctypes.CDLL(str(library))


@contextlib.contextmanager
def on_cpu(library: ctypes.CDLL, num_blocks: int, *, late_copies: bool) -> Iterator[None]:
    """Lets `kernel.routed_experts` take tensors on the CPU.

    Args:
        library: What `build` gave.
        num_blocks: Of `multiply`, at least 2.
        late_copies: Whether copies into shared memory arrive only when they are waited for.
    """
    library.set_late_copies(int(late_copies))
    device = SimpleNamespace(multi_processor_count=num_blocks)
    with (
        mock.patch.object(kernel, "library", return_value=library),
        mock.patch.object(kernel, "current_stream", return_value=ctypes.c_void_p(None)),
        mock.patch.object(torch.cuda, "get_device_properties", return_value=device),
        mock.patch.object(torch.cuda, "device_of", return_value=contextlib.nullcontext()),
    ):
        yield
