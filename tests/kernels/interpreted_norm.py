"""Compares the kernel of RMSNorm with torch's in FP32: usage: interpreted_norm.py cpu|cuda."""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F

from megatron_trace.rollout.kernels.norm import uncentred_norm

EPS = 1e-6


def main(device: str) -> None:
    """Prints how many inputs agreed."""
    generator = torch.Generator().manual_seed(0)
    count = 0
    for shape in ((1, 16), (25, 1, 2048), (3, 1, 4, 256), (0, 64), (2, 100)):
        for size in (1e-3, 1.0, 300.0):
            x = (size * torch.randn(shape, generator=generator)).bfloat16().to(device)
            weight = torch.randn(shape[-1], generator=generator).bfloat16().to(device)
            for rows in (x, x.repeat_interleave(2, -1)[..., : shape[-1]]):
                y = uncentred_norm(rows, weight, EPS)
                expected = F.rms_norm(rows.double(), (shape[-1],), 1 + weight.double(), EPS).float()
                assert y.shape == rows.shape
                assert y.dtype == torch.bfloat16
                # Half a unit of BF16's last place, and a whole one where the interpreter truncates.
                limit = (2.0**-8 if device == "cuda" else 2.0**-7) * 1.001
                error = (y.float() - expected).abs()
                assert (error <= limit * expected.abs()).all(), (shape, size)
                count += 1
    sys.stdout.write(f"{count} inputs")


if __name__ == "__main__":
    main(sys.argv[1])
