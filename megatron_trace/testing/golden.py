"""Golden files: what other libraries made of our inputs, as differences from what we make of them.

A library that cannot be installed beside ours runs once, under `tools/make_golden.py`. Its results
on millions of values are kept as a digest and the blocks where they differ from ours: whoever
recomputes ours, puts those blocks in and gets the digest, has proved that all the rest is equal.

Legend: N values of a block (16 or 32), B blocks of a row. A case is one format on one input, named
`format/input/dtype`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch

from megatron_trace.formats import (
    BLOCK_SIZE,
    E4M3_MAX,
    MX_BLOCK_SIZE,
    encode,
    four_over_six,
    global_scale_from_amax,
    mxfp4,
    mxfp8,
)
from megatron_trace.formats.minifloat import E2M1, E4M3, Minifloat
from megatron_trace.formats.scales_e8m0 import ScaleRule
from megatron_trace.testing.hard_inputs import hard_inputs
from megatron_trace.testing.integer_inputs import integer_inputs

Encoded = tuple[torch.Tensor, torch.Tensor]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# Where multiples of 1/4 lie on the bounds of codes, the global scale must be 1.
_SCALE_OF_TIES = 1.0


@dataclass(frozen=True)
class Input:
    """One tensor that every library gets.

    Attributes:
        name: Of `integer_inputs` or `hard_inputs`, and the dtype.
        x: float [rows, K], contiguous.
        global_scale: About what the global scale should be; None for that of the largest value.
    """

    name: str
    x: torch.Tensor
    global_scale: float | None

    def amax(self, e4m3_max: float = E4M3_MAX) -> torch.Tensor:
        """Gives the FP32 [1] largest magnitude that leads to the global scale."""
        if self.global_scale is None:
            return self.x.abs().max().float().reshape(1)
        return torch.tensor([self.global_scale], dtype=torch.float32) * (6 * e4m3_max)

    def row_amax(self) -> torch.Tensor:
        """Gives the FP32 [rows, 1] largest magnitudes of the rows."""
        return self.x.abs().amax(-1, keepdim=True).float()

    def in_blocks_of_32(self) -> torch.Tensor:
        """Gives x with zeros appended to its rows."""
        return torch.nn.functional.pad(self.x, (0, -self.x.shape[-1] % MX_BLOCK_SIZE))


def golden_inputs() -> Iterator[Input]:
    """Gives 4 million values of four distributions, and the hard inputs that have values."""
    for dtype_name, dtype in DTYPES.items():
        for name, x in integer_inputs(dtype).items():
            yield Input(f"{name}/{dtype_name}", x, _SCALE_OF_TIES if name == "ties" else None)
        for case in hard_inputs(dtype):
            if case.x.numel():
                x = case.x.reshape(-1, case.x.shape[-1]).contiguous()
                yield Input(f"{case.name}/{dtype_name}", x, case.global_scale)


@dataclass(frozen=True)
class Format:
    """One format as the golden files name it.

    Attributes:
        encode: Gives our codes and scale bytes of x under a global scale, or None.
        element: Format of the codes.
        size: Values of a block.
        global_scale: Gives the FP32 global scale of an input, [1] or [rows, 1]; None for MX.
    """

    encode: Callable[[torch.Tensor, Any], Encoded]
    element: Minifloat = E2M1
    size: int = BLOCK_SIZE
    global_scale: Callable[[Input], torch.Tensor] | None = None

    def x(self, given: Input) -> torch.Tensor:
        """Gives the tensor to quantise: in whole blocks."""
        return given.in_blocks_of_32() if self.size == MX_BLOCK_SIZE else given.x

    def ours(self, given: Input) -> Encoded:
        """Gives our codes uint8 [rows, K] and scale bytes uint8 [rows, B]."""
        scale = self.global_scale(given) if self.global_scale else None
        return self.encode(self.x(given), scale)


def _static(e4m3_max: float) -> Callable[[Input], torch.Tensor]:
    return lambda given: global_scale_from_amax(given.amax(e4m3_max), e4m3_max=e4m3_max)


def _formats() -> dict[str, Format]:
    formats = {
        "nvfp4": Format(encode, global_scale=_static(E4M3_MAX)),
        "nvfp4_rows": Format(
            encode, global_scale=lambda given: global_scale_from_amax(given.row_amax())
        ),
    }
    for e4m3_max in (256, 448):
        for error in get_args(four_over_six.ErrorRule):
            formats[f"four_over_six_{e4m3_max}_{error}"] = Format(
                partial(four_over_six.encode, error=error), global_scale=_static(e4m3_max)
            )
    for name, module, element in (("mxfp4", mxfp4, E2M1), ("mxfp8", mxfp8, E4M3)):
        for rule in get_args(ScaleRule):
            formats[f"{name}_{rule}"] = Format(
                partial(module.encode, scale_rule=rule), element, MX_BLOCK_SIZE
            )
    return formats


FORMATS = _formats()


def digest(*tensors: torch.Tensor) -> str:
    """Gives 16 hexadecimal digits of the bytes of tensors."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


@dataclass(frozen=True)
class Differences:
    """Blocks where a library differs from us; D of them.

    Attributes:
        blocks: int64 [D]; which, counted over all rows.
        codes: uint8 [D, N]; theirs.
        scale_bytes: uint8 [D]; theirs.
    """

    blocks: torch.Tensor
    codes: torch.Tensor
    scale_bytes: torch.Tensor


def record(ours: Encoded, theirs: Encoded, fmt: Format) -> dict[str, Any]:
    """Gives the entry of a golden file for one case.

    Args:
        ours: Our codes uint8 [rows, K] and scale bytes uint8 [rows, B].
        theirs: Those of the library.
        fmt: The format.
    """
    size = fmt.size
    codes, their_codes = ours[0].reshape(-1, size), theirs[0].reshape(-1, size)
    scale_bytes, their_bytes = ours[1].flatten(), theirs[1].flatten()
    differs = (codes != their_codes).any(-1) | (scale_bytes != their_bytes)
    digits = fmt.element.code_bits // 4
    blocks = {
        block: f"{int(their_bytes[block]):02x} "
        + "".join(f"{code:0{digits}x}" for code in their_codes[block].tolist())
        for block in differs.nonzero().flatten().tolist()
    }
    return {"theirs": digest(*theirs), "blocks": blocks}


def differences(entry: dict[str, Any], fmt: Format) -> Differences:
    """Gives the differing blocks of an entry.

    Args:
        entry: What `record` gave.
        fmt: The format.
    """
    texts = [text.split(" ") for text in entry["blocks"].values()]
    digits = fmt.element.code_bits // 4
    codes = [
        [int(text[i : i + digits], 16) for i in range(0, len(text), digits)] for _, text in texts
    ]
    return Differences(
        torch.tensor([int(block) for block in entry["blocks"]], dtype=torch.int64),
        torch.tensor(codes, dtype=torch.uint8).reshape(-1, fmt.size),
        torch.tensor([int(byte, 16) for byte, _ in texts], dtype=torch.uint8),
    )


def require_equal_elsewhere(ours: Encoded, theirs: Differences, expected: str) -> None:
    """Asserts that ours, with the blocks that differ put in, is what the library gave.

    Args:
        ours: Our codes uint8 [rows, K] and scale bytes uint8 [rows, B].
        theirs: The blocks that are known to differ.
        expected: Digest of what the library gave.

    Raises:
        AssertionError: Ours differs elsewhere.
    """
    codes, scale_bytes = ours[0].clone(), ours[1].clone()
    codes.view(-1, theirs.codes.shape[-1])[theirs.blocks] = theirs.codes
    scale_bytes.view(-1)[theirs.blocks] = theirs.scale_bytes
    assert digest(codes, scale_bytes) == expected, (
        f"differs from the library beyond the {len(theirs.blocks)} blocks that are known to"
    )


@dataclass(frozen=True)
class Golden:
    """What one library made of the golden inputs.

    Attributes:
        header: Library, versions, command.
        inputs: Digest of each input.
        cases: What `record` gave, by `format/input/dtype`.
    """

    header: dict[str, str]
    inputs: dict[str, str]
    cases: dict[str, dict[str, Any]]

    def write(self, path: Path) -> None:
        """Writes a file with a line for each case, so that changes are readable."""
        lines = [f'"header": {json.dumps(self.header)}', f'"inputs": {json.dumps(self.inputs)}']
        lines += [f'"{name}": {json.dumps(entry)}' for name, entry in self.cases.items()]
        path.write_text("{\n" + ",\n".join(lines) + "\n}\n")

    @classmethod
    def read(cls, path: Path) -> Golden:
        """Reads a file."""
        cases = json.loads(path.read_text())
        return cls(cases.pop("header"), cases.pop("inputs"), cases)
