"""Kernels of the packed K/V cache: the specification in torch, Triton, and CUDA C++ for decode.

`ops` chooses among them. `reference`, `append`, `attention` and `cuda` give the same functions
under the same names; bytes are equal, attention within a stated tolerance.
"""
