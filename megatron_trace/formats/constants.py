"""Constants of NVFP4: E2M1 values, E4M3 block scales, blocks of 16."""

# Magnitudes of the E2M1 codes 0 to 7; the mantissa bit of a code is its parity.
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_MAX = 6.0
E4M3_MAX = 448.0
E4M3_MIN_SUBNORMAL = 2.0**-9
BLOCK_SIZE = 16
MX_BLOCK_SIZE = 32
