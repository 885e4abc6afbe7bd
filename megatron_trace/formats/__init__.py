"""Number formats: rounding to nearest and by the rollout's hints.

`reference` is the specification of NVFP4; `four_over_six` and, in `mx`, `mxfp4` and `mxfp8` specify
the other formats by functions of the same names. `number_format` lists them all, `kernels_whole` is
their translation to Triton, and `ops` the public entry: it takes a format, picks torch or Triton,
and adds straight-through gradients. docs/formats.md compares the formats.
"""

from megatron_trace.formats import four_over_six, ops, residues
from megatron_trace.formats.constants import (
    BLOCK_SIZE,
    E2M1_MAX,
    E2M1_VALUES,
    E4M3_MAX,
    E4M3_MIN_SUBNORMAL,
    MX_BLOCK_SIZE,
)
from megatron_trace.formats.mx import mxfp4, mxfp8
from megatron_trace.formats.number_format import (
    FORMAT_SETS,
    MXFP4,
    MXFP8,
    NUMBER_FORMATS,
    NVFP4,
    NVFP4_4OVER6,
    FormatSet,
    NumberFormat,
    format_set,
)
from megatron_trace.formats.packing import (
    narrowed,
    pack_bits,
    pack_codes,
    pack_hint,
    pack_pairs,
    pack_residues,
    residue_bytes,
    unpack_bits,
    unpack_codes,
    unpack_hint,
    unpack_pairs,
    unpack_residues,
)
from megatron_trace.formats.reference import decode, encode, guided_codes, own_scale_bytes
from megatron_trace.formats.scales_e4m3 import global_scale_from_amax

__all__ = [
    "BLOCK_SIZE",
    "E2M1_MAX",
    "E2M1_VALUES",
    "E4M3_MAX",
    "E4M3_MIN_SUBNORMAL",
    "FORMAT_SETS",
    "MXFP4",
    "MXFP8",
    "MX_BLOCK_SIZE",
    "NUMBER_FORMATS",
    "NVFP4",
    "NVFP4_4OVER6",
    "FormatSet",
    "NumberFormat",
    "decode",
    "encode",
    "format_set",
    "four_over_six",
    "global_scale_from_amax",
    "guided_codes",
    "mxfp4",
    "mxfp8",
    "narrowed",
    "ops",
    "own_scale_bytes",
    "pack_bits",
    "pack_codes",
    "pack_hint",
    "pack_pairs",
    "pack_residues",
    "residue_bytes",
    "residues",
    "unpack_bits",
    "unpack_codes",
    "unpack_hint",
    "unpack_pairs",
    "unpack_residues",
]
