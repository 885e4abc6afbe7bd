"""Number formats: NVFP4 by rounding to nearest and by the rollout's hints.

`reference` is the specification, `kernels` its translation to Triton, `ops` the public entry that
picks one of them and adds straight-through gradients.
"""

from megatron_trace.formats import ops
from megatron_trace.formats.constants import (
    BLOCK_SIZE,
    E2M1_MAX,
    E2M1_VALUES,
    E4M3_MAX,
    E4M3_MIN_SUBNORMAL,
)
from megatron_trace.formats.reference import (
    decode,
    encode,
    global_scale_from_amax,
    guided_codes,
    pack_bits,
    pack_codes,
    unpack_bits,
    unpack_codes,
)

__all__ = [
    "BLOCK_SIZE",
    "E2M1_MAX",
    "E2M1_VALUES",
    "E4M3_MAX",
    "E4M3_MIN_SUBNORMAL",
    "decode",
    "encode",
    "global_scale_from_amax",
    "guided_codes",
    "ops",
    "pack_bits",
    "pack_codes",
    "unpack_bits",
    "unpack_codes",
]
