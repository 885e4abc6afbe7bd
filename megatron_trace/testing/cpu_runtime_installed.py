"""Installs the stand-in for the CUDA runtime when it is imported: for whoever can only import."""

from megatron_trace.testing import cpu_runtime

cpu_runtime.install()
